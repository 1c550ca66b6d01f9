"""Write the measured figures into the README: `python -m pop_engine.tools.figures benchmarks README.md`.

What stands between the two markers is replaced; nothing there is written by hand.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pop_engine.configs.errors import UsageError, exit_with_message
from pop_engine.tools.ablations.result import AblationResult
from pop_engine.tools.ablations.table import render_ablations
from pop_engine.tools.bench.result import BenchResult
from pop_engine.tools.bench_builds import BuildsResult
from pop_engine.tools.bench_decode import DecodeResult
from pop_engine.tools.bench_figures import render_peers, render_ttft
from pop_engine.tools.bench_memory import MemoryResult
from pop_engine.tools.calibration_figures import render_calibration
from pop_engine.tools.calibration_table import CalibrationTable
from pop_engine.tools.machine import Machine
from pop_engine.tools.markdown import markdown_table, origin
from pop_engine.tools.spread import Spread

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="figures", description="Write the measured figures into the README.")
    parser.add_argument("folder", type=Path, help="folder with the benchmarks' JSON files")
    parser.add_argument("readme", type=Path)
    arguments = parser.parse_args(argv)
    return exit_with_message("figures", lambda: write_figures(arguments.folder, arguments.readme))


def write_figures(folder: Path, readme: Path) -> int:
    """Replace the block between the markers. Raises UsageError where they are missing."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UsageError(f"{readme}: expected one line {BEGIN} and one {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{render_figures(folder)}\n{END}{after}", encoding="utf-8")
    return 0


def render_figures(folder: Path) -> str:
    """All tables, as Markdown."""
    ttft, peers = (BenchResult.load(folder / name) for name in ("ttft.json", "peers.json"))
    decode = msgspec.json.decode((folder / "decode.json").read_bytes(), type=DecodeResult)
    memory = msgspec.json.decode((folder / "memory.json").read_bytes(), type=MemoryResult)
    blocks = [_versions(ttft.runs[0].machine), render_ttft(ttft), render_peers(peers), _decode(decode), _memory(memory)]
    for path in sorted(folder.glob("builds*.json")):
        blocks.append(_builds(msgspec.json.decode(path.read_bytes(), type=BuildsResult)))
    for path in sorted(folder.glob("calibration*.json")):
        blocks.append(render_calibration(msgspec.json.decode(path.read_bytes(), type=CalibrationTable)))
    if paths := sorted(folder.glob("ablations*.json")):
        blocks.append(render_ablations([msgspec.json.decode(path.read_bytes(), type=AblationResult) for path in paths]))
    return "\n\n".join(blocks)


def _versions(machine: Machine) -> str:
    return (
        f"Measured with ONNX Runtime {machine.onnxruntime_version} in fp32, by `make bench` (other engines: by "
        "`pop-bench --peers`), on the machine that each table names: compare times within a table. The files are in "
        "`benchmarks/`."
    )


def _decode(result: DecodeResult) -> str:
    rows = [
        [
            str(row.batch_size),
            _milliseconds(row.pop),
            _milliseconds(row.full),
            f"{row.pop.median / row.full.median:.3f}",
        ]
        for row in result.rows
    ]
    header = ["batch", "engine, ms a step", "decode graph alone, ms a step", "ratio"]
    return (
        f"**Decode**: the engine's one session against a plain session of `decode.onnx`, {result.context_len} tokens "
        f"in each slot, both over the engine's own kind of cache memory. {origin(result.machine)}\n\n"
        + markdown_table(header, rows)
    )


def _memory(result: MemoryResult) -> str:
    rows = [
        [
            row.engine.boundary,
            *(f"{size / 1e6:,.0f}" for size in (row.weight_bytes, row.cache_bytes, row.peak_memory_bytes)),
            f"{row.budget_bytes / 1e6:,.0f}",
        ]
        for row in result.rows
    ]
    header = ["boundary", "weights, MB", "cache used, MB", "peak of `pop-run`, MB", "1.15 × weights + cache + 200, MB"]
    return f"**Memory**, {result.rows[0].num_tokens} tokens. {origin(result.machine)}\n\n" + markdown_table(
        header, rows
    )


def _builds(result: BuildsResult) -> str:
    rows = [
        [
            f"`pop-build {' '.join(row.arguments)}`",
            f"{row.seconds:.0f}",
            f"{row.peak_memory_bytes / 1e6:,.0f}",
            f"{row.weight_bytes / 1e6:,.0f}" if row.weight_bytes else "",
            f"{row.plan_bytes / 1e6:.1f}" if row.plan_bytes else "",
            ", ".join(f"{phase} {count.products} / {count.attentions}" for phase, count in row.operators.items()),
        ]
        for row in result.rows
    ]
    return (
        "**Builds**, with the verification that ort-cpu builds with weights end in. Products are nodes: for ort-cpu, "
        f"several layers' K, or V, may be stacked into one. {origin(result.machine)}\n\n"
        + markdown_table(
            [
                "command",
                "seconds",
                "peak of all processes, MB",
                "weights, MB",
                "plans, MB",
                "matrix products / attentions",
            ],
            rows,
        )
    )


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.p10:.1f} to {spread.p90:.1f})"


if __name__ == "__main__":
    sys.exit(main())

"""pop-bench on tiny engines, with a real peer, and what becomes of peers that are missing or broken."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from engine_kit import SMALL, TinyModels
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.bench import entrants
from pop_engine.tools.bench.cli import main
from pop_engine.tools.bench.options import parse_options
from pop_engine.tools.bench.peers import registry
from pop_engine.tools.bench.peers.kind import PeerKind
from pop_engine.tools.bench.result import FULL, POP, BenchResult

TRANSFORMERS = "transformers eager, fp32"


@pytest.fixture(scope="module")
def pair(tiny: TinyModels) -> list[str]:
    pop, full = (tiny.directory((SMALL, tail), "one-pass") for tail in (1, 0))
    return [str(pop), "--against", str(full), "--threads", "1", "--repeats", "1", "--output-len", "4"]


def test_everyone_runs_and_the_files_are_whole(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peer's fp32 tokens are the full engine's, or the two did not run the same model."""
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    what = ["--measure-rates", "--input-len", "6,9", "--batch-size", "1,2", "--concurrency", "2", "--num-requests", "3"]
    files = ["--json", str(out), "--plot", str(plot)]
    assert main([*pair, *what, *files, "--peer", "transformers-eager-fp32"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (run,) = BenchResult.load(out).runs
    assert [(row.input_len, row.batch_size) for row in run.rows] == [(6, 1), (6, 2), (9, 1), (9, 2)]
    for row in run.rows:
        assert [timing.engine for timing in row.timings] == [POP, FULL, TRANSFORMERS]
        assert [timing.num_same_tokens for timing in row.timings][1:] == [4, 4]
        for timing in row.timings:
            assert timing.ttft_ms.count == row.batch_size
            assert timing.itl_ms is not None
            assert (timing.itl_ms.count, timing.itl_ms.p99 > 0) == (3, True)
    assert [(load.input_len, load.concurrency, load.num_requests) for load in run.loads] == [(6, 2, 3), (9, 2, 3)]
    assert all(timing.itl_ms is not None and timing.itl_ms.count == 3 * 3 for timing in run.loads[0].timings)
    assert [engine.kind for engine in run.engines] == ["pop", "full", "peer"]
    assert all(engine.peak_memory_bytes > 20e6 for engine in run.engines)
    assert run.engines[2].versions.keys() == {"transformers"}
    assert run.absent == ()
    assert run.rates is not None
    assert 1e9 < run.rates.bytes_per_second < 1e12
    assert 1e9 < run.rates.flops_per_second < 1e14
    drawing = ElementTree.parse(plot).getroot()
    bars = [node for node in drawing.iter("{http://www.w3.org/2000/svg}rect") if "fill" in node.attrib]
    # The paper, and for each engine a bar at both lengths and a patch in the legend.
    assert len(bars) == 1 + 3 * 2 + 3
    assert "6 tokens in, 4 out, 2 at once" in captured.out


def test_a_run_is_added_to_a_file(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    alone = [*pair[:1], *pair[3:], "--json", str(out), "--append"]
    for length in ("4", "5"):
        assert main([*alone, "--input-len", length]) == 0
    runs = BenchResult.load(out).runs
    assert [run.rows[0].input_len for run in runs] == [4, 5]
    assert [timing.engine for timing in runs[0].rows[0].timings] == [POP]
    assert runs[0].rows[0].ratio_to_bound is None
    out.write_text("{}")
    assert main([*alone, "--input-len", "4"]) == 2
    assert capsys.readouterr().err.startswith(f"pop-bench: error: {out}: not a result of pop-bench")


def peer(name: str, package: str = "transformers", *, prepares: bool = False, reads_gguf: bool = False) -> PeerKind:
    def never(*_: object) -> None:
        raise AssertionError("runs in another process")

    return PeerKind(
        name, name, "fp32", package, package, never, never if prepares else None, reads_gguf  # type: ignore[arg-type]
    )  # fmt: skip


def test_missing_and_broken_peers_are_a_line_each(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (
        peer("absent", "no_such_package"),
        peer("no gguf", reads_gguf=True),
        peer("cannot prepare", prepares=True),
        peer("cannot load"),
        peer("runs"),
    )
    monkeypatch.setattr(registry, "PEERS", kinds)
    says = "import sys; print('loading', 'ValueError: no kernel', sep='\\n', file=sys.stderr); sys.exit(1)"
    answers = 'print(\'{"ttft_ms": [], "step_ms": [], "peak_memory_bytes": 9}\', flush=True); input()'

    def command(verb: str, kind: PeerKind, *_: object) -> list[str]:
        return [sys.executable, "-c", answers if kind.name == "runs" else says]

    monkeypatch.setattr(entrants, "_command", command)
    options, pop = parse_options([pair[0], "--peers"]), Manifest.load(Path(pair[0]))
    with entrants.open_participants(options, pop, None) as found:
        assert [member.entrant.name for member in found.members] == [POP, "runs, fp32"]
        assert {peer.name: peer.reason for peer in found.all_absent()} == {
            "absent, fp32": "not installed; `pip install no_such_package` brings it",
            "no gguf, fp32": "reads GGUF files only, and the engine was not built from one; give --gguf FILE",
            "cannot prepare, fp32": "its model could not be made (ValueError: no kernel)",
            "cannot load, fp32": "cannot load, fp32: its worker ended with exit code 1 (ValueError: no kernel)",
        }


def test_peers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(["--list-peers"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [kind.name for kind in registry.PEERS]
    assert lines[0].split()[1] == "transformers"


def test_the_json_has_what_a_reader_of_figures_needs(pair: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*pair, "--input-len", "5", "--json", str(out)]) == 0
    (run,) = msgspec.json.decode(out.read_bytes())["runs"]
    assert {"cpu_model", "num_cores", "onnxruntime_version", "commit", "date"} <= run["machine"].keys()
    assert (run["threads"], run["repeats"], run["seed"]) == (1, 1, 0)
    ttft = run["rows"][0]["timings"][1]["ttft_ratio"]
    assert ttft.keys() == {"mean", "median", "p10", "p90", "p99", "count"}
    assert run["rows"][0]["bound"] > 1
    assert out.read_text().endswith("}\n")

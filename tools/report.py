"""An engine directory in words and a drawing, from its manifest alone."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import Binding
from pop_engine.configs.manifest import (
    BuildRecord,
    FileRecord,
    Manifest,
    TargetRecord,
    VerificationRecord,
    WeightsRecord,
)
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.calibration_report import calibration_lines
from pop_engine.tools.plan_report import plan_lines
from pop_engine.tools.table import align_rows, format_bytes
from pop_engine.tools.vision_report import vision_lines

TRUNK_MARK, TAIL_MARK = "█", "░"
_INDENT = " " * 10
_OPERATOR_ORDER = (("MatMul", "Gemm"), ("Attention",), ("TensorScatter",))


def describe_engine(manifest: Manifest, directory: Path, width: int) -> str:
    """The whole report. `width` is that of the terminal; only the drawing of the layers wraps to it."""
    lines = [
        *_section("engine", [f"{directory} (format {manifest.format_version})"]),
        *_section("model", _model_lines(manifest)),
        *_section("layers", [*draw_plan(manifest.plan, width - len(_INDENT)), *_phase_lines(manifest)]),
        *_section("target", [_describe_target(manifest.target)]),
        *_section("tail", calibration_lines(manifest.calibration)),
        *_section("images", vision_lines(manifest.vision)),
        *_section("limits", _limit_lines(manifest)),
        *_section("cache", _cache_lines(manifest)),
        *_section("graphs", describe_operators(*_graphs(manifest))),
        *_section("bindings", _binding_lines(_graphs(manifest))),
        *_section("plans", plan_lines((manifest.prefill, manifest.decode))),
        *_section("weights", _weight_lines(manifest)),
        *_section("files", _file_lines(manifest.files)),
        *_section("verified", [_describe_verification(manifest.verification)]),
        *_section("build", _build_lines(manifest.build)),
    ]
    return "\n".join(lines)


def _graphs(manifest: Manifest) -> list[GraphRecord]:
    vision = [] if manifest.vision is None else [manifest.vision.graph]
    return [manifest.prefill, manifest.decode, *vision]


def draw_plan(plan: PrunePlan, width: int) -> list[str]:
    """One mark per layer, trunk then tail, in lines of at most `width` characters; the counts follow the marks."""
    marks = TRUNK_MARK * plan.num_trunk_layers + TAIL_MARK * plan.num_tail_layers
    width = max(width, 8)
    lines = [marks[start : start + width] for start in range(0, len(marks), width)]
    counts = f"{plan.num_trunk_layers} trunk + {plan.num_tail_layers} tail"
    if len(lines[-1]) + 2 + len(counts) <= width:
        return [*lines[:-1], f"{lines[-1]}  {counts}"]
    return [*lines, counts]


def describe_operators(*graphs: GraphRecord) -> list[str]:
    """How often each operator occurs in each graph: matrix products first, then attention, then by count."""
    names = {name for graph in graphs for name in graph.operators}
    totals = {name: sum(graph.operators.get(name, 0) for graph in graphs) for name in names}
    rows = [["operator", *(graph.file for graph in graphs)]]
    for name in sorted(names, key=lambda name: (_operator_rank(name), -totals[name], name)):
        rows.append([name, *(str(graph.operators.get(name, "-")) for graph in graphs)])
    rows.append(["all", *(str(sum(graph.operators.values())) for graph in graphs)])
    return align_rows(rows, frozenset(range(1, len(graphs) + 1)))


def describe_bindings(bindings: Iterable[Binding], direction: str) -> list[list[str]]:
    """One row per binding or run of layers: direction, name, shape, dtype, and the buffer that it shares."""
    groups: dict[tuple[str, ...], list[Binding]] = {}
    for binding in bindings:
        alias_pattern = _layer_pattern(binding.alias or "")[0]
        key = (_layer_pattern(binding.name)[0], str(binding.shape), binding.dtype, alias_pattern)
        groups.setdefault(key, []).append(binding)
    return [_binding_row(group, direction) for group in groups.values()]


def collapse_names(names: Sequence[str]) -> str:
    """Names that differ in a layer's index alone, as one: `past_key.0 … past_key.29`, or `past_key.[0-4,6-29]`."""
    patterns = [_layer_pattern(name) for name in names]
    indices = sorted(index for _, index in patterns if index is not None)
    if len(names) == 1 or len(indices) != len(names):
        return ", ".join(names)
    runs = list(_runs(indices))
    pattern = patterns[0][0]
    if len(runs) == 1:
        return f"{pattern.format(runs[0][0])} … {pattern.format(runs[0][1])}"
    ranges = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return pattern.format(f"[{ranges}]")


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{title if number == 0 else '':<{len(_INDENT)}}{line}"


def _model_lines(manifest: Manifest) -> list[str]:
    dims, source = manifest.dims, manifest.source
    revision = f", revision {source.revision}" if source.revision else ""
    return [
        f"{source.name}: {dims.model_type}, {manifest.dtype}, {dims.num_hidden_layers} layers, "
        f"hidden {dims.hidden_size}, intermediate {dims.intermediate_size}",
        f"{dims.num_attention_heads} heads, {dims.num_key_value_heads} KV heads of {dims.head_dim}, "
        f"vocabulary {dims.vocab_size}, trained for {dims.max_position_embeddings} positions",
        f"from {source.location}{revision}",
    ]


def _phase_lines(manifest: Manifest) -> list[str]:
    """What each phase runs, in the words of the drawing."""
    num_layers, num_tail_layers = manifest.dims.num_hidden_layers, manifest.plan.num_tail_layers
    window = manifest.boundary_window
    rows, tokens = ("row goes", "token runs") if window == 1 else (f"{window} rows go", f"{window} tokens run")
    boundary = {
        "one-pass": f"in the same pass, the last {rows} through every layer",
        "two-step": f"the last prompt {tokens} as the first decode step",
    }[manifest.boundary]
    calibrated = "" if manifest.calibration is None else ", calibrated"
    prefill = f"{TRUNK_MARK} in full, {TAIL_MARK} K and V projections only{calibrated}"
    if num_tail_layers == 0:
        prefill = f"all {num_layers} layers in full: nothing is pruned"
    return align_rows(
        [
            ["prefill", prefill],
            ["boundary", f"{manifest.boundary}: {boundary}"],
            ["decode", f"all {num_layers} layers, {manifest.target.decode_with} graph"],
        ]
    )


def _describe_target(target: TargetRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in target.versions.items())
    return f"{target.name} ({versions})" if versions else target.name


def _limit_lines(manifest: Manifest) -> list[str]:
    limits = manifest.limits
    return [
        f"{limits.max_seq_len} tokens a sequence, {limits.max_batch_size} sequences, "
        f"{limits.max_prefill_len} tokens a prefill chunk"
    ]


def _cache_lines(manifest: Manifest) -> list[str]:
    cache = manifest.cache
    bits = re.search(r"\d+", cache.dtype)
    per_token = cache.bytes_per_token(int(bits.group()) // 8 if bits else 4)
    per_slot = per_token * cache.max_seq_len
    return [
        f"{cache.dtype}, {per_token} bytes a token, {format_bytes(per_slot)} a slot, "
        f"{format_bytes(per_slot * manifest.limits.max_batch_size)} for all {manifest.limits.max_batch_size} slots"
    ]


def _operator_rank(name: str) -> int:
    for rank, words in enumerate(_OPERATOR_ORDER):
        if any(word in name for word in words):
            return rank
    return len(_OPERATOR_ORDER)


def _layer_pattern(name: str) -> tuple[str, int | None]:
    """`present_key.7.boundary` becomes `present_key.{}.boundary` and 7, and `model.layers.7.norm` the like."""
    match = re.fullmatch(r"((?:[^.\d]+\.)+)(\d+)(.*)", name)
    return (f"{match[1]}{{}}{match[3]}", int(match[2])) if match else (name, None)


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(indices), key=lambda item: item[1] - item[0]):
        members = [index for _, index in run]
        yield members[0], members[-1]


def _binding_row(group: Sequence[Binding], direction: str) -> list[str]:
    shape = " × ".join(map(str, group[0].shape))
    aliases = [binding.alias for binding in group if binding.alias]
    alias = f"shares {collapse_names(aliases)}" if aliases else ""
    return [direction, collapse_names([binding.name for binding in group]), shape, group[0].dtype, alias]


def _binding_lines(graphs: Iterable[GraphRecord]) -> Iterator[str]:
    for graph in graphs:
        yield graph.file
        rows = [
            *describe_bindings(graph.contract.inputs, "in"),
            *describe_bindings(graph.contract.weights, "in"),
            *describe_bindings(graph.contract.outputs, "out"),
        ]
        yield from align_rows(rows, indent="  ")


def _weight_lines(manifest: Manifest) -> list[str]:
    if manifest.weights is None:
        return ["none: built with --no-weights, these are graphs alone"]
    graphs = f"{manifest.prefill.file} and {manifest.decode.file}"
    return [*_weight_summary(manifest.weights, graphs), *_file_lines(manifest.weights.files)]


def _weight_summary(weights: WeightsRecord, graphs: str) -> list[str]:
    return [
        f"{weights.mode}: {weights.directory}, {weights.dtype}, {format_bytes(weights.num_bytes)} "
        f"in {len(weights.files)} file{'s' if len(weights.files) != 1 else ''}",
        f"one copy shared by {graphs}",
    ]


def _file_lines(files: Sequence[FileRecord]) -> list[str]:
    if not files:
        return ["none"]
    rows = [[record.path, format_bytes(record.num_bytes), f"sha256 {record.sha256[:12]}"] for record in files]
    return align_rows(rows, frozenset({1}))


def _describe_verification(verification: VerificationRecord) -> str:
    if verification.status == "skipped":
        return f"skipped: {verification.reason or 'no reason recorded'}"
    return (
        f"passed against PyTorch: logit error {verification.prefill_max_error:.2g} in prefill "
        f"({verification.num_prompt_tokens} tokens), {verification.decode_max_error:.2g} in decode "
        f"({verification.num_decode_steps} steps), {verification.tolerance:.2g} allowed"
    )


def _build_lines(build: BuildRecord) -> list[str]:
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in build.step_seconds.items())
    total = sum(build.step_seconds.values())
    return [
        f"{total:.1f} s" + (f" ({steps})" if steps else ""),
        f"peak memory {format_bytes(build.peak_memory_bytes)}, pop-engine {build.pop_engine_version}",
    ]

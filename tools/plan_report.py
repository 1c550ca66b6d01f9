"""The plans of an engine in words, from what the build read back from them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.plan_record import AttentionRecord, ConstantRecord, PlanRecord, ProfileRecord
from pop_engine.tools.table import align_rows, format_bytes


def plan_lines(graphs: Iterable[GraphRecord]) -> Iterator[str]:
    """Each plan: where it runs, the shapes it is tuned for, how every attention is set, which caches are in place."""
    for graph in graphs:
        if graph.plan is not None:
            yield from _describe(graph.plan)


def _describe(plan: PlanRecord) -> Iterator[str]:
    yield (
        f"{plan.file}: for {plan.gpu}, {format_bytes(plan.num_bytes)}, {plan.num_layers} layers, "
        f"compiled in {plan.compile_seconds:.1f} s"
    )
    in_place = sum(binding.alias is not None for binding in plan.contract.outputs)
    rows = [
        *(["profile", profile.name, _ranges(profile)] for profile in plan.profiles),
        *(["attention", f"{count} layers", text] for text, count in _attention_settings(plan.attentions).items()),
        ["cache", f"{in_place} outputs", "written in place, each at the address of its input"],
        _weights(plan),
        *(["constants", f"{count} inside", text] for text, count in _constants(plan.constants).items()),
        ["weight streaming", _yes(plan.weight_streaming), ""],
        ["version compatible", _yes(plan.version_compatible), ""],
        *([["optimization", f"level {level}", ""]] if (level := plan.optimization_level) is not None else []),
        *([["timing cache", "yes", ""]] if plan.timing_cache else []),
    ]
    yield from align_rows(rows, indent="  ")


def _weights(plan: PlanRecord) -> list[str]:
    inside = plan.weights_inside
    if inside.count:
        return ["weights", f"{inside.count} inside", format_bytes(inside.num_bytes)]
    return ["weights", f"{len(plan.contract.weights)} inputs", "named as in the checkpoint, none inside"]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _ranges(profile: ProfileRecord) -> str:
    ranges = (f"{dim} {least}…{largest} (tuned for {tuned})" for dim, (least, tuned, largest) in profile.dims.items())
    return ", ".join(ranges)


def _attention_settings(attentions: Iterable[AttentionRecord]) -> Counter[str]:
    return Counter(
        f"lengths {attention.lengths}, " + (f"mask {attention.mask}" if attention.mask else attention.causal)
        for attention in attentions
    )


def _constants(constants: Iterable[ConstantRecord]) -> Counter[str]:
    """Constants by what they look like: rotary frequencies, an eps for every norm, shapes."""
    return Counter(
        f"{constant.dtype} {' × '.join(map(str, constant.shape)) or 'scalar'}, {format_bytes(constant.num_bytes)}"
        for constant in constants
    )

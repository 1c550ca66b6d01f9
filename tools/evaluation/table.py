"""An evaluation in words and columns, for a terminal."""

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.evaluation.result import EvalEngine, EvalResult, EvalSetting, SweepResult, SweepRow
from pop_engine.tools.evaluation.scores import Scores
from pop_engine.tools.machine import Machine
from pop_engine.tools.table import align_rows, format_bytes

NOTHING_TO_KEEP = "none to keep: the full model answers as well without the prompts"


def format_result(result: EvalResult) -> str:
    """Scores of one engine."""
    lines = [
        describe_subject(result.pop),
        describe_setting(result.setting, result.scores.num_answer_tokens),
        describe_machine_line(result.machine),
        "",
        *align_rows(score_rows(result.scores)),
    ]
    if result.setting.max_loss_percent is not None:
        lines += ["", verdict(result)]
    return "\n".join(lines)


def format_sweep(result: SweepResult) -> str:
    """A row for each tail."""
    rows = [["tail", "calibrated", "benefit kept", "NLL", "KL", "top-1", "exact", "TTFT ms", "ratio"]]
    rows += [_sweep_cells(row) for row in result.rows]
    scored = next((row.scores for row in result.rows if row.scores is not None), None)
    lines = [
        f"{result.full.model}, {result.full.num_hidden_layers} layers, {result.full.dtype}, {result.full.target}",
        describe_setting(result.setting, 0 if scored is None else scored.num_answer_tokens),
        describe_machine_line(result.machine),
        "",
        *align_rows(rows, frozenset({0, 3, 4, 7, 8})),
    ]
    lines += [f"{tail_name(row)}: {row.refused}" for row in result.rows if row.refused is not None]
    return "\n".join([*lines, *(["", sweep_verdict(result)] if result.setting.max_loss_percent is not None else [])])


def _sweep_cells(row: SweepRow) -> list[str]:
    head = [str(row.num_tail_layers), "yes" if row.calibrated else "no"]
    scores = row.scores
    if scores is None:
        return [*head, "not built", "", "", "", "", "", ""]
    return [
        *head,
        format_benefit(scores.benefit),
        f"{scores.nll_pop.value:.4f}",
        f"{scores.kl.value:.4f}",
        f"{scores.top1_agreement.value:.1%}",
        f"{scores.exact_match.value:.1%}",
        f"{scores.ttft_pop_ms.value:.1f}",
        f"{scores.ttft_ratio.value:.2f}",
    ]


def score_rows(scores: Scores) -> list[list[str]]:
    """Name and value of every score, with standard errors over documents."""
    return [
        ["benefit kept", format_benefit(scores.benefit)],
        ["NLL, full model", with_error(scores.nll_full, ".4f")],
        ["NLL, POP", with_error(scores.nll_pop, ".4f")],
        ["NLL, no context", with_error(scores.nll_none, ".4f")],
        ["KL from the full model", with_error(scores.kl, ".4f")],
        ["top-1 agreement", str(scores.top1_agreement)],
        ["first token agrees", str(scores.first_token_agreement)],
        ["greedy answers equal", str(scores.exact_match)],
        ["TTFT, full engine", f"{with_error(scores.ttft_full_ms, '.1f')} ms"],
        ["TTFT, POP", f"{with_error(scores.ttft_pop_ms, '.1f')} ms"],
        ["TTFT saved", f"{with_error(scores.ttft_saved_ms, '.1f')} ms"],
        ["TTFT ratio", f"{with_error(scores.ttft_ratio, '.3f')}"],
    ]


def format_benefit(benefit: Estimate | None) -> str:
    """A percentage with its error, or why there is none."""
    return NOTHING_TO_KEEP if benefit is None else str(benefit)


def with_error(estimate: Estimate, spec: str) -> str:
    """A value and its standard error."""
    return f"{estimate.value:{spec}} ± {estimate.standard_error:{spec}}"


def describe_subject(engine: EvalEngine) -> str:
    """The engine in one line."""
    calibrated = "" if engine.calibrated_on is None else f", calibrated on {engine.calibrated_on}"
    return (
        f"{engine.model}, {engine.dtype}, {engine.target}, {engine.num_tail_layers} of {engine.num_hidden_layers} "
        f"layers in the tail, {engine.boundary}, boundary window {engine.boundary_window}{calibrated}"
    )


def describe_setting(setting: EvalSetting, num_answer_tokens: int) -> str:
    """The data in one line."""
    return (
        f"{setting.num_documents} documents of {setting.data}, {num_answer_tokens} answer tokens, "
        f"at most {setting.max_tokens} each; values are means over documents ± standard error"
    )


def describe_machine_line(machine: Machine) -> str:
    """The machine, versions and commit in one line."""
    return (
        f"{machine.cpu_model}, {machine.num_cores} cores, {format_bytes(machine.memory_bytes)}, onnxruntime "
        f"{machine.onnxruntime_version}, python {machine.python_version}, commit {machine.commit}, {machine.date}"
    )


def verdict(result: EvalResult) -> str:
    """Whether the engine keeps to --max-loss."""
    limit, benefit = result.setting.max_loss_percent, result.scores.benefit
    if benefit is None:
        return f"--max-loss {limit:g} cannot be judged: {NOTHING_TO_KEEP}"
    relation = "within" if result.within_max_loss else "over"
    return f"{(1 - benefit.value):.1%} of the benefit lost: {relation} --max-loss {limit:g}"


def sweep_verdict(result: SweepResult) -> str:
    """The longest tail within --max-loss."""
    limit = result.setting.max_loss_percent
    if result.longest is None:
        return f"no tail stays within --max-loss {limit:g}"
    row = result.rows[result.longest]
    assert row.scores is not None
    return (
        f"longest tail within --max-loss {limit:g}: {tail_name(row)}, {format_benefit(row.scores.benefit)} kept, "
        f"first token {row.scores.ttft_ratio.value:.2f} times as fast"
    )


def tail_name(row: SweepRow) -> str:
    """A row in words."""
    return f"{row.num_tail_layers} tail layers{', calibrated' if row.calibrated else ''}"

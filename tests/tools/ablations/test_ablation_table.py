"""The ablations' table, chart and order, from scores that are easily worked out."""

from dataclasses import replace
from statistics import stdev
from xml.etree import ElementTree

import pytest

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.ablations.catalogue import ABLATIONS, Ablation, find_ablations
from pop_engine.tools.ablations.order import order_steps
from pop_engine.tools.ablations.report import ablation_chart, ablation_page
from pop_engine.tools.ablations.result import AblationResult, AblationRow, FitRecord, FullScores
from pop_engine.tools.ablations.scores import VariantScores
from pop_engine.tools.ablations.table import format_ablations, format_layers, render_ablations
from pop_engine.tools.evaluation.bars import draw_bars
from pop_engine.tools.evaluation.result import EvalSetting
from pop_engine.tools.evaluation.scores import mean_of
from pop_engine.tools.machine import Machine

MACHINE = Machine("Some <CPU>", 2, 24_000_000_000, "3.11.7", "2.0", "1.32.0", "abc123", "2026-11-30T00:00:00+00:00")
FULL, NONE = (2.0, 3.0, 4.0), (4.0, 4.5, 6.5)


def row(ablation: Ablation, losses: tuple[float, float, float]) -> AblationRow:
    nlls = tuple(full + loss for full, loss in zip(FULL, losses, strict=True))
    agreement = Estimate(0.75, 0.02)
    scores = VariantScores(mean_of(nlls), Estimate.of_benefit(NONE, nlls, FULL), agreement, agreement, nlls)
    return AblationRow.of(ablation, (7, 8, 9), scores)


def result(losses: dict[str, tuple[float, float, float]]) -> AblationResult:
    rows = tuple(row(ablation, losses[ablation.name]) for ablation in ABLATIONS if ablation.name in losses)
    return AblationResult(
        machine=MACHINE,
        versions={"torch": "2.13.0"},
        setting=EvalSetting("data.jsonl", "0" * 64, 3, 512, 64, True, None, None),
        model="tiny <model>",
        revision=None,
        num_hidden_layers=10,
        num_pruned_layers=3,
        fit=FitRecord("notes.txt", None, 33_000),
        full=FullScores((1, 2, 5), 192, mean_of(FULL), mean_of(NONE), FULL, NONE),
        rows=rows,
    )


AS_IN_PAPER = result({"calibrated": (0.1, 0.1, 0.1), "pop": (0.2, 0.4, 0.6), "first": (9.0, 9.0, 9.0)})


def test_steps_of_the_order_are_differences_of_the_same_documents() -> None:
    steps = order_steps(AS_IN_PAPER)
    assert [(step.better.name, step.worse.name) for step in steps] == [("calibrated", "pop"), ("pop", "first")]
    assert steps[0].loss.value == pytest.approx(0.3)
    assert steps[0].loss.standard_error == pytest.approx(stdev([0.1, 0.3, 0.5]) / 3**0.5)
    assert all(step.is_kept for step in steps)
    other = result({"pop": (0.5, 0.5, 0.5), "no-boundary": (0.4, 0.4, 0.4), "interleaved": (9.0, 9.0, 9.0)})
    (step,) = order_steps(other)
    assert str(step) == ("POP without the boundary loses -0.100 ± 0.000 nats a token against POP, unlike in the paper")
    assert "does not hold everywhere" in ablation_page(other)


def test_bars_have_the_lengths_of_their_values_and_end_at_the_edge() -> None:
    chart = ablation_chart(AS_IN_PAPER)
    # Of a benefit of 6 nats over three documents: 0.3, 1.2 and 27 lost.
    assert [bar.value for bar in chart.bars] == pytest.approx([1 - 0.3 / 6, 1 - 1.2 / 6, 1 - 27 / 6])
    assert (chart.low, chart.high) == (-0.5, 1.0)
    root = ElementTree.fromstring(draw_bars(chart))
    groups = [group for group in root.findall("g") if group.get("class") == "series-0"][:3]
    lengths = [float(group[0].get("width", "")) for group in groups]
    assert lengths[0] / lengths[1] == pytest.approx(0.95 / 0.8, rel=1e-2)
    assert lengths[2] / lengths[1] == pytest.approx(0.5 / 0.8, rel=1e-2)
    assert [group.find("polygon") is not None for group in groups] == [False, False, True]
    assert [group.find("line") is not None for group in groups] == [True, True, False]


def test_the_page_holds_text_as_text_and_every_document() -> None:
    page = ablation_page(AS_IN_PAPER)
    root = ElementTree.fromstring(page.partition("\n")[2])
    assert "tiny &lt;model&gt;" in page
    assert "The paper's order holds." in {text.text for text in root.iter("p")}
    assert [cell.text for cell in list(root.iter("tr"))[-1]][:3] == ["5", "4.0000", "6.5000"]


def test_markdown_has_a_column_for_each_model() -> None:
    second = replace(result({"pop": (0.0, 0.0, 0.0)}), model="other", num_hidden_layers=18)
    second = replace(second, setting=replace(second.setting, num_documents=1024))
    second = replace(second, machine=replace(second.machine, commit="abc"))
    lines = render_ablations([AS_IN_PAPER, second]).splitlines()
    assert "`abc`" in lines[0]
    assert f"`{AS_IN_PAPER.machine.commit}`" in lines[0]
    assert lines[2:] == [
        "|  | tiny <model>, 3 of 10 (3 documents, 192 tokens scored) "
        "| other, 3 of 18 (1024 documents, 192 tokens scored) |",
        "| ---: | ---: | ---: |",
        # By hand: the ratio estimate's residuals are 0.05 d − 0.1, 0.2 d − loss and 4.5 d − 9, with d = 2, 1.5, 2.5.
        "| POP, calibrated | 95.0% ± 0.7% (75.0%) |  |",
        "| POP | 80.0% ± 5.0% (75.0%) | 100.0% ± 0.0% (75.0%) |",
        "| POP on the first layers | -350.0% ± 65.0% (75.0%) |  |",
    ]


def test_the_terminal_s_table_says_what_was_refused() -> None:
    refused = AblationRow.of(ABLATIONS[0], (), None, "a tail of 1 has nothing to calibrate")
    printed = format_ablations(replace(AS_IN_PAPER, rows=(refused, *AS_IN_PAPER.rows[1:])))
    assert "POP, calibrated: a tail of 1 has nothing to calibrate" in printed
    assert "7–9" in printed


def test_layers_are_named_in_runs() -> None:
    assert format_layers([0, 1, 2, 5, 7, 8, 20]) == "0–2, 5, 7, 8, 20"
    assert format_layers([]) == ""


def test_names_are_found_in_the_table_s_order() -> None:
    assert [ablation.name for ablation in find_ablations(("first", "pop", "first"))] == ["pop", "first"]
    assert find_ablations(("all",)) == ABLATIONS
    with pytest.raises(ValueError, match="'last': expected all, or of these between commas: calibrated, pop, "):
        find_ablations(("last",))

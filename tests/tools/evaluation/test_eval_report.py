"""The report's page: well-formed, self-contained, escaped, and with the numbers it is made of."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.evaluation.difference import mark_differences
from pop_engine.tools.evaluation.report import NUM_CASES, result_page, sweep_page, worst_cases
from pop_engine.tools.evaluation.result import EvalEngine, EvalResult, EvalSetting, SweepResult, SweepRow
from pop_engine.tools.evaluation.scores import DocumentScore, PositionLoss, summarize
from pop_engine.tools.evaluation.svg import Plot, Point, Series, draw, ticks
from pop_engine.tools.machine import Machine

NASTY = "<script>alert('x')</script> & \"quoted\" http://example.org/?a=1&b=2 </div>\x00\x1b[31m \U0001f600 ]]>"
MACHINE = Machine("Some <CPU>", 2, 24_000_000_000, "3.11.7", "2.0", "1.32.0", "abc123", "2026-11-30T00:00:00+00:00")
SETTING = EvalSetting("data & more.jsonl", "0" * 64, 9, None, 64, True, 5.0, None)
ENGINE = EvalEngine(
    f"/engines/{NASTY}", "tiny", None, "fp32", "ort-cpu", {"torch": "2.13"}, 30, 10, "one-pass", 16, NASTY, "0.1.0", 7
)


def documents(count: int, loss: float = 0.3) -> tuple[DocumentScore, ...]:
    return tuple(
        DocumentScore(
            line=index + 1,
            num_prompt_tokens=100 + index,
            num_answer_tokens=12,
            nll_full=1.0 + 0.01 * index,
            nll_pop=1.0 + 0.01 * index + loss * (index % 5 + 1) + 0.001 * index,
            nll_none=4.0,
            kl=0.125,
            top1_agreement=0.75,
            first_token_agrees=index % 2 == 0,
            greedy_matches=index == 0,
            num_equal_tokens=index,
            ttft_full_ms=140.0,
            ttft_pop_ms=100.0,
            prompt=f"{NASTY} {index}",
            reference=NASTY,
            answer_full=f"the cat sat {NASTY}",
            answer_pop=f"the dog sat {NASTY}",
        )
        for index in range(count)
    )


POSITIONS = tuple(PositionLoss(index, 9, 1.0 / (index + 1), 1.5 / (index + 1), 4.0) for index in range(12))
RESULT = EvalResult(MACHINE, SETTING, ENGINE, ENGINE, summarize(documents(9)), True, POSITIONS, documents(9))
ROWS = (
    *(
        SweepRow(length, calibrated, True, summarize(documents(9, loss)), POSITIONS, documents(9, loss))
        for length, calibrated, loss in ((0, False, 0.0), (6, False, 0.1), (6, True, 0.05), (10, False, 0.3))
    ),
    SweepRow(10, True, None, None, (), (), f"refused because {NASTY}"),
)
SWEEP = SweepResult(MACHINE, SETTING, ENGINE, NASTY, 16, ROWS, 2)
PAGES = {"result": result_page(RESULT), "sweep": sweep_page(SWEEP)}
pages = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


class Strict(HTMLParser):
    """Every tag closed where it must be; collects elements and their attributes."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.found.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pages
def test_the_page_is_well_formed_as_html_and_as_xml(page: str) -> None:
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert page.startswith("<!DOCTYPE html>\n")
    root = ElementTree.fromstring(page)
    assert [child.tag for child in root] == ["head", "body"]


@pages
def test_the_page_loads_nothing_and_runs_nothing(page: str) -> None:
    parser = Strict()
    parser.feed(page)
    tags = {tag for tag, _ in parser.found}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image", "a"})
    names = {name for _, attributes in parser.found for name in attributes}
    assert names.isdisjoint({"src", "href", "xlink:href", "srcset", "action", "style", "background", "xmlns"})
    assert not [name for name in names if name.startswith("on")]
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"url\(|@import|expression", style)


@pages
def test_every_text_of_a_user_is_escaped(page: str) -> None:
    assert "<script" not in page
    assert "\x00" not in page
    assert "\x1b" not in page
    text = "".join(ElementTree.fromstring(page).itertext())
    shown = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert text.count(shown) >= NUM_CASES
    # The parser sees the end tag that the text holds as text.
    assert text.count("</div>") >= NUM_CASES


def test_the_page_holds_the_scores() -> None:
    text = " ".join("".join(ElementTree.fromstring(PAGES["result"]).itertext()).split())
    scores = RESULT.scores
    assert scores.benefit is not None
    for expected in (
        f"benefit kept{scores.benefit}",
        f"{scores.nll_pop.value:.4f} ± {scores.nll_pop.standard_error:.4f}",
        f"{scores.ttft_ratio.value:.3f} ± {scores.ttft_ratio.standard_error:.3f}",
        f"{(1 - scores.benefit.value):.1%} of the benefit lost: within --max-loss 5",
        "abc123",
        "onnxruntime 1.32.0",
        "10 of 30 layers in the tail",
        "boundary window 16",
    ):
        assert expected in text


def test_the_sweep_names_what_it_chose_and_what_was_refused() -> None:
    root = ElementTree.fromstring(PAGES["sweep"])
    text = "".join(root.itertext())
    assert "longest tail within --max-loss 5: 6 tail layers, calibrated" in text
    assert "10 tail layers, calibrated: refused because <script>" in text
    (chosen,) = root.iterfind(".//tr[@class='chosen']")
    assert "".join(chosen.itertext()).startswith("6 tail layers, calibrated")
    trade_off = next(iter(root.iterfind(".//svg")))
    # One point for each row with scores, and one of the legend for each kind.
    assert len(trade_off.findall(".//circle")) == 4 + 2


def test_the_worst_come_first_and_equal_answers_are_left_out() -> None:
    lines = [case.title for case in worst_cases(documents(9))]
    assert lines == ["Line 5", "Line 9", "Line 4", "Line 8", "Line 3", "Line 7"]
    assert worst_cases(documents(1)) == []


def test_what_cannot_be_measured_is_said() -> None:
    scores = replace(RESULT.scores, benefit=None)
    page = result_page(replace(RESULT, scores=scores, within_max_loss=False))
    assert "--max-loss 5 cannot be judged" in page
    assert 'class="verdict bad"' in page
    assert "no tail stays within --max-loss 5" in sweep_page(replace(SWEEP, longest=None))
    assert ElementTree.fromstring(sweep_page(replace(SWEEP, rows=ROWS[-1:], longest=None))) is not None


@pytest.mark.parametrize(
    ("first", "second", "marked"),
    [
        ("the cat sat", "the dog sat", (["cat"], ["dog"])),
        ("same text", "same text", ([], [])),
        ("", "new", ([], ["new"])),
        ("a b c", "a c", (["b "], [])),
        ("one\ntwo", "three", (["one\ntwo"], ["three"])),
    ],
)
def test_differences(first: str, second: str, marked: tuple[list[str], list[str]]) -> None:
    pieces = mark_differences(first, second)
    assert tuple("".join(piece.text for piece in side) for side in pieces) == (first, second)
    assert tuple([piece.text for piece in side if piece.is_marked] for side in pieces) == marked


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.93, 1.01, [0.94, 0.96, 0.98, 1.0]),
        (-3.0, 57.0, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]),
        (1e-5, 3e-5, [1e-5, 1.5e-5, 2e-5, 2.5e-5, 3e-5]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_points_lie_where_their_values_are() -> None:
    points = [Point(0.0, 1.0), Point(10.0, 2.0, 0.5, label="b<"), Point(5.0, 1.5)]
    root = ElementTree.fromstring(draw(Plot("t", "x", "y", [Series("s", points, 0)], limit=1.0)))
    first, second, middle = (
        (float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in root.findall(".//circle[@r='3.5']")
    )
    assert middle == pytest.approx(((first[0] + second[0]) / 2, (first[1] + second[1]) / 2), abs=0.11)
    assert first[0] < second[0]
    assert first[1] > second[1]
    (limit,) = root.findall(".//line[@class='limit']")
    assert float(limit.attrib["y1"]) == pytest.approx(first[1], abs=0.11)
    assert any(text.text == "b<" for text in root.iter("text"))


@pytest.mark.parametrize("points", [[], [Point(3.0, 0.0)], [Point(1.0, 1.0), Point(1.0, 1.0)]])
def test_plots_of_few_points_have_axes(points: list[Point]) -> None:
    assert ElementTree.fromstring(draw(Plot("t", "x", "y", [Series("s", points, 0)], diagonal=True))) is not None


def test_a_single_document_makes_a_page() -> None:
    result = replace(RESULT, documents=documents(1), scores=summarize(documents(1)), positions=POSITIONS[:1])
    assert result.scores.kl == Estimate(0.125, 0.0)
    assert ElementTree.fromstring(result_page(result)) is not None


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (`apt install chromium`)")
@pages
def test_chromium_opens_the_page_without_an_error(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'page.png'}"]
    url = (tmp_path / "page.html").as_uri()
    finished = subprocess.run([*command, url], capture_output=True, text=True, check=False, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "CONSOLE" not in finished.stderr
    assert (tmp_path / "page.png").stat().st_size > 10_000

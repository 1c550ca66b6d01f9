"""The plot of both curves: one point a layer on a logarithmic axis, none where the importance is 0."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pop_engine.configs.calibration import Estimate
from pop_engine.configs.prune_plan_file import ImportanceRecord
from pop_engine.tools.importance_plot import importance_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(prefill: list[float], decode: list[float]) -> ElementTree.Element:
    first, second = (tuple(Estimate(value, value / 10) for value in curve) for curve in (prefill, decode))
    record = ImportanceRecord("a<b", None, "self", "", 0, "fp32", 8, 16, 4, 4.0, first, second, first)
    return ElementTree.fromstring(importance_svg(record))


def series(picture: ElementTree.Element, style: int) -> ElementTree.Element:
    return next(group for group in picture.iter(f"{SVG}g") if group.get("class") == f"series-{style}")


def test_equal_ratios_are_equal_distances() -> None:
    prefill = series(drawn([1000.0, 100.0, 10.0, 1.0], [1.0, 2.0, 4.0, 8.0]), 0)
    heights = [float(circle.get("cy", "")) for circle in prefill.iter(f"{SVG}circle")]
    steps = [lower - upper for upper, lower in pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.11)
    assert steps[0] > 20
    bars = [float(line.get("y1", "")) - float(line.get("y2", "")) for line in prefill.iter(f"{SVG}line")]
    assert bars == pytest.approx([steps[0] * 0.2 / 2.302585] * 4, abs=0.11)


def test_a_layer_that_does_not_matter_has_no_point() -> None:
    picture = drawn([10.0, 1.0, 0.0], [1.0, 3.0, 9.0])
    titles = [[title.text for title in series(picture, style).iter(f"{SVG}title")] for style in (0, 1)]
    assert titles[0] == ["layer 0: 10 ± 1", "layer 1: 1 ± 0.1"]
    assert len(titles[1]) == 3


def test_the_axis_has_values_not_exponents() -> None:
    picture = drawn([1000.0, 100.0, 10.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    labels = {text.text for text in picture.iter(f"{SVG}text")}
    assert {"1", "10", "100", "1000"} <= labels
    assert "layer of a<b; bars are standard errors over 8 samples" in labels
    assert picture.find(f"{SVG}svg").get("aria-label") == "Importance of each layer: a<b, 8 samples"  # type: ignore[union-attr]


def test_the_last_third_is_marked() -> None:
    """Of six layers two: from between the fourth and the fifth to the edge."""
    picture = drawn([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [1.0] * 6)
    circles = [float(circle.get("cx", "")) for circle in series(picture, 0).iter(f"{SVG}circle")]
    (band,) = (found for found in picture.iter(f"{SVG}rect") if found.get("class") == "band")
    start, end = float(band.get("x", "")), float(band.get("x", "")) + float(band.get("width", ""))
    assert start == pytest.approx((circles[3] + circles[4]) / 2, abs=0.11)
    assert end > circles[5]

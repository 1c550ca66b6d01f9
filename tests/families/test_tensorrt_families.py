"""Every family compiled for TensorRT-RTX, without a GPU: it works, or it is refused with the words on record."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from families.family_record import check_recorded
from families.family_table import FAMILIES
from families.tensorrt_check import check_tensorrt
from nightly import nightly_unless

# One for each thing that TensorRT lacks, and two that no target takes; `make test-all` compiles every one.
IN_CI = {"gemma2", "mixtral", "mamba", "t5"}
RECORD = Path(__file__).with_name("tensorrt_rtx.json")
Results = dict[str, "Future[str]"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Every family that was selected, side by side."""
    pytest.importorskip("tensorrt_rtx", reason="needs `pip install tensorrt-rtx-cu13`: 95 MB, and no GPU")
    items = (item for item in request.session.items if hasattr(item, "callspec") and item.path == request.path)
    selected = {item.callspec.params["name"] for item in items}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        yield {
            name: pool.submit(check_tensorrt, name, tmp_path_factory.mktemp(name))
            for name in FAMILIES
            if name in selected
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", [nightly_unless(name in IN_CI, name) for name in FAMILIES])
def test_family_on_tensorrt_rtx(name: str, results: Results) -> None:
    """UPDATE_FAMILIES=1 records instead; `python -m pop_engine.tools.family_table` puts it into the README."""
    found = results[name].result()
    assert "\n" not in found
    assert FAMILIES[name].refused in found
    check_recorded(RECORD, name, found)

"""Every family compiled for TensorRT-RTX, without a GPU: it works, or it is refused with the words on record."""

from pathlib import Path

import pytest

from families.family_record import check_recorded
from families.family_table import FAMILIES
from families.tensorrt_check import check_tensorrt
from nightly import nightly_unless

# One for each thing that TensorRT lacks, and two that no target takes; `make test-all` compiles every one.
IN_CI = {"gemma2", "mixtral", "mamba", "t5"}
RECORD = Path(__file__).with_name("tensorrt_rtx.json")


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", [nightly_unless(name in IN_CI, name) for name in FAMILIES])
def test_family_on_tensorrt_rtx(name: str, tmp_path: Path) -> None:
    """UPDATE_FAMILIES=1 records instead; `python -m pop_engine.tools.family_table` puts it into the README."""
    pytest.importorskip("tensorrt_rtx", reason="needs `pip install tensorrt-rtx-cu13`: 95 MB, and no GPU")
    found = check_tensorrt(name, tmp_path)
    assert "\n" not in found
    assert FAMILIES[name].refused in found
    check_recorded(RECORD, name, found)

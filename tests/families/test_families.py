"""Every family of the table: built, run and compared, or refused with the words that the table gives."""

from pathlib import Path

import pytest

from families.family_check import FamilyResult, check_family
from families.family_record import check_recorded
from families.family_table import FAMILIES, REFUSED, WORKING
from nightly import nightly_unless

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# fp32 rounding, relative to the largest logit. Seen: below 1e-6.
TOLERANCE = 1e-5
# One of each kind; `make test-all` checks every one.
IN_CI = {"llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi4-mini", "cohere2", "gpt2", "mixtral", "gpt_oss"}
RESULTS = Path(__file__).with_name("results.json")


@pytest.mark.parametrize("name", [nightly_unless(family.name in IN_CI, family.name) for family in WORKING])
def test_family_works(name: str, tmp_path: Path) -> None:
    result = check_family(name, tmp_path)
    assert not result.refusal
    assert result.errors
    assert max(result.errors.values()) < TOLERANCE, result.errors
    assert result.tokens["found"] == result.tokens["expected"]
    _check_recorded(name, result)


@pytest.mark.parametrize("name", [family.name for family in REFUSED])
def test_family_is_refused(name: str, tmp_path: Path) -> None:
    result = check_family(name, tmp_path)
    assert FAMILIES[name].refused in result.refusal
    assert "\n" not in result.refusal
    _check_recorded(name, result)


def _check_recorded(name: str, result: FamilyResult) -> None:
    """Operator counts and words are those on record."""
    found: dict[str, object] = {"features": FAMILIES[name].features}
    found |= {"refusal": result.refusal} if result.refusal else {"operators": result.operators}
    check_recorded(RESULTS, name, found)

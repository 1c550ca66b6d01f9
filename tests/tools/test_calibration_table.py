"""The calibration table: which documents it scores, and its scores against the ones of single continuations."""

import pytest

from calibration_kit import random_model
from pop_engine.builder.analysis.benefit import continuation_nll
from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, Piece
from pop_engine.builder.reference import Reference
from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.calibration_table import Setting, choose_documents
from pop_engine.tools.continuation_scores import DocumentScorer

SETTING = Setting("model", "data", "", "text", 1000, 4, (32, 100), (1, 16))


def test_documents_are_chosen_among_the_long_ones() -> None:
    long = 100 + CONTINUATION_LEN
    chosen = choose_documents([long - 1, long] * 10, SETTING)
    assert len(chosen) == 4
    assert all(index % 2 for index in chosen)
    with pytest.raises(UsageError, match="3 of 20 documents have 164 tokens"):
        choose_documents([long] * 3 + [long - 1] * 17, SETTING)
    with pytest.raises(UsageError, match="others to fit on"):
        choose_documents([long] * 4, SETTING)


def test_one_prefill_scores_as_many_do() -> None:
    model = random_model()
    document = [(5 * index * index + index) % 97 for index in range(60 + CONTINUATION_LEN)]
    reference = Reference(model, PrunePlan(5, 3))
    (scores,) = DocumentScorer((0,), [document], (20, 60)).scores(reference, (1, 16), lambda done, total: None)
    assert set(scores) == {(20, 1), (20, 16), (60, 1), (60, 16)}
    for (length, window), score in scores.items():
        piece = Piece((0,), tuple(document[:length]), tuple(document[length : length + CONTINUATION_LEN]))
        assert score.nll == pytest.approx(continuation_nll(reference, piece, window), abs=1e-4)
        assert len(score.choices) == CONTINUATION_LEN

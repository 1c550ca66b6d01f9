"""Samples on disk: back to the bit, none of another key, and a torn last line is no sample."""

from pathlib import Path

import pytest

from pop_engine.builder.analysis.importance import GateGradients
from pop_engine.builder.analysis.journal import Journal
from pop_engine.configs.errors import EngineError

KEY = {"model": "a", "seed": "0"}
FIRST = GateGradients((0.1 + 0.2, 1e-40), (-3.141592653589793, 2.0**-149), 7)
SECOND = GateGradients((0.5, 0.0), (1.0, 2.0), 3)


def write(path: Path) -> None:
    with Journal(path, KEY) as journal:
        assert journal.found == {}
        journal.add(0, FIRST)
        journal.add(5, SECOND)


def test_samples_come_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal"
    write(path)
    with Journal(path, KEY) as journal:
        assert journal.found == {0: FIRST, 5: SECOND}
        journal.add(6, FIRST)
    with Journal(path, KEY) as journal:
        assert journal.found == {0: FIRST, 5: SECOND, 6: FIRST}


def test_every_torn_end_leaves_the_samples_before_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    content = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with Journal(path, KEY) as journal:
            assert len(journal.found) == max(sum(end <= length for end in ends) - 1, 0)
            journal.add(9, SECOND)
        with Journal(path, KEY) as journal:
            assert journal.found[9] == SECOND


def test_another_key_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    with Journal(path, KEY | {"seed": "1"}) as journal:
        assert journal.found == {}
    with Journal(path, KEY) as journal:
        assert journal.found == {}


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(path.read_bytes().replace(b'"index":0', b'"index":?'))
    with pytest.raises(EngineError, match="journal: damaged .*delete it and begin anew"), Journal(path, KEY):
        pass

"""Prose out of files: what counts, how it is divided, and that a choice can be made again."""

import json
from pathlib import Path

import pytest

from pop_engine.tools.local_text import divide, extract_prose, main

SENTENCE = "It is a truth that the owner of a good fortune is in want of a wife, and this is what the story is about. "
PROSE = (SENTENCE * 3).strip()


def test_running_english_is_kept_and_nothing_else() -> None:
    code = "for (i = 0; i < n; i++) { total += values[i] * weights[i]; }\n" * 5 + "."
    spanish = "La casa de mis padres estaba cerca del mar y desde sus ventanas se veían los barcos. " * 3
    text = "\n\n".join([PROSE.replace(" good", "\ngood"), code, spanish.strip(), "Too short to count."])
    assert extract_prose(text) == PROSE


def test_a_long_text_is_divided_between_paragraphs() -> None:
    paragraphs = [f"{PROSE} {index}" for index in range(100)]
    documents = divide("\n\n".join(paragraphs))
    assert "\n\n".join(documents).split("\n\n") == paragraphs
    assert all(3000 <= len(document) <= 12_500 for document in documents)


def test_the_same_seed_takes_the_same_documents_of_each_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        for index in range(6):
            text = "\n\n".join(f"{folder.name}{index} {PROSE}" for _ in range(12))
            (folder / f"{index}.txt").write_text(text)
    arguments = [argument for folder in folders for argument in ("--folder", str(folder))]
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for out in outs:
        assert main([*arguments, "--per-source", "4", "-o", str(out)]) == 0
    assert outs[0].read_text() == outs[1].read_text()
    origins = [json.loads(line)["origin"] for line in outs[0].read_text().splitlines()]
    assert [sum(origin.startswith(str(folder)) for origin in origins) for folder in folders] == [4, 4]
    assert main(["--folder", str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 2
    assert "no English prose was found" in capsys.readouterr().err

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.configs.errors import EngineError

Folder = Callable[[str], Path]
Opened = Callable[..., Checkpoint]


def add(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_record(folder: Folder, opened: Opened, tmp_path: Path) -> None:
    path = folder("single")
    eos = {"content": "<end>", "special": True}
    add(path, "tokenizer_config.json", {"bos_token": "a", "eos_token": eos, "pad_token": None, "chat_template": "T"})
    add(path, "generation_config.json", {"eos_token_id": [7, 8]})
    record = opened(path).save_tokenizer(tmp_path)
    assert record is not None
    # The generation config's ids, then the tokenizer's own end token.
    assert record.eos_token_ids == (7, 8, 5)
    assert record.special_tokens == {"bos_token": "a", "eos_token": "<end>"}
    assert record.chat_template == "T"
    assert (tmp_path / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()


def test_eos_from_config(folder: Folder, opened: Opened, tmp_path: Path) -> None:
    path = folder("single")
    (path / "generation_config.json").unlink(missing_ok=True)
    record = opened(path).save_tokenizer(tmp_path)
    assert record is not None
    assert (record.eos_token_ids, record.special_tokens, record.chat_template) == ((3, 4), {}, None)


@pytest.mark.parametrize(
    "template",
    [[{"name": "tool", "template": "X"}, {"name": "default", "template": "T"}], "T"],
)
def test_chat_template_kinds(folder: Folder, opened: Opened, tmp_path: Path, template: object) -> None:
    path = folder("single")
    add(path, "tokenizer_config.json", {"chat_template": template})
    record = opened(path).save_tokenizer(tmp_path)
    assert record is not None
    assert record.chat_template == "T"
    add(path, "chat_template.jinja", "J")
    record = opened(path).save_tokenizer(tmp_path)
    assert record is not None
    assert record.chat_template == "J"


def test_no_tokenizer(folder: Folder, opened: Opened, tmp_path: Path) -> None:
    assert opened(folder("sharded")).save_tokenizer(tmp_path) is None
    assert not (tmp_path / "tokenizer.json").exists()


def test_damaged_tokenizer(folder: Folder, opened: Opened, tmp_path: Path) -> None:
    path = folder("single")
    add(path, "tokenizer.json", "{}")
    with pytest.raises(EngineError, match=r"tokenizer.json: not a readable tokenizer"):
        opened(path).save_tokenizer(tmp_path)


def test_damaged_tokenizer_config(folder: Folder, opened: Opened, tmp_path: Path) -> None:
    path = folder("single")
    add(path, "tokenizer_config.json", "{")
    with pytest.raises(EngineError, match=r"tokenizer_config.json: not JSON"):
        opened(path).save_tokenizer(tmp_path)


def test_tokenizer_that_cannot_be_converted(folder: Folder, opened: Opened, tmp_path: Path) -> None:
    path = folder("single")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(EngineError, match="tokenizer"):
        opened(path).save_tokenizer(tmp_path)

"""A checkpoint folder's tokenizer, as the runtime needs it: tokenizer.json, special tokens, chat template."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig

from pop_engine.builder.checkpoint.json_file import read_json_object
from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import TOKENIZER_NAME, TokenizerRecord

_VOCABULARY_FILES = (
    TOKENIZER_NAME, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"
)  # fmt: skip
_TEMPLATE_FILE = "chat_template.jinja"
_DEFAULT_TEMPLATE = "default"


def save_folder_tokenizer(
    folder: Path, directory: Path, hf_config: PreTrainedConfig, *, trust_remote_code: bool
) -> TokenizerRecord | None:
    """Write the folder's tokenizer.json into a directory; None where the folder has no tokenizer files.

    Raises EngineError where a file is damaged or the tokenizer has no fast form.
    """
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        return None
    target = directory / TOKENIZER_NAME
    if (folder / TOKENIZER_NAME).is_file():
        shutil.copyfile(folder / TOKENIZER_NAME, target)
        tokenizer = _load(target, folder / TOKENIZER_NAME)
    else:
        tokenizer = _convert(folder, trust_remote_code=trust_remote_code)
        tokenizer.save(str(target))
    special_tokens = _special_tokens(folder)
    eos_sources = (
        _read_json(folder / "generation_config.json").get("eos_token_id"),
        hf_config.get_text_config().eos_token_id,
        tokenizer.token_to_id(special_tokens.get("eos_token", "")),
    )
    return TokenizerRecord(first_eos_ids(eos_sources[:2], eos_sources[2]), special_tokens, _chat_template(folder))


def first_eos_ids(sources: Iterable[int | list[int] | None], own: int | None) -> tuple[int, ...]:
    """The first source's ids, each a number or a list, and the tokenizer's own eos token after them."""
    found = next((source for source in sources if source is not None), None)
    ids = list(found) if isinstance(found, list | tuple) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))


def default_template(template: Any) -> str | None:
    """One template where a checkpoint may have many: the one named `default`, else the first."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get(_DEFAULT_TEMPLATE) or next(iter(template.values()), None)
    return template or None


def _load(path: Path, origin: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    # The library raises plain Exception.
    except Exception as error:
        raise EngineError(f"{origin}: not a readable tokenizer ({reason(error)}); fetch the file again") from error


def _convert(folder: Path, *, trust_remote_code: bool) -> Tokenizer:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    # A conversion can fail anywhere in the tokenizer's own class.
    except Exception as error:
        raise EngineError(
            f"{folder}: its tokenizer has no {TOKENIZER_NAME} and cannot be converted to one ({reason(error)})"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise EngineError(
            f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; expected a checkpoint with {TOKENIZER_NAME}"
        )
    return backend


def _special_tokens(folder: Path) -> dict[str, str]:
    merged = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    tokens = {name: value for name, value in merged.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path) -> str | None:
    file = folder / _TEMPLATE_FILE
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        for name in ("tokenizer_config.json", "chat_template.json"):
            if template := default_template(_read_json(folder / name).get("chat_template")):
                return template
    except (UnicodeDecodeError, KeyError, TypeError) as error:
        raise EngineError(f"{folder}: its chat template is damaged ({reason(error)}); fetch the files again") from error
    return None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}

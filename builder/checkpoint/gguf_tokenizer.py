"""A GGUF file's tokenizer, with what transformers' conversion leaves out put back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata

from pop_engine.builder.checkpoint.reason import reason
from pop_engine.builder.checkpoint.tokenizer_files import default_template, first_eos_ids
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import TOKENIZER_NAME, TokenizerRecord

_KEYS = "tokenizer.ggml."
# llama.cpp splits every digit off for these before it applies GPT-2's pattern.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_PLAIN_BYTE_LEVEL = frozenset({"", "default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "gigachat", "exaone4"})
# llama.cpp adds the bos token for these even where an older file does not say so.
_ADD_BOS = frozenset({"llama3", "llama-v3", "llama-bpe"})
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def save_gguf_tokenizer(path: Path, directory: Path) -> TokenizerRecord | None:
    """Write a GGUF file's tokenizer as tokenizer.json; None where the file has none.

    Raises UsageError where the tokenizer is of a kind that would come out wrong, EngineError where it is damaged.
    """
    metadata, _ = read_gguf_metadata(str(path))
    kind = metadata.get(_KEYS + "model")
    if kind is None or kind == "none":
        return None
    if kind == "gpt2":
        _refuse_unknown_split(path, metadata)
    try:
        # Not AutoTokenizer: it would read the whole file's metadata once more, for a class that changes nothing here.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    # A conversion can fail anywhere in the tokenizer's own class.
    except Exception as error:
        raise EngineError(
            f"{path}: its tokenizer cannot be converted ({reason(error)}); use the safetensors folder"
        ) from error
    backend: Tokenizer = tokenizer.backend_tokenizer
    if kind == "gpt2" and metadata.get(_KEYS + "pre") in _SINGLE_DIGITS:
        _split_digits(backend)
    if _wants_bos(metadata, bool(getattr(tokenizer, "add_bos_token", False))):
        _add_bos(backend, tokenizer.bos_token, metadata.get(_KEYS + "bos_token_id"), path)
    backend.save(str(directory / TOKENIZER_NAME))
    special_tokens = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    template = default_template(tokenizer.chat_template)
    return TokenizerRecord(_eos_ids(metadata, backend, template), special_tokens, template)


def _refuse_unknown_split(path: Path, metadata: Mapping[str, Any]) -> None:
    split = metadata.get(_KEYS + "pre", "")
    if split not in _SINGLE_DIGITS | _PLAIN_BYTE_LEVEL | GGUF_PRE_TOKENIZER_SPLITS.keys():
        raise UsageError(
            f"{path}: its tokenizer splits text by the rules {split!r}, which transformers does not know, "
            "so token ids would be wrong; use the safetensors folder"
        )


def _split_digits(backend: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _wants_bos(metadata: Mapping[str, Any], converted: bool) -> bool:
    if metadata.get(_KEYS + "pre") in _ADD_BOS:
        return bool(metadata.get(_KEYS + "add_bos_token", True))
    return converted


def _add_bos(backend: Tokenizer, bos: str | None, bos_id: int | None, path: Path) -> None:
    if bos is None or bos_id is None:
        raise EngineError(f"{path}: asks for a bos token at the start of every prompt, but names none")
    if backend.encode("a").ids[:1] != [bos_id]:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
        )


def _eos_ids(metadata: Mapping[str, Any], backend: Tokenizer, template: str | None) -> tuple[int, ...]:
    """The file's own end tokens, and the one that ends a turn in its chat template."""
    stated = [metadata.get(f"{_KEYS}{name}_token_id") for name in ("eos", "eot", "eom")]
    turns = [backend.token_to_id(token) for token in _END_OF_TURN if template and token in template]
    return first_eos_ids([[token_id for token_id in (*stated, *turns) if token_id is not None]], None)

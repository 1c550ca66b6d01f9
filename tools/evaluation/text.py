"""Text to tokens for an evaluation, by a tokenizer and without a session."""

from pathlib import Path

import tokenizers

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import TOKENIZER_NAME, TokenizerRecord
from pop_engine.runtime.chat_template import ChatMessage, ChatTemplate
from pop_engine.runtime.tokenizer import Tokenizer


class EvalText:
    """Prompts as pop-run encodes them, and answers, which continue a text and so have no special tokens."""

    def __init__(self, directory: Path, record: TokenizerRecord | None) -> None:
        """Of the folder that holds tokenizer.json, and what is recorded of it.

        Raises UsageError where there is no tokenizer, EngineError where its file is damaged.
        """
        if record is None:
            raise UsageError(f"{directory}: has no tokenizer, so text cannot be evaluated; build from a model with one")
        self._tokenizer = Tokenizer.load(directory, record)
        self._plain = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_NAME))
        self._plain.no_padding()
        self._plain.no_truncation()
        self._template = None if record.chat_template is None else ChatTemplate(
            record.chat_template, record.special_tokens
        )  # fmt: skip
        self.eos_token_ids = record.eos_token_ids
        self._bos_token = record.special_tokens.get("bos_token")

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._template is not None

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return None if self._bos_token is None else self._plain.token_to_id(self._bos_token)

    def begins_with_bos(self, text: str) -> bool:
        """Whether the text spells out its first special token, as chat templates do."""
        return self._bos_token is not None and text.startswith(self._bos_token)

    @property
    def prefix(self) -> list[int]:
        """The special tokens that every plain text of the model begins with."""
        return self._tokenizer.encode("")

    def encode(self, text: str) -> list[int]:
        """A whole text, with special tokens."""
        return self._tokenizer.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """A piece of text, without special tokens."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_chat(self, message: str) -> list[int]:
        """A user's message, up to where the answer begins."""
        return self._tokenizer.encode_chat([{"role": "user", "content": message}])

    def render_chat(self, messages: list[ChatMessage]) -> str:
        """A conversation as text, up to where the answer begins. Raises UsageError where there is no template."""
        if self._template is None:
            raise UsageError("messages: this model has no chat template; give the prompt as plain text")
        return self._template.render(messages)

    def encode_answer(self, prompt: str, answer: str) -> list[int]:
        """What `answer` adds to the tokens of the prompt's text, or its own where they would merge."""
        before, both = self.encode_plain(prompt), self.encode_plain(prompt + answer)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self.encode_plain(answer)

    def last_tokens(self, text: str, count: int) -> str:
        """The end of a text that its last `count` tokens cover."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return text if len(encoding.ids) <= count else text[encoding.offsets[-count][0] :]

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones left out."""
        return self._tokenizer.decode(token_ids)

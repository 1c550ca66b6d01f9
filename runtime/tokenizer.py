"""Text and messages to token ids, and back."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import TOKENIZER_NAME, TokenizerRecord
from pop_engine.runtime.chat_template import ChatMessage, ChatTemplate


class Tokenizer:
    """An engine's tokenizer, with the ids and texts that transformers' fast tokenizer of the model gives."""

    def __init__(self, backend: tokenizers.Tokenizer, record: TokenizerRecord) -> None:
        # A saved tokenizer may carry the padding and truncation of its training; transformers switches them off too.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._eos_token_ids = frozenset(record.eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_ids = frozenset(backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        template = record.chat_template
        self._chat_template = None if template is None else ChatTemplate(template, record.special_tokens)

    @classmethod
    def load(cls, directory: Path, record: TokenizerRecord) -> "Tokenizer":
        """Read the tokenizer of an engine directory. Raises EngineError where its file is missing or damaged."""
        path = directory / TOKENIZER_NAME
        if not path.is_file():
            raise EngineError(f"{path}: no such file; the engine directory is incomplete, build it again")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing more specific.
            raise EngineError(f"{path}: not a readable tokenizer ({error}); build the engine again") from error
        return cls(backend, record)

    @property
    def has_chat_template(self) -> bool:
        """True where `encode_chat` can be used."""
        return self._chat_template is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation."""
        return self._eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the model starts or ends a text with.

        Raises UsageError where the text is no valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next turn begins.

        Raises UsageError where the model has no chat template, and on messages that it cannot render.
        """
        return self.encode_rendered(self.render(messages))

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text of a conversation as the chat template writes it. Raises as `encode_chat`."""
        if self._chat_template is None:
            raise UsageError("messages: this model has no chat template; give the prompt as plain text (--no-chat)")
        return self._chat_template.render(messages)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered conversation."""
        # The template writes its own special tokens. As in transformers, those that a message contains
        # ("<|im_end|>" typed by a user) become the same ids: text from strangers can end its own turn.
        return self._encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """How a text writes one token. Raises EngineError where the vocabulary has no such id."""
        text = self._backend.id_to_token(token_id)
        if text is None:
            raise EngineError(f"{TOKENIZER_NAME}: has no token {token_id}, which images need; build the engine again")
        return str(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out. Incomplete UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def is_skipped(self, token_id: int) -> bool:
        """True where `decode` leaves this id out: a special token, or an id that only pads the logits."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """True for a byte-fallback token (`<0x0A>`), whose text depends on the byte tokens around it."""
        return token_id in self._byte_ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise UsageError(
                f"prompt: {found} is half of a surrogate pair, expected valid Unicode; read the text as UTF-8"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

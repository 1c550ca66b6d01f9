"""Text as it is decoded: whole characters only, and nothing of a stop string."""

from pop_engine.runtime.tokenizer import Tokenizer

# Tokens kept to decode the next ones after. Four bytes settle where a UTF-8 character starts, one token whether a
# space is at the start of the text; the rest is margin.
_CONTEXT_LEN = 8
_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns the ids of one sequence into pieces of text that are never taken back.

    All pieces together, flush included, are `tokenizer.decode` of all ids, cut before the first stop string to be
    completed (the longest, where several end at the same character). The work for a token does not grow with the
    length of the text. Byte-fallback tokens show once the first other token follows: until then a further byte
    can still change all of them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._max_held = max((len(text) for text in stop), default=1) - 1
        # The last tokens, and how many characters of their text have been taken.
        self._window: list[int] = []
        self._num_taken = 0
        # Text that may be the beginning of a stop string.
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was completed. It can be completed by `flush` too."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be shown now, often empty. Nothing comes after a stop."""
        # Keeping skipped tokens out of the window keeps it short when a model repeats its end token.
        if self._stopped or self._tokenizer.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        shown = self._cut(self._take_whole_characters())
        if self._stopped:
            return shown
        num_held = self._count_stop_prefix(self._held)
        ready = len(self._held) - num_held
        shown, self._held = self._held[:ready], self._held[ready:]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the generation; empty after a stop."""
        if self._stopped:
            return ""
        rest = self._tokenizer.decode(self._window)[self._num_taken :]
        self._window, self._num_taken = [], 0
        shown = self._cut(rest)
        if not self._stopped:
            shown, self._held = self._held, ""
        return shown

    def _take_whole_characters(self) -> str:
        text = self._tokenizer.decode(self._window)
        # Only the last U+FFFD can stand for a character whose bytes are still coming; earlier ones are final.
        num_open = int(text.endswith(_REPLACEMENT))
        whole = text[self._num_taken : len(text) - num_open]
        self._num_taken = len(text) - num_open
        if len(self._window) > 2 * _CONTEXT_LEN:
            self._window = self._window[-_CONTEXT_LEN:]
            self._num_taken = len(self._tokenizer.decode(self._window)) - num_open
        return whole

    def _cut(self, text: str) -> str:
        """Add text to what is held; where that completes a stop string, stop and return what comes before it."""
        self._held += text
        found = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if not found:
            return ""
        _, start = min(found)
        shown, self._held, self._stopped = self._held[:start], "", True
        return shown

    def _count_stop_prefix(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

"""Where two answers differ, word by word."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from pop_engine.tools.evaluation.page import Piece

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def mark_differences(first: str, second: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces; joined, they are the texts again. Marked is what the other does not have there."""
    words = _WORDS.findall(first), _WORDS.findall(second)
    blocks = SequenceMatcher(None, *words, autojunk=False).get_matching_blocks()
    return (
        list(_pieces(words[0], [(block.a, block.size) for block in blocks])),
        list(_pieces(words[1], [(block.b, block.size) for block in blocks])),
    )


def _pieces(words: list[str], shared: list[tuple[int, int]]) -> Iterator[Piece]:
    position = 0
    for start, size in shared:
        for begin, end, is_marked in ((position, start, True), (start, start + size, False)):
            if end > begin:
                yield Piece("".join(words[begin:end]), is_marked)
        position = start + size

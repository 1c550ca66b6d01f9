"""Placeholders in a prompt's text, replaced by what stands for each image's tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.processor import PromptImage


@dataclass(frozen=True)
class Replacement:
    """What one placeholder becomes: text, and the images whose tokens are in it, in order."""

    text: str
    images: tuple[PromptImage, ...]


def expand_placeholders(
    text: str, replacements: Mapping[str, Sequence[Replacement]]
) -> tuple[str, tuple[PromptImage, ...]]:
    """The text with every placeholder replaced, each by the next of its list, and the images in the text's order.

    Raises UsageError where a placeholder is there more often than its list is long, or less.
    """
    for placeholder, given in replacements.items():
        _check_count(placeholder, text.count(placeholder), len(given))
    left = {placeholder: iter(given) for placeholder, given in replacements.items()}
    pieces: list[str] = []
    images: list[PromptImage] = []
    for piece in re.split("(" + "|".join(map(re.escape, replacements)) + ")", text):
        if piece in left:
            replacement = next(left[piece])
            pieces.append(replacement.text)
            images += replacement.images
        else:
            pieces.append(piece)
    return "".join(pieces), tuple(images)


def _check_count(placeholder: str, found: int, given: int) -> None:
    if found > given:
        raise UsageError(
            f"prompt: {placeholder} is there {found} times, but {given} of its images or videos are given; "
            "give one for each, or take it out of the text"
        )
    if found < given:
        raise UsageError(
            f"prompt: {given} images or videos are given for {placeholder}, but it is there {found} times; "
            "write it where each belongs, or use the chat template"
        )

"""Placeholders in texts, and images in token ids."""

import pytest

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.expansion import Replacement, expand_placeholders
from pop_engine.runtime.images.processor import PromptImage
from pop_engine.runtime.images.prompt import place_images

SMALL, LARGE = PromptImage(("a",), 0, 0, 1, 2), PromptImage(("b",), 0, 0, 2, 2)
IMAGES = [Replacement("<i><i>", (SMALL,)), Replacement("<i><i><i><i>", (LARGE,))]
VIDEO = Replacement("<0.5 s><v><1.5 s><v>", (SMALL, SMALL))


def test_each_placeholder_becomes_the_next_image() -> None:
    assert expand_placeholders("a<i>b<i>", {"<i>": IMAGES}) == ("a<i><i>b<i><i><i><i>", (SMALL, LARGE))
    assert expand_placeholders("plain", {"<i>": []}) == ("plain", ())


def test_images_and_videos_keep_the_order_of_the_text() -> None:
    text, images = expand_placeholders("<v>.<i>", {"<i>": [IMAGES[1]], "<v>": [VIDEO]})
    assert text == "<0.5 s><v><1.5 s><v>.<i><i><i><i>"
    assert images == (SMALL, SMALL, LARGE)


def test_a_placeholder_is_no_pattern() -> None:
    assert expand_placeholders("a|b <|i|>", {"<|i|>": [IMAGES[0]]})[0] == "a|b <i><i>"


def test_more_placeholders_than_images_and_fewer() -> None:
    with pytest.raises(
        UsageError, match=r"^prompt: <i> is there 2 times, but 1 of its images or videos are given; give"
    ):
        expand_placeholders("<i><i>", {"<i>": IMAGES[:1]})
    with pytest.raises(
        UsageError, match=r"^prompt: 2 images or videos are given for <i>, but it is there 1 times; write"
    ):
        expand_placeholders("<i>", {"<i>": IMAGES})


def test_images_are_placed_in_token_ids() -> None:
    prompt = place_images([1, 9, 9, 2, 9, 9, 9, 9], [SMALL, LARGE], frozenset({9}))
    assert [(placed.start, placed.stop) for placed in prompt.images] == [(1, 3), (4, 8)]
    assert list(prompt) == [1, 9, 9, 2, 9, 9, 9, 9]
    assert (len(prompt), prompt[0], prompt[1:3]) == (8, 1, (9, 9))


def test_two_images_side_by_side() -> None:
    prompt = place_images([9] * 6, [LARGE, SMALL], frozenset({9}))
    assert [(placed.start, placed.stop) for placed in prompt.images] == [(0, 4), (4, 6)]


def test_one_token_for_each_image_is_repeated() -> None:
    prompt = place_images([1, 9, 2, 9], [SMALL, LARGE], frozenset({9}))
    assert list(prompt) == [1, 9, 9, 2, 9, 9, 9, 9]
    assert [(placed.start, placed.stop) for placed in prompt.images] == [(1, 3), (4, 8)]


@pytest.mark.parametrize("token_ids", [[9, 9, 9], [1, 2]])
def test_token_ids_with_another_number_of_image_tokens(token_ids: list[int]) -> None:
    with pytest.raises(UsageError, match=rf"it has {token_ids.count(9)} image tokens, but its 1 images take 2; leave"):
        place_images(token_ids, [SMALL], frozenset({9}))


def test_an_image_in_two_pieces() -> None:
    with pytest.raises(UsageError, match="the 2 tokens of an image at token 0 are not in one piece"):
        place_images([9, 1, 9], [SMALL], frozenset({9}))

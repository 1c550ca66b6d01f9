"""What the Python API refuses: UsageError for wrong calls, with the engine left as it was."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_fixtures import MAX_SEQ_LEN, NUM_SLOTS, VOCAB_SIZE, CliKit
from pop_engine.configs.errors import UsageError
from pop_engine.runtime import Engine, SamplingParams
from pop_engine.runtime.messages import ImagePart

pytest_plugins = ["cli_plugin"]


@pytest.fixture(scope="module")
def loaded(cli_kit: CliKit) -> Iterator[Engine]:
    with Engine.load(cli_kit.engine) as engine:
        yield engine


TEXT_ONLY = "images: this model takes text only, as plain strings; leave them out, or build a vision-language model"
IMAGE_PART: ImagePart = {"type": "image", "image": "a.png"}
CALLS: dict[str, tuple[Callable[[Engine], object], str]] = {
    "no tokens": (lambda e: e.generate([]), "prompt: empty; expected at least one token"),
    "empty text": (lambda e: e.generate(""), "prompt: empty; expected at least one token"),
    "token above the vocabulary": (
        lambda e: e.generate([VOCAB_SIZE]),
        f"token id {VOCAB_SIZE}: expected 0 to {VOCAB_SIZE - 1}, the model's vocabulary",
    ),
    "negative token": (lambda e: e.generate([-1]), f"token id -1: expected 0 to {VOCAB_SIZE - 1}"),
    "too many tokens": (
        lambda e: e.generate([1] * (MAX_SEQ_LEN + 1)),
        f"prompt of {MAX_SEQ_LEN + 1} tokens: the engine holds max_seq_len {MAX_SEQ_LEN}; shorten it",
    ),
    "half a surrogate pair": (lambda e: e.generate("ab\ud800"), "prompt: U+D800 at character 2 is half of a surrogate"),
    "no messages": (lambda e: e.chat([]), "messages: the list is empty; expected at least one"),
    "message without a role": (lambda e: e.chat([{"content": "a"}]), "messages[0]: has no 'role'"),  # type: ignore[typeddict-item]
    "image to a text model": (lambda e: e.generate([5], images=[b"x"]), TEXT_ONLY),
    "image in a message to a text model": (lambda e: e.chat([{"role": "user", "content": [IMAGE_PART]}]), TEXT_ONLY),
    "image beside a message to a text model": (
        lambda e: e.chat([{"role": "user", "content": "a"}], images=["a.png"]),
        TEXT_ONLY,
    ),
    "slot never allocated": (lambda e: e.prefill(0, [5]), "slot 0: not allocated; expected one that allocate_slot"),
    "slot that does not exist": (lambda e: e.prefill(99, [5]), "slot 99: not allocated"),
    "negative slot": (lambda e: e.decode_step([-1], [5]), "slot -1: not allocated"),
    "slot freed twice": (lambda e: e.free_slot(1), "slot 1: not allocated"),
}


@pytest.mark.parametrize("call", CALLS)
def test_call(loaded: Engine, call: str) -> None:
    wrong, message = CALLS[call]
    with pytest.raises(UsageError) as caught:
        wrong(loaded)
    assert str(caught.value).startswith(message)
    assert loaded.num_free_slots == NUM_SLOTS
    assert len(loaded.generate([5, 6], SamplingParams(max_tokens=2)).token_ids) == 2


def test_more_slots_than_there_are(loaded: Engine) -> None:
    slots = [loaded.allocate_slot() for _ in range(NUM_SLOTS)]
    with pytest.raises(UsageError, match=rf"^slots: all {NUM_SLOTS} are taken; free one, or build with a higher"):
        loaded.allocate_slot()
    for slot in slots:
        loaded.free_slot(slot)


@pytest.mark.parametrize(("count", "tokens"), [(2, [5, 6]), (1, [5, 6]), (1, [])])
def test_decode_step_of_a_slot_twice_or_without_its_token(loaded: Engine, count: int, tokens: list[int]) -> None:
    slot = loaded.allocate_slot()
    loaded.prefill(slot, [5])
    with pytest.raises(UsageError, match=r"^decode_step: slots \[0.*give each slot once, with one token"):
        loaded.decode_step([slot] * count, tokens)
    loaded.free_slot(slot)


def test_full_slot(loaded: Engine) -> None:
    slot = loaded.allocate_slot()
    loaded.prefill(slot, [5] * MAX_SEQ_LEN)
    message = rf"^sequence of {MAX_SEQ_LEN + 1} tokens: the engine holds max_seq_len {MAX_SEQ_LEN}; shorten it"
    with pytest.raises(UsageError, match=message):
        loaded.decode_step([slot], [5])
    with pytest.raises(UsageError, match=message):
        loaded.prefill(slot, [5])
    loaded.free_slot(slot)


def test_closed_engine(cli_kit: CliKit) -> None:
    engine = Engine.load(cli_kit.engine)
    engine.close()
    with pytest.raises(UsageError, match="^the engine is closed; load it again$"):
        engine.generate([5])


def test_threads(cli_kit: CliKit) -> None:
    with pytest.raises(UsageError, match="^threads 0: expected a whole number of at least 1, or none for all cores$"):
        Engine.load(cli_kit.engine, threads=0)


def test_path_that_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an engine directory"):
        Engine.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 1.5}, "max_tokens 1.5: expected a whole number of at least 1"),
        ({"temperature": "hot"}, "temperature 'hot': expected a number from 0 to 100"),
        ({"stop": "end"}, "stop 'end': expected a tuple of strings, none of them empty"),
        ({"stop": ("end", "")}, "stop ('end', ''): expected a tuple of strings, none of them empty"),
        ({"seed": "x"}, "seed 'x': expected a whole number of at least 0"),
    ],
)
def test_sampling_params(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message

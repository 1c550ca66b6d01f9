"""The Python API on a real, if tiny, engine."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_kit import CHAT_TEMPLATE, MAX_SEQ_LEN, NUM_SLOTS, SMALL, VOCAB_SIZE, TinyModels, random_tokens
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime import Engine, SamplingParams

PLAN = (SMALL, SMALL - 1)
PROMPT = "the cat sat on the mat"
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
Loader = Callable[..., Engine]


@pytest.fixture
def engine(tiny: TinyModels) -> Engine:
    return tiny.engine(PLAN, "one-pass")


@pytest.fixture
def load(tiny: TinyModels, tmp_path: Path, request: pytest.FixtureRequest) -> Loader:
    """Loads a private copy of the engine, its tokenizer record changed; `record=None` leaves it without one."""

    def load_copy(**tokenizer: Any) -> Engine:
        directory = Path(shutil.copytree(tiny.directory(PLAN, "one-pass"), tmp_path / "engine"))
        manifest = Manifest.load(directory)
        assert manifest.tokenizer is not None
        record = None if tokenizer.get("record", ...) is None else dataclasses.replace(manifest.tokenizer, **tokenizer)
        dataclasses.replace(manifest, tokenizer=record).save(directory / "engine.json")
        loaded = Engine.load(directory)
        request.addfinalizer(loaded.close)
        return loaded

    return load_copy


def test_generate_is_greedy_by_default_and_repeats(engine: Engine) -> None:
    first = engine.generate(PROMPT, SHORT)
    assert first.token_ids == engine.generate(PROMPT, SHORT).token_ids
    assert len(first.token_ids) == 12
    assert len(set(first.token_ids)) > 4, "a model that repeats one token shows nothing"
    slot = engine.allocate_slot()
    logits = engine.prefill(slot, engine.encode(PROMPT))
    for token_id in first.token_ids:
        assert int(logits.argmax()) == token_id
        logits = engine.decode_step([slot], [token_id])[0]
    engine.free_slot(slot)


def test_text_and_its_token_ids_are_one_prompt(engine: Engine) -> None:
    token_ids = engine.encode(PROMPT)
    expected = engine.generate(PROMPT, SHORT)
    assert len(token_ids) > 3
    for prompt in (token_ids, tuple(token_ids), np.array(token_ids)):
        assert engine.generate(prompt, SHORT).token_ids == expected.token_ids  # type: ignore[arg-type]
    assert engine.encode(token_ids) == token_ids


def test_a_stream_joined_is_what_generate_returns(engine: Engine) -> None:
    expected = engine.generate(PROMPT, SHORT)
    pieces = list(engine.stream(PROMPT, SHORT))
    assert "".join(piece.text for piece in pieces) == expected.text != ""
    assert tuple(piece.token.token_id for piece in pieces) == expected.token_ids


def test_text_is_the_decoded_tokens(engine: Engine) -> None:
    found = engine.generate(PROMPT, SHORT)
    assert engine._tokenizer is not None
    assert found.text == engine._tokenizer.decode(found.token_ids)


def test_chat_renders_the_template(engine: Engine) -> None:
    assert engine.has_chat_template
    messages = [{"role": "user", "content": "the cat"}]
    expected = engine.encode("<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant:")
    assert engine.encode_chat(messages) == expected  # type: ignore[arg-type]
    answer = engine.chat(messages, SHORT)  # type: ignore[arg-type]
    assert answer.token_ids == engine.generate(expected, SHORT).token_ids
    assert answer.metrics.num_prompt_tokens == len(expected)
    pieces = engine.stream_chat(messages, SHORT)  # type: ignore[arg-type]
    assert "".join(piece.text for piece in pieces) == answer.text


def test_metrics(engine: Engine) -> None:
    metrics = engine.generate(PROMPT, SHORT).metrics
    assert metrics.num_prompt_tokens == len(engine.encode(PROMPT))
    assert metrics.num_output_tokens == 12
    assert 0 < metrics.ttft_ms < 60_000
    assert 0 < metrics.tpot_ms < 60_000
    one = engine.generate(PROMPT, SamplingParams(max_tokens=1))
    assert (one.metrics.num_output_tokens, one.metrics.tpot_ms) == (1, 0.0)


def test_max_tokens_ends_with_length(engine: Engine) -> None:
    found = engine.generate(PROMPT, SHORT)
    assert (found.finish_reason, len(found.token_ids)) == ("length", 12)


@pytest.mark.parametrize("num_tokens", [MAX_SEQ_LEN - 3, MAX_SEQ_LEN])
def test_a_full_slot_ends_with_length(engine: Engine, num_tokens: int) -> None:
    found = engine.generate(random_tokens(num_tokens), SamplingParams(ignore_eos=True))
    # The last token is sampled without room to write it.
    assert (found.finish_reason, len(found.token_ids)) == ("length", MAX_SEQ_LEN - num_tokens + 1)


def test_an_end_token_stops(engine: Engine, load: Loader) -> None:
    expected = engine.generate(PROMPT, SHORT)
    position = next(i for i in range(3, 12) if expected.token_ids[i] not in expected.token_ids[:i])
    own = load(eos_token_ids=(0, expected.token_ids[position]))
    found = own.generate(PROMPT)
    assert found.finish_reason == "stop"
    assert found.token_ids == expected.token_ids[: position + 1]
    assert own._tokenizer is not None
    assert found.text == own._tokenizer.decode(expected.token_ids[:position])
    assert own.generate(PROMPT, SHORT).token_ids == expected.token_ids, "ignore_eos runs on"


def test_a_stop_string_ends_and_does_not_leak(engine: Engine) -> None:
    expected = engine.generate(PROMPT, SHORT)
    stop = expected.text[4:7]
    cut = expected.text.find(stop)
    params = dataclasses.replace(SHORT, stop=("no such text", stop))
    found = engine.generate(PROMPT, params)
    assert (found.finish_reason, found.text) == ("stop", expected.text[:cut])
    assert len(found.token_ids) < 12
    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    assert "".join(piece.text for piece in engine.stream(PROMPT, params)) == found.text


def test_a_seed_repeats_and_another_differs(engine: Engine) -> None:
    def sample(seed: int | None) -> tuple[int, ...]:
        return engine.generate(PROMPT, dataclasses.replace(SHORT, temperature=2.0, seed=seed)).token_ids

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in (7, 8, 9)}) == 3
    assert sample(7) != engine.generate(PROMPT, SHORT).token_ids
    assert sample(None) != sample(None)


def test_logprobs_are_those_of_the_logits(engine: Engine) -> None:
    found = engine.generate(PROMPT, dataclasses.replace(SHORT, logprobs=3, max_tokens=1))
    slot = engine.allocate_slot()
    logits = engine.prefill(slot, engine.encode(PROMPT)).astype(np.float64)
    engine.free_slot(slot)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    (token,) = found.logprobs
    assert token.logprob == pytest.approx(logprobs.max(), abs=1e-4)
    assert [token_id for token_id, _ in token.top_logprobs] == np.argsort(-logits)[:3].tolist()
    assert [value for _, value in token.top_logprobs] == pytest.approx(np.sort(logprobs)[::-1][:3].tolist(), abs=1e-4)
    assert engine.generate(PROMPT, SHORT).logprobs == ()


def test_a_closed_engine_says_so(load: Loader) -> None:
    with load() as own:
        own.generate(PROMPT, SHORT)
        slot = own.allocate_slot()
        stream = own.stream(PROMPT, SHORT)
        next(stream)
    for call in (
        lambda: own.generate(PROMPT),
        lambda: own.prefill(slot, [1]),
        lambda: own.decode_step([slot], [1]),
        lambda: next(stream),
    ):
        with pytest.raises(UsageError, match="the engine is closed"):
            call()
    own.close()
    own.free_slot(slot)
    assert own.num_free_slots == NUM_SLOTS


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: empty"),
        ("", "prompt: empty"),
        ([VOCAB_SIZE], f"token id {VOCAB_SIZE}: expected 0 to {VOCAB_SIZE - 1}"),
        ([1, -1], "token id -1"),
        ([1] * (MAX_SEQ_LEN + 1), f"prompt of {MAX_SEQ_LEN + 1} tokens: the engine holds max_seq_len {MAX_SEQ_LEN}"),
        ("a\ud800", "U\\+D800 at character 1"),
    ],
    ids=["no ids", "no text", "id too high", "id negative", "too long", "surrogate"],
)
def test_a_bad_prompt_is_refused_before_it_takes_a_slot(engine: Engine, prompt: str | list[int], message: str) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(UsageError, match=message):
            call(prompt)
    assert engine.num_free_slots == NUM_SLOTS


def test_without_a_tokenizer_ids_still_work(engine: Engine, load: Loader) -> None:
    own, token_ids = load(record=None), engine.encode(PROMPT)
    found = own.generate(token_ids, SHORT)
    assert found.token_ids == engine.generate(token_ids, SHORT).token_ids
    assert found.text == ""
    with pytest.raises(UsageError, match="no tokenizer: give token ids"):
        own.generate(PROMPT)
    with pytest.raises(UsageError, match="stop: the engine has no tokenizer"):
        own.generate(token_ids, SamplingParams(stop=("a",)))


def test_without_a_template_chat_is_refused(load: Loader) -> None:
    own = load(chat_template=None)
    assert not own.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        own.chat([{"role": "user", "content": "hello"}])


def test_the_manifest_has_the_template_and_the_end_token(engine: Engine) -> None:
    record = engine.manifest.tokenizer
    assert record is not None
    assert record.chat_template == CHAT_TEMPLATE
    assert record.special_tokens == {"eos_token": "<|end|>"}
    assert record.eos_token_ids == (0,)


def test_threads_are_checked(tiny: TinyModels) -> None:
    with pytest.raises(UsageError, match="threads 0"):
        Engine.load(tiny.directory(PLAN, "one-pass"), threads=0)


def test_running_an_engine_imports_nothing_of_the_builders(tiny: TinyModels) -> None:
    """The whole way, not only the import: load, generate, chat."""
    program = """
import json, sys
import pop_engine.runtime
from pop_engine.runtime import Engine, SamplingParams
imported = sorted(sys.modules)
with Engine.load(sys.argv[1]) as engine:
    engine.generate("the cat", SamplingParams(max_tokens=3))
    engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, temperature=1.0))
print(json.dumps([imported, sorted(sys.modules)]))
"""
    directory = tiny.directory(PLAN, "one-pass")
    done = subprocess.run([sys.executable, "-c", program, directory], capture_output=True, text=True, check=True)
    for modules in json.loads(done.stdout):
        assert "pop_engine.runtime.engine" in modules
        roots = {name.partition(".")[0] for name in modules}
        assert not roots & {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "yaml", "rich"}
        assert not [name for name in modules if name.startswith("pop_engine.builder")]

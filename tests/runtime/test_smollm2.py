"""A real model: SmolLM2-135M-Instruct's engines against Hugging Face's generate, and against the reference of POP."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nightly import nightly_unless
from pop_engine.runtime import Engine, SamplingParams
from pop_reference import greedy
from real_model_kit import MAX_LOGIT_ERROR, check_full_engine, engine_greedy, hf_logits

# As the engines: with more, threads wait for each other where two test processes share two cores.
pytestmark = [pytest.mark.smollm2, pytest.mark.usefixtures("one_torch_thread")]

# Prompt lengths in tokens, and the text each is cut from.
LENGTHS = (5, 6, 8, 11, 16, 23, 32, 47, 64, 90, 128, 150, 200, 256, 300, 400, 512, 700, 1024, 1500)
# 64 tokens of both take ten seconds and more; `make test-all` takes every prompt.
IN_CI = (5, 64, 200, 1500)
TEXTS = (
    """The lighthouse at the end of the bay had been dark for eleven years when Marta was asked to restore it. She
arrived in March with two trunks, a box of lamps and a letter from the harbour office that nobody in the village had
read. The keeper's house smelled of salt and old paper. On the first night a storm came in from the west, and the
windows shook so hard that she moved her bed into the kitchen. In the morning the fishermen stood in the yard and
asked, politely, whether she meant to stay. She told them that the lens was whole, that the clockwork could be cleaned,
and that a light which has been out for eleven years can wait one more week for a new pane of glass.
""",
    """import heapq


def shortest_paths(graph: dict[str, dict[str, float]], source: str) -> dict[str, float]:
    \"\"\"Dijkstra's algorithm over non-negative weights.\"\"\"
    distances = {source: 0.0}
    queue = [(0.0, source)]
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > distances.get(node, float("inf")):
            continue
        for neighbour, weight in graph[node].items():
            candidate = distance + weight
            if candidate < distances.get(neighbour, float("inf")):
                distances[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return distances


class Matrix:
    def __init__(self, rows):
        self.rows = [list(row) for row in rows]

    def __matmul__(self, other):
        return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*other.rows)] for r in self.rows])
""",
    """Table 3. Rainfall by month in 1987: January 112.4 mm, February 98.1 mm, March 76.9 mm, April 54.0 mm, May 61 mm,
June 38.7 mm, July 29.5 mm, August 33.2 mm, September 70.8 mm, October 120.6 mm, November 131.9 mm, December 127.2 mm.
The total was 954.6 mm, which is 14.2 % above the mean of 1951-1980 (836.0 mm). Flight 4471 left at 06:35 and landed at
09:50; its 183 passengers paid 24,705 euros. 17 x 23 = 391, 391 + 609 = 1000, sqrt(1764) = 42, 2^16 = 65536.
""",
    """<|im_start|>system
You are a helpful assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
Below is a report. Read it and answer the question at the end in two sentences. The committee met four times between
April and September. It heard from farmers, from the owners of the two mills and from the water board, and it walked the
length of the river on a wet day in June. Everybody agreed that the weir above the lower mill is in poor repair; nobody
agreed on who should pay. The older maps give it to the parish, the newer ones to the mill. What did they agree on?
<|im_end|>
<|im_start|>assistant
""",
)


def prompt_of(engine: Engine, num_tokens: int, index: int) -> list[int]:
    """The last `num_tokens` tokens of a text, repeated until it is long enough."""
    token_ids: list[int] = []
    for position in range(index, index + 2 * len(TEXTS)):
        token_ids = engine.encode(TEXTS[index % len(TEXTS)] if position == index else TEXTS[position % 4]) + token_ids
    while len(token_ids) < num_tokens:
        token_ids = token_ids + token_ids
    return token_ids[-num_tokens:]


@pytest.mark.parametrize(
    ("index", "num_tokens"),
    [nightly_unless(pair[1] in IN_CI, *pair) for pair in enumerate(LENGTHS)],
)
def test_full_engine_is_hugging_face(
    smollm2_full_engine: Engine, smollm2_hf_model: Any, index: int, num_tokens: int
) -> None:
    prompt = prompt_of(smollm2_full_engine, num_tokens, index)
    assert len(prompt) == num_tokens
    check_full_engine(smollm2_full_engine, smollm2_hf_model, prompt)


@pytest.mark.parametrize("num_tokens", [8, 150])
def test_generate_gives_the_same_tokens(smollm2_full_engine: Engine, num_tokens: int) -> None:
    prompt = prompt_of(smollm2_full_engine, num_tokens, 0)
    found = smollm2_full_engine.generate(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    assert list(found.token_ids) == engine_greedy(smollm2_full_engine, prompt, 16).token_ids


@pytest.mark.parametrize(("index", "num_tokens"), [(0, 9), (1, 120), (2, 600)])
def test_pop_engine_is_the_reference_of_pop(
    smollm2_engine: Engine, smollm2_hf_model: Any, index: int, num_tokens: int
) -> None:
    prompt = prompt_of(smollm2_engine, num_tokens, index)
    found = engine_greedy(smollm2_engine, prompt, 16)
    assert found.token_ids == greedy(smollm2_hf_model, prompt, 10, 16)
    # Pruned it is: the full model's logits are elsewhere.
    full = hf_logits(smollm2_hf_model, prompt, found.token_ids[:1])
    assert np.abs(found.logits[:1] - full).max() > 100 * MAX_LOGIT_ERROR


def test_the_build_was_verified(smollm2_engine: Engine) -> None:
    verification = smollm2_engine.manifest.verification
    assert verification.status == "passed"
    assert 0 < verification.prefill_max_error < MAX_LOGIT_ERROR
    assert 0 < verification.decode_max_error < MAX_LOGIT_ERROR


def test_chat_answers_a_plain_question(smollm2_engine: Engine) -> None:
    question = "What is the capital of France? Answer in one sentence."
    answer = smollm2_engine.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=40))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


@pytest.fixture(scope="module")
def gguf_model(smollm2_gguf: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)


def test_the_engines_weights_are_those_of_transformers_gguf_loading(gguf_model: Any, smollm2_hf_model: Any) -> None:
    expected = dict(gguf_model.named_parameters())
    found = dict(smollm2_hf_model.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    rotary = [model.model.rotary_emb.inv_freq for model in (gguf_model, smollm2_hf_model)]
    assert torch.equal(*rotary)

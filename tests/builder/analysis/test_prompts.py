"""What samples begin with, and what is sampled after it: the model's own tokens, up to its stop token."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gate_kit import scaled_model
from pop_engine.builder.analysis.prompts import PromptGroup, SampleSize, file_prompts, self_prompts
from pop_engine.configs.errors import UsageError

SIZE = SampleSize(num_samples=4, max_len=12, output_len=4)
MODEL = scaled_model([1.0, 1.0])


def tokenizer() -> Tokenizer:
    """One token a word, w2 … w60, after a first token 0."""
    words = {f"w{index}": index for index in range(2, 61)} | {"<s>": 0, "?": 1}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def words(start: int, count: int) -> str:
    return " ".join(f"w{start + index}" for index in range(count))


def prompts_of(path: Path, size: SampleSize = SIZE) -> list[tuple[int, ...]]:
    groups = file_prompts(path, tokenizer(), MODEL.config, size).groups
    assert all(len(prompt) == group.prompt_len for group in groups for prompt in group.given)
    return [prompt for group in groups for prompt in group.given]


def test_prompts_have_the_prefix_and_not_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": "w5 w6", "answer": "w50"}, {"text": "w7"}, "w8 w9 w10"]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert prompts_of(path) == [(0, 7), (0, 5, 6), (0, 8, 9, 10)]


def test_long_texts_give_whole_pieces(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(words(2, 7 + 7 + 5))
    assert prompts_of(path) == [(0, *range(2, 9)), (0, *range(9, 16))]


def test_prompts_come_from_everywhere_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(words(2, 56))
    found = prompts_of(path)
    assert [prompt[1] for prompt in found] == [2, 16, 30, 44]


def test_prompts_of_one_length_go_together(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(words(2 + index % 3, 2 + index % 2)) for index in range(40)))
    groups = file_prompts(path, tokenizer(), MODEL.config, SampleSize(40, 12, 4)).groups
    assert [(len(group.given), group.prompt_len) for group in groups] == [(16, 3), (4, 3), (16, 4), (4, 4)]
    assert {group.num_tokens for group in groups} == {4}


@pytest.mark.parametrize("text", ["", "w2", "w2 w3 w4 w5 w6 w7 w8 w9"])
def test_too_little_text_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"prompts of 2 to 8 tokens; expected two or more"):
        prompts_of(path)


def test_the_models_own_text_is_divided_into_prompt_and_output() -> None:
    prompts = self_prompts(MODEL.config, SampleSize(20, 12, 4))
    assert [len(group.given) for group in prompts.groups] == [16, 4]
    samples = prompts.groups[1].samples(MODEL, torch.Generator().manual_seed(0))
    assert {(len(sample.prompt), len(sample.output)) for sample in samples} == {(8, 4)}
    assert {sample.prompt[0] for sample in samples} == {0}
    assert samples == prompts.groups[1].samples(MODEL, torch.Generator().manual_seed(0))


def test_outputs_are_drawn_from_the_model_and_end_at_a_stop_token() -> None:
    """First output tokens of many equal prompts have the model's own probabilities; a 5-sigma bound for each token."""
    given, count = (0, 5, 9), 4000
    group = PromptGroup((given,) * count, 2, 3, frozenset({11, 12}))
    samples = group.samples(MODEL, torch.Generator().manual_seed(0))
    probabilities = MODEL(input_ids=torch.tensor([given]), use_cache=False).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([sample.output[0] for sample in samples]), minlength=97) / count
    bound = 5 * (probabilities * (1 - probabilities) / count).sqrt() + 1e-3
    assert ((counts - probabilities).abs() < bound).all()
    for sample in samples:
        assert sample.prompt == given
        assert len(sample.output) == (1 if sample.output[0] in {11, 12} else 2)

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.checkpoint.layout import plan_weights
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.errors import EngineError, UsageError

Opened = Callable[..., Checkpoint]
TOKENS = ["<unk>", "<s>", "</s>", "<end_of_turn>", "a", "b", "▁", "▁a"]


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Checkpoint:
    return open_checkpoint(BuildConfig("smollm2-135m", Path("out")))


def test_config_has_no_noise(checkpoint: Checkpoint) -> None:
    config = checkpoint.hf_config.to_dict()
    assert "quantization_config" not in config
    assert "_model_name_or_path" not in config
    assert checkpoint.options.tail_layers == 10


def test_tokenizer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    record = checkpoint.save_tokenizer(tmp_path)
    assert record is not None
    assert record.eos_token_ids == (2,)
    assert record.special_tokens["eos_token"] == "<|im_end|>"
    assert record.chat_template is not None
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # Two spaces before a number: GPT-2's pattern alone would give the second one to the number.
    assert tokenizer.encode("a  2024").tokens == ["a", "ĠĠ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer.encode("In 2024,  1st²").ids) == "In 2024,  1st²"


def test_cannot_be_linked(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shapes = {"model.norm.weight": (576,)}
    assert plan_weights(shapes, checkpoint, "fp32", None, tmp_path).mode == "copy"
    for mode in ("link", "reference"):
        with pytest.raises(UsageError, match=r"not a safetensors file.*use --weights copy"):
            plan_weights(shapes, checkpoint, "fp32", mode, tmp_path)


def write_gguf(path: Path, *, extra: tuple[str, ...] = (), width: int = 32, **metadata: Any) -> Path:
    """A one-layer llama with a sentencepiece tokenizer, and what a test changes about it."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(metadata.get("tokenizer", "llama"))
    if "pre" in metadata:
        writer.add_tokenizer_pre(metadata["pre"])
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([2, 3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["▁ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}<end_of_turn>")
    if "scaling" in metadata:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    if "split" in metadata:
        writer.add_uint16("split.count", metadata["split"])
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (8, width), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    for name, shape in (shapes | dict.fromkeys(extra, (4,))).items():
        values = random.standard_normal(shape).astype(np.float32)
        if name == "blk.0.ffn_down" and (kind := metadata.get("quantization")) is not None:
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_bos_is_added_where_the_file_asks_for_it(tmp_path: Path, opened: Opened) -> None:
    record = opened(write_gguf(tmp_path / "m.gguf")).save_tokenizer(tmp_path)
    assert record is not None
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids[0] == 1
    # </s>, and the token that ends a turn in the file's chat template.
    assert record.eos_token_ids == (2, 3)


def test_small_file_equals_transformers(tmp_path: Path, opened: Opened) -> None:
    checkpoint = opened(write_gguf(tmp_path / "m.gguf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert checkpoint.tensors is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(checkpoint.tensors[name].read(), parameter), name


def test_the_vocabulary_is_parsed_once(tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what takes long in a large file, and what gguf's reader does when it is made."""
    made: list[Path] = []

    class Watched(gguf.GGUFReader):
        def __init__(self, path: Path) -> None:
            made.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Watched)
    opened(write_gguf(tmp_path / "m.gguf")).save_tokenizer(tmp_path)
    assert len(made) == 1


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantized_tensor_is_what_gguf_makes_of_it(tmp_path: Path, opened: Opened, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    full, quantized = (
        opened(write_gguf(tmp_path / f"{i}.gguf", quantization=q)) for i, q in enumerate((None, quantization))
    )
    assert full.tensors is not None
    assert quantized.tensors is not None
    name = "model.layers.0.mlp.down_proj.weight"
    stored = gguf.quantize(full.tensors[name].read().numpy(), quantization)
    assert np.array_equal(quantized.tensors[name].read().numpy(), gguf.dequantize(stored, quantization))


def test_small_tokenizer_equals_transformers(tmp_path: Path, opened: Opened) -> None:
    opened(write_gguf(tmp_path / "m.gguf")).save_tokenizer(tmp_path)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("a", "ab a", "b<end_of_turn>a"):
        assert own.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text


def test_without_weights(tmp_path: Path, opened: Opened) -> None:
    assert opened(write_gguf(tmp_path / "m.gguf"), with_weights=False).tensors is None


def test_wrong_shape(tmp_path: Path, opened: Opened) -> None:
    checkpoint = opened(write_gguf(tmp_path / "m.gguf", width=16))
    with pytest.raises(EngineError, match=r"model.embed_tokens.weight has shape \[8, 16\]"):
        plan_weights({"model.embed_tokens.weight": (8, 32)}, checkpoint, "fp32", None, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": ("rope_freqs",)}, "RoPE scaling"),
        ({"scaling": True}, "RoPE scaling .yarn."),
        ({"extra": ("blk.0.ffn_up_exps",)}, "mixture-of-experts"),
        ({"split": 3}, "one of 3 parts"),
    ],
)
def test_refused(tmp_path: Path, opened: Opened, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened(write_gguf(tmp_path / "m.gguf", **change))


def test_unknown_split_rules(tmp_path: Path, opened: Opened) -> None:
    checkpoint = opened(write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", pre="martian"))
    with pytest.raises(UsageError, match="rules 'martian'"):
        checkpoint.save_tokenizer(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, 900])
def test_truncated(tmp_path: Path, opened: Opened, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(EngineError, match=r"m\.gguf: .*fetch the file again"):
        opened(path)


def test_truncated_data(tmp_path: Path, opened: Opened) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match=r"m\.gguf: .*fetch the file again"):
        opened(path)

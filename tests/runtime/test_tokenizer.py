"""Ids and chat prompts against transformers' fast tokenizer over the same file."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import TokenizerRecord
from pop_engine.runtime.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are kind.<|im_end|>
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}{% endif %}
"""
FEATURES = """{{ bos_token }}{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ strftime_now('%Y') }}
{%- for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}
{%- generation %}{{ message.content }}{% endgeneration %}{% endfor %}
{%- if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}
{%- set ns = namespace(count=0) %}{% set ns.count = messages | length %}{{ ns.count }}"""
TEXTS = ["", " ", "hello  world\n", "Ünïcode 東京 👩‍👩‍👧 🙂", "<|im_end|>x<s>", "a\x00b", "1234 + 5 = 1239", "\ufffd"]


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, the world says hello", "user system assistant You are kind."], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def record(chat_template: str | None = CHATML) -> TokenizerRecord:
    return TokenizerRecord((2,), {"bos_token": "<s>", "eos_token": "<|im_end|>"}, chat_template)


def hugging_face(chat_template: str) -> Any:
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="<|im_end|>", chat_template=chat_template
    )


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), record())


def test_encode_and_decode_equal_transformers(tokenizer: Tokenizer) -> None:
    reference = hugging_face(CHATML)
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == reference(text)["input_ids"]
        assert token_ids[0] == 0
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    assert tokenizer.decode(tokenizer.encode("  東京 👩‍👩‍👧")) == "  東京 👩‍👩‍👧"


@pytest.mark.parametrize("template", [CHATML, FEATURES])
@pytest.mark.parametrize(
    "roles",
    [["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "skip", "user"]],
)
def test_encode_chat_equals_transformers(template: str, roles: list[str]) -> None:
    tokenizer, reference = Tokenizer(byte_level_backend(), record(template)), hugging_face(template)
    for text in TEXTS:
        messages: Any = [{"role": role, "content": f'{text} <b> & "q"'} for role in roles]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found = tokenizer.encode_chat(messages)
        assert found == reference(expected, add_special_tokens=False)["input_ids"]
        assert found == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_chat_adds_no_second_bos_and_opens_the_assistants_turn(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert 0 not in token_ids
    assert token_ids.count(1) == 3
    assert tokenizer.decode(token_ids).endswith("assistant\n")


def test_special_tokens_in_content_become_ids_as_in_transformers(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    typed = tokenizer.encode_chat([{"role": "user", "content": "hello<|im_end|>"}])
    assert typed.count(2) == plain.count(2) + 1


def test_saved_padding_and_truncation_are_off() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend, record()).encode("hello world " * 9)) > 9
    assert len(Tokenizer(backend, record()).encode("hello")) < 9


def test_load_reads_the_engine_directory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path, record(None))
    assert loaded.encode("hello 🙂") == tokenizer.encode("hello 🙂")
    assert loaded.eos_token_ids == {2}
    assert not loaded.has_chat_template
    assert tokenizer.has_chat_template


def test_load_names_a_missing_and_a_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json: no such file; .*build it again"):
        Tokenizer.load(tmp_path, record())
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(EngineError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.load(tmp_path, record())


def test_skipped_and_byte_tokens() -> None:
    vocab = {"<unk>": 0, "<0x0A>": 1, "a": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["plain"])
    tokenizer = Tokenizer(backend, record())
    assert [tokenizer.is_byte(i) for i in range(6)] == [False, True, False, False, False, False]
    assert [tokenizer.is_skipped(i) for i in range(6)] == [False, False, False, True, False, True]


def test_text_that_is_no_unicode_is_a_usage_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"prompt: U\+DCFF at character 2 is half of a surrogate pair"):
        tokenizer.encode("ab\udcff")
    with pytest.raises(UsageError, match=r"U\+D83D at character \d+"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages: the list is empty"),
        ("hello", r"messages: expected a list of role and content pairs, found str"),
        ({"role": "user", "content": "x"}, r"messages: expected a list .* found dict"),
        (None, r"messages: expected a list .* found NoneType"),
        (["hello"], r"messages\[0\]: expected a mapping with role and content, found str"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\]: has no 'content'"),
        ([{"content": "x"}], r"messages\[0\]: has no 'role'"),
        ([{"role": "user", "content": None}], r"messages\[0\]: 'content' is NoneType; expected a string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]: 'role' is int"),
        ([{"role": "user", "content": "x", "tool_calls": []}], r"messages\[0\]: unknown key 'tool_calls'"),
    ],
)
def test_bad_messages_are_named(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tokenizer.encode_chat(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"this model has no chat template; .*--no-chat"),
        ("{{ raise_exception('roles must alternate') }}", r"chat template refuses them \(roles must alternate\)"),
        ("{% for %}", r"chat template fails \(TemplateSyntaxError"),
        ("{{ nothing.here.at_all }}", r"chat template fails \(UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", r"chat template fails \(SecurityError"),
        ("{{ messages.append(1) }}", r"chat template fails \(SecurityError"),
        ("{{ messages + 1 }}", r"chat template fails \(TypeError"),
        ("{{ 1 // 0 }}", r"chat template fails \(ZeroDivisionError"),
    ],
)
def test_templates_that_fail_are_named(template: str | None, message: str) -> None:
    tokenizer = Tokenizer(byte_level_backend(), record(template))
    with pytest.raises(UsageError, match=message):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_import_is_light() -> None:
    code = (
        "import sys, pop_engine.runtime.text_stream, pop_engine.runtime.sampling;"
        "print([name for name in ('torch', 'transformers', 'onnx', 'jinja2', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

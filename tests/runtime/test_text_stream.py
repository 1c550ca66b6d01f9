"""Pieces of text against the text of all ids at once."""

import random
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pop_engine.configs.manifest import TokenizerRecord
from pop_engine.runtime.text_stream import TextStream
from pop_engine.runtime.tokenizer import Tokenizer

CORPUS = ["hello world, the world says hello  there", "the quick brown fox: don't stop", "東京 says hello 🙂"]
TEXTS = [
    "hello world",
    "  two leading spaces,\n\n\n  and   more   ",
    "👩‍👩‍👧 family 🙂🙃🙂 and 東京都, naïve café",
    "\ufffd\ufffd literal \ufffd",
    "🙂" * 40,
    "don't stop the fox " * 30,
    "ཀཁགང་ཅཆཇཉ " * 10,
]
RECORD = TokenizerRecord((0,), {}, None)


class CountingTokenizer(Tokenizer):
    """Counts the ids that go through decode: the work that streaming does."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS[:2], trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Gemma have it: ▁ for spaces, `<0xNN>` for what the vocabulary lacks."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["<eos>", "<unk>"], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    vocab = trained.get_vocab()
    vocab |= {name: len(vocab) + position for position, name in enumerate(byte_names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(["<eos>", "<unk>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


@pytest.fixture(params=[byte_level, byte_fallback, metaspace], ids=lambda build: build.__name__)
def tokenizer(request: pytest.FixtureRequest) -> CountingTokenizer:
    return CountingTokenizer(request.param(), RECORD)


@pytest.fixture
def byte_tokenizer() -> CountingTokenizer:
    return CountingTokenizer(byte_level(), RECORD)


def pieces(tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> Iterator[str]:
    stream = TextStream(tokenizer, stop)
    for token_id in token_ids:
        yield stream.push(token_id)
        if stream.stopped:
            assert stream.push(token_ids[0]) == ""
            break
    yield stream.flush()
    assert stream.flush() == ""


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The oracle: read character by character, stop at the first that ends a stop string."""
    for end in range(len(text) + 1):
        ended = [item for item in stop if text[:end].endswith(item)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def vocabulary_size(tokenizer: Tokenizer) -> int:
    return next(token_id for token_id in range(10_000) if tokenizer.is_skipped(token_id) and token_id > 300)


def random_ids(tokenizer: Tokenizer, rng: random.Random, size: int) -> list[int]:
    """Any ids at all, so mostly broken UTF-8, with special and unknown ids between."""
    return [rng.randrange(vocabulary_size(tokenizer) + 5) for _ in range(size)]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_make_the_whole_text(tokenizer: CountingTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_pieces_of_random_ids_make_the_whole_text(tokenizer: CountingTokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        token_ids = random_ids(tokenizer, rng, rng.randrange(60))
        assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_random_bytes_make_the_whole_text() -> None:
    for build, name in ((byte_level, "ĠðŁĻĤâĢį"), (byte_fallback, None)):
        tokenizer = Tokenizer(build(), RECORD)
        names = list(name) if name else [f"<0x{byte:02X}>" for byte in (0x0A, *"🙂‍".encode())] + ["a", "▁"]
        backend = build()
        alphabet = [token_id for item in names if (token_id := backend.token_to_id(item)) is not None]
        assert len(alphabet) == len(names)
        rng = random.Random(2)
        for _ in range(400):
            token_ids = rng.choices(alphabet, k=rng.randrange(50))
            assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_text_is_shown_as_soon_as_it_is_whole(byte_tokenizer: CountingTokenizer) -> None:
    token_ids = byte_tokenizer.encode("a🙂b")
    assert list(pieces(byte_tokenizer, token_ids)) == ["a", "", "", "", "🙂", "b", ""]


def test_byte_fallback_shows_at_the_next_other_token() -> None:
    tokenizer = Tokenizer(byte_fallback(), RECORD)
    token_ids = tokenizer.encode("the🙃fox")
    shown = list(pieces(tokenizer, token_ids))
    assert "".join(shown) == "the🙃fox"
    assert [piece for piece in shown if "🙃" in piece] == ["🙃f"]


def test_an_unfinished_character_comes_out_at_the_end_only(byte_tokenizer: CountingTokenizer) -> None:
    token_ids = byte_tokenizer.encode("hello🙂")[:-1]
    *pushed, flushed = pieces(byte_tokenizer, token_ids)
    assert "".join(pushed) == "hello"
    assert flushed == "\ufffd"


def test_no_piece_breaks_a_character(tokenizer: CountingTokenizer) -> None:
    for text in TEXTS:
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces(tokenizer, tokenizer.encode(text)))


STOPS = [
    ("world",),
    ("\n",),
    ("lo", "hello wo"),
    ("hello", "ell"),
    ("ab", "xaby", "b"),
    ("aab",),
    ("🙂🙃",),
    ("the fox", "don't"),
    ("zzz",),
    (" ",),
    ("\ufffd",),
]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_stop_strings_cut_and_never_leak(tokenizer: CountingTokenizer, stop: tuple[str, ...]) -> None:
    for text in [*TEXTS, "aaaab", "aaxaby", "xab", "hello wo", "say hello world twice: hello world"]:
        token_ids = tokenizer.encode(text)
        expected, shown = cut(tokenizer.decode(token_ids), stop), ""
        for piece in pieces(tokenizer, token_ids, stop):
            shown += piece
            assert expected.startswith(shown)
        assert shown == expected


def test_random_stops_on_random_letters(byte_tokenizer: CountingTokenizer) -> None:
    rng = random.Random(4)
    num_stopped = 0
    for _ in range(600):
        stop = tuple("".join(rng.choices("abé", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
        token_ids = byte_tokenizer.encode("".join(rng.choices("abé", k=30)))
        text = byte_tokenizer.decode(token_ids)
        shown = ""
        for piece in pieces(byte_tokenizer, token_ids, stop):
            shown += piece
            assert cut(text, stop).startswith(shown)
        assert shown == cut(text, stop)
        num_stopped += shown != text
    assert 100 < num_stopped < 600


def test_stopped_says_so_at_the_token_that_completes_it(byte_tokenizer: CountingTokenizer) -> None:
    stream = TextStream(byte_tokenizer, ("cd",))
    states = [(stream.push(token_id), stream.stopped) for token_id in byte_tokenizer.encode("xcyczcd")]
    assert states == [("x", False), ("", False), ("cy", False), ("", False), ("cz", False), ("", False), ("", True)]
    assert stream.flush() == ""


def test_held_prefix_of_a_stop_is_given_at_the_end(byte_tokenizer: CountingTokenizer) -> None:
    assert list(pieces(byte_tokenizer, byte_tokenizer.encode("zww"), ("wwx",))) == ["z", "", "", "ww"]


def test_flush_can_complete_a_stop() -> None:
    tokenizer = Tokenizer(byte_fallback(), RECORD)
    stream = TextStream(tokenizer, ("🙃",))
    shown = "".join(stream.push(token_id) for token_id in tokenizer.encode("fox🙃"))
    assert (shown + stream.flush(), stream.stopped) == ("fox", True)


@pytest.mark.parametrize("kind", ["text", "skipped", "replacement", "broken", "bytes"])
def test_work_is_linear_in_the_length(tokenizer: CountingTokenizer, kind: str) -> None:
    num_tokens = 3000
    sources = {
        "text": tokenizer.encode("the quick brown fox " * 100),
        "skipped": [0],
        "replacement": tokenizer.encode("\ufffd"),
        "broken": tokenizer.encode("🙂")[:1],
        "bytes": tokenizer.encode("ཀ"),
    }
    token_ids = (sources[kind] * num_tokens)[:num_tokens]
    expected = tokenizer.decode(token_ids)
    tokenizer.num_decoded = 0
    assert "".join(pieces(tokenizer, token_ids)) == expected
    assert tokenizer.num_decoded <= 20 * num_tokens

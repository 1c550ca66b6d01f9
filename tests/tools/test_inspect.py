"""pop-inspect on a small engine directory made by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import (
    Binding,
    CacheShape,
    GraphContract,
    KVShape,
    decode_contract,
    prefill_contract,
)
from pop_engine.configs.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    BuildRecord,
    Limits,
    Manifest,
    ModelSource,
    TargetRecord,
    VerificationRecord,
    WeightsRecord,
    record_file,
)
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.inspect import main
from pop_engine.tools.report import collapse_names, describe_bindings, describe_operators, draw_plan

PLAN = PrunePlan(30, 10)
CACHE = CacheShape((KVShape(3, 64),) * 30, 4096, "float32")
GRAPH_FILES = ("prefill.onnx", "decode.onnx", "tokenizer.json")


def make_engine(directory: Path) -> Manifest:
    """Write a directory that has an engine's files, though not their contents, and its manifest."""
    weights = directory / "weights"
    weights.mkdir(parents=True)
    for name in GRAPH_FILES:
        (directory / name).write_bytes(f"content of {name}".encode())
    (weights / "model.safetensors").write_bytes(b"w" * 1500)
    contracts = (
        prefill_contract(PLAN, "one-pass", CACHE, 49152, boundary_writes=True),
        decode_contract(CACHE, 49152),
    )
    operators = ({"Mul": 500, "MatMul": 231, "GroupQueryAttention": 30}, {"MatMul": 211, "GroupQueryAttention": 30})
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        source=ModelSource("smollm2-135m", "/models/smollm2", "abc123"),
        dims=ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192),
        plan=PLAN,
        boundary="one-pass",
        dtype="fp32",
        target=TargetRecord("ort-cpu", {"onnxruntime": "1.32.0"}, "prefill"),
        limits=Limits(4096, 8, 512),
        cache=CACHE,
        prefill=GraphRecord("prefill.onnx", contracts[0], operators[0]),
        decode=GraphRecord("decode.onnx", contracts[1], operators[1]),
        weights=WeightsRecord(
            "copy", "weights", "fp32", 1500, (record_file(weights / "model.safetensors", "weights/model.safetensors"),)
        ),
        tokenizer=None,
        verification=VerificationRecord("passed", "", 64, 4, 2.4e-5, 3.5e-5, 1e-3),
        build=BuildRecord({"export": 12.5, "verify": 3.25}, 1_200_000_000, "0.1.0"),
        files=tuple(record_file(directory / name, name) for name in GRAPH_FILES),
    )
    manifest.save(directory / MANIFEST_NAME)
    return manifest


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    make_engine(tmp_path / "engine")
    return tmp_path / "engine"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


FACTS = [
    "smollm2-135m: llama, fp32, 30 layers, hidden 576",
    "9 heads, 3 KV heads of 64",
    "from /models/smollm2, revision abc123",
    "█" * 20 + "░" * 10 + "  20 trunk + 10 tail",
    "█ in full, ░ K and V projections only",
    "one-pass: in the same pass, the last row goes through every layer",
    "all 30 layers, prefill graph",
    "ort-cpu (onnxruntime 1.32.0)",
    "4096 tokens a sequence, 8 sequences, 512 tokens a prefill chunk",
    "46080 bytes a token, 189 MB a slot, 1.51 GB for all 8 slots",
    "past_key.0 … past_key.29",
    "shares past_value.0 … past_value.29",
    "present_key.20.boundary … present_key.29.boundary",
    "copy: weights, fp32, 1.5 kB in 1 file",
    "one copy shared by prefill.onnx and decode.onnx",
    "passed against PyTorch: logit error 2.4e-05 in prefill (64 tokens), 3.5e-05 in decode (4 steps)",
    "15.8 s (export 12.5, verify 3.2)",
    "peak memory 1.2 GB, pop-engine 0.1.0",
]


def test_text_names_the_key_facts_in_few_lines(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, engine)
    assert code == 0
    assert [fact for fact in FACTS if fact not in out] == []
    assert len(out.splitlines()) < 60


def test_text_of_a_full_engine_and_of_bare_graphs(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = replace(
        Manifest.load(engine),
        plan=PrunePlan(30, 0),
        boundary="two-step",
        weights=None,
        verification=VerificationRecord("skipped", "--no-verify"),
    )
    bare.save(engine / MANIFEST_NAME)
    _, out = run(capsys, engine)
    assert "30 trunk + 0 tail" in out
    assert "nothing is pruned" in out
    assert "two-step: the last prompt token runs as the first decode step" in out
    assert "none: built with --no-weights" in out
    assert "skipped: --no-verify" in out


@pytest.mark.parametrize(("width", "num_lines"), [(100, 1), (30, 2), (12, 4), (1, 5)])
def test_the_drawing_wraps_to_the_terminal(width: int, num_lines: int) -> None:
    lines = draw_plan(PLAN, width)
    assert len(lines) == num_lines
    assert "".join(lines).replace(" ", "").startswith("█" * 20 + "░" * 10 + "20trunk")


def test_operators_start_with_matrix_products_and_attention() -> None:
    empty = GraphContract((), ())
    lines = describe_operators(
        GraphRecord("a.onnx", empty, {"Mul": 900, "Attention": 3, "MatMul": 7}),
        GraphRecord("b.onnx", empty, {"Add": 9, "Attention": 3}),
    )
    assert [line.split() for line in lines] == [
        ["operator", "a.onnx", "b.onnx"],
        ["MatMul", "7", "-"],
        ["Attention", "3", "3"],
        ["Mul", "900", "-"],
        ["Add", "-", "9"],
        ["all", "910", "12"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_bindings_collapse_only_where_they_are_alike() -> None:
    assert collapse_names(["past_key.7"]) == "past_key.7"
    assert collapse_names([f"past_key.{i}" for i in (0, 1, 3, 5, 6)]) == "past_key.[0-1,3,5-6]"
    rows = describe_bindings(
        [Binding("x.0", (2,), "int64"), Binding("x.1", (3,), "int64"), Binding("x.2", (2,), "int64")], "in"
    )
    assert [row[1] for row in rows] == ["x.[0,2]", "x.1"]


def test_json_round_trips(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, engine, "--json")
    assert code == 0
    assert msgspec.json.decode(out, type=Manifest) == Manifest.load(engine)
    assert "check" not in json.loads(out)


def test_json_with_check(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, engine, "--json", "--check")[1])["check"] == {
        "passed": True,
        "num_files": 4,
        "failures": [],
        "unlisted": [],
    }
    (engine / "decode.onnx").unlink()
    code, out = run(capsys, engine, "--json", "--check")
    assert code == 1
    assert json.loads(out)["check"]["failures"] == [f"{engine / 'decode.onnx'}: missing"]


def test_check_of_a_whole_engine(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, engine, "--check")
    assert code == 0
    assert out.endswith("all 4 files match\n")


def test_check_finds_each_kind_of_damage(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (engine / "decode.onnx").unlink()
    (engine / "tokenizer.json").write_bytes(b"short")
    weights = engine / "weights" / "model.safetensors"
    weights.write_bytes(b"v" + weights.read_bytes()[1:])
    (engine / "notes.txt").write_text("mine")
    code, out = run(capsys, engine, "--check")
    assert code == 1
    found = out.splitlines()[-5:]
    assert found[0] == f"{engine / 'decode.onnx'}: missing"
    assert found[1] == f"{engine / 'tokenizer.json'}: size differs: 5 bytes, expected 25"
    assert found[2].startswith(f"{weights}: hash differs: sha256 ")
    assert found[3] == "notes.txt: not listed in engine.json"
    assert found[4] == "3 of 4 files do not match; build the engine again"


def test_an_unlisted_file_is_mentioned_and_no_failure(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (engine / "notes.txt").write_text("mine")
    code, out = run(capsys, engine, "--check")
    assert code == 0
    assert out.splitlines()[-2:] == ["notes.txt: not listed in engine.json", "all 4 files match"]


def test_check_follows_referenced_weights(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "checkpoint"
    (engine / "weights").rename(elsewhere)
    manifest = Manifest.load(engine)
    assert manifest.weights is not None
    files = tuple(replace(file, path=str(elsewhere / Path(file.path).name)) for file in manifest.weights.files)
    referenced = replace(manifest.weights, mode="reference", directory=str(elsewhere), files=files)
    replace(manifest, weights=referenced).save(engine / MANIFEST_NAME)
    assert run(capsys, engine, "--check")[0] == 0
    elsewhere.rename(tmp_path / "moved")
    code, out = run(capsys, engine, "--check")
    assert code == 1
    assert f"{elsewhere / 'model.safetensors'}: missing" in out


def test_check_names_the_target_of_a_broken_link(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = engine / "weights" / "model.safetensors"
    weights.unlink()
    weights.symlink_to("/gone/model.safetensors")
    assert f"{weights}: missing (a link to /gone/model.safetensors)" in run(capsys, engine, "--check")[1]


def test_a_folder_that_is_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "not an engine directory (it has no engine.json)" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
    assert "no such engine directory" in capsys.readouterr().err


def test_an_engine_of_a_newer_format(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((engine / MANIFEST_NAME).read_text()) | {"format_version": FORMAT_VERSION + 1}
    (engine / MANIFEST_NAME).write_text(json.dumps(content))
    assert main([str(engine)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pop-inspect: error: ")
    assert "upgrade pop-engine" in error
    assert error.count("\n") == 1


def test_no_heavy_import_and_no_encoding_error(engine: Path) -> None:
    """The command in a process of its own: it imports no tensor library, and blocks print on an ASCII terminal."""
    code = (
        "import sys; from pop_engine.tools.inspect import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'transformers', 'numpy'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(engine), "--check"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "20 trunk + 10 tail" in result.stdout

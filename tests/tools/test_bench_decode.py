"""The decode benchmark on tiny engines: what is counted, and what the baseline computes."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

from engine_kit import SMALL, TinyModels
from pop_engine.configs.manifest import Manifest
from pop_engine.tools import bench_decode, plain_decode
from pop_engine.tools.bench_builds import OperatorCounts, count_operators
from pop_engine.tools.bench_message import BenchRequest

PLAN = (SMALL, 1)


def test_only_settled_steps_of_both_are_counted(tiny: TinyModels, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    options = ["--batch", "1,2", "--context", "4", "--steps", "3", "--repeats", "2", "--threads", "1"]
    assert bench_decode.main([str(tiny.directory(PLAN, "one-pass")), *options, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["batch_size"] for row in rows] == [1, 2]
    assert all(row[side]["count"] == 3 * 2 and row[side]["min"] > 0 for row in rows for side in ("pop", "full"))


def test_the_baseline_runs_the_decode_graph_on_a_cache_that_was_written(tiny: TinyModels) -> None:
    directory = tiny.directory(PLAN, "one-pass")
    manifest = Manifest.load(directory)
    options = ort.SessionOptions()
    folder = str((directory / "weights").resolve())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    session = ort.InferenceSession((directory / "decode.onnx").read_bytes(), options)
    binding, caches = plain_decode._bind(session, manifest, 2)
    assert len(caches) == 2 * SMALL
    before = {name: np.array(cache) for name, cache in caches.items()}
    reply = plain_decode.measure(session, manifest, BenchRequest(((1, 2, 3), (4, 5)), 4, 2))
    assert len(reply.step_ms) == 4
    assert all(np.array_equal(caches[name], before[name]) for name in caches), "the measured caches are its own"
    del binding


def test_operators_are_counted_whatever_the_target_calls_them(tiny: TinyModels) -> None:
    manifest = Manifest.load(tiny.directory(PLAN, "one-pass"))
    found = count_operators(manifest.decode)
    assert found == OperatorCounts(7 * SMALL + 1, SMALL, sum(manifest.decode.operators.values()))
    # The tail's K and V for context rows, which the decode graph has not.
    assert count_operators(manifest.prefill).products == found.products + 2

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.checkpoint.layout import WeightLayout, plan_weights
from pop_engine.builder.checkpoint.writer import write_weights
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import WeightsRecord, file_sha256

Folder = Callable[[str], Path]
Opened = Callable[..., Checkpoint]
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    return path


def write(checkpoint: Checkpoint, parameters: Shapes, engine: Path, dtype="fp32", mode=None):  # type: ignore[no-untyped-def]
    layout = plan_weights(parameters, checkpoint, dtype, mode, engine)
    steps: list[tuple[int, int]] = []
    record = write_weights(layout, checkpoint, engine, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (layout.num_bytes, layout.num_bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    return layout, record


def assert_whole(layout: WeightLayout, record: WeightsRecord, engine: Path) -> None:
    """What the record says is on disk, and every entry's bytes are where the layout says, as safetensors sees them."""
    for file in record.files:
        path = engine / file.path
        assert (path.stat().st_size, file_sha256(path)) == (file.num_bytes, file.sha256)
    for name, entry in layout.entries.items():
        path = engine / layout.directory / entry.file
        raw = path.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
        with safe_open(path, "pt") as opened:
            tensor = opened.get_tensor(name)
        assert tuple(tensor.shape) == entry.shape
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == raw


@pytest.mark.parametrize("name", ["single", "sharded", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_copy(folder: Folder, opened: Opened, parameters: Shapes, engine: Path, name: str, dtype: str) -> None:
    checkpoint = opened(folder(name))
    layout, record = write(checkpoint, parameters, engine, dtype, "copy")
    assert_whole(layout, record, engine)
    assert (record.mode, record.dtype, record.directory) == ("copy", dtype, "weights")
    assert checkpoint.tensors is not None
    for key, entry in layout.entries.items():
        with safe_open(engine / "weights" / entry.file, "pt") as written:
            copied = written.get_tensor(key)
        assert torch.equal(copied, checkpoint.tensors[key].read().to(copied.dtype))


def test_copy_aligns_odd_sizes(folder: Folder, opened: Opened, engine: Path) -> None:
    path = folder("single")
    tensors = {"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(16), "d": torch.ones(())}
    save_file(tensors, path / "model.safetensors")
    layout, record = write(opened(path), {n: tuple(t.shape) for n, t in tensors.items()}, engine, mode="copy")
    assert all(entry.offset % 64 == 0 for entry in layout.entries.values())
    assert_whole(layout, record, engine)
    loaded = load_file(engine / "weights" / "model.safetensors")
    assert {name for name in loaded if not name.startswith("__padding__")} == tensors.keys()


@pytest.mark.parametrize("name", ["single", "sharded"])
def test_link_shares_the_inode(folder: Folder, opened: Opened, parameters: Shapes, engine: Path, name: str) -> None:
    path = folder(name)
    layout, record = write(opened(path), parameters, engine)
    assert record.mode == "link"
    assert_whole(layout, record, engine)
    for file in record.files:
        assert (engine / file.path).stat().st_ino == (path / Path(file.path).name).stat().st_ino


def test_link_follows_hub_symlinks(folder: Folder, opened: Opened, parameters: Shapes, engine: Path) -> None:
    path = folder("single")
    blob = path / "blob"
    (path / "model.safetensors").rename(blob)
    (path / "model.safetensors").symlink_to("blob")
    write(opened(path), parameters, engine)
    linked = engine / "weights" / "model.safetensors"
    assert not linked.is_symlink()
    assert linked.stat().st_ino == blob.stat().st_ino


def test_reference_writes_nothing(folder: Folder, opened: Opened, parameters: Shapes, engine: Path) -> None:
    path = folder("sharded")
    layout, record = write(opened(path), parameters, engine, mode="reference")
    assert list(engine.iterdir()) == []
    assert_whole(layout, record, engine)
    assert record.directory == str(path)
    assert all(Path(file.path).is_absolute() for file in record.files)


@pytest.mark.parametrize("mode", ["copy", "link", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values(  # type: ignore[no-untyped-def]
    folder: Folder, opened: Opened, parameters: Shapes, engine: Path, mode, value: float
) -> None:
    path = folder("single")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(EngineError, match=r"tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
        write(opened(path), parameters, engine, mode=mode)


def test_overflow(folder: Folder, opened: Opened, parameters: Shapes, engine: Path) -> None:
    path = folder("single")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(EngineError, match=r"model.norm.weight overflows"):
        write(opened(path), parameters, engine, "fp16")


def test_refused_link(folder: Folder, opened: Opened, parameters: Shapes, engine: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(UsageError, match=r"Operation not permitted.*use --weights copy"):
        write(opened(folder("single")), parameters, engine, mode="link")


def test_nothing_to_write(folder: Folder, opened: Opened, parameters: Shapes, engine: Path) -> None:
    path = folder("single")
    layout = plan_weights(parameters, opened(path), "fp32", None, engine)
    with pytest.raises(UsageError, match="opened without weights"):
        write_weights(layout, opened(path, with_weights=False), engine, lambda done, total: None)


def test_integers_are_refused(folder: Folder, opened: Opened, engine: Path) -> None:
    path = folder("single")
    save_file({"a": torch.ones(4, dtype=torch.int8)}, path / "model.safetensors")
    with pytest.raises(EngineError, match="tensor a is stored as I8"):
        write(opened(path), {"a": (4,)}, engine)


def test_memory_stays_at_one_tensor(folder: Folder, opened: Opened, engine: Path) -> None:
    path = folder("single")
    tensor = torch.ones(24, 1 << 20, dtype=torch.bfloat16)
    save_file({f"t{i}": row.clone() for i, row in enumerate(tensor)}, path / "model.safetensors")
    del tensor
    shapes: Shapes = {f"t{i}": (1 << 20,) for i in range(24)}
    layout = plan_weights(shapes, opened(path), "fp32", "copy", engine)
    checkpoint = opened(path)
    before = _resident_bytes()
    peak = 0

    def watch(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, _resident_bytes())

    write_weights(layout, checkpoint, engine, watch)
    # 100 MB are written, from tensors of 2 MB each.
    assert peak - before < 40_000_000
    shutil.rmtree(engine / "weights")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

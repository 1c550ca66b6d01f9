from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pop_engine.builder.checkpoint import layout as layout_module
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.checkpoint.layout import plan_weights
from pop_engine.configs.errors import EngineError, UsageError

Folder = Callable[[str], Path]
Opened = Callable[..., Checkpoint]
Shapes = dict[str, tuple[int, ...]]


def test_auto_links_where_it_can(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    checkpoint = opened(folder("sharded"))
    layout = plan_weights(parameters, checkpoint, "fp32", None, tmp_path)
    assert (layout.mode, layout.directory) == ("link", "weights")
    assert list(layout.entries) == list(parameters)
    assert checkpoint.tensors is not None
    for name, entry in layout.entries.items():
        stored = checkpoint.tensors[name]
        assert (entry.file, entry.offset, entry.shape) == (stored.file.name, stored.offset, parameters[name])


def test_auto_copies_another_dtype(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    layout = plan_weights(parameters, opened(folder("bf16")), "fp32", None, tmp_path)
    assert layout.mode == "copy"
    assert all(entry.offset % 64 == 0 for entry in layout.entries.values())


def test_copy_keeps_the_shards(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    checkpoint = opened(folder("sharded"))
    layout = plan_weights(parameters, checkpoint, "fp16", None, tmp_path)
    assert checkpoint.tensors is not None
    assert layout.by_file().keys() == {stored.file.name for stored in checkpoint.tensors.values()}


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_explicit_sharing_of_another_dtype(  # type: ignore[no-untyped-def]
    folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path, mode
) -> None:
    with pytest.raises(UsageError, match=f"--weights {mode}: tensor .* is stored as BF16 .* use --weights copy"):
        plan_weights(parameters, opened(folder("bf16")), "fp32", mode, tmp_path)


def test_another_file_system(folder: Folder, opened: Opened, parameters: Shapes) -> None:
    other = Path("/dev/shm")
    path = folder("single")
    if not other.is_dir() or other.stat().st_dev == path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    checkpoint = opened(path)
    assert plan_weights(parameters, checkpoint, "fp32", None, other).mode == "copy"
    with pytest.raises(UsageError, match="different file systems; use --weights copy"):
        plan_weights(parameters, checkpoint, "fp32", "link", other)


def test_reference_resolves_hub_symlinks(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    path = folder("single")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (path / "model.safetensors").rename(blobs / "0badcafe")
    (path / "model.safetensors").symlink_to(blobs / "0badcafe")
    layout = plan_weights(parameters, opened(path), "fp32", "reference", tmp_path)
    assert layout.directory == str(blobs)
    assert {entry.file for entry in layout.entries.values()} == {"0badcafe"}


def test_reference_needs_one_folder(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    path = folder("sharded")
    shard = sorted(path.glob("*.safetensors"))[0]
    (tmp_path / "elsewhere").mkdir()
    shard.replace(tmp_path / "elsewhere" / shard.name)
    shard.symlink_to(tmp_path / "elsewhere" / shard.name)
    with pytest.raises(UsageError, match="several folders"):
        plan_weights(parameters, opened(path), "fp32", "reference", tmp_path)


def test_missing_tensor(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    checkpoint = opened(folder("single"))
    with pytest.raises(EngineError, match=r"no tensor for parameter model.layers.9.extra.weight;"):
        plan_weights({**parameters, "model.layers.9.extra.weight": (2,)}, checkpoint, "fp32", None, tmp_path)


def test_wrong_shape(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    checkpoint = opened(folder("single"))
    with pytest.raises(EngineError, match=r"model.norm.weight has shape \[32\], config.json makes it \[33\]"):
        plan_weights({**parameters, "model.norm.weight": (33,)}, checkpoint, "fp32", None, tmp_path)


@pytest.mark.parametrize("rename", [lambda n: n.removeprefix("model."), lambda n: "model." + n])
def test_base_model_prefix(  # type: ignore[no-untyped-def]
    folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path, rename
) -> None:
    path = folder("single")
    tensors = load_file(path / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    layout = plan_weights(parameters, opened(path), "fp32", None, tmp_path)
    assert layout.entries["model.norm.weight"].stored_name == rename("model.norm.weight")


def test_extra_tensors_are_ignored(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    path = folder("single")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    layout = plan_weights(parameters, opened(path), "fp32", "copy", tmp_path)
    assert layout.entries.keys() == parameters.keys()


def test_without_weights(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    checkpoint = opened(folder("single"), with_weights=False)
    layout = plan_weights(parameters, checkpoint, "fp16", None, tmp_path)
    assert (layout.mode, set(layout.by_file())) == ("copy", {"model.safetensors"})
    monkeypatch.setattr(layout_module, "_MAX_SHARD_BYTES", 20_000)
    split = plan_weights(parameters, checkpoint, "fp16", None, tmp_path).by_file()
    assert len(split) > 1
    assert next(iter(split)) == f"model-00001-of-{len(split):05}.safetensors"
    with pytest.raises(UsageError, match="no weights to link"):
        plan_weights(parameters, checkpoint, "fp16", "link", tmp_path)


def test_unknown_mode(folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--weights symlink: expected one of link, copy, reference"):
        plan_weights(parameters, opened(folder("single")), "fp32", "symlink", tmp_path)  # type: ignore[arg-type]


def test_files_of_others_are_copied(  # type: ignore[no-untyped-def]
    folder: Folder, opened: Opened, parameters: Shapes, tmp_path: Path, monkeypatch
) -> None:
    checkpoint = opened(folder("single"))
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    monkeypatch.setattr("os.access", lambda *a: False)
    assert plan_weights(parameters, checkpoint, "fp32", None, tmp_path).mode == "copy"
    assert plan_weights(parameters, checkpoint, "fp32", "reference", tmp_path).mode == "reference"

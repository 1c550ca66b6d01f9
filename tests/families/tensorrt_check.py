"""Compile a tiny model of a family with TensorRT-RTX, and say what came of it."""

from pathlib import Path

from engine_kit import EngineKit
from families.family_check import MAX_SEQ_LEN, save_checkpoint
from families.family_table import FAMILIES
from pop_engine.configs.errors import PopError
from pop_engine.configs.manifest import Manifest

WORKS = "works"


def check_tensorrt(name: str, folder: Path) -> str:
    """`works` where both plans compile and pass the check of their wiring; else the words of the refusal.

    A refusal is a result, any other exception is not caught.
    """
    kit, checkpoint = EngineKit(folder), folder / "checkpoint"
    save_checkpoint(FAMILIES[name].config(is_wide=True), None, checkpoint)
    try:
        directory = kit.directory(
            checkpoint, with_weights=False, target="tensorrt-rtx", max_seq_len=MAX_SEQ_LEN, max_batch_size=2
        )
    except PopError as error:
        return str(error).replace(f"{checkpoint}/", "")
    manifest = Manifest.load(directory)
    assert manifest.prefill.plan is not None
    assert manifest.decode.plan is not None
    return WORKS

"""Whether two engines can be compared: one model, one tokenizer, and nothing pruned in the second."""

from collections.abc import Callable

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, TOKENIZER_NAME, Manifest


def check_pair(name: str, pop: Manifest, full_name: str, full: Manifest) -> None:
    """Raise UsageError where the two engines are not of one model, or the second is not a full one."""
    if full.plan.num_tail_layers:
        raise UsageError(
            f"--against {full_name}: has {full.plan.num_tail_layers} tail layers; expected a full engine, built with "
            "--tail-layers 0, or the model to build it from"
        )
    properties: tuple[tuple[str, Callable[[Manifest], object]], ...] = (
        ("dimensions", lambda manifest: manifest.dims),
        ("dtype", lambda manifest: manifest.dtype),
        ("target", lambda manifest: manifest.target.name),
        ("tokenizer", _tokenizer_sha256),
        ("chat template and special tokens", lambda manifest: manifest.tokenizer),
    )
    for title, read in properties:
        if read(pop) != read(full):
            raise _difference(name, full_name, title)
    if _are_other_weights(pop, full):
        raise _difference(name, full_name, "weights")


def _difference(name: str, full_name: str, title: str) -> UsageError:
    return UsageError(
        f"--against {full_name}: its {title} differ from those of {name}; build both from one model with the same "
        "options, or give the model"
    )


def _tokenizer_sha256(manifest: Manifest) -> str | None:
    return next((record.sha256 for record in manifest.files if record.path == TOKENIZER_NAME), None)


def _are_other_weights(pop: Manifest, full: Manifest) -> bool:
    """Linked and referenced files are the checkpoint's own; copies are cut into files of their own."""
    if pop.weights is None or full.weights is None:
        return False
    if (pop.weights.mode == "copy") != (full.weights.mode == "copy"):
        return (pop.source.name, pop.source.revision) != (full.source.name, full.source.revision)
    return _weight_hashes(pop) != _weight_hashes(full)


def _weight_hashes(manifest: Manifest) -> set[str]:
    assert manifest.weights is not None
    return {record.sha256 for record in manifest.weights.files if not record.path.endswith(CALIBRATED_WEIGHTS)}

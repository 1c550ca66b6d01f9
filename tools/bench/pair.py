"""Whether engines can be compared, and can do what is asked of them."""

from collections.abc import Callable
from pathlib import Path

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.bench.options import DEFAULT_INPUT_LENS, BenchOptions


def check_pair(engine: Path, pop: Manifest, against: Path, full: Manifest) -> None:
    """Raise UsageError where the two are no fair pair."""
    if full.plan.num_tail_layers:
        raise UsageError(
            f"--against {against}: has {full.plan.num_tail_layers} tail layers; "
            "expected a full engine, built with --tail-layers 0"
        )
    properties: tuple[tuple[str, Callable[[Manifest], object]], ...] = (
        ("dimensions", lambda manifest: manifest.dims),
        ("dtype", lambda manifest: manifest.dtype),
        ("target", lambda manifest: manifest.target.name),
        ("max_seq_len", lambda manifest: manifest.limits.max_seq_len),
    )
    for name, read in properties:
        if read(pop) != read(full):
            raise UsageError(
                f"--against {against}: {name} {read(full)}, but {engine} has {read(pop)}; "
                "build both from one model with the same options"
            )


def fitting_input_lens(options: BenchOptions, manifest: Manifest) -> tuple[int, ...]:
    """The prompt lengths to run. Raises UsageError where one that was asked for does not fit with its output."""
    # The last token is generated, but never run.
    longest = manifest.limits.max_seq_len - options.output_len + 1
    if options.input_lens is None:
        fitting = tuple(length for length in DEFAULT_INPUT_LENS if length <= longest)
        if not fitting:
            raise UsageError(
                f"--output-len {options.output_len}: {options.engine} holds {manifest.limits.max_seq_len} tokens, "
                "which leaves no room for a prompt; give --input-len and a shorter --output-len"
            )
        return fitting
    asked = max(options.input_lens, default=0)
    if asked > longest:
        raise UsageError(
            f"--input-len {asked}: {options.engine} holds {manifest.limits.max_seq_len} tokens with "
            f"--output-len {options.output_len}; give {max(longest, 0)} or less, or build with a longer --max-seq-len"
        )
    return options.input_lens


def check_batch_sizes(options: BenchOptions, path: Path, manifest: Manifest) -> None:
    """Raise UsageError where an engine has not the slots for a batch, or no weights to run."""
    largest, max_batch_size = max(options.batch_sizes, default=0), manifest.limits.max_batch_size
    if largest > max_batch_size:
        raise UsageError(
            f"--batch-size {largest}: {path} holds {max_batch_size} sequences; give {max_batch_size} or less, "
            "or build with a larger --max-batch-size"
        )
    if manifest.weights is None:
        raise UsageError(f"{path}: built without weights, so there is nothing to time; build it with them")

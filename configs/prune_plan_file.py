"""A prune plan on disk: what pop-analyze writes and `pop-build --prune-plan` reads."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pop_engine.configs.calibration import Estimate
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import DType
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.whole_file import write_json

_FORMAT_VERSION = 1


@dataclass(frozen=True)
class ImportanceRecord:
    """Virtual gates of every layer (PAPER.md, Virtual gates), with standard errors over samples.

    `prefill` and `decode` are Ĩ_l = E[(∂L/∂g_l)²], one for each layer; L is the loss of a sample's output in nats,
    summed over its tokens. `tail_loss` is what the same expansion predicts for a pruned tail of 0, 1, … L − 1 layers,
    in nats an output token. `fingerprint` tells the model's weights from others.
    """

    model: str
    fingerprint: str | None
    data: str
    sha256: str
    seed: int
    dtype: DType
    num_samples: int
    max_len: int
    output_len: int
    mean_output_tokens: float
    prefill: tuple[Estimate, ...]
    decode: tuple[Estimate, ...]
    tail_loss: tuple[Estimate, ...]


@dataclass(frozen=True)
class PrunePlanFile:
    """Which layers to prune at prefill, and why: the policy that chose them, and what it chose from.

    A plan written by hand needs `num_hidden_layers` and `pruned_layers` alone.
    """

    num_hidden_layers: int
    pruned_layers: tuple[int, ...]
    policy: str | None = None
    importance: ImportanceRecord | None = None
    format_version: int = _FORMAT_VERSION

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self)


def load_prune_plan(path: Path, num_hidden_layers: int) -> PrunePlan:
    """The plan of a file. Raises UsageError where it cannot be read, or is not a tail of a model with that depth."""
    origin = f"--prune-plan {path}"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=PrunePlanFile)
    except OSError as error:
        raise UsageError(f"{origin}: cannot be read ({error.strerror}); make one with pop-analyze") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{origin}: not a prune plan ({error}); make one with pop-analyze") from error
    if content.format_version != _FORMAT_VERSION:
        raise UsageError(f"{origin}: format version {content.format_version}, expected {_FORMAT_VERSION}")
    if content.num_hidden_layers != num_hidden_layers:
        raise UsageError(
            f"{origin}: made for {content.num_hidden_layers} layers, and the model has {num_hidden_layers}; "
            "analyze this model"
        )
    pruned = sorted(content.pruned_layers)
    if len(pruned) >= num_hidden_layers:
        raise UsageError(f"{origin}: prunes {len(pruned)} of {num_hidden_layers} layers; the first one has to stay")
    if pruned != list(range(num_hidden_layers - len(pruned), num_hidden_layers)):
        raise UsageError(
            f"{origin}: pruned_layers {', '.join(map(str, pruned))}: expected the last layers without a gap, each "
            f"once, up to {num_hidden_layers - 1}; a prefill can skip nothing else"
        )
    return PrunePlan(num_hidden_layers, len(pruned))

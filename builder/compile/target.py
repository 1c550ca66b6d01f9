"""What the build must know about a target: one object a target."""

from collections.abc import Mapping
from typing import Protocol

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.ort_cpu import OrtCpu
from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import Boundary, Phase
from pop_engine.configs.manifest import TargetName


class Target(Protocol):
    """How a target wants its graphs. `boundary_writes` as in io_contract.prefill_contract.

    `version_packages` are the packages whose versions an engine depends on.
    """

    name: TargetName
    boundary_writes: bool
    version_packages: tuple[str, ...]

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """The passes that turn a fused graph into the target's, given its weights as graph inputs by name."""

    def decode_with(self, boundary: Boundary) -> Phase:
        """The graph that serves decode."""


_TARGETS: dict[TargetName, Target] = {"ort-cpu": OrtCpu()}


def target_of(name: TargetName) -> Target:
    """The target of this name. Raises UsageError where there is none yet."""
    if name not in _TARGETS:
        raise UsageError(f"--target {name}: not supported yet; expected {', '.join(_TARGETS)}")
    return _TARGETS[name]

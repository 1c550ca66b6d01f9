"""Engine directory in, tokens out. NumPy and a runtime; never torch, never transformers' models."""

from pop_engine.runtime.engine import Engine
from pop_engine.runtime.sampling import SamplingParams

__all__ = ["Engine", "SamplingParams"]

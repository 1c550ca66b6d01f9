"""Engine directory in, tokens out. NumPy and a runtime; never torch, never transformers' models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pop_engine.runtime.engine import Engine
    from pop_engine.runtime.images.video import Video
    from pop_engine.runtime.sampling import SamplingParams

__all__ = ["Engine", "SamplingParams", "Video"]


def __getattr__(name: str) -> object:
    """Import the API on first use, so that `pop-run --help` need not wait for ONNX Runtime."""
    if name == "Engine":
        from pop_engine.runtime.engine import Engine

        return Engine
    if name == "SamplingParams":
        from pop_engine.runtime.sampling import SamplingParams

        return SamplingParams
    if name == "Video":
        from pop_engine.runtime.images.video import Video

        return Video
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

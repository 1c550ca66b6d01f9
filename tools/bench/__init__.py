"""pop-bench: how fast an engine is, against the full engine, the bound and other engines on the same machine."""

from pop_engine.tools.bench.contest import Contest, measure_decode

__all__ = ["Contest", "measure_decode"]

"""pop-bench: how fast an engine is, against the full engine, the bound and other engines on the same machine."""

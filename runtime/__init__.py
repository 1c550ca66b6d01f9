"""Engine directory in, tokens out. NumPy and a runtime; never torch, never transformers' models."""

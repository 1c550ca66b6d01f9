"""Checkpoint in, engine directory out. torch, transformers and onnx live here only."""

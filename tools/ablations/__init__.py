"""The paper's ablations and baselines, each from its paper's definition, on any Hugging Face causal LM in PyTorch."""

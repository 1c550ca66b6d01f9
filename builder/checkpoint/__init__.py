"""Where a model's config, weights and tokenizer come from, and how its weights become the engine's one copy."""

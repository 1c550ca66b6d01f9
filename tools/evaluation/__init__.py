"""pop-eval: what prefill-only pruning does to answers, measured on a user's own prompts."""

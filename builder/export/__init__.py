"""From a Hugging Face config to the two graphs, by tracing."""

"""Graph to graph: one pass a file."""

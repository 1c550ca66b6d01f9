"""Images and video frames of a prompt: read, made into tensors, run through the vision graph, put into chunks."""

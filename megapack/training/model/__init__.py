"""Models: architecture, loss, FLOPs and memory of a step."""

"""What is trained: architecture, loss, and what a step of it costs."""

"""A run: its processes, its inputs, the engine, and the files it writes."""

"""Variable-length attention behind one function; the backend is chosen once, at start."""

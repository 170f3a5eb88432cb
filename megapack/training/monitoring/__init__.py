"""Monitoring of a run: log, signals, lost ranks."""

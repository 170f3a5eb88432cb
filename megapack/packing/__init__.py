"""Lengths in, SampleIndex out: strategies, the .samples file, metrics. Stands on storage."""

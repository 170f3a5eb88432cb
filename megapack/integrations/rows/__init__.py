"""Rows of constant length and micro batches of a manifest, which a host can resume."""

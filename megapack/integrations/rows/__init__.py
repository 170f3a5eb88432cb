"""Rows of constant shape and micro batches, made from a manifest; how a host resumes them."""

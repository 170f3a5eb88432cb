"""Importing any part of the model imports its attention, as in Megatron-DeepSpeed."""

from megatron.model import transformer

__all__ = ["transformer"]

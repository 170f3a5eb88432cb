"""Lengths in, SampleIndex out: strategies, the .samples file, metrics. Stands on storage."""

from megapack.packing.engine import pack
from megapack.packing.index import SampleIndex
from megapack.packing.strategies import STRATEGIES, Parameter, Strategy, find_strategy

__all__ = ["STRATEGIES", "Parameter", "SampleIndex", "Strategy", "find_strategy", "pack"]

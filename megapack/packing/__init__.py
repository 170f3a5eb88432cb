"""Lengths in, SampleIndex out: strategies, the .samples file, metrics. Stands on storage."""

from megapack.packing.engine import pack
from megapack.packing.index import SampleIndex
from megapack.packing.strategies import STRATEGIES, find_strategy
from megapack.packing.strategy import Parameter, Strategy

__all__ = ["STRATEGIES", "Parameter", "SampleIndex", "Strategy", "find_strategy", "pack"]

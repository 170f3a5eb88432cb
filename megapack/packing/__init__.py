"""Packing strategies, the ``.samples`` file and its metrics: document lengths in, samples out."""

from megapack.packing.pack import PackingMethod, check_packing, pack
from megapack.packing.sample_index import SampleIndex, how_it_differs
from megapack.packing.strategies import STRATEGIES, Parameter, Strategy, find_strategy

__all__ = [
    "STRATEGIES",
    "PackingMethod",
    "Parameter",
    "SampleIndex",
    "Strategy",
    "check_packing",
    "find_strategy",
    "how_it_differs",
    "pack",
]

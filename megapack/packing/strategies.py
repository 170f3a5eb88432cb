"""The table of packing strategies: what each means, its parameters, its presets.

Everything that names strategies reads this table: ``pack``, the command line, ``compare``, the
shared law test and the reference tests. A new strategy is one C++ function, one runner, one
reference definition in ``tests/reference`` and one entry here.
"""

from __future__ import annotations

from typing import Any

from megapack.packing import runners
from megapack.packing.strategy import Parameter, Strategy, name_nearest

__all__ = ["STRATEGIES", "find_strategy"]


def find_strategy(name: str) -> Strategy:
    """The strategy of this name. Raises ValueError that names the nearest known one."""
    if name not in STRATEGIES:
        raise ValueError(f"no packing strategy {name!r}{name_nearest(name, list(STRATEGIES))}")
    return STRATEGIES[name]


_SHUFFLE = Parameter(
    name="shuffle",
    kind=bool,
    default=True,
    help="take the documents in seeded random order instead of file order",
)
_ATOM_SIZE = Parameter(
    name="atom_size",
    kind=int,
    default=None,
    minimum=1,
    help="tokens per shuffled piece, a divisor or a multiple of the capacity (the default)",
)
_LAST = Parameter(
    name="last",
    kind=str,
    default="pad",
    choices=("pad", "drop"),
    help="what becomes of the last, partial sample",
)
_EXTRA_CAPACITY = Parameter(
    name="extra_capacity",
    kind=int,
    default=0,
    minimum=0,
    maximum=1 << 20,
    help="tokens by which a bin may exceed the capacity; what lies past the capacity is dropped",
)
_POOL_SIZE = Parameter(
    name="pool_size",
    kind=int,
    default=1 << 20,
    minimum=1,
    help="documents per pool (drained pools: on average); what is packed together",
)
_BUCKET_LLM = (
    Parameter(
        name="pool",
        kind=str,
        default="drain",
        choices=("drain", "stream"),
        help="drain: fill a pool, then empty it; stream: one sample per added document, as "
        "Algorithm 1 is printed (one thread)",
    ),
    _POOL_SIZE,
    Parameter(
        name="padding_threshold",
        kind=float,
        default=0.045,
        minimum=0.0,
        maximum=1.0,
        help="more space than this share of a bucket is filled with the head of the shortest "
        "document, less is padded; 1: documents are never cut for it",
    ),
)

_TABLE = (
    Strategy(
        name="pad",
        description="a document per sample, the rest padding",
        source="Chen et al. 2024, A.3",
        many_buckets=False,
        run=runners.run_pad,
        parameters=(_ATOM_SIZE,),
    ),
    Strategy(
        name="concat",
        description="documents joined to one stream that is cut every capacity tokens",
        source="the classic (GPT-3, Megatron); atoms: Chen et al. 2024, A.3",
        many_buckets=False,
        run=runners.run_concat,
        parameters=(_SHUFFLE, _ATOM_SIZE, _LAST),
    ),
    Strategy(
        name="next_fit",
        description="a document that does not fit opens the next sample",
        source="random packing without splitting",
        many_buckets=False,
        run=runners.run_next_fit,
        parameters=(_SHUFFLE,),
    ),
    Strategy(
        name="length_sorted",
        description="next-fit over documents from short to long",
        source="length-sorted packing",
        many_buckets=False,
        run=runners.run_length_sorted,
    ),
    Strategy(
        name="first_fit_decreasing",
        description="from long to short, each document to the first bin with room",
        source="Johnson 1973; Seamless Packing (Yin et al. 2025), Algorithm 1",
        many_buckets=False,
        run=runners.run_first_fit_decreasing,
        parameters=(_EXTRA_CAPACITY,),
    ),
    Strategy(
        name="best_fit_decreasing",
        description="from long to short, each document to the fullest bin with room",
        source="Ding et al. 2024; Seamless Packing's baseline BFD",
        many_buckets=False,
        run=runners.run_best_fit_decreasing,
        parameters=(_EXTRA_CAPACITY,),
    ),
    Strategy(
        name="seamless",
        description="long documents in overlapping windows, the rest first-fit decreasing",
        source="Seamless Packing (Yin et al. 2025), section 3",
        many_buckets=False,
        run=runners.run_seamless,
        parameters=(
            Parameter(
                name="r_max",
                kind=float,
                default=0.3,
                minimum=0.0,
                maximum=1.0,
                help="largest repeated share of a sample for which windows overlap (equation 1)",
            ),
            Parameter(
                name="placement",
                kind=str,
                default="exact",
                choices=("exact", "paper", "published"),
                help="where windows begin: evenly, nothing lost; equation 3 as printed; the "
                "arithmetic of the authors' program",
            ),
            _EXTRA_CAPACITY,
            _LAST,
        ),
        presets={
            "paper": lambda capacity: _seamless_preset("paper", capacity),
            "published": lambda capacity: _seamless_preset("published", capacity),
        },
    ),
    Strategy(
        name="bucket_naive",
        description="documents go to the smallest bucket that holds them; there, concat",
        source="BucketLLM (Yang et al. 2024), Naive Bucketing",
        many_buckets=True,
        run=runners.run_bucket_naive,
        parameters=(_SHUFFLE,),
    ),
    Strategy(
        name="bucket_v0",
        description="bucket_llm without its pair search",
        source="BucketLLM-v0 (Yang et al. 2024)",
        many_buckets=True,
        run=runners.run_bucket_v0,
        parameters=_BUCKET_LLM,
        presets={"paper": lambda _: {"pool_size": 3000, "padding_threshold": 0.045}},
    ),
    Strategy(
        name="bucket_llm",
        description="the longest document's bucket, then the longest that fit or a better pair; "
        "large gaps take the head of the shortest document",
        source="BucketLLM (Yang et al. 2024), Algorithms 1 and 2",
        many_buckets=True,
        run=runners.run_bucket_llm,
        parameters=_BUCKET_LLM,
        presets={"paper": lambda _: {"pool_size": 3000, "padding_threshold": 0.045}},
    ),
    Strategy(
        name="bucket",
        description="the longest document's bucket, then the longest that fit; only documents "
        "longer than the largest bucket are cut",
        source="megapack, after BucketLLM",
        many_buckets=True,
        run=runners.run_bucket,
        parameters=(
            _POOL_SIZE,
            Parameter(
                name="promote",
                kind=str,
                default="auto",
                choices=("auto", "on", "off"),
                help="a sample that would be padded by more than padding_threshold moves to a "
                "larger bucket and is filled on; auto: if that saves padding worth having",
            ),
            Parameter(
                name="padding_threshold",
                kind=float,
                default=0.05,
                minimum=0.0,
                maximum=1.0,
                help="share of a bucket's capacity above which its space counts for promote",
            ),
            Parameter(
                name="refine",
                kind=bool,
                default=False,
                help="look for better samples with a linear program (seconds; needs scipy), and "
                "take them if they are worth it",
            ),
        ),
    ),
    Strategy(
        name="decompose",
        description="documents cut by the binary digits of their length, a piece per sample",
        source="Dataset Decomposition (Pouransari et al. 2024)",
        many_buckets=True,
        run=runners.run_decompose,
        parameters=(
            Parameter(
                name="min_bucket",
                kind=int,
                default=None,
                minimum=1,
                help="smallest piece in tokens, a power of two; shorter pieces are dropped "
                "(default: 256, or the smallest bucket if that is less)",
            ),
        ),
    ),
)


def _seamless_preset(placement: str, capacity: int) -> dict[str, Any]:
    """Appendix D: 50 extra tokens, 10 for samples of 512; the last partial sample is dropped."""
    extra = 50 if capacity > 512 else 10
    return {"r_max": 0.3, "placement": placement, "extra_capacity": extra, "last": "drop"}


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _TABLE}

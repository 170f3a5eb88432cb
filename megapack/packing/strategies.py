"""The packing strategies: what each means, its parameters, its presets, its call into the core.

Everything that names strategies reads ``STRATEGIES``: ``pack``, the command line, ``compare``, the
shared law test and the reference tests. A new strategy is one C++ function, one function here and
one reference definition in ``tests/reference``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing.bucket_choice import choose_bucket_way
from megapack.packing.ratios import exact_ratio, largest_overlap
from megapack.packing.strategy import Packing, Parameter, Request, Strategy, name_nearest

__all__ = ["STRATEGIES", "find_strategy"]

STRATEGIES: dict[str, Strategy] = {}
_Run = Callable[[Request], Packing]


def find_strategy(name: str) -> Strategy:
    """The strategy of this name. Raises ConfigError that names the nearest known one."""
    if name not in STRATEGIES:
        raise ConfigError(f"no packing strategy {name!r}{name_nearest(name, list(STRATEGIES))}")
    return STRATEGIES[name]


def _strategy(
    source: str, *parameters: Parameter, many_buckets: bool = False, **more: Any
) -> Callable[[_Run], _Run]:
    """Enter a function under its name; its docstring is what the strategy means."""

    def enter(run: _Run) -> _Run:
        STRATEGIES[run.__name__] = Strategy(
            name=run.__name__,
            description=" ".join((run.__doc__ or "").split()),
            source=source,
            many_buckets=many_buckets,
            run=run,
            parameters=parameters,
            **more,
        )
        return run

    return enter


# --- parameters that several have -----------------------------------------------------------------

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
    maximum=(1 << 63) - 1,
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
        "document, less is padded; 1: no document is split for it",
    ),
)
_BUCKET_LLM_PRESETS = {"paper": lambda _: {"pool_size": 3000, "padding_threshold": 0.045}}


def _atom_size(buckets: list[int], parameters: Mapping[str, Any]) -> int:
    """The parameter, or the capacity."""
    size = parameters["atom_size"]
    return buckets[-1] if size is None else int(size)


def _check_atom_size(buckets: list[int], parameters: Mapping[str, Any]) -> None:
    size, capacity = _atom_size(buckets, parameters), buckets[-1]
    if capacity % size and size % capacity:
        raise ConfigError(
            f"atom_size is {size:,} and the capacity {capacity:,}; one must be a multiple of the "
            "other"
        )


# --- samples of one length ------------------------------------------------------------------------


@_strategy("Chen et al. 2024, A.3", _ATOM_SIZE, check=_check_atom_size)
def pad(request: Request) -> Packing:
    """a document per sample, the rest padding"""
    atom_size = _atom_size(request.buckets, request.parameters)
    return _core.pack_pad(request.lengths, request.capacity, atom_size, request.common)


@_strategy(
    "the classic (GPT-3, Megatron); atoms: Chen et al. 2024, A.3",
    _SHUFFLE,
    _ATOM_SIZE,
    _LAST,
    check=_check_atom_size,
)
def concat(request: Request) -> Packing:
    """concatenate and chunk: one stream of all documents, split every capacity tokens"""
    return _core.pack_concat(
        request.lengths,
        request.capacity,
        _atom_size(request.buckets, request.parameters),
        request.parameters["last"] == "drop",
        request.parameters["shuffle"],
        request.common,
    )


@_strategy("random packing without splitting", _SHUFFLE)
def next_fit(request: Request) -> Packing:
    """a document that does not fit opens the next sample"""
    shuffle = request.parameters["shuffle"]
    return _core.pack_next_fit(request.lengths, request.capacity, shuffle, request.common)


@_strategy("length-sorted packing")
def length_sorted(request: Request) -> Packing:
    """next-fit over documents from short to long"""
    return _core.pack_length_sorted(request.lengths, request.capacity, request.common)


@_strategy("Johnson 1973; Seamless Packing (Yin et al. 2025), Algorithm 1", _EXTRA_CAPACITY)
def first_fit_decreasing(request: Request) -> Packing:
    """from long to short, each document to the first bin with room"""
    return _fit_decreasing(request, best=False)


@_strategy("Ding et al. 2024; Seamless Packing's baseline BFD", _EXTRA_CAPACITY)
def best_fit_decreasing(request: Request) -> Packing:
    """from long to short, each document to the fullest bin with room"""
    return _fit_decreasing(request, best=True)


def _fit_decreasing(request: Request, *, best: bool) -> Packing:
    extra = request.parameters["extra_capacity"]
    return _core.pack_fit_decreasing(request.lengths, request.capacity, extra, best, request.common)


@_strategy(
    "Seamless Packing (Yin et al. 2025), section 3",
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
        help="where windows begin: evenly, nothing lost; equation 3 as printed; the arithmetic of "
        "the authors' program",
    ),
    _EXTRA_CAPACITY,
    _LAST,
    presets={
        "paper": lambda capacity: _seamless_preset("paper", capacity),
        "published": lambda capacity: _seamless_preset("published", capacity),
    },
)
def seamless(request: Request) -> Packing:
    """long documents in overlapping windows, the rest first-fit decreasing"""
    placement = request.parameters["placement"]
    return _core.pack_seamless(
        request.lengths,
        request.capacity,
        largest_overlap(request.parameters["r_max"], placement, request.capacity),
        placement,
        request.parameters["extra_capacity"],
        request.parameters["last"] == "drop",
        request.common,
    )


def _seamless_preset(placement: str, capacity: int) -> dict[str, Any]:
    """Appendix D: 50 extra tokens, 10 for samples of 512; the last partial sample is dropped."""
    extra = 50 if capacity > 512 else 10
    return {"r_max": 0.3, "placement": placement, "extra_capacity": extra, "last": "drop"}


# --- buckets of several lengths -------------------------------------------------------------------


@_strategy("BucketLLM (Yang et al. 2024), Naive Bucketing", _SHUFFLE, many_buckets=True)
def bucket_naive(request: Request) -> Packing:
    """documents go to the smallest bucket that holds them; there, concat"""
    shuffle = request.parameters["shuffle"]
    return _core.pack_bucket_naive(request.lengths, request.buckets, shuffle, request.common)


@_strategy(
    "BucketLLM-v0 (Yang et al. 2024)", *_BUCKET_LLM, many_buckets=True, presets=_BUCKET_LLM_PRESETS
)
def bucket_v0(request: Request) -> Packing:
    """bucket_llm without its pair search"""
    return _bucket_llm(request, pairs=False)


@_strategy(
    "BucketLLM (Yang et al. 2024), Algorithms 1 and 2",
    *_BUCKET_LLM,
    many_buckets=True,
    presets=_BUCKET_LLM_PRESETS,
)
def bucket_llm(request: Request) -> Packing:
    """the longest document's bucket, then the longest that fit or a better pair; large gaps take
    the head of the shortest document"""
    return _bucket_llm(request, pairs=True)


def _bucket_llm(request: Request, *, pairs: bool) -> Packing:
    parameters = request.parameters
    rules = _core.BucketRules(
        capacities=request.buckets,
        overflow="head",
        padding_threshold=exact_ratio(parameters["padding_threshold"]),
        pairs=pairs,
        shuffle_segments=True,
    )
    pool_size = parameters["pool_size"]
    if parameters["pool"] == "drain":
        return _core.drain_buckets(request.lengths, rules, [], pool_size, request.common)
    return _core.stream_buckets(request.lengths, rules, pool_size, request.common)


@_strategy(
    "megapack, after BucketLLM",
    _POOL_SIZE,
    Parameter(
        name="promote",
        kind=str,
        default="auto",
        choices=("auto", "on", "off"),
        help="a sample that would be padded by more than padding_threshold moves to a larger "
        "bucket and is filled on; auto: if that saves padding worth having",
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
        help="look for better samples with a linear program, and take them if they are worth it "
        "(needs highspy; seconds, whatever the number of documents)",
    ),
    many_buckets=True,
)
def bucket(request: Request) -> Packing:
    """the longest document's bucket, then the longest that fit; a document is split only if it is
    longer than the largest bucket"""
    choice = choose_bucket_way(
        request.lengths,
        request.buckets,
        promote=request.parameters["promote"],
        padding_threshold=request.parameters["padding_threshold"],
        refine=request.parameters["refine"],
        threads=request.threads,
    )
    # Patterns for all documents need all documents in one pool.
    pool_size = max(1, len(request.lengths)) if choice.given else request.parameters["pool_size"]
    packed = _core.drain_buckets(
        request.lengths, choice.rules, choice.given, pool_size, request.common
    )
    return packed | {"decisions": choice.decisions}


def _decompose_buckets(buckets: list[int], parameters: Mapping[str, Any]) -> list[int]:
    """All powers of two from the smallest piece to the largest bucket."""
    smallest = parameters["min_bucket"]
    if smallest is None:
        smallest = min(256, buckets[0])
    exponents = range(smallest.bit_length() - 1, buckets[-1].bit_length())
    return [1 << exponent for exponent in exponents]


def _check_decompose(buckets: list[int], parameters: Mapping[str, Any]) -> None:
    smallest, largest = parameters["min_bucket"], buckets[-1]
    named = [] if smallest is None else [("min_bucket", smallest)]
    for name, value in (*named, *(("bucket", size) for size in buckets)):
        if value & (value - 1):
            raise ConfigError(f"{name} is {value:,}; decompose needs powers of two")
    if smallest is not None and smallest > largest:
        raise ConfigError(f"min_bucket is {smallest:,}; the largest bucket is {largest:,}")
    made, alignment = _decompose_buckets(buckets, parameters)[0], parameters.get("alignment", 1)
    if made % alignment:
        raise ConfigError(
            f"decompose makes buckets of {made:,} tokens, no multiple of the alignment "
            f"{alignment:,}; give min_bucket"
        )


@_strategy(
    "Dataset Decomposition (Pouransari et al. 2024)",
    Parameter(
        name="min_bucket",
        kind=int,
        default=None,
        minimum=1,
        help="smallest piece in tokens, a power of two; shorter pieces are dropped (default: 256, "
        "or the smallest bucket if that is less)",
    ),
    many_buckets=True,
    check=_check_decompose,
)
def decompose(request: Request) -> Packing:
    """documents cut by the binary digits of their length, a piece per sample"""
    sizes = _decompose_buckets(request.buckets, request.parameters)
    return _core.pack_decompose(request.lengths, sizes, request.common)

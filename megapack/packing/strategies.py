"""The packing strategies: what each means, its parameters, its presets, its call into the core.

Everything that names strategies reads ``STRATEGIES``: ``pack``, the command line, ``compare``, the
shared law test and the reference tests. CONTRIBUTING.md says what else a new strategy needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megapack.errors import ConfigError
from megapack.packing.bucket_choice import choose_bucket_way
from megapack.packing.ratios import exact_ratio, largest_overlap
from megapack.packing.sizes import (
    atom_size,
    check_atom_size,
    check_decompose,
    decompose_buckets,
)
from megapack.packing.strategy import Packing, Parameter, Request, Strategy, name_nearest

__all__ = ["STRATEGIES", "find_strategy"]

STRATEGIES: dict[str, Strategy] = {}
_Run = Callable[[Request], Packing]


def find_strategy(name: str) -> Strategy:
    """The strategy of this name. Raises ConfigError that names the nearest known one."""
    if name not in STRATEGIES:
        raise ConfigError(f"no packing strategy {name!r}{name_nearest(name, list(STRATEGIES))}")
    return STRATEGIES[name]


def _strategy(source: str, *parameters: Parameter, **more: Any) -> Callable[[_Run], _Run]:
    """Enter a function under its name; its docstring is what the strategy means."""

    def enter(run: _Run) -> _Run:
        STRATEGIES[run.__name__] = Strategy(
            name=run.__name__,
            description=" ".join((run.__doc__ or "").split()),
            source=source,
            run=run,
            parameters=parameters,
            **more,
        )
        return run

    return enter


# --- parameters that several have -----------------------------------------------------------------

_SHUFFLE = Parameter(
    name="shuffle",
    default=True,
    help="take the documents in seeded random order instead of file order",
)
_ATOM_SIZE = Parameter(
    name="atom_size",
    default=None,
    minimum=1,
    help="tokens per atom, which is what is shuffled: a divisor or a multiple of the capacity "
    "(the default)",
)
_LAST = Parameter(
    name="last",
    default="pad",
    choices=("pad", "drop"),
    help="what becomes of the last, partial sample",
)
_EXTRA_CAPACITY = Parameter(
    name="extra_capacity",
    default=0,
    minimum=0,
    maximum=1 << 20,
    help="tokens by which a bin may exceed the capacity; what lies past the capacity is dropped",
)
_POOL_SIZE = Parameter(
    name="pool_size",
    default=1 << 20,
    minimum=1,
    maximum=(1 << 63) - 1,
    help="documents per pool (drained pools: on average); what is packed together",
)
_BUCKET_LLM = (
    Parameter(
        name="pool",
        default="drain",
        choices=("drain", "stream"),
        help="drain: fill a pool, then empty it; stream: one sample per added document, as "
        "Algorithm 1 is printed (one thread)",
    ),
    _POOL_SIZE,
    Parameter(
        name="padding_threshold",
        default=0.045,
        minimum=0.0,
        maximum=1.0,
        help="more space than this share of a bucket is filled with the head of the shortest "
        "document, less is padded; 1: no document is split for it",
    ),
)
_BUCKET_LLM_PRESETS = {"paper": lambda _: {"pool_size": 3000, "padding_threshold": 0.045}}


# --- samples of one length ------------------------------------------------------------------------


@_strategy("Chen et al. 2024, A.3", _ATOM_SIZE, check=check_atom_size)
def pad(request: Request) -> Packing:
    """a document per sample, the rest padding"""
    size = atom_size(request.buckets, request.parameters)
    return request.pack("pad", capacity=request.capacity, atom_size=size)


@_strategy(
    "the classic (GPT-3, Megatron); atoms: Chen et al. 2024, A.3",
    _SHUFFLE,
    _ATOM_SIZE,
    _LAST,
    check=check_atom_size,
    may_drop=True,
)
def concat(request: Request) -> Packing:
    """concatenate and chunk: one stream of all documents, split every capacity tokens"""
    size = atom_size(request.buckets, request.parameters)
    rules = request.parameters | {"capacity": request.capacity, "atom_size": size}
    return request.pack("concat", **rules)


@_strategy("random packing without splitting", _SHUFFLE)
def next_fit(request: Request) -> Packing:
    """a document that does not fit opens the next sample"""
    return request.pack("next_fit", capacity=request.capacity, **request.parameters)


@_strategy("length-sorted packing")
def length_sorted(request: Request) -> Packing:
    """next-fit over documents from short to long"""
    return request.pack("length_sorted", capacity=request.capacity)


@_strategy(
    "Johnson 1973; Seamless Packing (Yin et al. 2025), Algorithm 1", _EXTRA_CAPACITY, may_drop=True
)
def first_fit_decreasing(request: Request) -> Packing:
    """from long to short, each document to the first bin with room"""
    rules = {"capacity": request.capacity, "best": False, **request.parameters}
    return request.pack("fit_decreasing", **rules)


@_strategy("Ding et al. 2024; Seamless Packing's baseline BFD", _EXTRA_CAPACITY, may_drop=True)
def best_fit_decreasing(request: Request) -> Packing:
    """from long to short, each document to the fullest bin with room"""
    rules = {"capacity": request.capacity, "best": True, **request.parameters}
    return request.pack("fit_decreasing", **rules)


def _seamless_preset(placement: str, capacity: int) -> dict[str, Any]:
    """Appendix D: 50 extra tokens, 10 for samples of 512; the last partial sample is dropped."""
    extra = 50 if capacity > 512 else 10
    return {"r_max": 0.3, "placement": placement, "extra_capacity": extra, "last": "drop"}


@_strategy(
    "Seamless Packing (Yin et al. 2025), section 3",
    Parameter(
        name="r_max",
        default=0.3,
        minimum=0.0,
        maximum=1.0,
        help="largest repeated share of a sample for which windows overlap (equation 1)",
    ),
    Parameter(
        name="placement",
        default="exact",
        choices=("exact", "paper", "published"),
        help="where windows begin: evenly, nothing lost; equation 3 as printed; the arithmetic of "
        "the authors' program",
    ),
    _EXTRA_CAPACITY,
    _LAST,
    presets={name: partial(_seamless_preset, name) for name in ("paper", "published")},
    may_drop=True,
    may_repeat=True,
)
def seamless(request: Request) -> Packing:
    """long documents in overlapping windows, the rest first-fit decreasing"""
    parameters, capacity = request.parameters, request.capacity
    r_max = largest_overlap(parameters["r_max"], parameters["placement"], capacity)
    return request.pack("seamless", **parameters | {"capacity": capacity, "r_max": r_max})


# --- buckets of several lengths -------------------------------------------------------------------


@_strategy("BucketLLM (Yang et al. 2024), Naive Bucketing", _SHUFFLE, many_buckets=True)
def bucket_naive(request: Request) -> Packing:
    """documents go to the smallest bucket that holds them; there, concat"""
    return request.pack("bucket_naive", buckets=request.buckets, **request.parameters)


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
    return request.pack(
        "bucket" if parameters["pool"] == "drain" else "bucket_stream",
        buckets=request.buckets,
        overflow="head",
        padding_threshold=exact_ratio(parameters["padding_threshold"]),
        pairs=pairs,
        shuffle_segments=True,
        pool_size=parameters["pool_size"],
    )


@_strategy(
    "megapack, after BucketLLM",
    _POOL_SIZE,
    Parameter(
        name="promote",
        default="auto",
        choices=("auto", "on", "off"),
        help="a sample that would be padded by more than padding_threshold moves to a larger "
        "bucket and is filled on; auto: if that saves padding worth having",
    ),
    Parameter(
        name="padding_threshold",
        default=0.05,
        minimum=0.0,
        maximum=1.0,
        help="share of a bucket's capacity above which its space counts for promote",
    ),
    Parameter(
        name="max_segments",
        default=None,
        minimum=1,
        maximum=(1 << 31) - 1,
        help="segments that a sample of the largest bucket may have, in smaller buckets in "
        "proportion: cu_seqlens then have a fixed length (default: any number)",
    ),
    Parameter(
        name="refine",
        default=False,
        help="look for better samples with a linear program, and take them if they are worth it "
        "(needs highspy; seconds, whatever the number of documents)",
    ),
    many_buckets=True,
)
def bucket(request: Request) -> Packing:
    """the longest document's bucket, then the longest that fit; a document is split only if it is
    longer than the largest bucket"""
    parameters = dict(request.parameters)
    pool_size = parameters.pop("pool_size")
    way = choose_bucket_way(request.lengths, request.buckets, threads=request.threads, **parameters)
    if "given" in way.rules:  # patterns for all documents need all documents in one pool
        pool_size = max(1, len(request.lengths))
    return request.pack("bucket", pool_size=pool_size, **way.rules) | {"decisions": way.decisions}


@_strategy(
    "Dataset Decomposition (Pouransari et al. 2024)",
    Parameter(
        name="min_bucket",
        default=None,
        minimum=1,
        help="smallest segment in tokens, a power of two; shorter ones are dropped (default: 256, "
        "or the smallest bucket if that is less)",
    ),
    many_buckets=True,
    check=check_decompose,
    may_drop=True,
)
def decompose(request: Request) -> Packing:
    """documents cut by the binary digits of their length, a segment per sample"""
    return request.pack("decompose", buckets=decompose_buckets(request.buckets, request.parameters))

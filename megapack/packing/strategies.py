"""Registry of the packing strategies: parameters, presets and calls of the core.

* ``STRATEGIES``: name -> ``Strategy``, for those that need only lengths; ``TREE``, which needs
  tokens; ``find_strategy`` looks one up.
* ``Strategy``, ``Parameter``: entries of the registry; ``Strategy.resolve`` checks parameters.
* ``Request``: input of a strategy.

    STRATEGIES["seamless"].resolve({"r_max": 0.5}, preset="paper", capacity=512)
    # -> {"r_max": 0.5, "placement": "paper", "extra_capacity": 10, "last": "drop"}

``pack``, the command line, ``compare`` and the tests read the registry. CONTRIBUTING.md says what
else a new strategy needs.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.calls import nearest
from megapack.errors import ConfigError
from megapack.packing.bucket_rules import Outcome, bucket_rules, exact_ratio
from megapack.packing.trees import DocumentTokens, check_tree, pack_trees

# Arrays of SampleIndex, dropped_tokens, repeated_tokens; from some strategies also decisions.
Packing = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Input of a strategy: checked lengths, ascending buckets, resolved parameters."""

    lengths: _core.DocumentLengths
    buckets: list[int]
    parameters: dict[str, Any]
    seed: int
    threads: int
    progress: Callable[[int, int], None] | None = None
    wide_ids: bool = False
    tokens: DocumentTokens | None = None
    """None for strategies that need only lengths."""
    second: NDArray[np.int64] | None = None  # of every document; None: only tokens are limited
    second_capacities: list[int] | None = None  # of every bucket

    @property
    def capacity(self) -> int:
        return self.buckets[-1]

    def pack(self, strategy: str, **rules: Any) -> Packing:
        """Pack the documents with a strategy of the core."""
        run = _core.Run(
            seed=self.seed, threads=self.threads, wide_ids=self.wide_ids, progress=self.progress
        )
        try:
            return _core.pack(strategy, self.lengths, rules, run)
        except MemoryError as error:
            raise MemoryError(
                f"packing {len(self.lengths):,} documents of {self.lengths.num_tokens:,} tokens "
                f"(the longest has {self.lengths.longest:,}) into samples of {self.capacity:,} "
                "tokens does not fit in memory; check that the lengths are in tokens"
            ) from error


@dataclass(frozen=True)
class Parameter:
    """One keyword of ``pack`` and one option of ``megapack-build pack``."""

    name: str
    default: Any  # None: an integer that depends on the buckets
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def kind(self) -> type:
        return int if self.default is None else type(self.default)

    def check(self, value: Any) -> Any:
        """Return ``value`` as ``kind``. Raises ConfigError: wrong type or out of range."""
        accepted = numbers.Integral if self.kind is int else numbers.Real
        if value is None and self.default is None:
            return None
        if self.choices:
            valid, limit = value in self.choices, f"one of {', '.join(self.choices)}"
        elif self.kind is bool:
            valid, limit = isinstance(value, bool), "True or False"
        elif isinstance(value, bool) or not isinstance(value, accepted):
            valid, limit = False, f"of type {self.kind.__name__}"
        else:
            with suppress(OverflowError):  # an integer above all floats is above every limit
                value = self.kind(value)
            low, high = self.minimum, self.maximum
            valid = (low is None or value >= low) and (high is None or value <= high)
            limit = f"at least {low}" if high is None else f"from {low} to {high}"
        if not valid:
            raise ConfigError(f"{self.name} is {value!r}; it must be {limit}")
        return value


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to turn document lengths into samples."""

    name: str
    description: str
    source: str  # the publication
    run: Callable[[Request], Packing]
    parameters: tuple[Parameter, ...] = ()  # in the order of the table in docs
    many_buckets: bool = False  # ``buckets`` may have more than one capacity
    may_drop: bool = False  # the strategy may leave tokens out of all samples
    may_repeat: bool = False  # the strategy may put a token into several samples
    needs_tokens: bool = False  # the strategy reads tokens, not only lengths
    two_capacities: bool = False  # buckets may limit a second size of documents
    # Name -> function that returns a paper's parameters for the largest capacity.
    presets: Mapping[str, Callable[[int], dict[str, Any]]] = field(default_factory=dict)
    # Raises ConfigError if the (ascending) buckets contradict the parameters.
    check: Callable[[list[int], Mapping[str, Any]], None] | None = None

    def resolve(
        self, values: Mapping[str, Any], *, preset: str | None = None, capacity: int = 0
    ) -> dict[str, Any]:
        """Return the defaults, overridden by the preset, then by ``values``. Raises ConfigError."""
        known = {parameter.name: parameter for parameter in self.parameters}
        resolved = {name: parameter.default for name, parameter in known.items()}
        if preset is not None:
            missing = f"strategy {self.name!r} has no preset"
            resolved |= _look_up(missing, preset, self.presets)(capacity)
        for name, value in values.items():
            missing = f"strategy {self.name!r} has no parameter"
            resolved[name] = _look_up(missing, name, known).check(value)
        return resolved


def _look_up(missing: str, name: str, known: Mapping[str, Any]) -> Any:
    """Look up a name; a ConfigError suggests the nearest known one."""
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{missing} {name!r}{nearest(name, known)} (known: {names})")
    return known[name]


STRATEGIES: dict[str, Strategy] = {}
_Run = Callable[[Request], Packing]


def find_strategy(name: str) -> Strategy:
    """Look up a strategy. Raises ConfigError, which suggests the nearest known one."""
    known = {**STRATEGIES, TREE.name: TREE}
    strategy: Strategy = _look_up("no packing strategy", name, known)
    return strategy


def _strategy(source: str, *parameters: Parameter, **more: Any) -> Callable[[_Run], _Run]:
    """Register a function under its name; its docstring is the strategy's description."""

    def register(run: _Run) -> _Run:
        STRATEGIES[run.__name__] = Strategy(
            name=run.__name__,
            description=" ".join((run.__doc__ or "").split()),
            source=source,
            run=run,
            parameters=parameters,
            **more,
        )
        return run

    return register


# --- values computed from buckets and parameters --------------------------------------------------


def largest_overlap(r_max: float, placement: str, capacity: int) -> tuple[int, int]:
    """Return Seamless Packing's r_max as a ratio; ``published``: rounded like the authors' code."""
    if placement == "published":
        return int(r_max * capacity), capacity
    return exact_ratio(r_max)


def atom_size(buckets: list[int], parameters: Mapping[str, Any]) -> int:
    """Return the parameter, or the capacity."""
    size = parameters["atom_size"]
    return buckets[-1] if size is None else int(size)


def check_atom_size(buckets: list[int], parameters: Mapping[str, Any]) -> None:
    """Check that atom and capacity divide each other. Raises ConfigError."""
    size, capacity = atom_size(buckets, parameters), buckets[-1]
    if capacity % size and size % capacity:
        raise ConfigError(
            f"atom_size is {size:,} and the capacity {capacity:,}; one must divide the other"
        )


def decompose_buckets(buckets: list[int], parameters: Mapping[str, Any]) -> list[int]:
    """Return all powers of two from the smallest segment to the largest bucket."""
    smallest = parameters["min_bucket"]
    if smallest is None:
        smallest = min(256, buckets[0])
    exponents = range(smallest.bit_length() - 1, buckets[-1].bit_length())
    return [1 << exponent for exponent in exponents]


def check_decompose(buckets: list[int], parameters: Mapping[str, Any]) -> None:
    """Check powers of two, and that alignment divides the smallest. Raises ConfigError."""
    smallest, largest = parameters["min_bucket"], buckets[-1]
    named = [] if smallest is None else [("min_bucket", smallest)]
    for name, value in (*named, *(("bucket", size) for size in buckets)):
        if value & (value - 1):
            raise ConfigError(f"{name} is {value:,}; decompose needs powers of two")
    if smallest is not None and smallest > largest:
        raise ConfigError(f"min_bucket is {smallest:,}; the largest bucket is {largest:,}")
    lowest, alignment = decompose_buckets(buckets, parameters)[0], parameters.get("alignment", 1)
    if lowest % alignment:
        raise ConfigError(
            f"decompose makes buckets of {lowest:,} tokens, not a multiple of the alignment "
            f"{alignment:,}; give min_bucket"
        )


# --- shared parameters ----------------------------------------------------------------------------

_SHUFFLE = Parameter(
    "shuffle", True, "take the documents in seeded random order instead of file order"
)
_ATOM_SIZE = Parameter(
    "atom_size",
    None,
    "tokens per atom, the unit that is shuffled: a divisor or a multiple of the capacity "
    "(default: the capacity)",
    minimum=1,
    maximum=(1 << 31) - 1,
)
_LAST = Parameter(
    "last", "pad", "pad or drop the last sample if it is not full", choices=("pad", "drop")
)
_EXTRA_CAPACITY = Parameter(
    "extra_capacity",
    0,
    "tokens by which a bin may exceed the capacity; tokens beyond the capacity are dropped",
    minimum=0,
    maximum=1 << 20,
)
_POOL_SIZE = Parameter(
    "pool_size",
    1 << 20,
    "documents per pool (drained pools: on average); documents of a pool are packed together",
    minimum=1,
    maximum=(1 << 63) - 1,
)
_BUCKET_LLM = (
    Parameter(
        "pool",
        "drain",
        "drain: fill a pool, then empty it; stream: one sample per added document, as "
        "Algorithm 1 is printed (one thread)",
        choices=("drain", "stream"),
    ),
    _POOL_SIZE,
    Parameter(
        "padding_threshold",
        0.045,
        "if more than this share of a bucket is free, it is filled with the head of the "
        "shortest document, else padded; 1: no document is split to fill a bucket",
        minimum=0.0,
        maximum=1.0,
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
    return request.pack(
        "fit_decreasing", capacity=request.capacity, best=False, **request.parameters
    )


@_strategy("Ding et al. 2024; Seamless Packing's baseline BFD", _EXTRA_CAPACITY, may_drop=True)
def best_fit_decreasing(request: Request) -> Packing:
    """from long to short, each document to the fullest bin with room"""
    return request.pack(
        "fit_decreasing", capacity=request.capacity, best=True, **request.parameters
    )


def _seamless_preset(placement: str, capacity: int) -> dict[str, Any]:
    """Appendix D: 50 extra tokens, 10 for samples of 512; the last partial sample is dropped."""
    extra = 50 if capacity > 512 else 10
    return {"r_max": 0.3, "placement": placement, "extra_capacity": extra, "last": "drop"}


@_strategy(
    "Seamless Packing (Yin et al. 2025), section 3",
    Parameter(
        "r_max",
        0.3,
        "largest repeated share of a sample for which windows overlap (equation 1)",
        minimum=0.0,
        maximum=1.0,
    ),
    Parameter(
        "placement",
        "exact",
        "where windows begin: exact: evenly, no token is lost; paper: equation 3 as printed; "
        "published: as the authors' program computes it",
        choices=("exact", "paper", "published"),
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
    """fill the bucket of the longest document with the longest documents that fit, or with a better
    pair, and large gaps with the head of the shortest document"""
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
        "promote",
        "auto",
        "on: a sample that would be padded by more than padding_threshold moves to a larger "
        "bucket and gets more documents; lookahead: as on, but prefer documents that "
        "leave no space, or enough for another one; auto: the first of off, on and lookahead that "
        "pads at most 0.1 %, else the one that pads least",
        choices=("auto", "on", "lookahead", "off"),
    ),
    Parameter(
        "padding_threshold",
        0.05,
        "free share of a bucket's capacity above which promote moves the sample",
        minimum=0.0,
        maximum=1.0,
    ),
    Parameter(
        "max_segments",
        None,
        "limit of segments in a sample of the largest bucket, proportionally lower for "
        "smaller buckets, so that cu_seqlens has a fixed length (default: no limit)",
        minimum=1,
        maximum=(1 << 31) - 1,
    ),
    Parameter(
        "refine",
        False,
        "look for better samples with a linear program, and take them if they pad no more (needs "
        "highspy; takes seconds for any number of documents)",
    ),
    many_buckets=True,
    two_capacities=True,
)
def bucket(request: Request) -> Packing:
    """fill the bucket of the longest document with the longest documents that fit; a document is
    split only if it is longer than the largest bucket"""
    parameters = dict(request.parameters)
    pool_size = parameters.pop("pool_size")
    if request.second is not None:
        return _bucket_second(request, pool_size, **parameters)
    rules, decisions = bucket_rules(request.lengths, request.buckets, request.threads, **parameters)
    if "given" in rules:  # patterns for all documents need all documents in one pool
        pool_size = max(1, len(request.lengths))
    return request.pack("bucket", pool_size=pool_size, **rules) | {"decisions": decisions}


def _bucket_second(
    request: Request,
    pool_size: int,
    *,
    promote: str,
    padding_threshold: float,
    max_segments: int | None,
    refine: bool,
) -> Packing:
    assert not refine, "check_packing refuses it"
    padded: dict[str, Any] = {
        "buckets": request.buckets,
        "pool_size": pool_size,
        "max_segments": max_segments or 0,
        "second": request.second,
        "second_capacities": request.second_capacities,
    }
    promoted = {"overflow": "promote", "padding_threshold": exact_ratio(padding_threshold)}
    rules = {"off": padded, "on": padded | promoted}
    if promote != "auto":
        return request.pack("bucket_second", **rules[promote])
    # No plan on a histogram predicts this packing: pack both ways if promotion may help.
    packed = request.pack("bucket_second", **padded)
    off, tokens = Outcome.of_packing(packed), request.lengths.num_tokens
    if len(request.buckets) == 1 or not off.pads_too_much(tokens):
        return packed
    other = request.pack("bucket_second", **rules["on"])
    on = Outcome.of_packing(other)
    promote, packed = ("on", other) if on.positions < off.positions else ("off", packed)
    reason = f"padding is {off.padding(tokens)} without and {on.padding(tokens)} with it"
    return packed | {"decisions": {"promote": f"{promote}: {reason}"}}


@_strategy(
    "Dataset Decomposition (Pouransari et al. 2024)",
    Parameter(
        "min_bucket",
        None,
        "smallest segment in tokens, a power of two; shorter ones are dropped (default: "
        "256, or the smallest bucket if that is less)",
        minimum=1,
    ),
    many_buckets=True,
    check=check_decompose,
    may_drop=True,
)
def decompose(request: Request) -> Packing:
    """documents cut by the binary digits of their length, a segment per sample"""
    return request.pack("decompose", buckets=decompose_buckets(request.buckets, request.parameters))


# --- prefix trees ---------------------------------------------------------------------------------


def _tree(request: Request) -> Packing:
    assert request.tokens is not None, "pack checks this"
    arrays = pack_trees(request.tokens, request.capacity, **request.parameters)
    if request.progress is not None:
        request.progress(len(request.lengths), len(request.lengths))
    return arrays


TREE = Strategy(
    name="tree",
    description="documents that share prefixes become trees, in which a shared prefix is computed "
    "once; reads the tokens; train with data.attention: tree",
    source="megapack",
    run=_tree,
    parameters=(
        Parameter(
            "max_depth",
            None,
            "limit of the nodes on a path; deeper branches get copies of a node (default: no "
            "limit)",
            minimum=1,
            maximum=(1 << 31) - 1,
        ),
    ),
    check=check_tree,
    needs_tokens=True,
)

PARAMETERS = sorted({p.name for one in (*STRATEGIES.values(), TREE) for p in one.parameters})
"""Names of the parameters of all strategies, which are arguments of ``pack``."""

"""Typed seam of the C++ extension. Sections follow csrc/bindings/register_*.cpp."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# --- register_storage.cpp -----------------------------------------------------------------------
# `bytes` is a whole .idx (index_header: its first 34 bytes will do), `name` the file's, for errors.

# A file read-only, with no descriptor kept; OSError.
def map_file(descriptor: int, num_bytes: int) -> NDArray[np.uint8]: ...

# xxh64 of every BLOCK_BYTES bytes; a CheckedArray (megapack.storage.index_file) compares them with
# those promised before it is read: FormatError. Where the core reads an index it takes one for an
# array.
BLOCK_BYTES: int

def block_checksums(bytes: NDArray[np.uint8]) -> NDArray[np.uint64]: ...

class CheckedArray:
    def __init__(
        self, array: NDArray[Any], checksums: NDArray[np.uint64], *, name: str, remedy: str
    ) -> None: ...
    @property
    def unchecked(self) -> NDArray[Any]: ...
    def require(self, begin: int, end: int) -> None: ...
    def require_at(self, positions: NDArray[np.int64]) -> None: ...

def index_header(bytes: NDArray[np.uint8], file_bytes: int, name: str) -> dict[str, Any]: ...
def document_lengths(
    bytes: NDArray[np.uint8], name: str
) -> NDArray[np.int32] | NDArray[np.int64]: ...
def document_offsets(bytes: NDArray[np.uint8], name: str, itemsize: int) -> NDArray[np.int64]: ...
def sequence_lengths(bytes: NDArray[np.uint8], name: str) -> NDArray[np.int32]: ...
def sequence_pointers(bytes: NDArray[np.uint8], name: str) -> NDArray[np.int64]: ...
def document_indices(bytes: NDArray[np.uint8], name: str) -> NDArray[np.int64]: ...

# Smallest and largest id of any integer array. store_tokens also copies it into out[begin:], which
# has the dtype of the file, unless an id is outside of [low, high].
def token_range(tokens: NDArray[Any]) -> tuple[int, int]: ...
def store_tokens(
    tokens: NDArray[Any], out: NDArray[Any], begin: int, low: int, high: int
) -> tuple[int, int]: ...

# Block of sequence pointers and the byte behind it; block of document indices and the last end.
def scan_lengths(
    lengths: NDArray[np.int32], itemsize: int, begin: int
) -> tuple[NDArray[np.int64], int]: ...
def shift_document_ends(
    ends: NDArray[np.int64], num_sequences: int, previous: int, begin: int
) -> tuple[NDArray[np.int64], int]: ...

# --- register_tokenization.cpp ------------------------------------------------------------------

# (text, offsets (lines + 1), status (lines), line_begin (lines)); see csrc/core/text/jsonl.hpp.
def extract_jsonl(
    buffer: NDArray[np.uint8], key: str, values: str = "strings"
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]: ...
def valid_utf8(text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint8]: ...
def count_words(text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]: ...
def has_characters(
    text: NDArray[np.uint8], offsets: NDArray[np.int64], ranges: NDArray[np.int64]
) -> NDArray[np.uint8]: ...

# (tokens, offsets, largest id or -1); see csrc/core/text/frame.hpp.
def frame_documents_uint16(
    ids: NDArray[np.uint32] | NDArray[np.int32],
    offsets: NDArray[np.int64],
    prefix: list[int],
    suffix: list[int],
    vocab_size: int,
) -> tuple[NDArray[np.uint16], NDArray[np.int64], int]: ...
def frame_documents_int32(
    ids: NDArray[np.uint32] | NDArray[np.int32],
    offsets: NDArray[np.int64],
    prefix: list[int],
    suffix: list[int],
    vocab_size: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]: ...

# --- register_packing.cpp -----------------------------------------------------------------------
# A strategy gives a dict of the arrays of SampleIndex, "dropped_tokens" and "repeated_tokens".
# Wrong scalars and names are ValueErrors that name the argument and what it may be.

_Packing = dict[str, Any]

# int32, int64 or uint64 (num_documents,), viewed and read once: DataError for a length below 0 and
# for more than 2**62 tokens in all. num_longer: documents longer than `capacity`.
class DocumentLengths:
    num_tokens: int
    num_empty: int
    num_longer: int
    longest: int
    def __init__(
        self,
        lengths: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint64],
        *,
        capacity: int = ...,
    ) -> None: ...
    def __len__(self) -> int: ...

# `wide_ids` asks for int64 document numbers where int32 would do (tests).
class Run:
    def __init__(
        self,
        *,
        seed: int,
        threads: int,
        wide_ids: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None: ...

# By the name of the core's pack_<strategy>; register_packing.cpp says which rules it has.
def pack(strategy: str, lengths: DocumentLengths, rules: dict[str, Any], run: Run) -> _Packing: ...

# Rules of "seamless"; what its first stage makes of the documents.
def seamless_stage_one(lengths: DocumentLengths, rules: dict[str, Any]) -> dict[str, int]: ...

# Documents cut at `capacity`: counts of the rests by length (capacity,), number of full chunks.
def length_histogram(
    lengths: DocumentLengths, capacity: int, threads: int
) -> tuple[NDArray[np.int64], int]: ...

# Samples per bucket if a pool of counts[l] documents of length l is drained by rules of "bucket".
def count_bucket_samples(counts: NDArray[np.int64], rules: dict[str, Any]) -> list[int]: ...

# --- register_index.cpp -------------------------------------------------------------------------
_Index = NDArray[np.int32] | NDArray[np.int64]

# SampleIndex.segment_arrays, then the lengths; check_laws takes bucket_capacity before them. All
# arrays are int32 or int64.
def check_laws(*arrays: NDArray[Any]) -> None: ...
def whole_documents(*arrays: NDArray[Any]) -> int: ...
def label_tokens(*arrays: NDArray[Any]) -> NDArray[np.int64]: ...
def attention_cost(sample_segment_offsets: _Index, segment_length: _Index) -> NDArray[np.int64]: ...
def attention_cost_of(
    sample_segment_offsets: _Index,
    segment_length: _Index,
    samples: NDArray[np.int64],
    capacity: int,
    whole: bool,
) -> NDArray[np.int64]: ...

# SampleIndex.segment_arrays, then the number of documents.
def measure_samples(*arrays: Any) -> dict[str, Any]: ...

# --- register_gather.cpp ------------------------------------------------------------------------

def will_need(array: NDArray[Any], begin: int, num_bytes: int) -> None: ...

# take: uint8 (num_bytes,), not cleared; its memory is handed out again when all its views are gone.
class MemoryPool:
    def __init__(self, max_blocks: int) -> None: ...
    def take(self, num_bytes: int) -> NDArray[np.uint8]: ...

# Fill-in-the-middle: sentinels, the token that ends a document (-1: none), and of character cuts
# the tables (megapack/data/fim.py makes them): int64 characters (ids,), first_cut (ids + 1,),
# first_part (2 cuts + 1,), parts.
class Fim:
    def __init__(
        self,
        *,
        prefix: int,
        suffix: int,
        middle: int,
        end: int = -1,
        eod: int = -1,
        spm_rate: float,
        tables: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
        | None = None,
    ) -> None: ...

# A run of ids, from first_ids[r] to first_ids[r + 1], is consecutive samples of shards[r] from
# first_samples[r] on; sources: of every shard the number of its source.
class StepView:
    def __init__(
        self,
        num_lists: int,
        loss_weight: NDArray[np.float32] | None,
        epochs: NDArray[np.int64] | None,
        fim_rates: NDArray[np.float64] | None,
        seed: int,
    ) -> None: ...

class BatchShape:
    def __init__(
        self, num_rows: int, row_tokens: int, capacity: int, per_row: bool, num_cu_seqlens: int
    ) -> None: ...

class Gatherer:
    def __init__(
        self,
        *,
        first_ids: NDArray[np.int64],
        shards: NDArray[np.int64],
        first_samples: NDArray[np.int64],
        sources: NDArray[np.int64],
        positions: str,
        attention: str,
        label_boundary: str,
        loss: str,
        alignment: int,
        pad_token: int,
        fim: Fim | None = None,
    ) -> None: ...
    # excluded: documents, ascending; excluded_by: the first list (from 1 on) that has
    # each of them; segment_joined: 1 where one goes on in the group of the one before;
    # first_document: its number in the source; fim_longest: documents of 2 to so many tokens
    # have room for sentinels, -1: none. A shard that is open already stays as it is.
    def open(
        self,
        shard: int,
        *,
        tokens: NDArray[Any],
        labels: NDArray[Any] | None,
        weights: NDArray[Any] | None,
        index_bytes: NDArray[np.uint8],
        index_name: str,
        sample_segment_offsets: NDArray[np.int64],
        segment_document: _Index,
        segment_begin: _Index,
        segment_length: NDArray[np.int32],
        excluded: NDArray[np.int64],
        excluded_by: NDArray[np.int64],
        segment_joined: NDArray[np.uint8] | None = None,
        first_document: int = 0,
        fim_longest: int = -1,
    ) -> None: ...
    # shards that are not open
    @property
    def num_closed(self) -> int: ...
    # those of these samples; all else is for samples of open ones
    def closed(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]: ...
    # -> cu_seqlens, cu_seqlens_padded (with alignment), source of each segment, max_seqlen
    def gather(
        self,
        sample_ids: NDArray[np.int64],
        view: StepView,
        shape: BatchShape,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        loss_mask: NDArray[np.float32],
        position_ids: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, NDArray[np.int32] | None, int]: ...
    # -> for every sample: labels, their weight, sequences with labels
    def count_labels(
        self, sample_ids: NDArray[np.int64], view: StepView
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]: ...
    # -> for every transformed document, int64: position in sample_ids, segment of the sample
    # (excluded ones not counted), number in the source, 1 for SPM, and its two cuts, in tokens or
    # characters
    def fim_draws(
        self, sample_ids: NDArray[np.int64], view: StepView
    ) -> tuple[NDArray[np.int64], ...]: ...
    def token_ranges(
        self, sample_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...
    def will_need(self, sample_ids: NDArray[np.int64]) -> int: ...
    def read_exactly(self) -> None: ...

# --- register_schedule.cpp ----------------------------------------------------------------------

def random_bits(key: int, counter: int) -> int: ...

# float64 (count,), uniform in [0, 1): of counters 0, 1, ...
def random_units(key: int, count: int) -> NDArray[np.float64]: ...
def permute_range(key: int, size: int, first: int, count: int) -> NDArray[np.int64]: ...
def permute_inverse(key: int, size: int, values: NDArray[np.int64]) -> NDArray[np.int64]: ...
def permute_epochs(
    keys: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    begins: NDArray[np.int64],
    counts: NDArray[np.int64],
    shuffled: bool,
) -> NDArray[np.int64]: ...

class CycleOrder:
    def __init__(
        self,
        counts: NDArray[np.int64],
        odds: NDArray[np.float64],
        key: int,
        times: Literal["spread", "random", "consecutive"],
        largest_first: bool,
    ) -> None: ...
    def __len__(self) -> int: ...
    def counts(self, end: int) -> NDArray[np.int64]: ...
    def range(self, begin: int, end: int) -> NDArray[np.int32]: ...
    def at(self, position: int) -> tuple[int, int]: ...
    def position(self, bucket: int, rank: int) -> int: ...

class Blend:
    def __init__(self, weights: NDArray[np.int64]) -> None: ...
    def range(
        self, begin: int, end: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]: ...
    def taken(self, end: int) -> NDArray[np.int64]: ...
    def taken_of(self, source: int, end: int) -> int: ...

def assign_evenly(costs: NDArray[np.int64], bin_sizes: NDArray[np.int64]) -> NDArray[np.int64]: ...

# --- register_planning.cpp ----------------------------------------------------------------------
# (number of micro batches; first rank, degree, micro batch of every document); see
# csrc/core/planning/step_plan.hpp.

# costs: (documents * kinds,), none: of the lengths; max_costs_per_rank: (kinds,), none: anything;
# groups: (documents,), none: each by itself
def plan_step(
    lengths: NDArray[np.int64],
    costs: NDArray[np.float64],
    max_costs_per_rank: NDArray[np.float64],
    groups: NDArray[np.int64],
    *,
    balance: str,
    num_ranks: int,
    max_tokens_per_rank: int,
    max_documents_per_rank: int,
    max_context_parallel_size: int,
    linear_cost_tokens: int,
    micro_batch_multiple: int,
) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...

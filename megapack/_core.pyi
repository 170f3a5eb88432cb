"""Typed seam of the C++ extension. Sections follow csrc/bindings/register_*.cpp."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# --- register_storage.cpp -----------------------------------------------------------------------
# `bytes` is a whole .idx (index_header: its first 34 bytes will do), `name` the file's, for errors.

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

# --- register_packing.cpp -----------------------------------------------------------------------
# `lengths`: int32 or int64 (num_documents,), not negative. A strategy gives a dict of the arrays of
# SampleIndex, "dropped_tokens" and "repeated_tokens"; `wide_ids` asks for int64 document numbers.

_Lengths = NDArray[np.int32] | NDArray[np.int64]
_Progress = Callable[[int, int], None] | None

def pack_streams(
    lengths: _Lengths,
    *,
    buckets: list[int],
    shuffle: bool,
    drop_last: bool,
    seed: int,
    threads: int,
    wide_ids: bool,
    progress: _Progress,
) -> dict[str, Any]: ...
def pack_buckets(
    lengths: _Lengths,
    *,
    buckets: list[int],
    pool_size: int,
    promote: bool,
    seed: int,
    threads: int,
    wide_ids: bool,
    progress: _Progress,
) -> dict[str, Any]: ...

# num_tokens, num_empty, num_longer (than `capacity`), shortest, longest.
def count_documents(lengths: _Lengths, capacity: int) -> dict[str, int]: ...

# SampleIndex.segment_arrays, then the lengths in the dtype of segment_begin.
def measure_samples(*arrays: NDArray[Any]) -> dict[str, Any]: ...
def label_tokens(*arrays: NDArray[Any]) -> NDArray[np.int64]: ...
def attention_cost(
    sample_segment_offsets: NDArray[np.int64], segment_length: NDArray[np.int32]
) -> NDArray[np.int64]: ...

# --- register_gather.cpp ------------------------------------------------------------------------

_Index = NDArray[np.int32] | NDArray[np.int64]

class Gatherer:
    def __init__(
        self, *, positions: str, attention: str, labels: str, alignment: int, pad_token: int
    ) -> None: ...
    def add_source(
        self,
        *,
        tokens: NDArray[Any],
        labels: NDArray[Any] | None,
        index_bytes: NDArray[np.uint8],
        index_name: str,
        sample_segment_offsets: NDArray[np.int64],
        segment_document: _Index,
        segment_begin: _Index,
        segment_length: NDArray[np.int32],
    ) -> None: ...
    # -> cu_seqlens, cu_seqlens_padded (with alignment), source of each segment, max_seqlen
    def gather(
        self,
        source_ids: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        *,
        num_rows: int,
        row_tokens: int,
        capacity: int,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        loss_mask: NDArray[np.float32],
        position_ids: NDArray[np.int64],
        per_row: bool,
        num_cu_seqlens: int,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, NDArray[np.int32], int]: ...
    def count_labels(
        self, source_ids: NDArray[np.int64], sample_ids: NDArray[np.int64]
    ) -> NDArray[np.int64]: ...

# --- register_schedule.cpp ----------------------------------------------------------------------

def random_bits(key: int, counter: int) -> int: ...
def permute_range(key: int, size: int, first: int, count: int) -> NDArray[np.int64]: ...
def order_cycle(
    counts: NDArray[np.int64], odds: NDArray[np.float64], key: int, spread: bool
) -> NDArray[np.int32]: ...
def blend_pattern(
    shares: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def attention_cost_of(
    sample_segment_offsets: NDArray[np.int64],
    segment_length: NDArray[np.int32],
    samples: NDArray[np.int64],
    capacity: int,
    whole: bool,
) -> NDArray[np.int64]: ...
def deal_evenly(costs: NDArray[np.int64], bin_sizes: NDArray[np.int64]) -> NDArray[np.int64]: ...

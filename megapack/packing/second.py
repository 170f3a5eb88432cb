"""Second sizes of documents (images, frames, bytes), which buckets limit in addition to tokens.

- ``second_capacities``: the second capacity of every bucket.
- ``check_second``: one size per document, none above the capacity of the largest bucket.
- ``read_second``: the sizes in a .npy, or the sums of a column over each document.
- ``second_per_sample``, ``second_metrics``: what the samples of an index hold, and their padding.

Three documents of 3, 5 and 4 tokens, with 4, 0 and 2 images, in buckets of 8 tokens and 4 images::

    index = pack([3, 5, 4], buckets=8, second=[4, 0, 2], second_capacity=4)
    [index.sample(i)[1] for i in range(2)]         # -> [(0, 0, 3), (1, 0, 5)], [(2, 0, 4)]
    index.segment_second                           # -> 4, 0, 2
    index.metrics()["second_padding_ratio"]        # -> 0.25: 6 images in 2 samples of 4
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.calls import nearest
from megapack.errors import ConfigError, DataError
from megapack.packing.metrics import Lengths, array_checksum
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.tokens import open_npy
from megapack.units import checked_integer

Sizes = NDArray[np.int64]

_LARGEST = 1 << 40


def second_capacities(given: int | Iterable[int], num_buckets: int) -> list[int]:
    """Return the second capacity of every bucket, from one number for all or one for each. Raises
    ConfigError."""
    numbers = list(given) if isinstance(given, Iterable) else [given]
    capacities = [checked_integer("second_capacity", number, 1, _LARGEST) for number in numbers]
    capacities *= num_buckets if len(capacities) == 1 else 1
    if len(capacities) != num_buckets:
        raise ConfigError(
            f"second_capacity is {capacities}; give one number for all buckets, or one for each: "
            f"{num_buckets}"
        )
    if any(larger < smaller for smaller, larger in pairwise(capacities)):
        raise ConfigError(
            f"second_capacity is {capacities}, in the order of ascending buckets; it must "
            "not decrease, so that a larger bucket holds every document of a smaller one"
        )
    return capacities


def check_second(
    sizes: ArrayLike | None, lengths: Lengths, capacities: list[int] | None
) -> Sizes | None:
    """Return the sizes as int64 (num_documents,), 0 for empty documents, which are in no sample;
    None if sizes and capacities are None. Raises ConfigError if only one of them is, DataError for
    a wrong shape or dtype, a size below 0, or a size above all capacities."""
    if sizes is None and capacities is None:
        return None
    if sizes is None or capacities is None:
        missing = "second" if sizes is None else "second_capacity"
        raise ConfigError(f"{missing} is missing: give second and second_capacity, or neither")
    array, capacity = np.asarray(sizes), capacities[-1]
    if array.shape != lengths.shape or (array.size and array.dtype.kind not in "iu"):
        raise DataError(
            f"second sizes have dtype {array.dtype} and shape {array.shape}; give "
            f"{len(lengths):,} integers, one for each document"
        )
    filled = lengths > 0
    if (array < 0).any():
        i = int(np.argmax(array < 0))
        raise DataError(f"document {i} has the second size {array[i]}; it must be at least 0")
    larger = np.flatnonzero(filled & (array > capacity))
    if len(larger):
        raise DataError(
            f"document {larger[0]} has the second size {array[larger[0]]:,}, and the largest "
            f"bucket holds {capacity:,}; {len(larger):,} of {len(array):,} documents exceed it, "
            "and documents are not cut for it: raise second_capacity to "
            f"{array[larger].max():,}, or leave them out (--documents)"
        )
    return np.where(filled, array, 0).astype(np.int64)


def read_second(second: str, prefix: str) -> NDArray[Any]:
    """Return the second size of every document of a dataset. ``second`` is the path of a .npy, or
    the name of a column of integers; the sum of its rows over a document is the second size.
    Raises ConfigError if the column does not exist or does not have one integer per token;
    FormatError or OSError if a file cannot be read."""
    if second.endswith(".npy"):
        return np.array(open_npy(second))
    dataset = IndexedDataset(prefix)
    columns = dataset.columns
    if second not in columns:
        names = ", ".join(columns) or "no columns"
        raise ConfigError(
            f"{prefix} has no column {second!r}{nearest(second, columns)}; it has {names}: give "
            "one of its columns, or a .npy with the second size of every document"
        )
    spec = columns[second].spec
    if spec.shape or not spec.has_range:
        raise ConfigError(
            f"column {second} of {prefix} is {spec}; second sizes are sums of integers, one per "
            "token: give another column, or a .npy with a size per document"
        )
    if is_remote(prefix):
        raise ConfigError(
            f"--second {second} reads a whole column of {prefix}: pack a local copy, then "
            "megapack-build upload both"
        )
    lengths = np.asarray(dataset.document_lengths, np.int64)
    sizes = np.zeros(len(lengths), np.int64)
    begins = (np.cumsum(lengths) - lengths)[lengths > 0]
    if len(begins):  # reduceat refuses empty arrays
        sizes[lengths > 0] = np.add.reduceat(columns[second].rows, begins, dtype=np.int64)
    return sizes


def second_checksum(sizes: ArrayLike) -> str:
    """Return the checksum of second sizes that an index records."""
    return array_checksum(np.ascontiguousarray(sizes, "<i8"))


def second_of_segments(sizes: Sizes, documents: NDArray[Any]) -> NDArray[Any]:
    """Return the size of the document of each segment, int32 if all sizes fit, else int64."""
    narrow = sizes.max(initial=0) <= np.iinfo(np.int32).max
    of_segments: NDArray[Any] = sizes[documents].astype(np.int32 if narrow else np.int64)
    return of_segments


def second_per_sample(index: Any) -> Sizes:
    """Return the sum of the second sizes of each sample of a SampleIndex, (num_samples,)."""
    ends = np.cumsum(index.segment_second, dtype=np.int64)
    sums: Sizes = np.diff(np.append(0, ends)[np.asarray(index.sample_segment_offsets)])
    return sums


def second_metrics(index: Any) -> dict[str, Any]:
    """Return second_per_bucket, the second sizes that the samples of each bucket hold, and
    second_padding_ratio, the share of their second capacities that stays free. Every segment of a
    cut document counts with the size of the whole document."""
    bounds = pairwise(np.asarray(index.bucket_sample_offsets).tolist())
    sizes = second_per_sample(index)
    held = [int(sizes[begin:end].sum()) for begin, end in bounds]
    samples = np.diff(index.bucket_sample_offsets).tolist()
    capacities = index.parameters["second_capacity"]
    room = sum(c * n for c, n in zip(capacities, samples, strict=True))
    ratio = (room - sum(held)) / room if room else 0.0
    return {"second_per_bucket": held, "second_padding_ratio": ratio}

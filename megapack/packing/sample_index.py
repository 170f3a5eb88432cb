"""SampleIndex: which pieces of which documents stand in which sample.

Samples are numbered by rising capacity, segments by sample. Documents of 5, 3, 9 and 2 tokens in
buckets of 4 and 8; the third is longer than any bucket, so its last token goes elsewhere:

    bucket_capacity         4, 8
    bucket_sample_offsets   0, 1, 3             sample 0 is of the first bucket, 1, 2 of the other
    sample_segment_offsets  0, 2, 3, 5
    segment_document        3, 2 | 2 | 0, 1     sample 0: document 3, the last token of document 2
    segment_begin           0, 8 | 0 | 0, 0
    segment_length          2, 1 | 8 | 5, 3
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import FormatError, IndexMismatchError
from megapack.packing import file_format as samples_format
from megapack.packing.groups import GROUP_COUNTS
from megapack.packing.metrics import (
    DocumentTotals,
    Lengths,
    SegmentArrays,
    compute_metrics,
    lengths_fingerprint,
)
from megapack.storage.address import is_remote
from megapack.storage.files import check_target
from megapack.storage.index_file import CheckedArray, block_checksums
from megapack.storage.remote.reader import fetch_file

# ---- Whether an index and what stands on disk already belong together, as sentences -------------

IDX_CHECKSUMS = "idx_xxh64"


def describe_source(dataset: Any, prefix: str) -> dict[str, str]:
    """Description of the documents in a ``.samples`` file: fingerprint, prefix, checksums of all
    blocks of the .idx (``idx_xxh64``), which is read for that.

    Args:
        dataset: an IndexedDataset or an IndexFile.
        prefix: where to say that it lies.
    """
    sums = dataset.idx_checksums
    return {"fingerprint": dataset.fingerprint, "prefix": str(prefix), IDX_CHECKSUMS: sums}


def how_it_differs(
    path: str | os.PathLike[str],
    *,
    strategy: str,
    parameters: Mapping[str, Any],
    buckets: list[int],
    seed: int,
    dataset: str | None,
    checksums: Mapping[str, str] | None = None,
    chosen: str | None = None,
    groups: str | None = None,
) -> str | None:
    """How the index in a file differs from this one in documents or options, as a sentence.

    Args:
        dataset: fingerprint of the documents, or None.
        checksums: of the arrays it should have; None: whatever follows from the rest.
        chosen: checksum of the numbers of the documents that are packed; None: all.
        groups: checksum of the ids of their groups; None: there are none.

    Returns:
        None: it is what ``pack`` makes of all that, by this release, and it is whole.
    """
    try:
        found, arrays = samples_format.read(Path(path))
        for array in arrays.values():
            np.asarray(array)  # compares all of it
    except FormatError as error:
        return str(error)
    release = found["created_by"]
    pairs = {
        "another dataset": ((found["source"] or {}).get("fingerprint"), dataset),
        "other documents of it": ((found["source"] or {}).get("documents"), chosen),
        "other groups": ((found["groups"] or {}).get("ids"), groups),
        "another strategy": (found["strategy"], strategy),
        "other parameters": (found["parameters"], parameters),
        "other buckets": (found["buckets"], buckets),
        "another seed": (found["seed"], seed),
        f"another release ({release})": (release, samples_format.CREATED_BY),
    }
    different = [what for what, (there, wanted) in pairs.items() if there != wanted]
    if different:
        return f"it was packed with {' and '.join(different)}"
    if checksums is not None and found["checksums"] != checksums:
        return "it holds other samples"
    return None


_HEADER = (
    *("created_by", "strategy", "parameters", "buckets", "seed", "decisions"),
    *("num_documents", "dropped_tokens", "repeated_tokens"),
)


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """The order in which ``megapack-build arrange`` wrote the samples of a source."""

    source: str
    """Fingerprint of the source that was arranged."""
    seed: int
    """Seed of its order."""
    block_tokens: int
    window_blocks: int


class SourceIndex(Protocol):
    """Samples of one source: a list of shards, each packed from one .bin/.idx pair.

    A single ``.samples`` file (``SampleIndex``) is a list of one; a shard manifest
    (``megapack.packing.sharded.ShardedIndex``) lists many and opens each when it is needed.
    Documents are numbered through the shards.
    """

    @property
    def path(self) -> Path | str | None:
        """File or address of the index; None: it is in memory."""

    @property
    def strategy(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters of the strategy, and packing options that differ from their defaults."""

    @property
    def fingerprint(self) -> str:
        """Identity of documents and samples."""

    @property
    def arranged(self) -> Arranged | None:
        """The order in which the samples were written, if they were arranged."""

    @property
    def bucket_capacity(self) -> NDArray[np.int64]: ...

    @property
    def bucket_sample_offsets(self) -> NDArray[np.int64]:
        """First sample of every bucket, then the number of samples, (num_buckets + 1,)."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_documents(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents of all shards."""

    @property
    def alignment(self) -> int:
        """Segments can be placed at multiples of this without leaving their sample's capacity."""

    @property
    def fim_room(self) -> int:
        """Tokens by which a document of one segment may grow (see ``fim_longest``)."""

    @property
    def has_groups(self) -> bool:
        """Documents were packed in groups."""

    @property
    def first_documents(self) -> NDArray[np.int64]:
        """Number of the first document of every shard, then of all documents, (shards + 1,)."""

    @property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Runs of samples of the source that are consecutive samples of one shard.

        int64 (runs + 1,): first sample of each run in the source, then the number of samples;
        int64 (runs,): shard of each run; int64 (runs,): its first sample there.
        """

    @property
    def open_shards(self) -> list[SampleIndex | None]:
        """Samples of every shard; None: ``open`` maps them."""

    def open(self, number: int) -> SampleIndex:
        """Return the samples of one shard, mapped.

        Raises:
            IndexMismatchError: the file is not the one that the manifest lists.
            FormatError, OSError: it is damaged or missing.
        """

    @property
    def most_segments(self) -> list[int]:
        """Most segments of one sample, for every bucket; 0 for a bucket without samples."""

    @property
    def longest_segment(self) -> int:
        """Tokens of the longest segment; 0 without samples."""

    @property
    def longest_reach(self) -> int:
        """Largest begin + length of a segment: tokens of its document up to the segment's end."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SampleIndex:
    """Samples grouped by bucket, in memory or memory-mapped from a ``.samples`` file.

    Made by ``pack`` or ``SampleIndex.load``. Sample ``i`` has the segments
    ``sample_segment_offsets[i]`` to ``sample_segment_offsets[i + 1]``; bucket ``b`` has the samples
    ``bucket_sample_offsets[b]`` to ``bucket_sample_offsets[b + 1]``, buckets in ascending order of
    capacity. What its segments leave of a sample's capacity is padding. The arrays along samples
    and segments of an index that was loaded are ``CheckedArray``s: what is read is compared with
    its checksum.

    Attributes:
        bucket_capacity: int64 (num_buckets,), tokens.
        bucket_sample_offsets: int64 (num_buckets + 1,).
        sample_segment_offsets: int64 (num_samples + 1,).
        segment_document: int32 (num_segments,); int64 beyond 2**31 - 1 documents.
        segment_begin: int32 (num_segments,), first token in the document; int64 where a document
            is longer than 2**31 - 1 tokens.
        segment_length: int32 (num_segments,), tokens, at least 1.
        strategy, parameters, buckets, seed: what made it (``buckets`` as it was asked for).
        decisions: what the strategy decided by itself, and why; name -> sentence.
        documents: totals of the documents it was packed from.
        dropped_tokens, repeated_tokens: in no sample, and in more than one.
        source: of the dataset it was packed from (``describe_source``), or None.
        created_by: the release that packed it.
        path: the file it is mapped from, or None.
        segment_joined: uint8 (num_segments,), 1 where a segment goes on in the group of the one
            before it in its sample, with its next document; None: it was packed without groups.
        groups: checksum of the group ids (``ids``) and ``GROUP_COUNTS``; None: without.
    """

    bucket_capacity: NDArray[np.int64]
    bucket_sample_offsets: NDArray[np.int64]
    sample_segment_offsets: NDArray[np.int64]
    segment_document: NDArray[np.int32] | NDArray[np.int64]
    segment_begin: NDArray[np.int32] | NDArray[np.int64]
    segment_length: NDArray[np.int32]
    strategy: str
    parameters: dict[str, Any]
    buckets: list[int]
    seed: int
    decisions: dict[str, str]
    documents: DocumentTotals
    dropped_tokens: int
    repeated_tokens: int
    source: dict[str, Any] | None = None
    created_by: str = samples_format.CREATED_BY
    path: Path | None = None
    segment_joined: NDArray[np.uint8] | None = None
    groups: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for array in self._arrays.values():
            array.flags.writeable = False

    @property
    def alignment(self) -> int:
        return int(self.parameters.get("alignment", 1))

    @property
    def fim_room(self) -> int:
        return int(self.parameters.get("fim_room", 0))

    @property
    def fim_longest(self) -> int:
        """Tokens of the longest document that has this room; -1: none has any."""
        return max(self.buckets) - self.fim_room if self.fim_room else -1

    @property
    def has_groups(self) -> bool:
        return self.groups is not None

    @property
    def num_documents(self) -> int:
        return self.documents.num_documents

    @property
    def num_tokens(self) -> int:
        """Of the documents it was packed from."""
        return self.documents.num_tokens

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_capacity)

    @property
    def num_samples(self) -> int:
        return len(self.sample_segment_offsets) - 1

    @property
    def num_segments(self) -> int:
        return len(self.segment_length)

    # --- a source of one shard ------------------------------------------------------------------

    @property
    def arranged(self) -> None:
        return None

    @property
    def first_documents(self) -> NDArray[np.int64]:
        return np.array([0, self.num_documents], np.int64)

    @property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        first, none = np.array([0, self.num_samples], np.int64), np.zeros(1, np.int64)
        return first, none, none

    @property
    def open_shards(self) -> list[SampleIndex | None]:
        return [self]

    def open(self, number: int) -> SampleIndex:
        assert number == 0, "a sample index is one shard"
        return self

    @property
    def most_segments(self) -> list[int]:
        return [
            int(np.diff(self.sample_segment_offsets[begin : end + 1]).max(initial=0))
            for begin, end in pairwise(self.bucket_sample_offsets.tolist())
        ]

    @property
    def longest_segment(self) -> int:
        return int(self.segment_length.max(initial=0))

    @property
    def longest_reach(self) -> int:
        ends = np.asarray(self.segment_length, np.int64) + self.segment_begin
        return int(ends.max(initial=0))

    # --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        num, ends = self.num_buckets, self.bucket_capacity[[0, -1]].tolist()
        buckets = f"bucket of {ends[0]:,}" if num == 1 else f"{num:,} buckets of {ends[0]:,}"
        up_to = "" if num == 1 else f" to {ends[1]:,}"
        return (
            f"SampleIndex({self.strategy}, {buckets}{up_to} tokens, {self.num_samples:,} samples, "
            f"{self.num_documents:,} documents)"
        )

    def sample(self, i: int) -> tuple[int, list[tuple[int, int, int]]]:
        """(bucket, [(document, begin, length), ...]) of sample ``i``. Raises IndexError."""
        segments = self._segments_of(i)
        bucket = int(np.searchsorted(self.bucket_sample_offsets, i % len(self), side="right")) - 1
        columns = (self.segment_document, self.segment_begin, self.segment_length)
        return bucket, list(zip(*(column[segments].tolist() for column in columns), strict=True))

    def groups_of(self, sample: int) -> list[int]:
        """Of every segment of a sample the number of its group, counted in the sample: segments of
        one number see each other with attention ``group``. Raises IndexError."""
        segments = self._segments_of(sample)
        if self.segment_joined is None:
            return list(range(segments.stop - segments.start))
        alone = np.asarray(self.segment_joined[segments]) == 0
        numbers: list[int] = (np.cumsum(alone) - 1).tolist()
        return numbers

    def _segments_of(self, sample: int) -> slice:
        if not -self.num_samples <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of an index with {self.num_samples} samples")
        i = sample % self.num_samples
        return slice(*self.sample_segment_offsets[i : i + 2].tolist())

    def segment_arrays(self) -> SegmentArrays:
        """The arrays in the order in which the C++ core takes them."""
        return (
            self.bucket_sample_offsets,
            self.sample_segment_offsets,
            self.segment_document,
            self.segment_begin,
            self.segment_length,
        )

    def metrics(self) -> dict[str, Any]:
        """Metrics of the packing; the keys are those of ``compute_metrics``.

        Counted on the first call; an index that was loaded has them in its header.
        """
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> dict[str, Any]:
        metrics = compute_metrics(
            self.bucket_capacity,
            self.segment_arrays(),
            self.documents,
            dropped_tokens=self.dropped_tokens,
            repeated_tokens=self.repeated_tokens,
        )
        groups = self.groups or {}
        if self.documents.num_with_fim_room is not None:
            metrics["num_documents_with_fim_room"] = self.documents.num_with_fim_room
        return metrics | {name: groups[name] for name in GROUP_COUNTS if name in groups}

    def label_tokens(self, document_lengths: Lengths) -> NDArray[np.int64]:
        """Per sample, how many of its tokens have a label: int64 (num_samples,).

        The label of a token is the next token of its document, also where the segment ends before
        the document does; only the last token of a document has none. ``document_lengths``
        (num_documents,) are those of the documents this index was packed from.

        Raises:
            IndexMismatchError: another number of documents.
        """
        return _core.label_tokens(*self.segment_arrays(), self._own_lengths(document_lengths))

    def attention_cost(self) -> NDArray[np.int64]:
        """Per sample, the sum of segment length squared: int64 (num_samples,)."""
        return _core.attention_cost(self.sample_segment_offsets, self.segment_length)

    def _own_lengths(self, lengths: Lengths) -> Lengths:
        if len(lengths) != self.num_documents:
            raise IndexMismatchError(
                f"the index was packed from {self.num_documents:,} documents; the lengths given "
                f"are of {len(lengths):,}"
            )
        dtype = np.int32 if np.asarray(lengths).dtype == np.int32 else np.int64
        return np.require(lengths, dtype, ["C", "A"])  # those of an .idx lie at byte 34

    # --- identity -------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the content: the same arrays have the same fingerprint, saved or not."""
        text = "".join(f"{name}:{digest};" for name, digest in self._checksums.items())
        return xxhash.xxh3_128_hexdigest(text.encode())

    @cached_property
    def _checksums(self) -> dict[str, str]:
        """``block_checksums`` of the arrays; of a loaded index those that its header promises."""
        return {name: block_checksums(a) for name, a in self._arrays.items()}

    @property
    def _arrays(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name) for name in samples_format.ARRAYS}
        joined = self.segment_joined
        return arrays if joined is None else {**arrays, "segment_joined": joined}

    def check_source(self, dataset: Any) -> None:
        """Refuse a dataset other than the one this index was packed from.

        What the fingerprint of the dataset does not cover is compared when it is read: its .idx is
        held to the checksums that it had when it was packed (``IndexedDataset.hold_to``).

        Args:
            dataset: an IndexedDataset.

        Raises:
            IndexMismatchError: says what differs.
        """
        source, documents = self.source or {}, self.documents
        apart = f"{self.path or 'this index'} and {dataset.prefix} do not belong together"
        if dataset.num_documents != documents.num_documents:
            raise IndexMismatchError(
                f"{apart}: the index was packed from {documents.num_documents:,} documents, the "
                f"dataset has {dataset.num_documents:,}; pack it again"
            )
        recorded = source.get("fingerprint")
        if recorded is not None:
            if recorded != dataset.fingerprint:
                raise IndexMismatchError(
                    f"{apart}: the index was packed from a dataset with fingerprint {recorded} "
                    f"({source.get('prefix')}), this one has {dataset.fingerprint}; pack it again"
                )
        elif documents.lengths_fingerprint != lengths_fingerprint(dataset.document_lengths):
            raise IndexMismatchError(
                f"{apart}: as many documents, but of other lengths; pack the dataset again"
            )
        if IDX_CHECKSUMS in source:
            dataset.hold_to(source[IDX_CHECKSUMS])

    # --- file -----------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False
    ) -> bool:
        """Write the ``.samples`` file; it appears under its name when it is complete.

        Args:
            path: the file.
            source: the IndexedDataset it was packed from, or what ``describe_source`` says of
                it; ``check_source`` compares with it. ``documents`` in the dict is a checksum of
                the numbers of those that were packed, if not all were.
            overwrite: replace a file that is another index, or damaged.

        Returns:
            Whether it was written; False: the same index stands there already.

        Raises:
            ConfigError: another file stands there and ``overwrite`` is False, or something that is
                no regular file; there is no such directory; the name is too long.
            IndexMismatchError: ``source`` has another number of documents.
            OSError: the file cannot be written.
        """
        if source is not None and not isinstance(source, Mapping):
            self.check_source(source)
            source = describe_source(source, source.prefix)
        source = self.source if source is None else dict(source)
        same = {name: getattr(self, name) for name in ("strategy", "parameters", "buckets", "seed")}
        recorded, chosen = ((source or {}).get(name) for name in ("fingerprint", "documents"))
        same |= {"dataset": recorded, "chosen": chosen, "checksums": self._checksums}
        same["groups"] = (self.groups or {}).get("ids")
        difference = partial(how_it_differs, path, **same)
        if not check_target(path, overwrite=overwrite, difference=difference):
            return False
        header = {name: getattr(self, name) for name in _HEADER} | {
            "source": source,
            "metrics": self._metrics,
            "lengths_fingerprint": self.documents.lengths_fingerprint,
            **({} if self.groups is None else {"groups": self.groups}),
        }
        samples_format.write(Path(path), header, self._arrays, self._checksums)
        return True

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verify: bool = False) -> SampleIndex:
        """Memory-map a ``.samples`` file.

        Args:
            path: the file; one at an address is copied to the local cache, and verified there.
            verify: read all of it, and refuse it unless every checksum is right. Without, the
                header and the arrays along the buckets are checked, and every block of the others
                when something of it is read for the first time.

        Raises:
            FormatError: truncated, damaged, of another version, or not a ``.samples`` file.
            OSError: the file cannot be opened.
        """
        if is_remote(path):
            path = fetch_file(os.fspath(path), lambda copy: cls.load(copy, verify=True))
        header, arrays = samples_format.read(Path(path))
        metrics = header["metrics"]
        documents = DocumentTotals(
            num_documents=header["num_documents"],
            num_empty=metrics["num_empty_documents"],
            num_longer=metrics["num_documents_longer_than_largest_bucket"],
            num_tokens=metrics["num_tokens"],
            num_whole=None,
            lengths_fingerprint=header["lengths_fingerprint"],
            num_with_fim_room=metrics.get("num_documents_with_fim_room"),
        )
        values = {"segment_joined": None, **header, **arrays}
        values |= {"documents": documents, "path": Path(path)}
        index = cls(**{field.name: values[field.name] for field in fields(cls)})
        vars(index).update(_metrics=metrics, _checksums=header["checksums"])  # need no counting
        if verify:
            index.verify()
        return index

    def verify(self, document_lengths: Lengths | None = None) -> None:
        """Read everything: the checksums of all arrays and, given the lengths of its documents,
        that no sample exceeds its capacity and no segment leaves its document.

        Raises:
            FormatError: says what is damaged.
            IndexMismatchError: another number of documents.
        """
        for array in self._arrays.values():
            if isinstance(array, CheckedArray):
                array.verify()
        if document_lengths is not None:
            lengths = self._own_lengths(document_lengths)
            _core.check_laws(self.bucket_capacity, *self.segment_arrays(), lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:  # worker processes, wherever they run, map the same file
            return _load_again, (self.path.absolute(), self.fingerprint)
        return partial(SampleIndex, **{f.name: getattr(self, f.name) for f in fields(self)}), ()


def _load_again(path: Path, fingerprint: str) -> SampleIndex:
    """A pickled index. Raises IndexMismatchError: its file holds other samples by now."""
    index = SampleIndex.load(path)
    if index.fingerprint != fingerprint:
        raise IndexMismatchError(
            f"{path} holds other samples than when it was opened: it was packed again; start the "
            "run again"
        )
    return index

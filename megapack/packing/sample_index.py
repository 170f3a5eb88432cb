"""``SampleIndex``: the segments of documents in each sample.

Samples are numbered by ascending capacity, segments by sample. Documents of 5, 3, 9 and 2 tokens in
buckets of 4 and 8; the third is longer than both buckets, so its last token is a second segment:

    bucket_capacity         4, 8
    bucket_sample_offsets   0, 1, 3             sample 0 has capacity 4, samples 1 and 2 capacity 8
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
from typing import Any

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
    segment_pairs,
)
from megapack.packing.second import second_metrics, second_per_sample
from megapack.storage.address import is_remote
from megapack.storage.files import check_target
from megapack.storage.index_file import CheckedArray, block_checksums
from megapack.storage.remote.reader import fetch_file
from megapack.units import counted

IDX_CHECKSUMS = "idx_xxh64"


def describe_source(dataset: Any, prefix: str) -> dict[str, str]:
    """Return the record of a dataset for its ``.samples`` file; reads the whole .idx.

    Args:
        dataset: an IndexedDataset or an IndexFile.
        prefix: the prefix to record.
    """
    checksums = dataset.idx_checksums
    return {"fingerprint": dataset.fingerprint, "prefix": str(prefix), IDX_CHECKSUMS: checksums}


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
    second: str | None = None,
    tokens: str | None = None,
) -> str | None:
    """Return how a file differs from what ``pack`` would write with these arguments, or None.

    Args:
        dataset: fingerprint of the documents, or None.
        checksums: expected checksums of the arrays; None: not compared.
        chosen: checksum of the numbers of the packed documents; None: all were packed.
        groups: checksum of the group ids; None: packed without groups.
        second: checksum of the second sizes; None: only tokens were limited.
        tokens: checksum of the tokens that strategy ``tree`` compares; None: it compares none.
    """
    try:
        header, arrays = samples_format.read(Path(path))
        for array in arrays.values():
            np.asarray(array)  # compares all blocks with their checksums
    except FormatError as error:
        return str(error)
    release = header["created_by"]
    recorded_and_expected = {
        "another dataset": ((header["source"] or {}).get("fingerprint"), dataset),
        "other documents of this dataset": ((header["source"] or {}).get("documents"), chosen),
        "other tokens": ((header["source"] or {}).get("tokens"), tokens),
        "other groups": ((header["groups"] or {}).get("ids"), groups),
        "other second sizes": (header["second"], second),
        "another strategy": (header["strategy"], strategy),
        "other parameters": (header["parameters"], parameters),
        "other buckets": (header["buckets"], buckets),
        "another seed": (header["seed"], seed),
        f"another release ({release})": (release, samples_format.CREATED_BY),
    }
    different = [what for what, (a, b) in recorded_and_expected.items() if a != b]
    if different:
        return f"it was packed with {' and '.join(different)}"
    if checksums is not None and header["checksums"] != checksums:
        return "it holds other samples"
    return None


_HEADER = (
    *("created_by", "strategy", "parameters", "buckets", "seed", "decisions"),
    *("num_documents", "dropped_tokens", "repeated_tokens"),
)


_LOADED = (*(name for name in _HEADER if name != "num_documents"), "source", "groups", "second")
_ARRAYS = (*samples_format.ARRAYS, *samples_format.OPTIONAL_ARRAYS)


class WithRoom:
    """Base of classes that have the ``parameters`` of a packing: the room that it left in
    samples."""

    parameters: Any

    @property
    def alignment(self) -> int:
        """Segments can begin at multiples of this and still fit their sample's capacity."""
        return int(self.parameters.get("alignment", 1))

    @property
    def fim_room(self) -> int:
        """Tokens by which a document of one segment may grow."""
        return int(self.parameters.get("fim_room", 0))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SampleIndex(WithRoom):
    """Samples grouped by bucket, in memory (``pack``) or mapped from a file (``load``).

    Sample ``i`` has the segments ``sample_segment_offsets[i]`` to ``sample_segment_offsets[i + 1]``
    and pads the rest of its capacity. Bucket ``b``, in ascending order of capacity, has the samples
    ``bucket_sample_offsets[b]`` to ``bucket_sample_offsets[b + 1]``. The arrays of samples and
    segments of a loaded index are ``CheckedArray``s, which compare blocks with their checksums.

    Attributes:
        bucket_capacity: int64 (num_buckets,), tokens.
        bucket_sample_offsets: int64 (num_buckets + 1,).
        sample_segment_offsets: int64 (num_samples + 1,).
        segment_document: int32 (num_segments,); int64 for more than 2**31 - 1 documents.
        segment_begin: int32 (num_segments,), first token in the document; int64 if a document has
            more than 2**31 - 1 tokens.
        segment_length: int32 (num_segments,), tokens, at least 1.
        strategy, parameters, buckets, seed: options of ``pack``.
        decisions: choices of the strategy, name -> choice and reason.
        documents: totals of the packed documents.
        dropped_tokens, repeated_tokens: tokens in no sample; in more than one.
        source: ``describe_source`` of the packed dataset, or None.
        created_by: the release that packed it.
        path: the mapped file, or None.
        segment_joined: uint8 (num_segments,), 1 if the previous segment of the sample has the same
            group; None: packed without groups.
        groups: checksum of the group ids (``ids``) and ``GROUP_COUNTS``; None: without groups.
        segment_second: int32 or int64 (num_segments,), second size of the segment's document; None:
            packed without second sizes.
        segment_parent: int32 (num_segments,), number in the sample of the segment that each segment
            continues, -1: none. Segments are the nodes of prefix trees, parents first: a segment's
            ``segment_begin`` is the length of the path to it, and its tokens are those of every
            document through it. None: no trees. This also holds for the next two.
        segment_end_offsets: int64 (num_segments + 1,); the documents from
            ``end_document[segment_end_offsets[s]]`` to ``[segment_end_offsets[s + 1]]`` end with s.
        end_document: (documents that are not empty,), dtype as ``segment_document``; each once.
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
    segment_second: NDArray[np.int32] | NDArray[np.int64] | None = None
    second: str | None = None
    segment_parent: NDArray[np.int32] | None = None
    segment_end_offsets: NDArray[np.int64] | None = None
    end_document: NDArray[np.int32] | NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None and not isinstance(array, CheckedArray):  # of read-only files
                array.flags.writeable = False

    @property
    def fim_longest(self) -> int:
        """Tokens of the longest document that may grow by ``fim_room``; -1: no document may."""
        return max(self.buckets) - self.fim_room if self.fim_room else -1

    @property
    def has_groups(self) -> bool:
        return self.groups is not None

    @property
    def has_trees(self) -> bool:
        return self.segment_parent is not None

    @property
    def num_documents(self) -> int:
        return self.documents.num_documents

    @property
    def num_tokens(self) -> int:
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

    # --- a source of one shard: see ShardedIndex -------------------------------------------------

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
        if self.has_trees:
            return self.longest_reach  # a segment begins with the path to it
        return int(self.segment_length.max(initial=0))

    @property
    def longest_reach(self) -> int:
        ends = np.asarray(self.segment_length, np.int64) + self.segment_begin
        return int(ends.max(initial=0))

    # --- samples ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        smallest, largest = self.bucket_capacity[[0, -1]].tolist()
        buckets = f"bucket of {smallest:,}"
        if self.num_buckets > 1:
            buckets = f"{self.num_buckets:,} buckets of {smallest:,} to {largest:,}"
        return (
            f"SampleIndex({self.strategy}, {buckets} tokens, "
            f"{counted(self.num_samples, 'sample')}, {counted(self.num_documents, 'document')})"
        )

    def sample(self, i: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return (bucket, [(document, begin, length), ...]) of a sample. Raises IndexError."""
        segments = self._segments_of(i)
        bucket = int(np.searchsorted(self.bucket_sample_offsets, i % len(self), side="right")) - 1
        columns = (self.segment_document, self.segment_begin, self.segment_length)
        return bucket, list(zip(*(column[segments].tolist() for column in columns), strict=True))

    def groups_of(self, sample: int) -> list[int]:
        """Return the group of every segment of a sample, numbered within the sample. With attention
        ``group``, segments of one group attend to each other. Raises IndexError."""
        segments = self._segments_of(sample)
        if self.segment_joined is None:
            return list(range(segments.stop - segments.start))
        begins_group = np.asarray(self.segment_joined[segments]) == 0
        numbers: list[int] = (np.cumsum(begins_group) - 1).tolist()
        return numbers

    def _segments_of(self, sample: int) -> slice:
        if not -self.num_samples <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of an index with {self.num_samples} samples")
        i = sample % self.num_samples
        return slice(*self.sample_segment_offsets[i : i + 2].tolist())

    def documents_of(self, sample: int) -> list[tuple[int, int]]:
        """Return the documents of a sample with prefix trees, in the order of their last segments:
        (document, number of its last segment in the sample). Raises IndexError."""
        assert self.segment_end_offsets is not None and self.end_document is not None
        segments = self._segments_of(sample)
        offsets = np.asarray(self.segment_end_offsets[segments.start : segments.stop + 1])
        documents = self.end_document[int(offsets[0]) : int(offsets[-1])].tolist()
        last = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)).tolist()
        return list(zip(documents, last, strict=True))

    def segment_arrays(self) -> SegmentArrays:
        """Return the arrays in the order of the C++ core's arguments."""
        return (
            self.bucket_sample_offsets,
            self.sample_segment_offsets,
            self.segment_document,
            self.segment_begin,
            self.segment_length,
        )

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of ``compute_metrics``, from the header if the index was loaded."""
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> dict[str, Any]:
        metrics = compute_metrics(
            self.bucket_capacity,
            self.segment_arrays(),
            self.documents,
            dropped_tokens=self.dropped_tokens,
            repeated_tokens=self.repeated_tokens,
            in_trees=self.has_trees,
        )
        groups = self.groups or {}
        if self.documents.num_with_fim_room is not None:
            metrics["num_documents_with_fim_room"] = self.documents.num_with_fim_room
        if self.second is not None:
            metrics |= second_metrics(self)
        return metrics | {name: groups[name] for name in GROUP_COUNTS if name in groups}

    def label_tokens(self, document_lengths: Lengths) -> NDArray[np.int64]:
        """Count the tokens of each sample that have a label: int64 (num_samples,).

        A token's label is the next token of its document, even if the segment ends between the two;
        only the last token of a document has none. Raises IndexMismatchError if
        ``document_lengths`` has another number of documents.
        """
        return _core.label_tokens(*self.segment_arrays(), self._check_lengths(document_lengths))

    def attention_cost(self) -> NDArray[np.int64]:
        """Return the attention work of each sample, int64 (num_samples,): the sum of squared
        segment lengths; in trees, the sum of end^2 - begin^2 over the segments
        (``segment_pairs``)."""
        if self.has_trees:
            pairs = segment_pairs(self.segment_begin, self.segment_length)
            return np.diff(np.append(0, np.cumsum(pairs))[self.sample_segment_offsets])
        return _core.attention_cost(self.sample_segment_offsets, self.segment_length)

    def _check_lengths(self, lengths: Lengths) -> Lengths:
        if len(lengths) != self.num_documents:
            raise IndexMismatchError(
                f"the index was packed from {self.num_documents:,} documents; the lengths given "
                f"are of {len(lengths):,}"
            )
        dtype = np.int32 if np.asarray(lengths).dtype == np.int32 else np.int64
        return np.require(lengths, dtype, ["C", "A"])  # an .idx has them at byte 34: unaligned

    # --- identity --------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the arrays, saved or not."""
        text = "".join(f"{name}:{digest};" for name, digest in self._checksums.items())
        return xxhash.xxh3_128_hexdigest(text.encode())

    @cached_property
    def _checksums(self) -> dict[str, str]:
        """``block_checksums`` of the arrays; ``load`` takes them from the header."""
        return {name: block_checksums(a) for name, a in self._arrays.items()}

    @property
    def _arrays(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name) for name in samples_format.ARRAYS}
        more = {name: getattr(self, name) for name in samples_format.OPTIONAL_ARRAYS}
        return arrays | {name: array for name, array in more.items() if array is not None}

    def check_source(self, dataset: Any) -> None:
        """Check that this index was packed from ``dataset``, an IndexedDataset.

        Blocks of its .idx are compared with their checksums when they are read
        (``IndexedDataset.verify_reads``), since the fingerprint does not cover them. Raises
        IndexMismatchError, which says what differs.
        """
        source, documents = self.source or {}, self.documents
        origin, recorded = source.get("prefix"), source.get("fingerprint")
        difference = None
        remedy = f"give the dataset {origin}, or pack {dataset.prefix} again"
        if origin in (None, str(dataset.prefix)):  # it has changed
            remedy = "pack it again"
        if dataset.num_documents != documents.num_documents:
            difference = (
                f"the index was packed from {documents.num_documents:,} documents, the dataset has "
                f"{dataset.num_documents:,}; {remedy}"
            )
        elif recorded is not None and recorded != dataset.fingerprint:
            difference = (
                f"the index was packed from a dataset with fingerprint {recorded} ({origin}), this "
                f"one has {dataset.fingerprint}; {remedy}"
            )
        elif recorded is None and documents.lengths_fingerprint != lengths_fingerprint(
            dataset.document_lengths
        ):
            difference = (
                "the number of documents is the same, but their lengths differ; pack the dataset "
                "again"
            )
        if difference is not None:
            subject = f"{self.path or 'this index'} and {dataset.prefix}"
            raise IndexMismatchError(f"{subject} do not belong together: {difference}")
        if IDX_CHECKSUMS in source:
            dataset.verify_reads(source[IDX_CHECKSUMS])

    # --- file ------------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False
    ) -> bool:
        """Write the ``.samples`` file under a temporary name, then rename it.

        Args:
            source: the packed IndexedDataset, or its ``describe_source``, for ``check_source``. If
                not all documents were packed, ``documents`` in the dict is a checksum of the
                numbers of those that were.
            overwrite: replace a damaged file or another index.

        Returns:
            True; False if the file already exists with the same content.

        Raises:
            ConfigError: another file exists and ``overwrite`` is False; the path is not a regular
                file, its directory does not exist, or its name is too long.
            IndexMismatchError: ``source`` has another number of documents.
            OSError: the file cannot be written.
        """
        if source is not None and not isinstance(source, Mapping):
            self.check_source(source)
            source = describe_source(source, source.prefix)
        source = self.source if source is None else dict(source)
        difference = partial(
            how_it_differs,
            path,
            strategy=self.strategy,
            parameters=self.parameters,
            buckets=self.buckets,
            seed=self.seed,
            dataset=(source or {}).get("fingerprint"),
            chosen=(source or {}).get("documents"),
            tokens=(source or {}).get("tokens"),
            checksums=self._checksums,
            groups=(self.groups or {}).get("ids"),
            second=self.second,
        )
        if not check_target(path, overwrite=overwrite, difference=difference):
            return False
        header = {name: getattr(self, name) for name in _HEADER} | {
            "source": source,
            "metrics": self._metrics,
            "lengths_fingerprint": self.documents.lengths_fingerprint,
            **({} if self.groups is None else {"groups": self.groups}),
            **({} if self.second is None else {"second": self.second}),
        }
        samples_format.write(Path(path), header, self._arrays, self._checksums)
        return True

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verify: bool = False) -> SampleIndex:
        """Memory-map a ``.samples`` file.

        Args:
            path: the file; a remote one is copied to the local cache and verified there.
            verify: compare all checksums now; otherwise those of the header now, and of each block
                when it is first read.

        Raises:
            FormatError: truncated, damaged, of another version, or not a ``.samples`` file.
            OSError: the file cannot be opened.
        """
        if is_remote(path):
            path = fetch_file(os.fspath(path), lambda copy: cls.load(copy, verify=True))
        path = Path(path)
        header, arrays = samples_format.read(path)
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
        values: dict[str, Any] = {name: header[name] for name in _LOADED} | arrays
        index = cls(**values, documents=documents, path=path)
        vars(index).update(_metrics=metrics, _checksums=header["checksums"])  # fill the caches
        if verify:
            index.verify()
        return index

    def verify(self, document_lengths: Lengths | None = None) -> None:
        """Compare all checksums; with document lengths, also check every segment.

        Segments must lie inside their documents, and samples must not exceed their capacity. The
        second capacity is always checked. Raises FormatError, which says what is damaged;
        IndexMismatchError for other documents.
        """
        for array in self._arrays.values():
            if isinstance(array, CheckedArray):
                array.verify()
        if self.second is not None:
            self._check_second()
        if document_lengths is not None:
            lengths = self._check_lengths(document_lengths)
            _core.check_laws(self.bucket_capacity, *self.segment_arrays(), lengths)
            self._check_trees(lengths)

    def _check_second(self) -> None:
        """Check that no sample exceeds the second capacity of its bucket."""
        sizes = second_per_sample(self)
        capacities = self.parameters["second_capacity"]
        limits = np.repeat(capacities, np.diff(self.bucket_sample_offsets))
        wrong = np.flatnonzero(sizes > limits)
        if len(wrong):
            raise FormatError(
                f"{self.path}: sample {wrong[0]} has a second size of {sizes[wrong[0]]:,}; its "
                f"second capacity is {limits[wrong[0]]:,}: pack again"
            )

    def _check_trees(self, lengths: Lengths) -> None:
        """Check that segments continue their parents, and every document ends in its place."""
        if self.segment_parent is None or self.segment_end_offsets is None:
            return
        begin = np.asarray(self.segment_begin, np.int64)
        ends = np.asarray(self.segment_end_offsets)
        reach = np.asarray(self.segment_length, np.int64) + begin
        first = np.asarray(self.sample_segment_offsets)
        number = np.arange(self.num_segments) - np.repeat(first[:-1], np.diff(first))
        parent = np.asarray(self.segment_parent)
        place = np.arange(self.num_segments) - number + parent
        before = np.where(parent < 0, 0, reach[place.clip(0, max(0, self.num_segments - 1))])
        wrong = (parent < -1) | (parent >= number) | (begin != before)
        documents = np.asarray(self.end_document)
        wrong |= np.diff(ends) < 0
        num_documents = len(np.unique(documents[(documents >= 0) & (documents < len(lengths))]))
        if wrong.any() or [ends[0], ends[-1], num_documents] != [0, len(documents), len(documents)]:
            raise FormatError(f"{self.path}: prefix trees are damaged or stale; pack again")
        if (lengths[documents] != np.repeat(reach, np.diff(ends))).any():
            raise FormatError(f"{self.path}: a document does not end with its segment; pack again")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:  # a worker process maps the same file
            return _load_again, (self.path.absolute(), self.fingerprint)
        return partial(SampleIndex, **{f.name: getattr(self, f.name) for f in fields(self)}), ()


def _load_again(path: Path, fingerprint: str) -> SampleIndex:
    """Open the file of a pickled index. Raises IndexMismatchError: it has other samples now."""
    index = SampleIndex.load(path)
    if index.fingerprint != fingerprint:
        raise IndexMismatchError(
            f"{path} holds other samples than when it was opened: it was packed again. Restart "
            "the run"
        )
    return index

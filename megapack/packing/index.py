"""SampleIndex: which pieces of which documents stand in which sample."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import IndexMismatchError
from megapack.packing import format as samples_format
from megapack.packing.metrics import compute_metrics

__all__ = ["SampleIndex"]

Lengths = NDArray[np.int32] | NDArray[np.int64]


class SampleIndex:
    """Samples grouped by bucket, in memory or memory-mapped from a ``.samples`` file.

    Made by ``pack`` or ``SampleIndex.load``. Sample ``i`` has the segments
    ``sample_segment_offsets[i]`` to ``sample_segment_offsets[i + 1]``; bucket ``b`` has the samples
    ``bucket_sample_offsets[b]`` to ``bucket_sample_offsets[b + 1]``, buckets in ascending order of
    capacity. What its segments leave of a sample's capacity is padding.

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
        num_documents, num_tokens: of the documents it was packed from.
        source: dict of fingerprint and prefix of the dataset it was packed from, or None.
        path: the file it is mapped from, or None.
    """

    bucket_capacity: NDArray[np.int64]
    bucket_sample_offsets: NDArray[np.int64]
    sample_segment_offsets: NDArray[np.int64]
    segment_document: NDArray[np.int32] | NDArray[np.int64]
    segment_begin: NDArray[np.int32] | NDArray[np.int64]
    segment_length: NDArray[np.int32]

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        header: dict[str, Any],
        *,
        lengths: Lengths | None = None,
        path: Path | None = None,
    ) -> None:
        for name in samples_format.ARRAYS:
            array = arrays[name]
            array.flags.writeable = False
            setattr(self, name, array)
        self._header = header
        self._lengths = lengths  # until the metrics are computed
        self.path = path

    @classmethod
    def from_packing(
        cls,
        result: Mapping[str, Any],
        lengths: Lengths,
        *,
        strategy: str,
        parameters: dict[str, Any],
        buckets: list[int],
        seed: int,
    ) -> SampleIndex:
        """The index of a packing just made (``pack`` calls this)."""
        header = {
            "strategy": strategy,
            "parameters": parameters,
            "buckets": buckets,
            "seed": seed,
            "decisions": dict(result.get("decisions", {})),
            "num_documents": len(lengths),
            "dropped_tokens": result["dropped_tokens"],
            "repeated_tokens": result["repeated_tokens"],
            "source": None,
        }
        return cls(result, header, lengths=lengths)

    @property
    def strategy(self) -> str:
        return str(self._header["strategy"])

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self._header["parameters"])

    @property
    def alignment(self) -> int:
        """Segments can be placed at multiples of this without leaving their sample's capacity."""
        return int(self._header["parameters"].get("alignment", 1))

    @property
    def buckets(self) -> list[int]:
        return list(self._header["buckets"])

    @property
    def seed(self) -> int:
        return int(self._header["seed"])

    @property
    def decisions(self) -> dict[str, str]:
        return dict(self._header["decisions"])

    @property
    def source(self) -> dict[str, Any] | None:
        source = self._header["source"]
        return None if source is None else dict(source)

    @property
    def num_documents(self) -> int:
        return int(self._header["num_documents"])

    @property
    def num_tokens(self) -> int:
        return int(self.metrics()["num_tokens"])

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_capacity)

    @property
    def num_samples(self) -> int:
        return len(self.sample_segment_offsets) - 1

    @property
    def num_segments(self) -> int:
        return len(self.segment_length)

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        capacities = ", ".join(str(c) for c in self.bucket_capacity)
        return (
            f"SampleIndex({self.strategy}, buckets [{capacities}], {self.num_samples:,} samples, "
            f"{self.num_documents:,} documents)"
        )

    def sample(self, i: int) -> tuple[int, list[tuple[int, int, int]]]:
        """(bucket, [(document, begin, length), ...]) of sample ``i``. Raises IndexError."""
        if not -self.num_samples <= i < self.num_samples:
            raise IndexError(f"sample {i} of an index with {self.num_samples} samples")
        i %= self.num_samples
        bucket = int(np.searchsorted(self.bucket_sample_offsets, i, side="right")) - 1
        segments = slice(*self.sample_segment_offsets[i : i + 2].tolist())
        columns = (self.segment_document, self.segment_begin, self.segment_length)
        return bucket, list(zip(*(column[segments].tolist() for column in columns), strict=True))

    def segment_arrays(self) -> tuple[NDArray[Any], ...]:
        """The arrays in the order in which the C++ core takes them."""
        return (
            self.bucket_sample_offsets,
            self.sample_segment_offsets,
            self.segment_document,
            self.segment_begin,
            self.segment_length,
        )

    def metrics(self) -> dict[str, Any]:
        """What the packing is worth; the keys are those of ``compute_metrics``.

        Counted on the first call; an index that was saved and loaded has them in its header.
        """
        if "metrics" not in self._header:
            assert self._lengths is not None
            self._header["metrics"] = compute_metrics(
                self,
                self._lengths,
                dropped_tokens=self._header["dropped_tokens"],
                repeated_tokens=self._header["repeated_tokens"],
            )
        return dict(self._header["metrics"])

    def label_tokens(self, document_lengths: Lengths) -> NDArray[np.int64]:
        """Per sample, how many of its tokens have a label.

        The label of a token is the next token of its document, also where the segment ends before
        the document does; only the last token of a document has none.

        Args:
            document_lengths: (num_documents,) of the documents this index was packed from.

        Returns:
            int64 (num_samples,).

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
        if self.segment_begin.dtype == np.dtype(np.int32):
            return np.ascontiguousarray(lengths, dtype=np.int32)
        return np.ascontiguousarray(lengths, dtype=np.int64)

    # --- identity -------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Identity of the content: the same arrays have the same fingerprint, saved or not."""
        text = "".join(f"{name}:{self._checksum(name)};" for name in samples_format.ARRAYS)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def _checksum(self, name: str) -> str:
        known: dict[str, str] = self._header.setdefault("checksums", {})
        if name not in known:
            known[name] = samples_format.checksum(getattr(self, name))
        return known[name]

    def check_source(self, dataset: Any) -> None:
        """Refuse a dataset other than the one this index was packed from.

        Args:
            dataset: an IndexedDataset (``num_documents``, ``fingerprint``, ``document_lengths``).

        Raises:
            IndexMismatchError: says what differs.
        """
        where = f"{self.path or 'this index'} and {dataset.prefix}"
        if dataset.num_documents != self.num_documents:
            raise IndexMismatchError(
                f"{where} do not belong together: the index was packed from {self.num_documents:,} "
                f"documents, the dataset has {dataset.num_documents:,}; pack it again"
            )
        recorded = (self._header["source"] or {}).get("fingerprint")
        if recorded is not None:
            if recorded != dataset.fingerprint:
                raise IndexMismatchError(
                    f"{where} do not belong together: the index was packed from a dataset with "
                    f"fingerprint {recorded} ({self._header['source'].get('prefix')}), this one "
                    f"has {dataset.fingerprint}; pack it again"
                )
        elif self.lengths_fingerprint != samples_format.lengths_fingerprint(
            dataset.document_lengths
        ):
            raise IndexMismatchError(
                f"{where} do not belong together: as many documents, but of other lengths; "
                "pack the dataset again"
            )

    @property
    def lengths_fingerprint(self) -> str:
        """Identity of the document lengths it was packed from."""
        if "lengths_fingerprint" not in self._header:
            assert self._lengths is not None
            self._header["lengths_fingerprint"] = samples_format.lengths_fingerprint(self._lengths)
        return str(self._header["lengths_fingerprint"])

    # --- file -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, source: Any = None) -> None:
        """Write the ``.samples`` file; it appears under its name when it is complete.

        Args:
            path: the file; replaced if it exists.
            source: the IndexedDataset (or a dict with ``fingerprint`` and ``prefix``) it was
                packed from; ``check_source`` compares with it.

        Raises:
            IndexMismatchError: ``source`` has another number of documents.
            OSError: the file cannot be written.
        """
        if source is not None and not isinstance(source, Mapping):
            self.check_source(source)
            source = {"fingerprint": source.fingerprint, "prefix": str(source.prefix)}
        header = {key: value for key, value in self._header.items() if key != "checksums"}
        header["source"] = source if source is not None else self._header["source"]
        header["metrics"] = self.metrics()
        header["lengths_fingerprint"] = self.lengths_fingerprint
        arrays = {name: getattr(self, name) for name in samples_format.ARRAYS}
        checksums = {name: self._checksum(name) for name in arrays}
        samples_format.write(Path(path), header, arrays, checksums)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SampleIndex:
        """Memory-map a ``.samples`` file.

        Raises:
            FormatError: truncated, damaged, of a newer version, or not a ``.samples`` file.
            OSError: the file cannot be opened.
        """
        header, arrays = samples_format.read(Path(path))
        return cls(arrays, header, path=Path(path))

    def verify(self, document_lengths: Lengths | None = None) -> None:
        """Read everything: the checksums of all arrays and, given the lengths of its documents,
        that no sample exceeds its capacity and no segment leaves its document.

        Raises:
            FormatError: says what is damaged.
            IndexMismatchError: another number of documents.
        """
        for name in samples_format.ARRAYS:
            samples_format.verify_array(self.path, name, getattr(self, name), self._checksum(name))
        if document_lengths is not None:
            lengths = self._own_lengths(document_lengths)
            _core.check_laws(self.bucket_capacity, *self.segment_arrays(), lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:  # worker processes map the same file
            return SampleIndex.load, (str(self.path),)
        self.metrics()
        self.lengths_fingerprint  # noqa: B018  (kept in the header, the lengths are not)
        arrays = {name: getattr(self, name) for name in samples_format.ARRAYS}
        return SampleIndex, (arrays, self._header)

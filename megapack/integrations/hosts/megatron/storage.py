"""megatron-core's IndexedDataset and IndexedDatasetBuilder, on megapack's storage.

They have the same names, arguments and results, so that megatron-core's own classes work with them.
But they raise an error for damaged input that megatron-core accepts: a truncated .bin, lengths that
do not sum to the tokens, ids that do not fit the dtype.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from megatron.core.datasets import indexed_dataset as stock
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from numpy.typing import DTypeLike, NDArray

from megapack import storage
from megapack.errors import DataError, FormatError
from megapack.integrations.host import Rebinding
from megapack.integrations.hosts.megatron.host import HOST
from megapack.storage.address import is_remote

# Modules of megatron-core that import the two classes by name.
HOLDERS = tuple(
    f"megatron.core.datasets.{kind}_dataset"
    for kind in ("indexed", "megatron", "gpt", "masked", "bert", "t5")
)


class IndexedDataset(storage.IndexedDataset, stock.IndexedDataset):  # type: ignore[misc]  # no stubs
    """A .bin/.idx pair with megatron-core's constructor; see ``megapack.IndexedDataset``.

    Raises FormatError if the .idx is damaged or disagrees with sequences_per_dataset, or if the
    .bin is too short, and OSError if a file is missing or cannot be read.

    Args:
        path_prefix: path of the files without suffix. For ``s3://`` and ``msc://``, the result is
            megatron-core's own reader.
        multimodal: the .idx has a mode per sequence; items are then ``(tokens, mode)``.
        mmap, fast_cache_load: ignored; local files are always mapped, and opening reads one header.
        object_storage_config, s3_config: used only for object storage.
        sequences_per_dataset: (sequences, document indices) that the .idx must have.
        dtype_code: ignored; the header names it (megatron-core guesses it from the vocabulary size,
            wrongly between 65,500 and 65,536).
    """

    def __new__(cls, path_prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        if is_object_storage_path(path_prefix):
            return stock.IndexedDataset(path_prefix, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: Any = None,
        s3_config: Any = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: Sequence[int] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        del object_storage_config, s3_config
        storage.IndexedDataset.__init__(self, path_prefix, multimodal)
        self.mmap = mmap
        self.object_storage_config = None
        self.fast_cache_load = fast_cache_load
        self.sequences_per_dataset = sequences_per_dataset
        self.dtype_code = dtype_code
        sizes = (len(self), self.num_documents + 1)
        if sequences_per_dataset is not None and tuple(sequences_per_dataset) != sizes:
            raise FormatError(
                f"{path_prefix}.idx has {sizes} sequences and document indices, but "
                f"sequences_per_dataset says {tuple(sequences_per_dataset)}: rebuild that file"
            )

    def __del__(self) -> None:
        """Do nothing: megatron-core's method deletes readers, which are properties here."""

    @property
    def index(self) -> _Index:
        return _Index(self)

    def __getstate__(self) -> tuple[Any, ...]:
        # An absolute path, because a worker may have a different working directory.
        prefix = self.prefix
        if not is_remote(prefix):
            prefix = os.path.abspath(prefix)  # noqa: PTH100 - pathlib would drop a trailing dot
        options = (self.fast_cache_load, self.sequences_per_dataset, self.dtype_code)
        return (prefix, self.multimodal, self.mmap, None, None, *options)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        IndexedDataset.__init__(self, *state)

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        if is_object_storage_path(os.fspath(path_prefix)):
            return bool(stock.IndexedDataset.exists(path_prefix))
        return storage.IndexedDataset.exists(path_prefix)


class _Index:
    """Index of a dataset with the interface of megatron-core's index reader."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self.dtype = dataset.dtype.type
        self.dtype_size = dataset.dtype.itemsize

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        """Return pointer (bytes), length (tokens) and mode of one sequence."""
        modes = self._dataset.sequence_modes
        pointer, length = self._dataset.sequence_pointers[i], self._dataset.sequence_lengths[i]
        return pointer, length, None if modes is None else modes[i]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class IndexedDatasetBuilder(storage.IndexedDatasetBuilder, stock.IndexedDatasetBuilder):  # type: ignore[misc]  # no stubs
    """Writer of a .bin/.idx pair with megatron-core's methods; see
    ``megapack.IndexedDatasetBuilder``. The .bin file gets its name when ``finalize(idx_path)``
    returns; as in megatron-core, it replaces an existing file. Signed dtypes allow negative ids."""

    def __init__(
        self, bin_path: str, dtype: DTypeLike = np.int32, multimodal: bool = False
    ) -> None:
        signed = np.dtype(dtype).kind == "i"
        storage.IndexedDatasetBuilder.__init__(
            self, bin_path, dtype, multimodal, allow_negative=signed, overwrite=True
        )

    @property
    def sequence_lengths(self) -> list[int]:
        """Number of tokens of every sequence so far; a copy."""
        return _as_list(self._log.layout().length_blocks())

    @property
    def document_indices(self) -> list[int]:
        """First sequence of every document, then the end of the last; a copy."""
        return [0, *_as_list(self._log.layout().end_blocks())][: self.num_documents + 1]

    @property
    def sequence_modes(self) -> list[int] | None:
        """Mode of every sequence so far (a copy); None without modes."""
        return _as_list(self._log.layout().mode_blocks()) if self.multimodal else None

    def add_documents(  # type: ignore[override]  # megatron-core's signature
        self,
        documents: Any,
        modes: Sequence[int] | None = None,
        eod_token: int | None = None,
        chunk_size: int = 1_000_000,
    ) -> None:
        """Add many documents of one sequence each (megatron-core 0.20). Raises DataError for ids
        that do not fit the dtype, and for a wrong number of modes.

        Args:
            documents: ``awkward.Array`` of token ids, or a sequence of lists of them.
            modes: mode of every document, if multimodal; default 0.
            eod_token: appended to every document.
            chunk_size: number of documents to join in memory at once.
        """
        if modes is not None and len(modes) != len(documents):
            raise DataError(f"{len(documents)} documents have {len(modes)} modes: give one each")
        for begin in range(0, len(documents), chunk_size):
            ids, ends = _join(documents[begin : begin + chunk_size])
            if eod_token is not None:
                ids = np.insert(ids, ends, eod_token)
                ends += np.arange(1, len(ends) + 1)
            offsets = np.concatenate([[0], ends])
            if modes is None:
                storage.IndexedDatasetBuilder.add_documents(self, ids, offsets)
                continue
            for i, mode in enumerate(modes[begin : begin + chunk_size]):
                document = ids[offsets[i] : offsets[i + 1]]
                self.add_document(document, [len(document)], [mode])


def _join(documents: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    awkward = sys.modules.get("awkward")
    if awkward is not None and isinstance(documents, awkward.Array):
        flat, lengths = awkward.flatten(documents), awkward.num(documents, axis=1)
    else:
        flat = [token for document in documents for token in document]
        lengths = [len(document) for document in documents]
    return np.asarray(flat, np.int64), np.cumsum(np.asarray(lengths, np.int64))


def _as_list(arrays: Iterable[NDArray[Any]]) -> list[int]:
    return [value for array in arrays for value in array.tolist()]


def rebind_storage() -> Rebinding:
    """Make megatron-core's modules use the two classes above until ``.undo()``."""
    rebinding = Rebinding(HOST)
    ours = {"IndexedDataset": IndexedDataset, "IndexedDatasetBuilder": IndexedDatasetBuilder}
    theirs = {name: getattr(stock, name) for name in ours}
    for holder in HOLDERS:
        module = importlib.import_module(holder)
        for name, value in ours.items():
            if getattr(module, name, None) is theirs[name]:
                rebinding.replace(module, name, value)
    return rebinding

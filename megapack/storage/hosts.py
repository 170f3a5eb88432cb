"""The names under which Megatron, Megatron-DeepSpeed and GPT-NeoX know an IndexedDataset."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["HostNames"]


class BinReader:
    """``read(dtype, count, offset)`` of the mapped tokens."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self._bytes = tokens.view(np.uint8).data

    def read(self, dtype: DTypeLike, count: int, offset: int) -> NDArray[Any]:
        """``count`` elements from byte ``offset`` on."""
        return np.frombuffer(self._bytes, dtype, count, offset)


class HostNames:
    """Aliases only; the facts are IndexedDataset's."""

    prefix: str
    tokens: NDArray[Any]
    sequence_lengths: Any  # cached properties of IndexedDataset
    document_indices: Any

    @property
    def path_prefix(self) -> str:
        return self.prefix

    @property
    def index(self) -> Any:
        """Megatron's reader of the .idx: dtype, sequence_lengths, ... are ours as well."""
        return self

    @property
    def bin_reader(self) -> BinReader:
        """Megatron's reader of .bin."""
        return BinReader(self.tokens)

    @property
    def sequence_count(self) -> int:
        return int(self.sequence_lengths.size)

    @property
    def document_count(self) -> int:
        """Length of document_indices, as in the header: documents + 1."""
        return int(self.document_indices.size)

    def get_document_indices(self) -> Any:
        return self.document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """In memory only, as in Megatron."""
        self.__dict__["document_indices"] = document_indices

    @property
    def sizes(self) -> Any:
        return self.sequence_lengths

    @property
    def doc_idx(self) -> Any:
        return self.document_indices

    def get_doc_idx(self) -> Any:
        return self.document_indices

    @property
    def supports_prefetch(self) -> bool:
        return False

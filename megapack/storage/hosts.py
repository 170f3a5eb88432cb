"""The names under which Megatron, Megatron-DeepSpeed and GPT-NeoX know an IndexedDataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class HostNames(ABC):
    """Aliases only; the facts are IndexedDataset's."""

    prefix: str
    tokens: NDArray[Any]

    @property
    @abstractmethod
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens per sequence."""

    @property
    @abstractmethod
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of every document, and the number of sequences."""

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
        return self.sequence_lengths.size

    @property
    def document_count(self) -> int:
        """Length of document_indices, as in the header: documents + 1."""
        return self.document_indices.size

    def get_document_indices(self) -> NDArray[np.int64]:
        return self.document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """In memory only, as in Megatron."""
        self.__dict__["document_indices"] = document_indices

    @property
    def sizes(self) -> NDArray[np.int32]:
        return self.sequence_lengths

    @property
    def doc_idx(self) -> NDArray[np.int64]:
        return self.document_indices

    def get_doc_idx(self) -> NDArray[np.int64]:
        return self.document_indices

    @property
    def supports_prefetch(self) -> bool:
        return False

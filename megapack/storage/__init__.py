"""Documents on disk: Megatron's .bin/.idx, written and read byte for byte. Stands on csrc/core."""

from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.dataset import IndexedDataset
from megapack.storage.mmididx import read_document_lengths

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "read_document_lengths"]

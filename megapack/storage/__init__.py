"""Documents on disk: Megatron's .bin/.idx, read and written byte for byte; uses csrc/core.

- dataset: reading; index_file opens the pair
- builder: writing; tokens writes .bin, index_writer .idx and the meta file (metadata)
- merge and importing: datasets from datasets, and from other tools' files
- verify, survey, repair: checks and repairs
- files, locks: temporary names and locks for every file that megapack writes
- remote: reading from object stores
"""

from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.dataset import IndexedDataset, read_document_lengths

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "read_document_lengths"]

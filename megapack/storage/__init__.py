"""Read and write documents on disk, in Megatron's .bin/.idx format byte for byte; uses csrc/core.

- dataset: reading; index_file opens the pair
- builder: writing; tokens writes .bin, index_writer writes .idx and the meta file (metadata)
- merge, importing: make datasets from other datasets, and from other tools' files
- verify, survey, repair: checks and repairs
- files, locks: temporary names and locks for every file that megapack writes
- remote: object stores
"""

from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.dataset import IndexedDataset, read_document_lengths

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "read_document_lengths"]

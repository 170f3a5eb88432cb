"""Read and write documents on disk, in Megatron's .bin/.idx format byte for byte; uses csrc/core.

- dataset: reading; index_file opens the pair
- columns, column_edits: data that belongs to tokens
- builder: writing; tokens writes .bin, index_writer writes .idx and the meta file (metadata)
- merge, importing: make datasets from other datasets, and from other tools' files
- verify, survey, repair: checks and repairs
- files, locks: temporary names and locks for every file that megapack writes
- remote: object stores
"""

from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.column_edits import add_column, remove_column
from megapack.storage.columns import ColumnSpec
from megapack.storage.dataset import IndexedDataset, read_document_lengths

__all__ = [
    "ColumnSpec",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "add_column",
    "read_document_lengths",
    "remove_column",
]

"""Documents on disk: Megatron's .bin/.idx, written and read byte for byte. Stands on csrc/core.

- dataset: reading; index_file opens the pair
- builder: writing; tokens makes .bin, index_writer .idx and the meta file (metadata)
- merge and importing: datasets from datasets, and from other tools' files
- verify, survey, repair: whether a dataset is what it claims to be, and mending
- files: for every file that megapack writes: names, locks, what may be replaced
- remote: reading from object stores
"""

from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.dataset import IndexedDataset, read_document_lengths

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "read_document_lengths"]

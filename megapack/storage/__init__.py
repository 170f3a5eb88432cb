"""Documents on disk: Megatron's .bin/.idx, written and read byte for byte. Stands on csrc/core.

- dataset: reading; opening, pair and mmididx open the files, hosts has Megatron's names, labels a
  second dataset beside the first
- builder: writing; tokens and token_writer make .bin, document_log and layout .idx, publishing
  gives all files their names; atomic, replace and lock are for every file that megapack writes
- remote: reading from object stores
- meta: what a dataset says of itself
- merge (of input_dataset) and importing (of foreign, plain_tokens): datasets from datasets
- verify (survey, verify_tokens, findings) and repair
"""

from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.dataset import IndexedDataset, read_document_lengths

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "read_document_lengths"]

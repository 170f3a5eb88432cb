"""One small packed dataset for all tests of loaders."""

from __future__ import annotations

import pytest

from megapack.data import PackedDataset
from megapack.packing import pack
from tests.data.corpora import packed_lengths, random_documents, write_documents


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("loader")
    dataset = write_documents(folder / "d", random_documents(packed_lengths(300, 64)))
    index = pack(dataset.document_lengths, "bucket", buckets=[16, 32, 64])
    index.save(folder / "d.samples", source=dataset)
    return PackedDataset(folder / "d", folder / "d.samples")

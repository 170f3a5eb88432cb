"""One small packed dataset for all tests of loaders."""

from __future__ import annotations

import pytest

from megapack.data import PackedDataset
from tests.data.corpora import packed_documents, packed_lengths, random_documents


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("loader")
    packed_documents(folder / "d", random_documents(packed_lengths(300, 64)), [16, 32, 64])
    return PackedDataset(folder / "d", folder / "d.samples")

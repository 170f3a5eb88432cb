"""Token ids that a model does not have are found before training, with and without metadata."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megapack.data import PackedDataset, check_token_ids
from megapack.data import dataset as vocabulary
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder


def documents(
    folder: Path, tokens: list[list[int]], *, name: str = "text", dtype: type = np.int32
) -> IndexedDataset:
    with IndexedDatasetBuilder(folder / name, dtype, allow_negative=dtype is np.int32) as builder:
        for one in tokens:
            builder.add_document(np.array(one, dtype))
    return IndexedDataset(folder / name)


def packed(dataset: IndexedDataset) -> PackedDataset:
    return PackedDataset(dataset, pack(dataset.document_lengths, buckets=[4]))


def forget(dataset: IndexedDataset) -> IndexedDataset:
    Path(f"{dataset.prefix}.meta.json").unlink()
    return IndexedDataset(dataset.prefix)


@pytest.mark.parametrize("with_meta", [True, False])
def test_an_id_as_large_as_the_vocabulary_is_refused(tmp_path: Path, with_meta: bool) -> None:
    dataset = documents(tmp_path, [[1, 2, 3], [7, 99, 4, 5]])
    data = packed(dataset if with_meta else forget(dataset))
    check_token_ids(data, 100)
    with pytest.raises(ConfigError, match=r"text holds token id 99, and the model has ids below"):
        check_token_ids(data, 99)


def test_labels_that_somebody_chose_are_looked_at_as_well(tmp_path: Path) -> None:
    text = documents(tmp_path, [[1, 2, 3], [4, 5]])
    documents(tmp_path, [[-100, 9, -100], [-100, 5]], name="text.labels")
    data = packed(text)
    check_token_ids(data, 10)
    with pytest.raises(ConfigError, match=r"text\.labels holds token id 9"):
        check_token_ids(data, 9)


def test_a_large_file_without_metadata_is_looked_at_all_over_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vocabulary, "_BLOCKS", 4)
    monkeypatch.setattr(vocabulary, "_BLOCK_TOKENS", 8)
    tokens = [1] * 400
    tokens[-400 // 4 :] = [50] * 100
    data = packed(forget(documents(tmp_path, [tokens])))
    logging.getLogger("megapack").propagate = True
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="token id 50"):
        check_token_ids(data, 50)
    assert "no .meta.json" in caplog.text and "of it" in caplog.text


def test_no_dtype_is_searched_for_what_it_cannot_hold(tmp_path: Path) -> None:
    data = packed(forget(documents(tmp_path, [[65535]], dtype=np.uint16)))
    check_token_ids(data, 65536)
    with pytest.raises(ConfigError, match="65535"):
        check_token_ids(data, 65535)


def test_nothing_has_no_ids(tmp_path: Path) -> None:
    check_token_ids(packed(documents(tmp_path, [[], []])), 1)

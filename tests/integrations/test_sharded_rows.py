"""A host's data path may be a shard manifest: its rows are those of the dataset it stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megapack.errors import ConfigError
from megapack.integrations.manifest import Manifest, is_manifest
from megapack.integrations.open_rows import open_rows, open_sources
from megapack.integrations.rows import RowDataset, RowOptions
from megapack.packing import pack
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.storage import IndexedDataset
from tests.data.corpora import packed_lengths, random_documents, write_documents

BUCKETS = [16, 32, 64]
OPTIONS = RowOptions(sequence_length=64, rows_per_block=4, seed=1)


def rows_of(data_path: str, split: tuple[float, float] = (0.0, 1.0)) -> RowDataset:
    manifest = Manifest.read(data_path)
    return open_rows(manifest, open_sources(manifest), OPTIONS, split=split)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """One dataset whose samples are those of the only shard, which is the simplest law."""
    dataset = write_documents(tmp_path / "a", random_documents(packed_lengths(300, 64)))
    pack(dataset.document_lengths, buckets=BUCKETS).save(tmp_path / "a.samples", source=dataset)
    manifest = str(tmp_path / "web.shards.json")
    plan = plan_packing(manifest, [str(tmp_path / "a")], {"buckets": BUCKETS})
    pack_shards(plan, lambda _: None)
    return manifest


def test_rows_of_a_shard_manifest(shards: str, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text("sources: [{prefix: a, index: a.samples}]\n")
    ours, theirs = rows_of(shards), rows_of(str(blend))
    assert not is_manifest(shards) and len(ours) == len(theirs) > 20
    for i in range(0, len(theirs), 5):
        assert all(torch.equal(ours[i][name], theirs[i][name]) for name in theirs[i])
    tokens = IndexedDataset(tmp_path / "a").tokens
    seen = np.concatenate([ours[i]["tokens"].numpy() for i in range(len(ours))])
    assert np.isin(np.unique(tokens), seen).all()


def test_rows_of_a_blend_of_shard_manifests_and_prefixes(shards: str) -> None:
    manifest = Manifest.of_blend([shards, "b"], [0.5, 0.5])
    assert [source.title for source in manifest.sources] == [shards, "b"]
    assert Manifest.read(manifest.to_json()) == manifest


def test_rows_of_a_part_of_a_shard_manifest_are_refused(shards: str) -> None:
    with pytest.raises(ConfigError, match=r"names index .*shards\.json, which has all its docum"):
        rows_of(shards, split=(0.0, 0.9))

"""Which documents are packed (match_repetition), as plain Python defines it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import build
from packing_inputs import as_packing, same_arrays

from megapack import _core
from megapack.data import PackedDataset
from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.pack import matched_documents
from megapack.packing.sharded import load_shards
from tests.data.corpora import write_documents

LENGTHS = np.random.default_rng(5).integers(0, 60, 4000).astype(np.int32)


def defined(num_documents: int, share: float, seed: int) -> list[bool]:
    """A document is kept if its own number in [0, 1) is below the share."""
    key = _core.random_bits(seed, 5)
    return [(_core.random_bits(key, d) >> 11) * 2.0**-53 < share for d in range(num_documents)]


@pytest.mark.parametrize("seed", [0, 3, 2**64 - 1])
def test_matched_documents_are_the_defined_ones_and_lie_inside_of_larger_shares(seed: int) -> None:
    inside = np.zeros(4000, np.bool_)
    for share in (0.02, 0.3, 0.6, 1.0):
        kept = matched_documents(4000, share, seed)
        assert kept.tolist() == defined(4000, share, seed)
        assert kept[:100].tolist() == matched_documents(100, share, seed).tolist()
        assert (kept | ~inside).all()
        assert abs(kept.mean() - share) < 4 * (share * (1 - share) / 4000) ** 0.5 + 1e-9
        inside = kept
    assert inside.all()


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_share_is_packed_as_if_the_other_documents_were_empty(name: str) -> None:
    buckets = [16, 32] if STRATEGIES[name].many_buckets else [32]
    index = pack(LENGTHS, name, buckets=buckets, seed=3, match_repetition=0.25)
    kept = matched_documents(len(LENGTHS), 0.25, 3)
    only = pack(np.where(kept, LENGTHS, 0), name, buckets=buckets, seed=3)
    assert as_packing(index) == as_packing(only) and index.num_segments > 100
    assert index.parameters == {**only.parameters, "match_repetition": 0.25}
    assert f"{kept.sum():,} of 4,000 documents" in index.decisions["match_repetition"]


def test_a_share_belongs_to_its_dataset_and_is_named_on_the_command_line(tmp_path: Path) -> None:
    dataset = write_documents(tmp_path / "d", [[1] * n for n in LENGTHS[:200].tolist()])
    index = pack(LENGTHS[:200], buckets=[64], match_repetition=0.5)
    data = PackedDataset(dataset, index)  # in memory: compared by the lengths of all documents
    assert 0 < len(data) == index.num_samples

    done = build("pack", dataset.prefix, "--buckets", "64", "--match-repetition", "1/2")
    assert done.returncode == 0 and "match_repetition" in done.stdout, done.stderr
    assert same_arrays(SampleIndex.load(f"{dataset.prefix}.samples"), index)
    other = build("pack", dataset.prefix, "--buckets", "64")
    assert other.returncode == 2 and "packed with other parameters" in other.stderr
    wrong = build("pack", dataset.prefix, "--buckets", "64", "--match-repetition", "3/2")
    assert wrong.returncode == 2 and "'3/2' is not a share above 0" in wrong.stderr

    manifest = tmp_path / "all.shards.json"
    options = ("--buckets", "64", "--match-repetition", "0.5", "--output", manifest)
    assert build("pack", dataset.prefix, *options).returncode == 0
    sharded = load_shards(manifest)
    assert same_arrays(sharded.open(0), index) and sharded.parameters["match_repetition"] == 0.5
    with pytest.raises(ConfigError, match="match_repetition is 0; it must be above 0"):
        pack(LENGTHS, buckets=[64], match_repetition=0)

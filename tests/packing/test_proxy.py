"""Documents of proxies, against a plain definition, and their samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import printed
from hypothesis import given
from hypothesis import strategies as st
from packing_inputs import same_arrays

from megapack import _core
from megapack.errors import ConfigError, IndexMismatchError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.proxy import NestedOrder, ProxySamples, shrink
from megapack.packing.sharded import load_index
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

LENGTHS = np.random.default_rng(0).lognormal(3.5, 1, 20_000).astype(np.int64) + 1
SCALES = (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024)


def defined(lengths: list[int], seed: int, *, waits: bool = True) -> list[int]:
    """Return all documents in the order of proxies, one number after the other; ``waits``: long
    documents wait for the tokens before them."""
    units = sorted((d for d, n in enumerate(lengths) if n), key=lambda d: (code(lengths[d]), d))
    bits = max(1, (len(units) - 1).bit_length())
    order = []
    for number in range(1 << bits):
        x = (number + _core.random_bits(seed, 5)) % 2**64
        for counter in range(6, 10):
            x ^= x * (_core.random_bits(seed, counter) & ~1) % 2**64
        place = int(f"{x % 2**64:064b}"[-bits:][::-1], 2)
        if place < len(units):
            order.append(units[place])
    before = np.cumsum([0, *(lengths[d] for d in order)]).tolist()
    turns = {d: max(tokens, 8 * lengths[d]) for d, tokens in zip(order, before, strict=False)}
    return sorted(order, key=turns.__getitem__) if waits else order


def code(length: int) -> tuple[int, int]:
    """Return the number of binary digits of a length, and its 9 leading ones."""
    digits = length.bit_length()
    return digits, length >> (digits - 9) if digits > 9 else length << (9 - digits)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=40).filter(any),
    seed=st.integers(0, 2**64 - 1),
    shares=st.lists(st.floats(0.001, 1), min_size=1, max_size=4).map(sorted),
)
def test_documents_equal_the_definition_and_are_nested(
    lengths: list[int], seed: int, shares: list[float]
) -> None:
    order, expected = NestedOrder(lengths, seed), defined(lengths, seed)
    inside: set[int] = set()
    for share in shares:
        tokens = share * sum(lengths)
        taken = order.first(tokens).tolist()
        assert taken == sorted(expected[: len(taken)])
        assert inside <= set(taken)
        errors = [abs(sum(lengths[d] for d in expected[:n]) - tokens) for n in range(1, 41)]
        assert math.isclose(min(errors), abs(sum(lengths[d] for d in taken) - tokens))
        assert taken == NestedOrder(lengths, seed).first(tokens).tolist()
        inside = set(taken)
    assert order.first(sum(lengths)).tolist() == np.flatnonzero(lengths).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_beginnings_have_a_document_of_every_part_of_the_lengths(seed: int) -> None:
    """2^12 documents differ in their 9 leading digits, or in their number of digits: each of 2^j
    equal parts has one of the first 2^j documents, and the seed chooses which."""
    lengths = (np.arange(256, 512)[:, None] << np.arange(16)).reshape(-1)
    lengths = np.random.default_rng(1).permutation(lengths)
    order = defined(lengths.tolist(), seed, waits=False)
    ranks = np.argsort(np.argsort(lengths))[order]
    for j in range(13):
        parts = ranks[: 1 << j] * (1 << j) // 4096
        assert sorted(parts) == list(range(1 << j))
    assert order[:8] != defined(lengths.tolist(), 5, waits=False)[:8]


def test_length_quantiles_are_those_of_the_source() -> None:
    """Compare the distribution functions: random documents differ several times as much. The first
    n members of a sequence of van der Corput have a discrepancy of at most log2(n) / 2 + 1."""
    order, whole = NestedOrder(LENGTHS, 0), np.sort(LENGTHS)
    for share in SCALES:
        taken = order.first(share * LENGTHS.sum())
        bound = (math.log2(len(taken)) / 2 + 1) / len(taken)
        assert distance(LENGTHS[taken], whole) < max(0.005, bound)
        assert bound < 0.005 or len(taken) < 2000
        chance = np.random.default_rng(0).choice(LENGTHS, len(taken), replace=False)
        factor = 2 if len(taken) > 200 else 1
        assert distance(chance, whole) > factor * distance(LENGTHS[taken], whole)


def distance(some: np.ndarray, whole: np.ndarray) -> float:
    """Return the largest difference of the shares of documents up to a length."""
    values = np.unique(some)
    share = np.searchsorted(np.sort(some), values, "right") / len(some)
    return float(abs(share - np.searchsorted(whole, values, "right") / len(whole)).max())


def test_scale_for_is_the_smallest_larger_one_that_whole_documents_meet() -> None:
    lengths = LENGTHS[:600]
    order = NestedOrder(lengths, 3)

    def error(k: int) -> float:
        taken = lengths[order.first(order.num_tokens / k)].sum()
        return float(abs(taken * k / order.num_tokens - 1))

    for scale in (500, 200, 64, 9, 2):
        k = order.scale_for(1 / scale, half_sample=0)
        assert error(k) <= 0.01 < min([error(i) for i in range(k + 1, scale)], default=1)
    assert order.scale_for(1 / 64, half_sample=order.num_tokens / 2000) <= 20
    assert order.scale_for(1, half_sample=0) == 1


# ---- samples


def dataset(prefix: Path, lengths: np.ndarray) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        tokens = np.random.default_rng(0).integers(0, 50_000, lengths.sum())
        builder.add_documents(tokens.astype(np.uint16), np.append(0, np.cumsum(lengths)))
    return IndexedDataset(prefix)


def packed(prefix: Path, lengths: np.ndarray, strategy: str, **options: Any) -> SampleIndex:
    data = dataset(prefix, lengths)
    index = pack(data.document_lengths, strategy, **options)
    path = prefix.with_name(f"{prefix.name}.samples")
    index.save(path, source=data)
    return SampleIndex.load(path)


def documents_of(image: ProxySamples) -> set[int]:
    [index] = image.shards
    return set(np.unique(index.segment_document).tolist())


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_scale_1_is_the_source_and_smaller_ones_have_whole_documents(
    name: str, tmp_path: Path
) -> None:
    buckets = [64, 256] if STRATEGIES[name].many_buckets else [256]
    index = packed(tmp_path / "d", LENGTHS[:4000], name, buckets=buckets, seed=3)
    prefix, out = str(tmp_path / "d"), tmp_path / "p"
    assert same_arrays(shrink(index, prefix, 1, out).shards[0], index)
    image = shrink(index, prefix, 1 / 8, out)
    [small] = image.shards
    assert (small.strategy, small.buckets, small.seed) == (name, buckets, 3)
    taken = np.zeros(4000, np.bool_)
    taken[NestedOrder(LENGTHS[:4000], 0).first(image.num_tokens)] = True
    assert image.num_documents == taken.sum() and abs(image.error) < 0.01
    small.verify(np.where(taken, LENGTHS[:4000], 0))
    pinned = {"promote": index.decisions["promote"].partition(":")[0]} if name == "bucket" else {}
    again = pack(np.where(taken, LENGTHS[:4000], 0), name, buckets=buckets, seed=3, **pinned)
    assert same_arrays(small, again)
    image.save(overwrite=False)
    image.save(overwrite=False)  # equal files are kept
    saved = load_index(image.index.path)
    saved.check_source(IndexedDataset(prefix))
    with pytest.raises(ConfigError, match="packed with other documents of this dataset"):
        shrink(index, prefix, 1 / 4, out).save(overwrite=False)


def test_scales_are_nested_and_have_the_share_of_the_samples(tmp_path: Path) -> None:
    """Padding is larger in small packings: the documents are those whose samples have the share."""
    index = packed(tmp_path / "d", LENGTHS, "bucket", buckets=[128, 512, 1024])
    inside: set[int] = set()
    for share in reversed(SCALES[:4]):
        image = shrink(index, str(tmp_path / "d"), share, tmp_path / "p")
        positions = image.index.bucket_capacity @ np.diff(image.index.bucket_sample_offsets)
        of = index.bucket_capacity @ np.diff(index.bucket_sample_offsets)
        assert math.isclose(image.error, positions / (share * of) - 1, abs_tol=1e-12)
        assert abs(positions - share * of) <= max(0.01 * share * of, 1024)
        assert (image.exact_scale is not None) == (abs(image.error) > 0.01)
        documents = documents_of(image)
        assert inside < documents and len(documents) == image.num_documents
        inside = documents


def test_groups_are_taken_whole(tmp_path: Path) -> None:
    """A source finds its groups in PREFIX.groups, or its file by the checksum."""
    ids = np.random.default_rng(2).integers(-1, 300, 2000)
    index = packed(tmp_path / "d", LENGTHS[:2000], "bucket", buckets=[256], groups=ids)
    prefix, out = str(tmp_path / "d"), tmp_path / "p"
    with pytest.raises(ConfigError, match="add --group-file"):
        shrink(index, prefix, 1 / 4, out)
    np.save(tmp_path / "other.npy", ids[::-1])
    np.save(tmp_path / "ids.npy", ids)
    files = [str(tmp_path / "other.npy"), str(tmp_path / "ids.npy")]
    image = shrink(index, prefix, 1 / 4, out, groups=files)
    taken = documents_of(image)
    for group in range(300):
        members = set(np.flatnonzero(ids == group).tolist())
        assert members <= taken or not members & taken
    assert image.shards[0].has_groups and 0 < len(taken) < 2000
    with IndexedDatasetBuilder(f"{prefix}.groups", np.int32, allow_negative=True) as builder:
        builder.add_documents(ids.astype(np.int32), np.arange(2001))
    assert same_arrays(shrink(index, prefix, 1 / 4, out).shards[0], image.shards[0])


def test_shards_are_one_source(tmp_path: Path) -> None:
    """The documents are chosen from all shards together, and numbers of documents stay."""
    parts = np.split(LENGTHS[:3000], [500, 1800])
    for number, lengths in enumerate(parts):
        dataset(tmp_path / f"{number}", lengths)
    names = [tmp_path / f"{number}" for number in range(3)]
    printed("pack", *names, "--buckets", "128,512", "--output", tmp_path / "all.shards.json")
    source = load_index(tmp_path / "all.shards.json")
    image = shrink(source, None, 1 / 4, tmp_path / "p")
    taken = np.concatenate(
        [
            first + np.unique(shard.segment_document)
            for first, shard in zip([0, 500, 1800], image.shards, strict=True)
        ]
    )
    order = NestedOrder(LENGTHS[:3000], 0)
    assert taken.tolist() == order.first(image.num_tokens).tolist()
    image.save(overwrite=False)
    saved = load_index(tmp_path / "p.shards.json")
    assert saved.fingerprint == image.index.fingerprint and saved.num_documents == 3000
    saved.verify()


def test_documents_that_were_not_packed_stay_out(tmp_path: Path) -> None:
    data, half = dataset(tmp_path / "d", LENGTHS[:1000]), tmp_path / "half.txt"
    half.write_text("\n".join(map(str, range(500, 1000))))
    printed("pack", data.prefix, "--buckets", 256, "--documents", half)
    index = SampleIndex.load(f"{data.prefix}.samples")
    image = shrink(index, data.prefix, 1 / 2, tmp_path / "p")
    assert min(documents_of(image)) >= 500 and image.of_tokens == LENGTHS[500:1000].sum()


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    index = packed(tmp_path / "d", np.zeros(3, np.int64), "bucket", buckets=[64])
    with pytest.raises(ConfigError, match="has no tokens: leave the source out"):
        shrink(index, str(tmp_path / "d"), 1 / 2, tmp_path / "p")


def test_prefix_trees_and_other_datasets(tmp_path: Path) -> None:
    data = dataset(tmp_path / "d", LENGTHS[:500].clip(1, 200))
    printed("pack", data.prefix, "--buckets", 256, "--strategy", "tree")
    index = SampleIndex.load(f"{data.prefix}.samples")
    image = shrink(index, data.prefix, 1 / 2, tmp_path / "p")
    assert image.shards[0].has_trees and abs(image.error) < 0.05
    dataset(tmp_path / "e", LENGTHS[500:1000])
    with pytest.raises(IndexMismatchError, match="do not belong together"):
        shrink(index, str(tmp_path / "e"), 1 / 2, tmp_path / "p")

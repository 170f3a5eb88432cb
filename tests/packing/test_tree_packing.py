"""Strategy ``tree``: samples are the prefix trees of their documents, as the definition says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import build, printed
from hypothesis import given
from hypothesis import strategies as st

from megapack.errors import ConfigError, DataError, FormatError
from megapack.packing import SampleIndex, how_it_differs, pack
from megapack.packing.sharded import load_shards
from megapack.packing.verify import verify_samples
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.reference.trees import tree_of

Documents = list[list[int]]

# Few different tokens: many shared prefixes, identical documents, and prefixes of each other.
documents = st.lists(st.lists(st.integers(1, 3), max_size=9), max_size=14)
ROLLOUTS = [[9, 8, 7, *([k] * (k % 4 + 1))] for k in range(6)] + [[5, 6], [9, 8], [5, 6]]


def packed(texts: Documents, capacity: int, **options: Any) -> SampleIndex:
    lengths = [len(text) for text in texts]
    flat = np.array([token for text in texts for token in text], np.int64)
    offsets = np.cumsum([0, *lengths])
    return pack(lengths, "tree", buckets=capacity, tokens=(flat, offsets), **options)


def write(prefix: Path, texts: Documents) -> Path:
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for text in texts:
            builder.add_document(text)
    return prefix


def check_samples(index: SampleIndex, texts: Documents) -> None:
    """Compare every sample with the tree of its documents; each document is in one sample."""
    assert index.segment_parent is not None
    placed: list[int] = []
    for i in range(index.num_samples):
        ends = index.documents_of(i)
        numbers = [document for document, _ in ends]
        placed += numbers
        tree = tree_of({number: texts[number] for number in numbers})
        assert numbers == tree.sequences and [last for _, last in ends] == tree.sequence_nodes
        _, segments = index.sample(i)
        assert [length for _, _, length in segments] == tree.node_lengths
        assert [begin for _, begin, _ in segments] == tree.node_depths
        begin, end = index.sample_segment_offsets[i : i + 2].tolist()
        assert index.segment_parent[begin:end].tolist() == tree.node_parents
        for node, (document, at, length) in enumerate(segments):
            same = texts[tree.node_sequences[node]]
            assert texts[document][: at + length] == same[: at + length]
        assert 0 < sum(tree.node_lengths) <= index.bucket_capacity[0]
    assert sorted(placed) == [number for number, text in enumerate(texts) if text]


@given(documents, st.integers(9, 20))
def test_samples_are_the_trees_of_their_documents(texts: Documents, capacity: int) -> None:
    index = packed(texts, capacity)
    check_samples(index, texts)
    metrics = index.metrics()
    assert metrics["shared_tokens"] == sum(map(len, texts)) - int(index.segment_length.sum())
    assert metrics["num_truncated_documents"] == metrics["dropped_tokens"] == 0
    pairs = sum(
        (begin + n) ** 2 - begin**2
        for i in range(index.num_samples)
        for _, begin, n in index.sample(i)[1]
    )
    assert metrics["attention_cost"] == pairs == index.attention_cost().sum()
    index.verify(np.array([len(text) for text in texts], np.int32))


def test_documents_that_share_a_prefix_meet_wherever_they_are() -> None:
    index = packed(ROLLOUTS, 32)
    assert index.num_samples == 1 and index.metrics()["shared_tokens"] == 3 * 5 + 2 + 2
    shuffled = [ROLLOUTS[i] for i in (8, 3, 1, 6, 0, 5, 7, 2, 4)]
    again = packed(shuffled, 32)
    assert np.array_equal(index.segment_length, again.segment_length)


def test_groups_stay_in_one_sample_if_they_fit() -> None:
    texts = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 8], [9, 9, 9], [9, 9, 8]]
    groups = [0, 0, 1, 1, -1, -1]
    index = packed(texts, 8, groups=groups)
    holder = {d: i for i in range(index.num_samples) for d, _ in index.documents_of(i)}
    assert holder[0] == holder[1] and holder[2] == holder[3]
    check_samples(index, texts)
    metrics = index.metrics()
    names = ("num_groups", "num_cut_groups", "num_groups_longer_than_largest_bucket")
    assert [metrics[name] for name in names] == [2, 0, 0]
    cut = packed(texts, 5, groups=groups).metrics()
    assert [cut[name] for name in names] == [2, 2, 2]


def test_max_depth_copies_deeper_nodes() -> None:
    texts = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert packed(texts, 16).metrics()["placed_tokens"] == 4
    index = packed(texts, 16, max_depth=2)
    parents = index.segment_parent
    assert index.num_samples == 1 and parents is not None
    assert (parents[parents[parents >= 0]] == -1).all(), "a path of three nodes"
    assert index.metrics()["placed_tokens"] > 4


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="only their lengths are known"):
        pack([3, 4], "tree", buckets=8)
    with pytest.raises(DataError, match=r"document 1 has 9 tokens, and a sample has 8"):
        packed([[1], [2] * 9], 8)
    with pytest.raises(DataError, match=r"tokens \(3 documents\) and lengths \(2\) differ"):
        pack([1, 1], "tree", buckets=8, tokens=(np.zeros(3, np.int32), [0, 1, 2, 3]))
    for option in ({"alignment": 2}, {"fim_room": 3}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} is . with strategy 'tree'"):
            packed([[1, 2]], 8, **option)
    with pytest.raises(ConfigError, match="samples of one length"):
        pack([1], "tree", buckets=[4, 8], tokens=(np.zeros(1, np.int32), [0, 1]))


def test_file_is_read_back_and_damage_is_found(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", ROLLOUTS)
    dataset = IndexedDataset(prefix)
    index = packed(ROLLOUTS, 16, groups=[0, 0, 0, 1, 1, 1, -1, -1, -1])
    index.save(tmp_path / "d.samples", source=dataset)
    loaded = SampleIndex.load(tmp_path / "d.samples", verify=True)
    assert loaded.fingerprint == index.fingerprint and loaded.has_trees
    assert loaded.metrics() == index.metrics()
    check_samples(loaded, ROLLOUTS)
    assert verify_samples(str(tmp_path / "d.samples")) == []
    for name in ("segment_parent", "segment_end_offsets", "end_document"):
        array = np.array(getattr(index, name))
        array[-1] += 1
        with pytest.raises(FormatError, match=r"damaged|does not end"):
            wrong = {**vars(index), name: array}
            fields = SampleIndex.__dataclass_fields__
            broken = SampleIndex(**{key: wrong[key] for key in fields})
            broken.verify(dataset.document_lengths)


def test_command_packs_trees_and_notices_other_tokens(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", ROLLOUTS)
    command = ("pack", prefix, "--strategy", "tree", "--buckets", 16)
    text = printed(*command)
    assert "shared tokens" in text
    index = SampleIndex.load(f"{prefix}.samples")
    check_samples(index, ROLLOUTS)
    assert "nothing to do" in build(*command).stderr
    same_lengths = [[token + 1 for token in ROLLOUTS[0]], *ROLLOUTS[1:]]
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "d", same_lengths)
    shutil.copy(tmp_path / "other" / "d.bin", tmp_path / "d.bin")
    assert "other tokens" in printed(*command, status=2)
    found = build("verify", f"{prefix}.samples")
    assert found.returncode == 1 and "prefix trees of other tokens than" in found.stdout
    assert verify_samples(f"{prefix}.samples", tokens=False) == []
    np.save(tmp_path / "some.npy", np.array([0, 4, 7]))
    output = tmp_path / "some.samples"
    printed(*command, "--documents", tmp_path / "some.npy", "--output", output)
    some = SampleIndex.load(output)
    assert sorted(d for d, _ in some.documents_of(0)) == [0, 4, 7]
    assert verify_samples(str(output)) == []


def test_a_chain_of_prefixes_is_refused_when_packed(tmp_path: Path) -> None:
    """2,048 prefixes of one text have 2,048 tokens, and 1,024 times as many on their paths."""
    text = np.random.default_rng(0).integers(0, 100, 2048).tolist()
    prefix = write(tmp_path / "d", [text[: i + 1] for i in range(2048)])
    command = ("pack", prefix, "--strategy", "tree", "--buckets", 2048)
    message = "2048 tokens, and 2098176 on the paths of its 2048 nodes; the limit is 256 x 2048"
    assert message in printed(*command, status=1)
    printed(*command, "--max-depth", 2)
    assert verify_samples(f"{prefix}.samples") == []


def test_shards_are_packed_one_by_one(tmp_path: Path) -> None:
    parts = [ROLLOUTS[:4], ROLLOUTS[4:]]
    prefixes = [write(tmp_path / name, part) for name, part in zip("ab", parts, strict=True)]
    manifest = tmp_path / "all.shards.json"
    printed("pack", *prefixes, "--strategy", "tree", "--buckets", 16, "--output", manifest)
    source = load_shards(manifest)
    assert source.has_trees
    for number, part in enumerate(parts):
        check_samples(source.open(number), part)
    assert "all.shards.json: 2 datasets" in printed(
        "pack", *prefixes, "--strategy", "tree", "--buckets", 16, "--output", manifest
    )


def test_comparison_with_an_existing_file_includes_tokens(tmp_path: Path) -> None:
    index = packed(ROLLOUTS, 16)
    index.save(tmp_path / "d.samples", source={"fingerprint": "f", "tokens": "1"})
    same: dict[str, Any] = {"strategy": "tree", "parameters": index.parameters, "seed": 0}
    same |= {"buckets": [16], "dataset": "f"}
    assert how_it_differs(tmp_path / "d.samples", **same, tokens="1") is None
    assert "other tokens" in str(how_it_differs(tmp_path / "d.samples", **same, tokens="2"))

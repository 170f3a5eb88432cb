"""Groups of documents, against plain definitions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import needs_torch  # noqa: F401
import numpy as np
import pytest
from commands import build, printed
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_inputs import as_packing, lengths, packings, same_arrays
from reference import DEFINITIONS
from reference.groups import grouped

from megapack.data import PackedDataset, Schedule
from megapack.errors import ConfigError, ResumeError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.groups import GROUP_COUNTS
from megapack.storage import IndexedDataset
from tests.data.corpora import write_documents

LENGTHS = np.random.default_rng(5).integers(0, 60, 4000).astype(np.int32)


# ---- groups


@st.composite
def documents_in_groups(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    found = draw(lengths)
    ids = draw(st.lists(st.integers(-1, 4), min_size=len(found), max_size=len(found)))
    return found, ids


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@settings(max_examples=settings.default.max_examples // 3)  # the definition processes single tokens
@given(data=st.data())
def test_groups_equal_definition(name: str, data: st.DataObject) -> None:
    documents, ids = data.draw(documents_in_groups(), label="lengths, ids")
    chosen = data.draw(packings(name), label="packing")
    if data.draw(st.booleans(), label="aligned"):
        chosen["buckets"] = [4 * capacity for capacity in chosen["buckets"]]
        chosen = {k: v for k, v in chosen.items() if k in ("buckets", "seed", "shuffle")}
        chosen["alignment"] = 4
    if data.draw(st.booleans(), label="room"):
        chosen["fim_room"] = min(3, chosen["buckets"][-1])
    defined = grouped(DEFINITIONS[name], ids, documents, **chosen)
    index = pack(np.array(documents, np.int32), name, groups=ids, threads=2, **chosen)
    packing = as_packing(index)
    assert packing.buckets == defined.packing.buckets
    assert (np.asarray(index.segment_joined) == np.array(defined.joined, np.uint8)).all()
    metrics = index.metrics()
    found = [metrics[name] for name in ("num_groups", "num_groups_longer_than_largest_bucket")]
    assert [*found, metrics["num_cut_groups"]] == list(defined[2:])
    if not {"alignment", "fim_room"} & set(chosen):
        assert packing == defined.packing
    index.verify(np.array(documents, np.int32))
    if name == "bucket" and not {"promote", "padding_threshold", "max_segments"} & set(chosen):
        assert metrics["num_cut_groups"] == metrics["num_groups_longer_than_largest_bucket"]
        assert metrics["num_truncated_documents"] <= sum(n > index.buckets[-1] for n in documents)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_documents_without_group_are_packed_as_without_groups(name: str) -> None:
    buckets = [16, 32] if STRATEGIES[name].many_buckets else [32]
    plain = pack(LENGTHS, name, buckets=buckets, seed=3)
    alone = pack(LENGTHS, name, buckets=buckets, seed=3, groups=np.full(len(LENGTHS), -1))
    assert same_arrays(plain, alone) and not np.asarray(alone.segment_joined).any()
    assert alone.metrics() == {**plain.metrics(), **dict.fromkeys(GROUP_COUNTS, 0)}


def test_example_of_module_docstring() -> None:
    index = pack([2, 3, 4, 4, 3, 9], "bucket", buckets=[8], groups=[7, 7, -1, 5, 7, 5])
    samples = [index.sample(i)[1] for i in range(index.num_samples)]
    assert [(0, 0, 2), (1, 0, 3), (4, 0, 3)] in samples
    metrics = index.metrics()
    assert [metrics[name] for name in GROUP_COUNTS] == [2, 1, 1]


def test_group_is_cut_after_the_document_that_fills_a_bucket() -> None:
    index = pack([5, 3, 3], "bucket", buckets=[8], groups=[7, 7, 7])
    samples = [index.sample(i)[1] for i in range(index.num_samples)]
    found = {tuple(d for d, _, _ in of): index.groups_of(i) for i, of in enumerate(samples)}
    assert found == {(0, 1): [0, 0], (2,): [0]}


@pytest.mark.parametrize("wrong", [[1, 2], [[1, 2, 3]], [0.5, 1, 2], np.array(["a", "b", "c"])])
def test_invalid_group_ids_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"it must be \(3,\) integers"):
        pack([1, 2, 3], buckets=[8], groups=wrong)


# ---- groups on the command line, from text to a sample


REPOSITORIES = ["a", "b", None, "a", "c", "a", "c"]


def test_groups_from_text_key_to_sample(tmp_path: Path) -> None:
    repos = [{} if name is None else {"repo": name} for name in REPOSITORIES]
    rows = [{"text": f"text number {i} " * 3, **repo} for i, repo in enumerate(repos)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prefix, samples = tmp_path / "c", tmp_path / "c.samples"
    text = ("--input", tmp_path / "c.jsonl", "--tokenizer", "bytes", "--append-eod")
    printed("tokenize", *text, "--group-key", "repo", "--output-prefix", prefix)
    ids = IndexedDataset(f"{prefix}.groups").tokens
    assert [ids[0] == ids[i] for i in (3, 5)] == [True, True] and ids[4] == ids[6]
    assert ids[2] == -1 and len({*ids.tolist()}) == 4

    how = (prefix, "--buckets", "64,192", "--groups")
    assert re.search(r"groups of documents +2\n", printed("pack", *how, "auto"))
    index, lengths = SampleIndex.load(samples), IndexedDataset(prefix).document_lengths
    assert same_arrays(index, pack(lengths, buckets=[64, 192], groups=ids))
    contents = [[d for d, _, _ in index.sample(i)[1]] for i in range(len(index))]
    [of_a] = [i for i, documents in enumerate(contents) if documents[:3] == [0, 3, 5]]
    shown = printed("inspect", samples, "--sample", of_a)
    assert "document 3, in the group of segment 0" in shown
    assert re.search(r"cu_seqlens \[0, 129.*\] with attention: group", shown)
    again = build("pack", *how, "auto")
    assert again.returncode == 0 and "nothing to do" in again.stderr
    np.save(tmp_path / "ids.npy", np.zeros(7, np.int64))
    assert "other groups" in printed("pack", *how, tmp_path / "ids.npy", status=2)

    batch = PackedDataset(prefix, samples, attention="group").micro_batch([of_a])
    assert batch["cu_seqlens"][1] == 129 and (batch["labels"][0, :128] >= 0).all()
    printed("pack", *how, "auto", "--output", tmp_path / "c.shards.json")
    sharded = PackedDataset(None, tmp_path / "c.shards.json", attention="group")
    assert sharded.micro_batch([of_a])["cu_seqlens"].equal(batch["cu_seqlens"])
    compared = printed("compare", *how, "auto")
    assert "2 groups of documents" in compared and "--groups auto" in compared


def test_missing_groups_are_refused_by_name(tmp_path: Path) -> None:
    dataset = write_documents(tmp_path / "d", [[1] * 5, [2] * 7])
    np.save(tmp_path / "three.npy", np.zeros(3, np.int64))
    (tmp_path / "empty.npy").touch()
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 and nothing else")
    for groups, status, message in (
        ("auto", 2, "tokenize with --group-key"),
        (tmp_path / "three.npy", 2, "must be (2,) integers"),
        (tmp_path / "empty.npy", 1, "is not a .npy file of numbers: "),
        (tmp_path / "zip.npy", 1, "is not a .npy file of numbers: "),
    ):
        command = ("pack", dataset.prefix, "--buckets", 8, "--groups", groups)
        assert message in printed(*command, status=status)
    plain = pack(dataset.document_lengths, buckets=[8])
    with pytest.raises(ConfigError, match="no source was packed with groups"):
        PackedDataset(dataset, plain, attention="group")
    grouped = pack(dataset.document_lengths, buckets=[8, 16], groups=[1, 1])
    both = [PackedDataset(dataset, grouped, attention=how) for how in ("document", "group")]
    alone, together = (Schedule(data, tokens_per_step=16) for data in both)
    assert together.resume_step(together.state_dict(3)) == 3
    with pytest.raises(ResumeError, match="attention was None and is 'group'"):
        together.resume_step(alone.state_dict(3))
    with pytest.raises(ConfigError, match="positions: document restarts positions"):
        PackedDataset(dataset, grouped, attention="group", positions="document")


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"pad"}))  # one unit per sample
def test_adjacent_parts_of_a_cut_group_are_joined(name: str) -> None:
    """A group longer than the largest bucket is cut; parts in one sample are joined."""
    ids, met = [0, 0, 1, 1, -1, -1, 1], 0
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 12, len(ids))
        buckets = [8, 16] if STRATEGIES[name].many_buckets else [16]
        index = pack(lengths, name, buckets=buckets, groups=ids, seed=seed)
        for sample in range(index.num_samples):
            documents = [document for document, _, _ in index.sample(sample)[1]]
            numbers = index.groups_of(sample)
            for i in range(1, len(documents)):
                alike = ids[documents[i]] == ids[documents[i - 1]] >= 0
                assert (numbers[i] == numbers[i - 1]) == alike
                met += alike
    assert met

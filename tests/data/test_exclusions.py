"""Excluded documents: batches equal those of a dataset without them."""

from __future__ import annotations

import json
import pickle
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megapack.data import (
    BatchLayout,
    BucketBatchSampler,
    PackedDataset,
    Schedule,
    Stage,
    build_loader,
    load_blend,
    open_blend,
)
from megapack.data.steps import StepView
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.storage.dataset import read_documents
from tests.data.corpora import (
    index_of,
    of_rank,
    packed_documents,
    packed_index,
    packed_lengths,
    write_documents,
)
from tests.data.test_gather import TENSORS, corpora, samples_of
from tests.reference import gather as reference
from tests.reference.gather import pieces


@given(case=corpora(), data=st.data())
def test_masked_sample_equals_the_sample_without_segments(
    case: dict[str, Any], data: st.DataObject
) -> None:
    """Try all options of the gather, two lists that add up, and every number of lists in force."""
    numbers = st.integers(0, len(case["documents"]) - 1)
    lists = [data.draw(st.lists(numbers)) for _ in range(2)]
    rows, row_tokens, capacity = case["rows"], case["row_tokens"], case["capacity"]
    layout = BatchLayout(micro_batch_tokens=rows * row_tokens, kind="rows", row_tokens=row_tokens)
    with tempfile.TemporaryDirectory() as folder:
        files = [write_list(Path(folder) / f"list{i}.npy", list_) for i, list_ in enumerate(lists)]
        documents = write_documents(Path(folder) / "docs", case["documents"], case["dtype"])
        stages = [Stage(from_step=i + 1, exclude={"docs": file}) for i, file in enumerate(files)]
        how = {"names": ["docs"], "stages": stages, **case["options"]}
        dataset = PackedDataset(documents, samples_of(case), **how)
        shape = {"num_rows": rows, "row_tokens": row_tokens, "capacity": capacity}
        for force in range(3):
            gone = {document for list_ in lists[:force] for document in list_}
            samples = [[s for s in sample if s[0] not in gone] for sample in case["samples"]]
            joined = still_joined(case, gone)
            how = {**shape, **case["options"]}
            expected = reference.gather(case["documents"], samples, joined=joined, **how)
            ids = np.arange(len(samples))
            batch = dataset.micro_batch(ids, layout=layout, view=StepView(num_lists=force))
            for name in TENSORS:
                assert batch[name].flatten().tolist() == getattr(expected, name), name
            lengths_of = "rooms" if "cu_seqlens_padded" in batch else "lengths"
            bounds = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
            assert bounds.tolist() == expected.cu_seqlens(lengths_of)
            assert dataset.count_labels(ids, StepView(num_lists=force)).sum() == sum(
                expected.loss_mask
            )
            attention = case["options"]["attention"]
            attended = check_costs(dataset, force, samples, capacity, attention, joined)
            assert [
                dataset.samples.segments(i, StepView(num_lists=force))[1] for i in ids.tolist()
            ] == samples
            lengths_there = dataset.samples.segment_lengths(ids, StepView(num_lists=force)).tolist()
            if attention == "group":
                assert (
                    joined_of(
                        [dataset.samples.groups_of(i, StepView(num_lists=force)) for i in ids]
                    )
                    == joined
                )
            assert lengths_there == [length for length in attended if length]


def test_rest_of_a_group_does_not_see_earlier_documents(tmp_path: Path) -> None:
    index = index_of({8: [[(0, 0, 2), (1, 0, 2), (2, 0, 3)]]}, [2, 2, 3])
    index = replace(index, segment_joined=np.array([0, 0, 1], np.uint8), groups={"ids": "by hand"})
    documents = write_documents(tmp_path / "docs", [[1, 2], [3, 4], [5, 6, 7]])
    stages = [Stage(from_step=1, exclude={"docs": write_list(tmp_path / "first.npy", [1])})]
    dataset = PackedDataset(documents, index, names=["docs"], stages=stages, attention="group")
    for force, bounds in enumerate(([0, 2, 7, 8], [0, 2, 5, 8])):
        assert (
            dataset.micro_batch([0], view=StepView(num_lists=force))["cu_seqlens"].tolist()
            == bounds
        )


def still_joined(case: dict[str, Any], gone: set[int]) -> set[tuple[int, int]]:
    """Return the (sample, segment) pairs, among the remaining segments, that continue a group."""
    groups: list[list[int]] = []
    for i, sample in enumerate(case["samples"]):
        group = 0
        groups.append([])
        for s, (document, _, _) in enumerate(sample):
            group += (i, s) not in case["joined"]
            if document not in gone:
                groups[i].append(group)
    return joined_of(groups)


def joined_of(groups: list[list[int]]) -> set[tuple[int, int]]:
    """Return the (sample, segment) pairs with the group of the segment before."""
    return {
        (i, s)
        for i, numbers in enumerate(groups)
        for s in range(1, len(numbers))
        if numbers[s] == numbers[s - 1]
    }


def check_costs(
    dataset: PackedDataset, num_lists: int, samples: Any, capacity: int, attention: str, joined: Any
) -> list[int]:
    """Check costs against the definition; return the lengths of the attention segments."""
    expected, attended = [], []
    for i, sample in enumerate(samples):
        lengths = [length for _, _, length in sample]
        starts = [s for s in range(len(lengths)) if (i, s) not in joined]
        runs = [sum(lengths[a:b]) for a, b in pairwise([*starts, len(lengths)])]
        attends = {"sample": [sum(lengths)], "document": lengths, "group": runs}[attention]
        attended += attends
        expected.append([*attends, capacity - sum(lengths)])
    ids = np.arange(len(samples))
    for window in (None, 12):
        costs = dataset.samples.attention_cost(
            ids, capacity, StepView(window=window, num_lists=num_lists)
        )
        parts = [
            [p for n in of_sample for p in pieces(n, window or capacity)] for of_sample in expected
        ]
        assert costs.tolist() == [sum(p * p for p in of_sample) for of_sample in parts]
    return attended


def write_list(path: Path, documents: Any) -> str:
    if path.suffix == ".npy":
        np.save(path, np.array(documents, np.int64))
    else:
        path.write_text("".join(f"{document}\n" for document in documents))
    return str(path)


def run_of(folder: Path, *stages: dict[str, Any], **options: Any) -> PackedDataset:
    """Return a run of two sources with these stages; every token is the number of its document."""
    sources = []
    for number, name in enumerate(("web", "code")):
        lengths = packed_lengths(120, 32, seed=number)
        if not (folder / f"{name}.idx").exists():
            ids = [[number * 1000 + d + 1] * int(n) for d, n in enumerate(lengths)]
            packed_documents(folder / name, ids, [16, 32])
        sources.append({"name": name, "prefix": name, "index": f"{name}.samples"})
    (folder / "blend.yaml").write_text(yaml.safe_dump({"sources": sources, "stages": [*stages]}))
    return open_blend(load_blend(folder / "blend.yaml"), **options)


@pytest.mark.parametrize("mix", ["step", "micro_step"])
def test_loader_masks_excluded_documents_from_the_step_on(tmp_path: Path, mix: Any) -> None:
    """Excluded tokens disappear from the batches; files are relative to the manifest."""
    gone = {"web": set(range(0, 120, 3)), "code": set(range(40))}
    write_list(tmp_path / "web.txt", gone["web"])
    write_list(tmp_path / "code.npy", sorted(gone["code"]))
    stages = [
        {"from_tokens": 5 * 256, "exclude": {"web": "web.txt"}},
        {"from_step": 9, "weights": {"web": 1, "code": 1}, "exclude": {"code": "code.npy"}},
    ]
    data = run_of(tmp_path, *stages)
    options = {"mix": mix, "micro_step_tokens": 128 if mix == "micro_step" else None}
    schedule = Schedule(data, tokens_per_step=256, **options)
    bare = run_of(tmp_path, *({**stage, "exclude": None} for stage in stages))
    plain = Schedule(bare, tokens_per_step=256, **options)
    begins = {"web": 5, "code": 9}
    seen_before: set[str] = set()
    for rank in range(2):
        for batch in build_loader(data, schedule, **of_rank(rank, 2, 64, num_steps=30)):
            tokens = set(batch["tokens"].flatten().tolist()) - {0}
            for number, (name, documents) in enumerate(gone.items()):
                shown = {t - 1 - number * 1000 for t in tokens} & documents
                assert not shown or batch["step"] < begins[name]
                seen_before |= {name for _ in shown}
    assert seen_before == {"web", "code"}
    check_reported_ids(data, schedule)
    for step in range(30):  # the same samples are drawn
        masked_step, plain_step = schedule.step(step), plain.step(step)
        assert masked_step.sample_ids.tolist() == plain_step.sample_ids.tolist()
        assert (masked_step.view.num_lists > 0) == (step >= 5)
        assert masked_step.num_label_tokens <= plain_step.num_label_tokens


def check_reported_ids(data: PackedDataset, schedule: Schedule) -> None:
    """Sample ids in batches, micro batches, logs and draws do not depend on masks; torch's
    DataLoader masks the same documents."""
    arguments = of_rank(micro=64, num_steps=30)
    sampler = BucketBatchSampler(schedule, **arguments)
    torch_loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)
    for batch, items, micro in zip(
        build_loader(data, schedule, **arguments), torch_loader, sampler, strict=True
    ):
        ids = batch["sample_ids"].tolist()
        assert ids == list(micro) == micro.sample_ids.tolist() and max(ids) < len(data)
        assert all(isinstance(data.samples.segments(i), tuple) for i in ids)
        tokens = torch.cat([item["tokens"] for item in items])
        assert torch.equal(tokens, batch["tokens"].flatten())
        step = schedule.step(batch["step"])
        assert set(ids) <= set(step.sample_ids.tolist())
        assert (micro.view.num_lists > 0) == (batch["step"] >= 5)


def test_lists_are_compared_at_a_resume(tmp_path: Path) -> None:
    """A list added from the present step on is logged; one added before it is refused."""
    write_list(tmp_path / "a.txt", [3, 4, 5])

    def schedule(*stages: dict[str, Any]) -> Schedule:
        return Schedule(run_of(tmp_path, *stages), tokens_per_step=256)

    listed = {"from_step": 6, "exclude": {"web": "a.txt"}}
    state = json.loads(json.dumps(schedule().state_dict(6)))
    [change] = schedule(listed).check_state(state)
    assert change.startswith("from step 6 on exclude was {} and is {'web': '3 documents, xxh3 ")
    done = json.loads(json.dumps(schedule(listed).state_dict(9)))
    assert schedule(listed).check_state(done) == []
    again = write_list(tmp_path / "again.npy", [5, 3, 4, 4])  # the same documents
    assert schedule({"from_step": 6, "exclude": {"web": again}}).check_state(done) == []
    for others in ([{**listed, "exclude": {"code": "a.txt"}}], [{**listed, "from_step": 7}], []):
        with pytest.raises(ResumeError, match="exclude was"):
            schedule(*others).check_state(done)
    assert "masked" in schedule().check_state(done, allow_change=["exclude", "from_step"])[0]
    for edited in ([3, 4], [3, 4, 6]):
        write_list(tmp_path / "a.txt", edited)
        with pytest.raises(ResumeError, match="exclude was"):
            schedule(listed).check_state(done)


def test_pickled_dataset_keeps_its_lists(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_list(file, range(60))
    data = run_of(tmp_path, {"from_step": 1, "exclude": {"web": "a.txt"}})
    text = pickle.dumps(data)
    file.unlink()
    copy = pickle.loads(text)
    ids = np.arange(5)
    assert (
        copy.count_labels(ids, StepView(num_lists=1)).tolist()
        == data.count_labels(ids, StepView(num_lists=1)).tolist()
    )
    assert copy.count_labels(ids, StepView(num_lists=1)).sum() < data.count_labels(ids).sum()


def test_label_counts_need_no_tokens(tmp_path: Path) -> None:
    """Count with bare indices, without tokens."""
    index = packed_index(200, (16, 32))
    file = write_list(tmp_path / "a.txt", range(0, 200, 2))
    lengths = packed_lengths(200, 32)
    stages = [Stage(from_step=1, exclude={"a": file})]
    schedule = Schedule(index, names=["a"], tokens_per_step=64, stages=stages)
    for step in range(1, 20):
        samples = schedule.step(step).sample_ids.tolist()
        segments = [
            s
            for sample in samples
            for s in schedule.samples.segments(sample, StepView(num_lists=1))[1]
        ]
        assert all(document % 2 for document, _, _ in segments)
        ends = sum(begin + n == lengths[document] for document, begin, n in segments)
        labels = sum(n for _, _, n in segments) - ends
        assert schedule.step(step).num_label_tokens == labels


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("3\nfour\n", "line 2: 'four' is not a document id"),
        ("-1\n", "line 1: '-1' is not a document id"),
        ("120\n", "excludes document 120 of 'web', which has 120 (counted from 0)"),
        (np.array([1.5]), "has float64 of shape (1,)"),
        (np.array([[1]]), "has int64 of shape (1, 1)"),
        (np.array([-3, 2]), "has ids -3 to 2, not 0"),
        (np.array([5, 2**63], np.uint64), f"to {2**63}, not 0 to 2^62 - 1"),
        (b"no npy", "is not a .npy file of numbers"),
        (b"", "is not a .npy file of numbers"),
    ],
)
def test_file_without_a_list_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / ("list" if isinstance(content, str) else "list.npy")
    if isinstance(content, np.ndarray):
        np.save(file, content)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises((FormatError, ConfigError)) as caught:
        run_of(tmp_path, {"from_step": 1, "exclude": {"web": file.name}})
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_lists_may_be_empty_unsorted_or_have_crlf(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"7\r\n\r\n 2 \n7")
    assert read_documents(tmp_path / "a").tolist() == [2, 7]
    (tmp_path / "b").write_bytes(b"")
    assert read_documents(tmp_path / "b").tolist() == []
    data = run_of(tmp_path, {"from_step": 3, "exclude": {"web": "b"}})
    assert "exclude" not in Schedule(data, tokens_per_step=256).identity()["stages"][0]


def test_unknown_sources_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="excludes documents of 'wep', an unknown or ambiguous source; sources are web, code",
    ):
        run_of(tmp_path, {"from_step": 1, "exclude": {"wep": "x"}})
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        run_of(tmp_path, {"from_step": 1, "exclude": {"web": "missing.txt"}})

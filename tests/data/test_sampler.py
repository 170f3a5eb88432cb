"""Assignment to ranks: the same bucket at the same time, together exactly the step, equal work."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapack import _core
from megapack.data import BatchLayout, BucketBatchSampler, PackedDataset, Schedule
from megapack.data import sampler as dealing
from megapack.data.sampler import assign
from megapack.data.tensors import _describe
from megapack.errors import ConfigError
from megapack.packing import pack
from tests.data.corpora import (
    of_rank,
    packed_index,
    packed_lengths,
    random_documents,
    small_loader,
    write_documents,
)

if TYPE_CHECKING:
    from tests.training.processes import Zygote


INDEX = packed_index(600, (16, 32, 64))


@st.composite
def launches(draw: st.DrawFn) -> dict[str, Any]:
    """Draw ranks, groups that share long samples, and fitting micro batches and steps."""
    group = draw(st.sampled_from([1, 1, 2, 4]))
    size = group * draw(st.sampled_from([1, 2, 3, 4, 6] if group == 1 else [1, 2, 3]))
    tokens = draw(st.sampled_from([n for n in (16, 32, 64, 128, 192) if n * group >= 64]))
    draw_tokens = size * tokens * draw(st.integers(1, 3))
    options = {
        "tokens_per_step": draw_tokens,
        "order": draw(st.sampled_from(["proportional", "uniform", "grow-p2", "sequential"])),
        "seed": draw(st.integers(0, 1000)),
    }
    if draw(st.integers(0, 2)) == 2:
        options |= {"mix": "micro_step", "micro_step_tokens": draw_tokens}
        options["tokens_per_step"] *= 2
    return {"group": group, "size": size, "tokens": tokens, "schedule": options}


def samplers(
    schedule: Schedule, size: int, micro_batch_tokens: int, **options: Any
) -> list[BucketBatchSampler]:
    of_ranks = [of_rank(rank, size, micro_batch_tokens, **options) for rank in range(size)]
    return [BucketBatchSampler(schedule, **arguments) for arguments in of_ranks]


@given(launch=launches(), dealing=st.sampled_from(["balanced", "in_order"]))
def test_ranks_share_buckets_and_cover_the_step(launch: dict[str, Any], dealing: str) -> None:
    """Groups share only samples longer than a micro batch."""
    group, size, tokens = (launch[name] for name in ("group", "size", "tokens"))
    schedule = Schedule(INDEX, **launch["schedule"])
    options = {"sequence_parallel_size": group, "num_steps": 4, "dealing": dealing}
    ranks = samplers(schedule, size, tokens, **options)
    assert {len(rank) for rank in ranks} == {sum(map(ranks[0].num_micro_steps, range(4)))}
    seen: dict[int, list[int]] = defaultdict(list)
    work: dict[int, list[Any]] = defaultdict(list)
    for row in zip(*ranks, strict=True):
        assert len({(b.step, b.micro_step, b.bucket, b.capacity) for b in row}) == 1
        step, capacity = row[0].step, row[0].capacity
        shared = group if capacity > tokens else 1
        assert {batch.sequence_parallel_size for batch in row} == {shared}
        num_labels = schedule.step(step).num_label_tokens
        assert {batch.num_step_label_tokens for batch in row} == {num_labels}
        for first in range(0, size, shared):
            members = [batch.sample_ids.tolist() for batch in row[first : first + shared]]
            assert all(ids == members[0] for ids in members), "a group has one micro batch"
            assert len(members[0]) * capacity == tokens * shared
            seen[step] += members[0]
            cost = schedule.samples.attention_cost(np.array(members[0]), capacity).sum()
            work[step] += [cost / shared] * shared
    for step, ids in seen.items():
        assert sorted(ids) == sorted(schedule.step(step).sample_ids.tolist()), "each sample once"
        assert np.allclose(ranks[0].attention_of_ranks(step), np.reshape(work[step], (-1, size)))


@given(size=st.integers(1, 9), micro_batches=st.integers(1, 12))
def test_pad_last_gives_some_ranks_empty_micro_batches(size: int, micro_batches: int) -> None:
    schedule = Schedule(INDEX, tokens_per_step=64 * micro_batches)
    if micro_batches % size:
        with pytest.raises(ConfigError, match="pad_last to true"):
            samplers(schedule, size, 64)
    ranks = samplers(schedule, size, 64, pad_last=True)
    batches = [sampler.micro_batches(3) for sampler in ranks]
    assert {len(of_rank) for of_rank in batches} == {-(-micro_batches // size)}
    ids = [i for of_rank in batches for batch in of_rank for i in batch]
    assert sorted(ids) == sorted(schedule.step(3).sample_ids.tolist())
    empty = sum(len(batch) == 0 for of_rank in batches for batch in of_rank)
    assert empty == size * -(-micro_batches // size) - micro_batches


def dealt(costs: list[int], sizes: list[int]) -> list[int]:
    """Assign as defined in csrc/core/schedule/assign.hpp: try every exchange, take the first
    best."""
    bins: list[list[int]] = [[] for _ in sizes]

    def load(b: int) -> int:
        return sum(costs[i] for i in bins[b])

    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        bins[
            min((b for b, members in enumerate(bins) if len(members) < sizes[b]), key=load)
        ].append(item)
    for _ in range(64):
        fullest = max(range(len(bins)), key=load)
        best = load(fullest)
        if best <= 1.001 * sum(costs) / len(bins):
            break
        chosen = None
        for other in set(range(len(bins))) - {fullest}:
            for i, j in itertools.product(range(len(bins[fullest])), range(len(bins[other]))):
                moved = costs[bins[fullest][i]] - costs[bins[other][j]]
                if max(load(fullest) - moved, load(other) + moved) < best:
                    best = max(load(fullest) - moved, load(other) + moved)
                    chosen = other, i, j
        if chosen is None:
            break
        other, i, j = chosen
        bins[fullest][i], bins[other][j] = bins[other][j], bins[fullest][i]
    return [i for members in bins for i in sorted(members, key=lambda i: (-costs[i], i))]


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=7), data=st.data())
def test_assignment_is_as_defined(sizes: list[int], data: st.DataObject) -> None:
    """Every bin has its number of samples, costliest first, and no exchange balances better."""
    cost = data.draw(st.sampled_from([st.integers(0, 4), st.integers(0, 1 << 40)]))
    costs = data.draw(st.lists(cost, min_size=sum(sizes), max_size=sum(sizes)))
    order = _core.assign_evenly(np.array(costs, np.int64), np.array(sizes, np.int64))
    assert order.tolist() == dealt(costs, sizes)


def test_assigned_work_is_nearly_equal() -> None:
    lengths = packed_lengths(60_000, 1024, seed=4)
    index = pack(lengths, "bucket", buckets=[256, 512, 1024])
    schedule = Schedule(index, tokens_per_step=16 * 6 * 1024, seed=1)
    [sampler, *_] = samplers(schedule, 16, 2 * 1024)
    dealt, undealt = [], []
    for step in range(30):
        [imbalance] = sampler.imbalance(step)
        dealt.append(imbalance.attention)
        undealt.append(imbalance.attention_in_order)
        assert 1 <= imbalance.attention <= imbalance.attention_in_order
    assert np.mean(dealt) < 1.02 and np.mean(undealt) > 1.1
    [batch, *_] = sampler.micro_batches(0)
    assert batch.imbalance == (dealt[0], undealt[0])


def test_micro_batches_of_a_rank_are_balanced_and_sorted() -> None:
    rng = np.random.default_rng(3)
    costs = rng.integers(50, 500, 4 * 5 * 8)
    assignment = assign(costs, num_ranks=4, num_micro_batches=20)
    for rank in range(4):
        loads = [costs[positions].sum() for positions in assignment.micro_batches(rank)]
        assert loads == sorted(loads, reverse=True)
        assert max(loads) / np.mean(loads) < 1.05
    in_order = assign(costs, num_ranks=4, num_micro_batches=20, how="in_order")
    assert in_order.order.tolist() == list(range(160))
    assert in_order.imbalance.attention == in_order.imbalance.attention_in_order


def test_unfitting_sizes_are_refused_with_fitting_ones() -> None:
    schedule = Schedule(INDEX, tokens_per_step=64 * 12)
    for options, message in (
        ({"micro_batch_tokens": 100}, "does not divide .*; set micro_batch_tokens to 128"),
        (
            {"micro_batch_tokens": 100, "data_parallel_size": 5},
            "set the number of ranks to 4 and micro_batch_tokens to 64",
        ),
        (
            {"micro_batch_tokens": 32},
            "cannot hold whole samples of 64; set micro_batch_tokens to 64",
        ),
        (
            {"micro_batch_tokens": 64, "data_parallel_size": 5},
            "64 tokens in tokens_per_step 768; set tokens_per_step to 640, or the number of ranks "
            "to 4, or pad_last to true, which gives 3 of 5 ranks an empty micro batch",
        ),
        ({"data_parallel_rank": 2, "data_parallel_size": 2}, "below data_parallel_size, 2"),
        ({"start_step": -1}, "counted from 0"),
        ({"num_steps": -1}, "num_steps is -1; it must be at least 0"),
        ({"dealing": "even"}, "dealing is 'even'; it must be 'balanced' or 'in_order'"),
    ):
        with pytest.raises(ConfigError, match=message):
            BucketBatchSampler(schedule, **{**of_rank(micro=64), **options})


@pytest.mark.parametrize("finite", [False, True])
def test_a_start_after_the_last_step_is_refused(finite: bool) -> None:
    schedule = Schedule(INDEX, tokens_per_step=64 * 12, finite=finite)
    count = schedule.num_steps()
    assert list(BucketBatchSampler(schedule, **of_rank(micro=64, start_step=count))) == []
    per_epoch = "" if finite else " per epoch"
    message = f"start_step is {count + 1}, and the schedule has {count} steps{per_epoch}; set start"
    with pytest.raises(ConfigError, match=f"{message}_step to at most {count}"):
        BucketBatchSampler(schedule, **of_rank(micro=64, start_step=count + 1))
    options = of_rank(micro=64, start_step=count + 1, num_steps=1)
    if finite:
        with pytest.raises(ConfigError, match=message):
            BucketBatchSampler(schedule, **options)
    else:  # the second epoch
        assert len(BucketBatchSampler(schedule, **options)) == 12


def test_rows_hold_samples_that_do_not_divide_them() -> None:
    index = pack(packed_lengths(300, 50), "bucket", buckets=[10, 24, 50])
    schedule = Schedule(index, tokens_per_step=64 * 8, row_tokens=64)
    for batch in samplers(schedule, 2, 128)[1]:
        assert len(batch) == 2 * (64 // batch.capacity)
    with pytest.raises(ConfigError, match="set micro_batch_tokens to 64"):
        samplers(schedule, 1, 32)


@pytest.mark.parametrize(
    ("capacity", "begins"), [(24, [0, 32]), (10, [0, 10, 20, 30, 40, 50]), (21, [0, 21, 42])]
)
def test_samples_of_a_row_begin_at_equal_distances(
    tmp_path: Path, capacity: int, begins: list[int]
) -> None:
    """Check sample starts against ``ScheduleConfig.row_tokens``, and boundaries."""
    dataset = write_documents(tmp_path / "d", [[number + 1] * 9 for number in range(len(begins))])
    index = pack([9] * len(begins), "pad", buckets=[capacity])
    layout = BatchLayout(micro_batch_tokens=64, kind="rows", row_tokens=64)
    batch = PackedDataset(dataset, index).micro_batch(range(len(begins)), layout=layout)
    places = [begin + i for begin in begins for i in range(9)]
    assert np.flatnonzero(batch["tokens"][0].numpy()).tolist() == places
    ends = [*begins[1:], 64]
    bounds = [x for begin, end in zip(begins, ends, strict=True) for x in (begin + 9, end)]
    assert batch["cu_seqlens"].tolist() == [0, *dict.fromkeys(bounds)]


def test_the_epoch_is_the_default_length() -> None:
    schedule = Schedule(INDEX, tokens_per_step=128)
    [whole] = samplers(schedule, 1, 128)
    [later] = samplers(schedule, 1, 128, start_step=5)
    assert len(whole) == schedule.num_steps() == len(later) + 5
    assert [b.step for b in later] == list(range(5, schedule.num_steps()))


def test_a_rank_sorts_only_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,096 ranks a Python loop over all ranks took 0.07 s per step."""
    calls: list[int] = []
    assign_evenly = dealing._core.assign_evenly

    def counted(costs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        calls.append(len(sizes))
        return assign_evenly(costs, sizes)

    ranks = 512
    schedule = Schedule(INDEX, tokens_per_step=64 * 2 * ranks)
    sampler = BucketBatchSampler(schedule, **of_rank(3, ranks, 64))
    monkeypatch.setattr(dealing, "_core", SimpleNamespace(assign_evenly=counted))
    assert len(sampler.micro_batches(1)) == 2
    assert calls == [ranks, 2]


# ---- Ranks that share long samples: a group has the same samples, each rank a slice


def test_the_slices_of_a_group_are_its_micro_batch(packed: PackedDataset) -> None:
    size, group, tokens = 4, 2, 32
    options = {"micro_batch_tokens": tokens, "sequence_parallel_size": group}
    ranks = [small_loader(packed, rank, size, **options) for rank in range(size)]
    kinds = set()
    for together in zip(*ranks, strict=True):
        capacity = together[0]["capacity"]
        shared = group if capacity > tokens else 1
        kinds.add(shared)
        layout = BatchLayout(micro_batch_tokens=tokens * shared)
        for first in range(0, size, shared):
            members = together[first : first + shared]
            ids = members[0]["sample_ids"].numpy()
            whole = packed.micro_batch(ids, layout=layout, capacity=capacity)
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert all(batch[name].shape == (1, tokens) for batch in members), name
                assert torch.equal(torch.cat([b[name] for b in members], 1), whole[name]), name
            for place, batch in enumerate(members):
                assert torch.equal(batch["cu_seqlens"], whole["cu_seqlens"]), "those of the whole"
                assert batch["max_seqlen"] == whole["max_seqlen"]
                if shared > 1:
                    assert batch["sequence_parallel_rank"] == place
                    assert batch["sequence_parallel_size"] == group
                else:
                    assert "sequence_parallel_rank" not in batch
    assert kinds == {1, group}, "only one kind of bucket: this covers half of the cases"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel_size": 3}, "sequence_parallel_size is 3, and 4 ranks cannot be"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size is 0"),
        ({}, "cannot hold whole samples of 64; set micro_batch_tokens to 64"),
        (
            {"sequence_parallel_size": 2, "micro_batch_tokens": 16},
            "a micro batch of 32 tokens of 2 ranks cannot hold whole samples of 64; set "
            "micro_batch_tokens to 32",
        ),
        ({"sequence_parallel_size": 2, "layout": "rows"}, "leave out layout='rows'"),
        ({"sequence_parallel_size": 2, "reuse_buffers": True}, "leave out layout='rows' and"),
    ],
)
def test_sizes_that_cannot_be_shared_are_refused(
    packed: PackedDataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_loader(packed, 0, 4, **{"micro_batch_tokens": 32, **options})


# ---- Ranks that disagree: all stop and name the rank and the field, in four real processes


PROGRAM = """
import json, os, sys
import torch.distributed as dist
from megapack.data import PackedDataset, Schedule, build_loader
from megapack.errors import RankMismatchError
from megapack.packing import pack
from megapack.storage import IndexedDataset

rank, folder, options = int(os.environ["RANK"]), sys.argv[1], json.loads(sys.argv[2])
dist.init_process_group("gloo")
mine = options.get(str(rank), {})
dataset = IndexedDataset(f"{folder}/d")
index = pack(dataset.document_lengths, "concat", buckets=[32], seed=mine.get("pack_seed", 0))
packed = PackedDataset(dataset, index, loss=mine.get("loss", "token_mean"))
schedule = Schedule(packed, tokens_per_step=32 * 8, seed=mine.get("seed", 7))
loader = build_loader(
    packed, schedule, data_parallel_rank=rank, data_parallel_size=4, micro_batch_tokens=64,
    start_step=mine.get("start_step", 0), num_steps=mine.get("num_steps", 9), check_ranks_every=3,
    weighted_loss=True,
)
done = 0
try:
    for batch in loader:
        done = batch["step"]
    print(json.dumps({"finished": True, "step": done}))
except RankMismatchError as error:
    print(json.dumps({"finished": False, "step": done, "error": str(error)}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_documents(path / "d", random_documents(packed_lengths(200, 32)))
    return path


def run_ranks(
    zygote: Zygote, folder: Path, options: dict[int, dict[str, int]]
) -> list[dict[str, Any]]:
    program, log = folder / "program.py", folder / f"{len(list(folder.iterdir()))}.log"
    program.write_text(PROGRAM)
    ranks = zygote.start([str(program), str(folder), json.dumps(options)], 4, log)
    ranks.succeed()
    return [json.loads(path.read_text().splitlines()[-1]) for path in ranks.logs]


@pytest.mark.multiprocess
def test_ranks_that_agree_end_and_others_are_named(zygote: Zygote, folder: Path) -> None:
    assert all(r["finished"] and r["step"] == 8 for r in run_ranks(zygote, folder, {}))
    wrong: Any = {1: {"pack_seed": 5}, 2: {"loss": "longalign", "seed": 8}}
    wrong[3] = {"start_step": 4, "num_steps": 5}
    for result in run_ranks(zygote, folder, wrong):
        assert not result["finished"]
        assert result["step"] == 0 and "seed is 8 on rank 2 and 7 on the other 3" in result["error"]
        assert "step is 4 on rank 3 and 0 on the other 3" in result["error"]
        assert "indices is #" in result["error"] and "on rank 1" in result["error"]
        assert "loss is #" in result["error"]  # missing on the other ranks


def test_a_message_names_at_most_eight_ranks() -> None:
    text = _describe("seed", [3] * 20 + list(range(10, 22)))
    assert text.count("on rank") == 8
    assert text.endswith("and 3 on the other 20")

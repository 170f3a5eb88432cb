"""Ranks that share long samples: the same samples in a group, a slice of the tokens each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import BatchLayout, BucketBatchSampler, PackedDataset, Schedule
from megapack.errors import ConfigError
from tests.data.corpora import packed_index, small_loader

INDEX = packed_index(600, (16, 32, 64))


@st.composite
def launches(draw: st.DrawFn) -> dict[str, int]:
    """Groups, and micro batches of which the longest samples need a group's or one rank's."""
    group = draw(st.sampled_from([2, 4]))
    size = group * draw(st.sampled_from([1, 2, 3]))
    tokens = draw(st.sampled_from([16, 32, 64, 128]))
    if tokens * group < 64:
        tokens = 32
    steps = draw(st.integers(1, 2))
    return {"group": group, "size": size, "tokens": tokens, "step": size * tokens * steps}


@given(launch=launches(), dealing=st.sampled_from(["balanced", "in_order"]))
def test_groups_share_only_what_is_too_long(launch: dict[str, int], dealing: str) -> None:
    group, size, tokens = (launch[name] for name in ("group", "size", "tokens"))
    schedule = Schedule(INDEX, tokens_per_step=launch["step"], seed=3)
    ranks = [
        BucketBatchSampler(
            schedule,
            data_parallel_rank=rank,
            data_parallel_size=size,
            micro_batch_tokens=tokens,
            sequence_parallel_size=group,
            num_steps=4,
            dealing=dealing,  # type: ignore[arg-type]
        )
        for rank in range(size)
    ]
    for step in range(4):
        content = schedule.step(step)
        shared = group if content.capacity > tokens else 1
        found, work = [], []
        for together in zip(*(rank.micro_batches(step) for rank in ranks), strict=True):
            assert {item.sequence_parallel_size for item in together} == {shared}
            for first in range(0, size, shared):
                members = [item.sample_ids.tolist() for item in together[first : first + shared]]
                assert all(ids == members[0] for ids in members), "a group has one micro batch"
                assert len(members[0]) * content.capacity == tokens * shared
                found += members[0]
                cost = schedule.samples.attention_cost(np.array(members[0]), content.capacity)
                work.append(np.full(shared, cost.sum() / shared))
        assert sorted(found) == sorted(content.sample_ids.tolist()), "each sample once"
        work_of_ranks = np.concatenate(work).reshape(-1, size)
        assert np.allclose(ranks[0].attention_of_ranks(step), work_of_ranks)


def test_the_slices_of_a_group_are_its_micro_batch(packed: PackedDataset) -> None:
    size, group, tokens = 4, 2, 32
    ranks = [
        small_loader(packed, rank, size, micro_batch_tokens=tokens, sequence_parallel_size=group)
        for rank in range(size)
    ]
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
                assert torch.equal(batch["cu_seqlens"], whole["cu_seqlens"]), "of the whole"
                assert batch["max_seqlen"] == whole["max_seqlen"]
                if shared > 1:
                    assert batch["sequence_parallel_rank"] == place
                    assert batch["sequence_parallel_size"] == group
                else:
                    assert "sequence_parallel_rank" not in batch
    assert kinds == {1, group}, "one kind of bucket only: the test shows half of it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel_size": 3}, "sequence_parallel_size is 3, and 4 ranks cannot be"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size is 0"),
        ({}, "samples of 64: make micro_batch_tokens a multiple of 64, or sequence_parallel_size"),
        (
            {"sequence_parallel_size": 2, "micro_batch_tokens": 16},
            "a micro batch of 32 tokens of 2 ranks cannot hold whole samples of 64: make "
            "micro_batch_tokens a multiple of 32",
        ),
        ({"sequence_parallel_size": 2, "layout": "rows"}, "leave out layout='rows'"),
        ({"sequence_parallel_size": 2, "reuse_buffers": True}, "leave out layout='rows' and"),
    ],
)
def test_unshareable_refused(packed: PackedDataset, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_loader(packed, 0, 4, **{"micro_batch_tokens": 32, **options})

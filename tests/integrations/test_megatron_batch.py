"""get_batch for megatron-core 0.16: real tensor-parallel groups, real GPTModel, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.data import default_collate

from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron import batch
from megapack.integrations.hosts.megatron.batch import (
    flatten_rows,
    get_batch,
    to_packed_seq_params,
)
from megapack.planning import context_parallel_indices
from tests.integrations.harness import run_ranks
from tests.integrations.samples import make_row

KEYS = ("tokens", "labels", "loss_mask", "position_ids")
ROWS = [make_row([3, 5, 8], 1, 17), make_row([16], 100, 17)]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4))
def test_flattening_keeps_segments_and_drops_padding_entries(rows: list[list[int]]) -> None:
    longest = max(sum(row) for row in rows)
    rows = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    flat = flatten_rows(default_collate([make_row(row, 1, longest + 1) for row in rows]))
    lengths = [length for row in rows for length in row]
    assert flat["cu_seqlens"].dtype == torch.int32
    assert flat["cu_seqlens"].diff().tolist() == lengths
    assert flat["tokens"].shape == (1, sum(lengths))
    assert int(flat["max_seqlen"]) == max(lengths)
    restarts = (flat["position_ids"][0] == 0).nonzero().flatten()
    assert restarts.tolist() == flat["cu_seqlens"][:-1].tolist()


def test_columns_are_flattened_and_refused_by_get_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**row, "experts": torch.rand(16, 2, 3)} for row in ROWS]
    flat = flatten_rows(default_collate(rows))
    assert torch.equal(flat["experts"][0], torch.cat([row["experts"] for row in rows]))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    with pytest.raises(ConfigError, match="the data has columns experts, and Megatron's get_batch"):
        get_batch(iter([default_collate(rows)]))


def test_packed_parameters_refuse_wrong_shapes_and_dtypes() -> None:
    cu_seqlens = torch.tensor([[0, 3, 8]], dtype=torch.int32)
    params = to_packed_seq_params(cu_seqlens, torch.tensor(5))
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert params.max_seqlen_q == 5 and isinstance(params.max_seqlen_q, int)
    with pytest.raises(ValueError, match="int32"):
        to_packed_seq_params(cu_seqlens.long(), 5)
    with pytest.raises(ValueError, match="flatten_rows"):
        to_packed_seq_params(cu_seqlens.repeat(2, 1), 5)
    with pytest.raises(ValueError, match="same segments"):
        to_packed_seq_params(cu_seqlens, 5, torch.tensor([0, 8], dtype=torch.int32))


def test_mamba_layers_get_segments_from_0_17_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core 0.16 has none; from 0.17 on it derives seq_idx from ``total_tokens``."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    for name in ("pipeline_model", "context"):
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", lambda: 1)
    monkeypatch.setattr(batch, "_broadcast", lambda rows: rows)

    @dataclass
    class NewerPackedSeqParams(batch.PackedSeqParams):  # type: ignore[misc]
        total_tokens: int | None = None

        def __post_init__(self) -> None:
            lengths = self.cu_seqlens_q.diff()
            segments = torch.arange(lengths.numel())
            self.seq_idx = segments.repeat_interleave(lengths, output_size=self.total_tokens)

    monkeypatch.setattr(batch, "PackedSeqParams", NewerPackedSeqParams)
    params = get_batch(iter([default_collate(ROWS)]))[5]
    assert params.total_tokens == 32
    assert params.seq_idx.tolist() == [0] * 3 + [1] * 5 + [2] * 8 + [3] * 16


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_context_parallel_ranks_split_a_row_into_equal_work(units: list[int], cp_size: int) -> None:
    lengths = [2 * cp_size * unit for unit in units]
    cu_seqlens = np.array([0, *np.cumsum(lengths)], np.int32)
    indices = [context_parallel_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
    assert sorted(np.concatenate(indices)) == list(range(sum(lengths)))
    position = np.concatenate([np.arange(length) for length in lengths])
    work = [int((position[of_rank] + 1).sum()) for of_rank in indices]
    assert max(work) == min(work), "early and late chunks must balance exactly"


def test_context_parallelism_names_an_indivisible_segment() -> None:
    with pytest.raises(ValueError, match=r"6 tokens .* align=4"):
        context_parallel_indices(np.array([0, 4, 10], np.int32), 2, 0)


def _tensor_parallel_batch(rank: int, world_size: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    iterator = iter([default_collate(ROWS)]) if rank == 0 else None
    tokens, labels, loss_mask, attention_mask, position_ids, params = get_batch(iterator)
    assert attention_mask is None and params is not None
    row = dict(zip(KEYS, (tokens, labels, loss_mask, position_ids), strict=True))
    return {**row, "cu_seqlens": params.cu_seqlens_q, "max_seqlen": params.max_seqlen_q}


@pytest.mark.multiprocess
def test_all_tensor_parallel_ranks_receive_the_same_batch(free_port: int) -> None:
    expected = flatten_rows(default_collate(ROWS))
    for received in run_ranks(_tensor_parallel_batch, 2, free_port):
        assert received["max_seqlen"] == int(expected["max_seqlen"])
        for key in (*KEYS, "cu_seqlens"):
            assert received[key].dtype == expected[key].dtype, key
            assert torch.equal(received[key], expected[key]), key


def _pipeline_stage(rank: int, world_size: int) -> tuple[bool, list[int], list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    batch = get_batch(iter([default_collate(ROWS[:1])]))
    assert batch[5] is not None
    refusals = []
    for iterator in (None, iter([default_collate(ROWS)])):
        with pytest.raises(ConfigError) as refused:
            get_batch(iterator)
        refusals.append(str(refused.value))
    return batch[0] is not None, batch[5].cu_seqlens_q.tolist(), refusals


@pytest.mark.multiprocess
def test_every_pipeline_stage_has_boundaries_and_only_the_ends_have_tokens(free_port: int) -> None:
    stages = run_ranks(_pipeline_stage, 3, free_port)
    assert [has_tokens for has_tokens, _, _ in stages] == [True, False, True]
    for _, boundaries, (without_data, of_two_rows) in stages:
        assert boundaries == [0, 3, 8, 16]
        assert (
            "all stages read packed rows" in without_data and "--micro-batch-size 1" in of_two_rows
        )


def aligned_row(lengths: list[int], align: int) -> dict[str, Tensor]:
    """Segments of these lengths, each with room up to a multiple of ``align``."""
    rooms = [-(-length // align) * align for length in lengths]
    row = make_row(rooms)
    for bound, room, length in zip(np.cumsum(rooms), rooms, lengths, strict=True):
        row["loss_mask"][bound - room + length - 1 : bound] = 0.0
    row["cu_seqlens_padded"] = row["cu_seqlens"]
    row["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return row


def _context_parallel_batch(rank: int, world_size: int, row: dict[str, Tensor]) -> Any:
    parallel_state.initialize_model_parallel(context_parallel_size=world_size)
    tokens, labels, mask, _, positions, params = get_batch(iter([default_collate([row])]))
    assert tokens is not None and labels is not None and mask is not None
    assert positions is not None and params is not None
    held = torch.cat([tokens, labels, mask.long(), positions])
    return held, params.cu_seqlens_q.tolist(), params.cu_seqlens_q_padded.tolist()


@pytest.mark.multiprocess
def test_context_parallel_ranks_together_hold_the_row(free_port: int) -> None:
    row = aligned_row([3, 8, 5], 4)
    answers = run_ranks(_context_parallel_batch, 2, free_port, row)
    whole = torch.stack([row[key].long() for key in KEYS])
    together = torch.cat([held for held, _, _ in answers], dim=1)
    assert torch.equal(together[:, together[0].argsort()], whole)
    for held, bounds, padded in answers:
        assert held.shape == (4, 10)
        assert bounds == padded == [0, 4, 12, 20], "as Megatron's main hands them to its attention"

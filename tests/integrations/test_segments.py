"""Attention inside documents for hosts that know nothing of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from megapack.errors import ConfigError
from megapack.integrations.dialects import GPT_NEOX, emit
from megapack.integrations.rows import text_rows as segments
from tests.hosts.flash import flash_attn_func, flash_attn_varlen_func
from tests.integrations.samples import make_row


def host_broadcast_data(keys: Any, data: Any, datatype: torch.dtype) -> dict[str, Tensor]:
    """Do what both hosts' broadcast_data does on one tensor-parallel rank."""
    for key in keys:
        assert data[key].dtype == datatype, key
    return {key: data[key].clone() for key in keys}


def host_masks(data: Tensor, eod_token: int) -> tuple[None, Tensor, Tensor]:
    """get_ltor_masks_and_position_ids with eod_mask_loss: a row is one causal run."""
    loss_mask = torch.ones(data.shape)
    loss_mask[data == eod_token] = 0.0
    return None, loss_mask, torch.arange(data.shape[1]).expand_as(data)


ROWS = [make_row([3, 5, 8], 1, 17), make_row([16], 100, 17)]


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    told = [emit({key: value[None] for key, value in row.items()}, GPT_NEOX) for row in rows]
    samples = [{key: value[0] for key, value in row.items()} for row in told]
    batch: dict[str, Tensor] = default_collate(samples)
    return batch


@pytest.fixture
def in_flight() -> Iterator[segments.CurrentBatch]:
    broadcast = segments.wrap_broadcast_data(host_broadcast_data)
    received = broadcast(["text"], collated(ROWS), torch.int64)
    assert torch.equal(received["text"], collated(ROWS)["text"])
    batch = segments.current()
    assert batch is not None
    yield batch
    segments.clear()


def test_broadcast_sends_the_boundaries_of_all_rows(in_flight: segments.CurrentBatch) -> None:
    assert in_flight.cu_seqlens.dtype == torch.int32
    assert in_flight.cu_seqlens.tolist() == [0, 3, 8, 16, 32]
    assert in_flight.max_seqlen == 16
    assert in_flight.loss_mask.dtype == torch.float32


def test_broadcasts_of_other_keys_pass_unchanged() -> None:
    broadcast = segments.wrap_broadcast_data(host_broadcast_data)
    data = {"types": torch.ones(2, dtype=torch.int64)}
    assert set(broadcast(["types"], data, torch.int64)) == {"types"}
    assert segments.current() is None


def test_boundaries_that_no_attention_used_are_an_error(
    in_flight: segments.CurrentBatch,
) -> None:
    """As where a host bound flash-attn's name before it was wrapped, or computes without it."""
    broadcast = segments.wrap_broadcast_data(host_broadcast_data)
    with pytest.raises(ConfigError, match="did not use the boundaries of the last micro batch"):
        broadcast(["text"], collated(ROWS), torch.int64)
    attention = segments.wrap_flash_attn_func(flash_attn_func, flash_attn_varlen_func)
    attention(*(torch.randn(2, 16, 1, 8) for _ in range(3)), causal=True)
    broadcast(["text"], collated(ROWS), torch.int64)
    segments.clear()
    broadcast(["text"], collated(ROWS), torch.int64)


def test_batch_without_labels_is_an_error() -> None:
    batch = collated(ROWS)
    batch[segments.MASK] *= 0
    with pytest.raises(ConfigError, match="a micro batch has no label"):
        segments.wrap_broadcast_data(host_broadcast_data)(["text"], batch, torch.int64)
    assert segments.current() is None


def test_masks_are_multiplied_and_positions_restart(in_flight: segments.CurrentBatch) -> None:
    wrapped = segments.wrap_masks_and_positions(host_masks)
    tokens = collated(ROWS)["text"][:, :-1]
    mask, loss_mask, position_ids = wrapped(tokens, eod_token=5)
    assert mask is None
    zeros = {(r, c) for r, c in (loss_mask == 0).nonzero().tolist()}
    assert zeros == {(0, 2), (0, 7), (0, 15), (1, 15), (0, 4)}, "ends of documents and the eod"
    assert torch.equal(position_ids, torch.stack([row["position_ids"] for row in ROWS]))
    with pytest.raises(ConfigError, match="sequence length curriculum"):
        wrapped(tokens[:, :8], eod_token=5)


@pytest.mark.parametrize("causal_varlen", [False, True], ids=["flash_attn", "flash_attn_varlen"])
def test_flash_attention_of_a_row_equals_that_of_its_documents(
    in_flight: segments.CurrentBatch, causal_varlen: bool
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 16, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    if causal_varlen:
        attend = segments.wrap_flash_attn_varlen_func(flash_attn_varlen_func)
        rows = torch.tensor([0, 16, 32], dtype=torch.int32)
        flat = [x.flatten(0, 1) for x in inputs]
        out = attend(*flat, rows, rows, 16, 16, 0.0, softmax_scale=None, causal=True)
        out = out.view(2, 16, 4, 8)
    else:
        attend = segments.wrap_flash_attn_func(flash_attn_func, flash_attn_varlen_func)
        out = attend(*inputs, 0.0, softmax_scale=None, causal=True)
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    expected = torch.empty_like(out)
    for row, begin, end in ((0, 0, 3), (0, 3, 8), (0, 8, 16), (1, 0, 16)):
        q, k, v = (x[row : row + 1, begin:end] for x in inputs)
        expected[row, begin:end] = flash_attn_func(q, k, v, causal=True)[0]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        gradients, torch.autograd.grad((expected * weights).sum(), inputs), rtol=1e-4, atol=1e-5
    )


def test_attention_over_other_tokens_is_refused_until_clear(
    in_flight: segments.CurrentBatch,
) -> None:
    attend = segments.wrap_flash_attn_func(flash_attn_func, flash_attn_varlen_func)
    x = torch.randn(1, 7, 2, 8)
    with pytest.raises(ConfigError, match=r"7 tokens.*32.*clear\(\)"):
        attend(x, x, x, causal=True)
    segments.clear()
    torch.testing.assert_close(attend(x, x, x, causal=True), flash_attn_func(x, x, x, causal=True))


def test_pipelines_with_several_micro_batches_in_flight_are_refused() -> None:
    segments.require_one_stage(0)
    segments.require_one_stage(1)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        segments.require_one_stage(2)

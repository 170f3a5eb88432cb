"""Masks from cu_seqlens say what the segments say, and no more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import block_diagonal_mask, flex_block_mask, segment_ids

rows = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths=rows, fill=st.integers(0, 3))
def test_segment_ids_count_segments_whatever_the_fill(lengths: list[int], fill: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].repeat(fill)]).int()
    expected = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert segment_ids(cu_seqlens, sum(lengths)).tolist() == expected


def test_segment_ids_of_rows_start_over_in_every_row() -> None:
    cu_seqlens = torch.tensor([[0, 2, 6, 6], [0, 1, 3, 6]], dtype=torch.int32)
    assert segment_ids(cu_seqlens, 6).tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2]]


@given(lengths=rows, causal=st.booleans())
def test_the_dense_mask_allows_the_own_segment_only(lengths: list[int], causal: bool) -> None:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    mask = block_diagonal_mask(segment_ids(cu_seqlens, sum(lengths)), causal=causal)
    assert mask.shape == (1, 1, sum(lengths), sum(lengths))
    for q, own in enumerate(owner):
        for k, other in enumerate(owner):
            assert mask[0, 0, q, k] == (own == other and (k <= q or not causal))


def test_flex_attention_and_the_dense_mask_attend_alike() -> None:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    torch.manual_seed(0)
    cu_seqlens = torch.tensor([[0, 40, 128, 128], [0, 7, 100, 128]], dtype=torch.int32)
    segments = segment_ids(cu_seqlens, 128)
    q, k, v = (torch.randn(2, 2, 128, 16) for _ in range(3))
    mask = block_diagonal_mask(segments)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for causal, wanted in ((True, expected),):
        found = flex_attention(q, k, v, block_mask=flex_block_mask(segments, causal=causal))
        assert torch.allclose(found, wanted, atol=1e-5)

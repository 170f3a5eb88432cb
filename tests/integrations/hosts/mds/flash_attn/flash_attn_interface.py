"""flash-attn's two functions by their documented meaning, in plain torch."""

import itertools

import torch
import torch.nn.functional as F


def _attend(q, k, v, softmax_scale, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    return _attend(q, k, v, softmax_scale, causal)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert bounds[-1] == q.shape[0]
    assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(bounds))
    parts = [
        _attend(q[a:b][None], k[a:b][None], v[a:b][None], softmax_scale, causal)
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat([part[0] for part in parts])

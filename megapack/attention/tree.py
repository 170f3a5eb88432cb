"""Attention over packed prefix trees: a token that several sequences share is computed once.

- ``tree_attention``: the queries of a node are its tokens, its keys are its path.
- ``tree_arguments`` (``transformers_interface``): the same as keyword arguments of a model.
- ``tree_mask``: the same as a dense mask, for models that take masks.

    segments = TreeSegments.of(tree_batch(tree, sequences))
    out = tree_attention(query, key, value, segments, backend="sdpa")

The operator of ``varlen_attention`` computes it, with every backend. Masks, windows and ALiBi use
the difference of depths, because kernels align the end of a node with the end of its path.
"""

from __future__ import annotations

from torch import Tensor

from megapack.attention.flex import dense_mask
from megapack.attention.problem import ScoreRule, TreeSegments
from megapack.attention.varlen import attend


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: TreeSegments,
    *,
    backend: str,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of every token to its path; return ``[T, H, D]`` in the dtype of
    ``query``.

    Raises ValueError for wrong shapes, for a rule that ``backend`` does not support and, with a CPU
    backend, for segments that do not describe T tokens.

    Args:
        query: ``[T, H, D]``.
        key, value: ``[T, Hkv, D]``; Hkv divides H (grouped-query attention).
        segments: nodes and their paths, on the device of ``query``. Padding is a root.
        backend: a name of ``BACKENDS``; see ``choose_backend``.
        scale: factor on the scores; None: ``D ** -0.5``.
        window: with w > 0, a token attends only to the last w tokens of its path, itself included.
        softcap: with c > 0, scores become ``c * tanh(scores / c)``.
        alibi_slopes: ``[H]`` float32; adds ``-slope * distance`` to the scores, where the distance
            is the difference of depths.
    """
    return attend(
        query,
        key,
        value,
        segments,
        backend=backend,
        scale=scale,
        causal=True,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def tree_mask(segments: TreeSegments, num_tokens: int, *, window: int = 0) -> Tensor:
    """Return a dense mask, bool ``[1, 1, T, T]``, True where a query (row) sees a key (column).

    The convention is that of torch's scaled_dot_product_attention and of the ``attention_mask`` of
    transformers models with ``attn_implementation="sdpa"``. Memory is quadratic: for short rows and
    for checking other backends. ``window`` as in ``tree_attention``.
    """
    return dense_mask(segments, num_tokens, ScoreRule(scale=1.0, window=window))[None, None]

"""A packed prefix tree as a batch: every token that sequences share is one token of the row.

- ``tree_batch``: turn a ``megapack.planning.Tree`` and its sequences into a ``TreeBatch``.
- ``TreeBatch``: the tensors; ``log_probs``, and values per sequence or per token of the row.

Two sequences with the prompt 5 6, and their batch:

    sequences       5 6 7 8 and 5 6 9        positions of both, one after the other
    tokens          5  6  7  8  9            position_ids   0  1  2  3  2
    predecessors   -1  0  1  2  1            the log-probability of a token is under their logits
    loss_weights    0  2  1  1  1            the sum of the weights that the sequences give a token
    token_index     0 1 2 3 | 0 1 4          rows of the positions of every sequence

    logits = model(input_ids=batch["tokens"], position_ids=batch["position_ids"],
                   **tree_arguments(TreeSegments.of(batch))).logits
    loss = -(batch["loss_weights"] * batch.log_probs(logits)).sum()

This loss is the sum over all sequences and tokens, because equal prefixes have equal logits. A
fused loss takes ``hidden[:, batch["predecessors"]]`` with ``batch["tokens"]`` as labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

# An array of every sequence, by its number.
PerSequence: TypeAlias = Any


class TreeBatch(dict[str, Any]):
    """Tensors of one row of T tokens, padding included, with S sequences of P positions in all.

    - ``tokens``, ``position_ids``: int64 (1, T). Positions are depths.
    - ``loss_weights``: float32 (1, T), of predicting each token; 0 in padding and at roots.
    - ``predecessors``: int64 (T,), row of the token before it; -1 in padding and at roots.
    - ``cu_seqlens_q``, ``cu_seqlens_k``, ``kv_index`` int32, ``max_seqlen_q``, ``max_seqlen_k``
      int: the nodes and paths (``megapack.attention.TreeSegments``).
    - ``sequences``: int64 (S,), numbers of the sequences, in the order of the next entries.
    - ``token_offsets``: int64 (S + 1,), and ``token_index``: int64 (P,), the rows of all positions.
    - ``occurrence_offsets``: int64 (T + 1,), and ``occurrences``: int64 (P,): for each token of the
    row, its entries in ``token_index``.
    - columns: (1, T, ...).
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TreeBatch:
        """Return the batch on a device."""
        move: dict[str, Any] = {"device": device, "non_blocking": non_blocking}
        return TreeBatch({n: x.to(**move) if torch.is_tensor(x) else x for n, x in self.items()})

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of every token of the row, (T,); 0 without predecessor.

        Args:
            logits: (1, T, vocabulary) or (T, vocabulary), of any float dtype. The result is float32
                (float64 for float64).
        """
        rows = logits.flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        before = self["predecessors"].clamp(min=0)
        # Branches share a predecessor: normalize its logits once.
        picked = rows[before, self["tokens"][0]] - rows.logsumexp(-1)[before]
        return picked.masked_fill(self["predecessors"] < 0, 0)

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all positions of all sequences, (P, ...), from those of the row's
        tokens, (T, ...); ``split(batch["token_offsets"].diff().tolist())`` separates sequences."""
        return values.index_select(0, self["token_index"])

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """Return for every token of the row, (T, ...), the sum of the values, (P, ...), of its
        positions in sequences: the inverse of ``per_sequence`` for gradients and weights."""
        total = values.new_zeros(self["tokens"].shape[1], *values.shape[1:])
        return total.index_add(0, self["token_index"], values)


def tree_batch(
    tree: Any,
    sequences: PerSequence,
    *,
    weights: PerSequence | None = None,
    columns: Mapping[str, PerSequence] | None = None,
    pad_to: int | None = None,
) -> TreeBatch:
    """Return a packed tree as a batch, on the CPU.

    Args:
        tree: a ``megapack.planning.Tree`` of a ``TreePlan``. If it has no sequence, the row is one
            token of padding, because all ranks must forward something.
        sequences: integers (length,) of every sequence, by number: the argument of ``plan_trees``.
        weights: floats (length,) of every sequence: weight of the loss of predicting each token,
            such as an advantage; None: 1. The first token of a sequence is never predicted, so its
            weight is not read.
        columns: by name, arrays (length, ...) of every sequence. Sequences that share a token must
            agree; the row gets the values of one of them.
        pad_to: tokens of the row, at least those of the tree; None: no padding. Padding is its own
            root at the end, of token 0.

    Raises:
        ValueError: the tree has more than ``pad_to`` tokens, or an array does not fit its sequence.
    """
    num_tokens, num_positions = tree.num_tokens, int(tree.token_offsets[-1])
    row = max(num_tokens, 1) if pad_to is None else pad_to
    if row < max(num_tokens, 1):
        raise ValueError(
            f"the tree has {num_tokens} tokens and pad_to is {pad_to}; raise it to at least "
            f"{max(num_tokens, 1)}, or plan with a lower max_tokens_per_rank"
        )
    for name, arrays in {"sequences": sequences, "weights": weights, **(columns or {})}.items():
        if arrays is not None:
            _check_lengths(tree, name, arrays)
    positions = np.ones(num_positions)
    if weights is not None:
        listed = [np.asarray(weights[i], np.float64) for i in tree.sequences.tolist()]
        positions = np.concatenate([*listed, positions[:0]])
    loss_weights = np.bincount(tree.token_index, weights=positions, minlength=num_tokens)
    loss_weights[tree.predecessors < 0] = 0
    counts = np.bincount(tree.token_index, minlength=row)
    values = {
        "tokens": tree.gather(sequences).astype(np.int64),
        "position_ids": tree.position_ids.astype(np.int64),
        "loss_weights": loss_weights.astype(np.float32),
        **{name: tree.gather(column) for name, column in (columns or {}).items()},
    }
    padded = {
        name: torch.from_numpy(_padded(value, row, 0))[None] for name, value in values.items()
    }
    padded["position_ids"][0, num_tokens:] = torch.arange(row - num_tokens)
    index = {
        "predecessors": _padded(tree.predecessors, row, -1),
        "sequences": tree.sequences,
        "token_offsets": tree.token_offsets,
        "token_index": tree.token_index,
        "occurrence_offsets": np.append(0, np.cumsum(counts)),
        "occurrences": tree.occurrences,
    }
    tensors = {name: torch.from_numpy(x.astype(np.int64)) for name, x in index.items()}
    return TreeBatch({**padded, **tensors, **_nodes(tree, row)})


def _nodes(tree: Any, row: int) -> dict[str, Any]:
    """Return nodes and paths, with padding as another root."""
    num_tokens = tree.num_tokens
    padding = np.arange(num_tokens, row, dtype=np.int32)
    ends_q, ends_k = tree.cu_seqlens_q, tree.cu_seqlens_k
    if len(padding):
        ends_q, ends_k = (np.append(e, e[-1] + len(padding)) for e in (ends_q, ends_k))
    arrays = {
        "cu_seqlens_q": ends_q,
        "cu_seqlens_k": ends_k,
        "kv_index": np.concatenate([tree.kv_index, padding]),
    }
    tensors = {name: torch.from_numpy(x.astype(np.int32)) for name, x in arrays.items()}
    longest = {"max_seqlen_q": np.diff(ends_q).max(), "max_seqlen_k": np.diff(ends_k).max()}
    return {**tensors, **{name: int(value) for name, value in longest.items()}}


def _padded(values: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    padding = np.full((length - len(values), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values, padding])


def _check_lengths(tree: Any, name: str, arrays: PerSequence) -> None:
    lengths = np.diff(tree.token_offsets).tolist()
    for number, length in zip(tree.sequences.tolist(), lengths, strict=True):
        if len(arrays[number]) != length:
            raise ValueError(
                f"{name} of sequence {number} has {len(arrays[number])} entries, and the tree was "
                f"planned with {length}: pass the sequences of plan_trees"
            )

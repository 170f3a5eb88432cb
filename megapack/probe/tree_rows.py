"""Packed prefix trees in ``check_rows``: what depends on a token, and a path without its branches.

Every node is a segment, and a token may change all tokens below it. "Odd" and "even" number the
branches of a parent; of the even ones, only leaves are changed. The last two runs have the longest
path without its branches, and its first half:

    nodes          | p p p p | a a a | b b b |    branches a and b of a prefix p
    odd changed    | p p p p | a a a | X X X |    p and a
    even changed   | p p p p | X X X | b b b |    p and b
    one alone      | p p p p   a a a |            this path
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

CAUSE = (
    "The model does not attend to whole paths: check that kv_index and the depths as position_ids "
    "reach every layer, and that no layer is recurrent"
)


def branches(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return for every node its number among the branches of its parent, and the row at which the
    last path through it ends: two int64 (nodes,), without empty nodes."""
    ends, path_ends = (batch[f"cu_seqlens_{name}"].tolist() for name in "qk")
    keys, counter = batch["kv_index"].tolist(), Counter[int]()
    numbers: list[int] = []
    last: list[int] = []
    open_nodes: list[tuple[int, int]] = []  # node and the length of its path, from a root down
    for begin, end, path, path_end in zip(ends, ends[1:], path_ends, path_ends[1:], strict=False):
        if begin == end:
            continue
        above = path_end - path - (end - begin)
        while open_nodes and open_nodes[-1][1] > above:
            open_nodes.pop()
        open_nodes.append((len(numbers), path_end - path))
        parent = keys[path + above - 1] if above else -1
        numbers.append(counter[parent])
        counter[parent] += 1
        last.append(end)
        for node, _ in open_nodes:
            last[node] = end
    return torch.tensor(numbers), torch.tensor(last)


def paths(batch: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """Yield the longest path of a tree, and its first half, without branches: batch, tokens of the
    original, tokens of the batch. The remaining tokens of the row become roots that are no longer,
    because a host may need rows of equal length."""
    tokens, path_ends = batch["tokens"], batch["cu_seqlens_k"].long()
    last = int(path_ends.diff().argmax())
    longest = batch["kv_index"].long()[path_ends[last] : path_ends[last + 1]]
    row = torch.arange(tokens.numel())
    for path in (longest, longest[: -(-len(longest) // 2)]):
        order = torch.cat([path, row[~torch.isin(row, path)]])
        depths = row % len(path)
        ends = torch.cat([(depths == 0).nonzero()[:, 0], row[-1:] + 1]).int()
        part = {
            name: value.flatten(0, 1)[order].view_as(value)
            if isinstance(value, Tensor) and value.shape[:2] == tokens.shape
            else value
            for name, value in batch.items()
        }
        part |= {"position_ids": depths.view_as(tokens), "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        part |= {"kv_index": row.int(), "predecessors": torch.where(depths > 0, row - 1, -1)}
        part |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), len(path))
        yield part, path, row[: len(path)]

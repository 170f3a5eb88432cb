"""``plan_trees``: sequences that share prefixes, each shared prefix computed once.

* ``plan_trees(sequences, num_ranks=, max_tokens_per_rank=, ...)`` returns a ``TreePlan``.
* ``TreePlan``: the ``Tree`` of every rank and micro batch; ``num_tokens``, ``repeated_tokens``,
  ``cost`` and ``critical_path``.
* ``Tree``: a row of unique tokens: nodes, paths, positions, and the index of every sequence.

```
sequences = [[7, 8, 1, 2], [7, 8, 3], [7, 8, 3, 4], [5, 6]]
plan = plan_trees(sequences, num_ranks=1, max_tokens_per_rank=16)
tree = plan.trees[0][0]                     # rank 0, micro batch 0
tree.gather(sequences).tolist()             # -> [5, 6, 7, 8, 1, 2, 3, 4]: 8 tokens instead of 13
tree.node_begins.tolist()                   # -> [0, 2, 4, 6, 7]: nodes 5 6 | 7 8 | 1 2 | 3 | 4
tree.node_parents.tolist()                  # -> [-1, -1, 1, 1, 3]
tree.position_ids.tolist()                  # -> [0, 1, 0, 1, 2, 3, 2, 3]
tree.sequences.tolist()                     # -> [3, 0, 1, 2]: by content
tree.token_index[tree.token_offsets[3] :]   # -> [2, 3, 6, 7]: row indices of sequence 2
plan = plan_trees(sequences, num_ranks=2, max_tokens_per_rank=6)
plan.num_tokens.tolist()                    # -> [[6, 4]]: 5 6 | 7 8 | 1 2, and 7 8 | 3 | 4
plan.repeated_tokens                        # -> 2
```

Attention: the queries of a node are its tokens, its keys the tokens of its path, causal and aligned
at the end. So every varlen kernel computes it with ``cu_seqlens_q``, ``cu_seqlens_k`` and keys and
values gathered by ``kv_index``. A loss that is a sum over (sequence, token) is exact if the weight
of a row token is the sum of the weights that its sequences give it.

Method: sort the sequences; cut the sorted order by dynamic programming, where a cut repeats the
shared prefix; put the runs into the fewest trees; move and exchange branches between trees while
that lowers repeated tokens and the time that ranks wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.planning.step_plan import CriticalPath, integers
from megapack.units import checked_integer, counted

__all__ = ["Tree", "TreePlan", "plan_trees"]

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """Row of unique tokens: a forest of tries of S sequences, N nodes and T tokens.

    A node is the longest run of tokens through which the same sequences pass. Parents precede
    children (preorder), and the tokens of a node are contiguous in the row. A sequence is the path
    from a root to the end of one node.

    Attributes:
        sequences: (S,) int64, numbers, ordered by content, then number.
        node_begins: (N,) int32, row index of the first token.
        node_lengths: (N,) int32, tokens, at least 1.
        node_parents: (N,) int32, -1: a root.
        node_depths: (N,) int32, position of the first token in its sequences.
        node_sequences: (N,) int64, number of a sequence whose tokens [depth, depth + length) are
            those of the node.
        sequence_nodes: (S,) int32, node in which each sequence ends.
    """

    sequences: Int64
    node_begins: Int32
    node_lengths: Int32
    node_parents: Int32
    node_depths: Int32
    node_sequences: Int64
    sequence_nodes: Int32

    @property
    def num_tokens(self) -> int:
        """T, unique tokens."""
        return int(self.node_lengths.sum())

    @cached_property
    def cu_seqlens_q(self) -> Int32:
        """(N + 1,) int32: node i has the queries [cu_seqlens_q[i], cu_seqlens_q[i + 1])."""
        return _offsets(self.node_lengths)

    @cached_property
    def cu_seqlens_k(self) -> Int32:
        """(N + 1,) int32: node i has the keys ``kv_index[cu_seqlens_k[i] : cu_seqlens_k[i + 1]]``.

        The number of keys is depth + length: the path from the root to the node's last token.
        """
        return _offsets(self.node_depths.astype(np.int64) + self.node_lengths)

    @cached_property
    def kv_index(self) -> Int32:
        """(keys,) int32: row indices of the paths of all nodes, one after the other."""
        return self._paths(np.arange(len(self.node_begins), dtype=np.int32))

    @cached_property
    def position_ids(self) -> Int32:
        """(T,) int32: depth of each token, its position in its sequences."""
        return np.arange(self.num_tokens, dtype=np.int32) + np.repeat(
            self.node_depths - self.node_begins, self.node_lengths
        )

    @cached_property
    def predecessors(self) -> Int32:
        """(T,) int32: row index of the token before it in its sequences; -1 at roots."""
        before = np.arange(-1, self.num_tokens - 1, dtype=np.int32)
        ends = np.append(self.node_begins + self.node_lengths - 1, -1)  # parent -1: the last entry
        before[self.node_begins] = ends[self.node_parents]
        return before

    @cached_property
    def token_offsets(self) -> Int64:
        """(S + 1,) int64: sequence i has the entries [offsets[i], offsets[i + 1])."""
        ends = self.node_depths + self.node_lengths
        return np.concatenate([[0], np.cumsum(ends[self.sequence_nodes], dtype=np.int64)])

    @cached_property
    def token_index(self) -> Int32:
        """(token_offsets[-1],) int32: row index of every position of every sequence.

        ``row_values[token_index]`` are the values of all sequences in the order of ``sequences``.
        """
        return self._paths(self.sequence_nodes)

    @cached_property
    def occurrence_offsets(self) -> Int64:
        """(T + 1,) int64: row token t has the entries [offsets[t], offsets[t + 1])."""
        counts = np.bincount(self.token_index, minlength=self.num_tokens)
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @cached_property
    def occurrences(self) -> Int64:
        """(token_offsets[-1],) int64: places of each row token in `token_index`, ascending."""
        return np.argsort(self.token_index, kind="stable").astype(np.int64)

    def gather(self, sequences: Any, offsets: Any = None) -> NDArray[Any]:
        """Return the row's values, (T, ...): tokens, or anything else that is equal in a shared
        prefix.

        Args:
            sequences: as in ``plan_trees``: a list of arrays by sequence number, or one flat array
                with `offsets`.
            offsets: (sequences + 1,) integers, if `sequences` is flat.
        """
        if offsets is not None:
            begins = np.asarray(offsets, np.int64)[self.node_sequences]
            where = np.repeat(begins, self.node_lengths) + self.position_ids
            flat: NDArray[Any] = np.asarray(sequences)[where]
            return flat
        nodes = zip(
            self.node_sequences.tolist(),
            self.node_depths.tolist(),
            self.node_lengths.tolist(),
            strict=True,
        )
        parts = [np.asarray(sequences[i])[depth : depth + n] for i, depth, n in nodes]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _paths(self, nodes: Int32) -> Int32:
        """Return the row indices of the paths of some nodes, one after the other."""
        return _core.tree_paths(self.node_begins, self.node_lengths, self.node_parents, nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class TreePlan:
    """Assignment of sequences to the trees of ranks and micro batches.

    Attributes:
        num_ranks: data-parallel ranks.
        num_micro_batches: micro batches of every rank.
        token_multiple: the tokens of a tree are padded to a multiple of this.
        trie_tokens: tokens of one trie of all sequences, the fewest that any plan forwards.
        sequences: (S,) int64, numbers by tree, where tree b is that of micro batch ``b //
            num_ranks`` and rank ``b % num_ranks``; in a tree by content, then number.
        tree_offsets: (trees + 1,) int64: tree b has ``sequences[tree_offsets[b] : tree_offsets[b +
            1]]``.
        lengths: (S,) int64, tokens of each of `sequences`.
        shared: (S,) int64, tokens that each shares with the one before in its tree.
    """

    num_ranks: int
    num_micro_batches: int
    token_multiple: int
    trie_tokens: int
    sequences: Int64
    tree_offsets: Int64
    lengths: Int64
    shared: Int64

    def __repr__(self) -> str:
        return (
            f"TreePlan({counted(len(self.sequences), 'sequence')}, "
            f"{counted(int((self.lengths - self.shared).sum()), 'token')} in "
            f"{counted(len(self.tree_offsets) - 1, 'tree')}, {counted(self.num_ranks, 'rank')})"
        )

    @cached_property
    def trees(self) -> list[list[Tree]]:
        """``[rank][micro batch]``; a tree may be empty."""
        return [self.of_rank(rank) for rank in range(self.num_ranks)]

    def of_rank(self, rank: int) -> list[Tree]:
        """Return a rank's trees by micro batch. Raises ValueError."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; the plan is for {self.num_ranks} ranks")
        numbers = range(rank, len(self.tree_offsets) - 1, self.num_ranks)
        return [self._tree(slice(*self.tree_offsets[b : b + 2].tolist())) for b in numbers]

    @cached_property
    def num_tokens(self) -> Int64:
        """(micro batches, ranks) int64: tokens of each tree, padded to `token_multiple`."""
        multiple = self.token_multiple
        return -(-self._per_tree(self.lengths - self.shared) // multiple) * multiple

    @property
    def repeated_tokens(self) -> int:
        """Tokens of all trees, without padding, beyond those of one trie."""
        return int(self.lengths.sum() - self.shared.sum()) - self.trie_tokens

    def cost(self, linear_cost_tokens: float) -> NDArray[np.float64]:
        """Return the predicted cost of each tree without padding, (micro batches, ranks) float64.

        In the unit of ``StepPlan.cost``: a token at depth p (from 0) costs ``2 p + 1 +
        linear_cost_tokens``, so that a sequence of n tokens alone costs n^2 + linear_cost_tokens x
        n. A tree costs that sum over its unique tokens.
        """
        return self.attention + linear_cost_tokens * self._per_tree(self.lengths - self.shared)

    @cached_property
    def attention(self) -> NDArray[np.float64]:
        """(micro batches, ranks): sum of 2 p + 1 over the unique tokens, p being their depths."""
        return self._per_tree(self.lengths**2 - self.shared**2).astype(np.float64)

    def critical_path(self, linear_cost_tokens: float) -> CriticalPath:
        """Return the step's length compared with equal work on all ranks, as in ``StepPlan``.

        Equal work includes the repeated tokens of the plan.
        """
        return CriticalPath.of_costs(self.cost(linear_cost_tokens))

    def _per_tree(self, amounts: Int64) -> Int64:
        """Sum amounts of sequences by tree."""
        ends = np.concatenate([[0], np.cumsum(amounts)])[self.tree_offsets]
        return np.diff(ends).reshape(self.num_micro_batches, self.num_ranks)

    def _tree(self, which: slice) -> Tree:
        numbers = self.sequences[which]
        nodes = _core.tree_nodes(self.lengths[which], self.shared[which])
        begins, lengths, parents, depths, first_sequences, sequence_nodes = nodes
        return Tree(
            sequences=numbers,
            node_begins=begins,
            node_lengths=lengths,
            node_parents=parents,
            node_depths=depths,
            node_sequences=numbers[first_sequences],
            sequence_nodes=sequence_nodes,
        )


@checked_call
def plan_trees(
    sequences: ArrayLike | Sequence[ArrayLike],
    *,
    offsets: ArrayLike | None = None,
    lengths: ArrayLike | Sequence[ArrayLike] | None = None,
    num_ranks: int,
    max_tokens_per_rank: int,
    linear_cost_tokens: float = 0,
    groups: ArrayLike | None = None,
    balance: Literal["micro_batches", "step", "pipeline"] = "micro_batches",
    micro_batch_multiple: int = 1,
    max_depth: int | None = None,
    token_multiple: int = 1,
) -> TreePlan:
    """Assign sequences to trees: fewest micro batches, few repeated tokens, equal work.

    A rank's tree of a micro batch holds whole sequences; a shared prefix is stored once. If
    sequences of two trees share a prefix, each tree has a copy of it. Among plans with the fewest
    micro batches that it finds, ``plan_trees`` minimizes the sum of two ratios: tokens of all trees
    to tokens of one trie, and the path that `balance` names to an equal share of the trie's cost.

    The result depends on the content of the sequences, not on their order: identical sequences
    are exchangeable.

    Args:
        sequences: list of (tokens,) integer arrays, one per sequence, each at least one token; or
            one flat array with `offsets`. With `lengths`, the items are keys of parts instead of
            tokens: sequences share a part if its key and all keys before it are equal.
        offsets: (sequences + 1,) integers: sequence i is ``sequences[offsets[i] : offsets[i +
            1]]``.
        lengths: tokens of each part, in the layout of `sequences`; equal keys on a shared prefix
            have equal lengths. None: the items are tokens.
        num_ranks: ranks to assign trees to.
        max_tokens_per_rank: limit of the tokens of a tree, at most 2^31 - 1.
        linear_cost_tokens: tokens, as in ``TreePlan.cost``; 0: only attention counts.
        groups: (sequences,) integers: sequences with the same number stay on one rank, and in one
            micro batch if their trie fits. None: no groups. Groups suit losses that need a whole
            group at once; without them, trees are fuller.
        balance: when ranks synchronize, as in ``plan_step``.
        micro_batch_multiple: the number of micro batches is a multiple of this.
        max_depth: limit of the nodes on a path. Sequences that branch in a node of this depth each
            get a copy of the node. None: no limit.
        token_multiple: the tokens of a tree are padded to a multiple of this (128 for some
            kernels); the padding counts against `max_tokens_per_rank`.

    Returns:
        The plan, the same on every rank and machine. Without sequences it has no micro batches.

    Raises:
        ValueError: a sequence is empty or exceeds a tree, arrays do not match, equal keys have
            different lengths, all paths of a tree together have more than 256 x
            `max_tokens_per_rank` tokens (lower `max_depth`), or an argument is out of range.
    """
    counts = {
        "num_ranks": checked_integer("num_ranks", num_ranks, 1, 1 << 20),
        "micro_batch_multiple": checked_integer(
            "micro_batch_multiple", micro_batch_multiple, 1, 1 << 20
        ),
        "max_tokens_per_rank": checked_integer(
            "max_tokens_per_rank", max_tokens_per_rank, 1, (1 << 31) - 1
        ),
        "token_multiple": checked_integer("token_multiple", token_multiple, 1, max_tokens_per_rank),
    }
    if not 0 <= linear_cost_tokens <= 1 << 28:
        raise ValueError(
            f"linear_cost_tokens is {linear_cost_tokens}; it must be from 0 to 268,435,456"
        )
    items, begins = _flat("sequences", sequences, offsets)
    order, shared = _core.sort_sequences(items, begins)
    ends = np.arange(len(items) + 1) if lengths is None else _ends(lengths, offsets, begins)
    tokens = (ends[begins[1:]] - ends[begins[:-1]])[order]
    if lengths is not None:
        _check_shared_lengths(items, ends, begins, order, shared)
        shared = ends[begins[order] + shared] - ends[begins[order]]
    _check_sequences(tokens, order, max_tokens_per_rank // token_multiple * token_multiple)
    trie_tokens = int(tokens.sum() - shared.sum())
    if max_depth is not None:
        shared = _core.limit_depth(
            tokens, shared, checked_integer("max_depth", max_depth, 1, 1 << 31)
        )
    group_ids = np.zeros(0, np.int64) if groups is None else integers("groups", groups)
    if groups is not None and group_ids.shape != order.shape:
        raise ValueError(
            f"groups has shape {group_ids.shape}; there are {len(order)} sequences: give a number "
            "for each"
        )
    num_micro_batches, tree_offsets, members, shared = _core.plan_trees(
        tokens,
        shared,
        group_ids if groups is None else group_ids[order],
        balance=balance,
        linear_cost_tokens=round(linear_cost_tokens),
        **counts,
    )
    return TreePlan(
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        token_multiple=token_multiple,
        trie_tokens=trie_tokens,
        sequences=order[members],
        tree_offsets=tree_offsets,
        lengths=tokens[members],
        shared=shared,
    )


# ---- Arguments -----------------------------------------------------------------------------------


def _flat(name: str, values: Any, offsets: ArrayLike | None) -> tuple[NDArray[Any], Int64]:
    """Return all items, and the begin of every sequence and the end of the last."""
    narrow = (np.uint16, np.int32) if name == "sequences" else ()  # dtypes that are not copied
    if offsets is None:
        parts = [integers(f"{name}[{i}]", part, narrow) for i, part in enumerate(values)]
        sizes = np.array([0, *map(len, parts)], np.int64)
        flat = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return integers(name, flat, narrow), np.cumsum(sizes)
    flat, begins = integers(name, values, narrow), integers("offsets", offsets)
    if not len(begins) or begins[0] < 0 or begins[-1] > len(flat) or (np.diff(begins) < 0).any():
        raise ValueError(
            f"offsets has {len(begins)} numbers for {len(flat)} items of {name}; it must be a "
            f"list that begins at 0 or later, never decreases and ends at {len(flat)} or earlier"
        )
    return flat, begins


def _ends(lengths: Any, offsets: ArrayLike | None, begins: Int64) -> Int64:
    """Return the tokens before every part."""
    parts, part_begins = _flat("lengths", lengths, offsets)
    if not np.array_equal(part_begins, begins):
        raise ValueError(
            f"lengths has {len(parts)} parts in {len(part_begins) - 1} sequences; give one length "
            f"for each of the {begins[-1]} keys in {len(begins) - 1} sequences"
        )
    if (parts < 1).any():
        i = int(np.flatnonzero(parts < 1)[0])
        raise ValueError(f"lengths of part {i} is {parts[i]}; leave out parts without tokens")
    return np.concatenate([[0], np.cumsum(parts)]).astype(np.int64)


def _check_shared_lengths(
    keys: NDArray[Any], ends: Int64, begins: Int64, order: Int64, shared: Int64
) -> None:
    """Check that neighbors in sorted order have equal lengths where they share keys."""
    parts = np.diff(ends)
    here = np.arange(shared.sum()) - np.repeat(np.cumsum(shared) - shared, shared)
    second = here + np.repeat(begins[order], shared)
    first = here + np.repeat(np.concatenate([[0], begins[order][:-1]])[: len(order)], shared)
    differ = np.flatnonzero(parts[first] != parts[second])
    if len(differ):
        i, j = int(first[differ[0]]), int(second[differ[0]])
        raise ValueError(
            f"key {keys[i]} has the lengths {parts[i]} and {parts[j]} after the same keys; give "
            "different parts different keys"
        )


def _check_sequences(tokens: Int64, order: Int64, most: int) -> None:
    wrong = np.flatnonzero((tokens < 1) | (tokens > most) | (tokens >= 1 << 28))
    if not len(wrong):
        return
    first = wrong[np.argmin(order[wrong])]
    number, length = int(order[first]), int(tokens[first])
    if length < 1:
        raise ValueError(f"sequence {number} has 0 tokens; leave it out")
    raise ValueError(
        f"sequence {number} has {length} tokens; a tree holds {min(most, (1 << 28) - 1)} "
        "(max_tokens_per_rank, rounded down to token_multiple): raise it, or cut the sequence"
    )


def _offsets(counts: NDArray[Any]) -> Int32:
    ends = np.cumsum(counts, dtype=np.int64)
    if len(ends) and ends[-1] >= 1 << 31:
        raise ValueError(
            f"the paths of a tree have {ends[-1]} keys; int32 offsets end at 2^31 - 1: lower "
            "max_tokens_per_rank or max_depth"
        )
    return np.concatenate([[0], ends]).astype(np.int32)

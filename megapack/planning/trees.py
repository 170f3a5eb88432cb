"""``plan_trees``: sequences that share prefixes, each shared prefix computed once.

* ``Tree``: a row of unique tokens: nodes, paths, positions, and the index of every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tree"]

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
        return _offsets(self.node_depths + self.node_lengths)

    @cached_property
    def kv_index(self) -> Int32:
        """(keys,) int32: row indices of the paths of all nodes, one after the other."""
        return _concatenated(self._paths)

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
        return _concatenated([self._paths[node] for node in self.sequence_nodes.tolist()])

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
        """Return the row's values, (T, ...): tokens or anything else that a shared prefix shares.

        Args:
            sequences: as in ``plan_trees``: a list of arrays by sequence number, or one flat array
                with `offsets`.
            offsets: (sequences + 1,) integers, if `sequences` is flat.
        """
        if offsets is not None:
            begins = np.asarray(offsets, np.int64)[self.node_sequences]
            where = np.repeat(begins, self.node_lengths) + self.position_ids
            return np.asarray(sequences)[where]
        nodes = zip(
            self.node_sequences.tolist(),
            self.node_depths.tolist(),
            self.node_lengths.tolist(),
            strict=True,
        )
        parts = [np.asarray(sequences[i])[depth : depth + n] for i, depth, n in nodes]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @cached_property
    def _paths(self) -> list[Int32]:
        paths: list[Int32] = []
        for begin, length, parent in zip(
            self.node_begins.tolist(),
            self.node_lengths.tolist(),
            self.node_parents.tolist(),
            strict=True,
        ):
            own = np.arange(begin, begin + length, dtype=np.int32)
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
        return paths


def _offsets(counts: Int32) -> Int32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _concatenated(parts: list[Int32]) -> Int32:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)

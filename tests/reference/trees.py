"""Definition of a prefix tree in plain Python: nodes, paths, positions, index.

    tree = tree_of({0: [7, 8, 1, 2], 1: [7, 8, 3], 2: [7, 8, 3, 4]})
    tree.node_lengths                # -> [2, 2, 1, 1]: 7 8 | 1 2 | 3 | 4
    tree.node_parents                # -> [-1, 0, 0, 2]
    path(tree, 3)                    # -> [0, 1, 4, 5], row indices from the root to the last token
    token_index(tree)                # -> [[0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]

The fields are those of ``megapack.planning.Tree``, as lists: ``Tree(**fields(tree))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class TreeLists(NamedTuple):
    sequences: list[int]  # numbers, ordered by content, then number
    node_begins: list[int]  # in the row
    node_lengths: list[int]
    node_parents: list[int]  # -1: a root
    node_depths: list[int]  # of the first token
    node_sequences: list[int]  # the first sequence through the node
    sequence_nodes: list[int]  # the node in which each sequence ends


def tree_of(sequences: Mapping[int, Sequence[int]]) -> TreeLists:
    """Return the forest of tries of sequences, of at least one token each, by number.

    A node is the longest run of tokens through which the same sequences pass: walk down from the
    root while one token follows and no sequence ends.
    """
    order = sorted(sequences, key=lambda number: (list(sequences[number]), number))
    tree = TreeLists(order, [], [], [], [], [], [0] * len(order))

    def add(members: list[int], depth: int, parent: int) -> None:
        """Add the nodes of sequences (positions in `order`) that share their first `depth`."""
        for token in sorted({sequences[order[i]][depth] for i in members}):
            inside = [i for i in members if sequences[order[i]][depth] == token]
            texts = [sequences[order[i]] for i in inside]
            end = depth + 1
            while all(len(t) > end and t[end] == texts[0][end] for t in texts):
                end += 1
            node = len(tree.node_begins)
            tree.node_begins.append(sum(tree.node_lengths))
            tree.node_lengths.append(end - depth)
            tree.node_parents.append(parent)
            tree.node_depths.append(depth)
            tree.node_sequences.append(order[inside[0]])
            for i in inside:
                if len(sequences[order[i]]) == end:
                    tree.sequence_nodes[i] = node
            add([i for i in inside if len(sequences[order[i]]) > end], end, node)

    add(list(range(len(order))), 0, -1)
    return tree


def fields(tree: TreeLists) -> dict[str, Any]:
    """Return arrays with the dtypes of ``megapack.planning.Tree``."""
    wide = {"sequences", "node_sequences"}
    return {
        name: np.array(values, np.int64 if name in wide else np.int32)
        for name, values in tree._asdict().items()
    }


def own_tokens(tree: TreeLists, node: int) -> list[int]:
    begin = tree.node_begins[node]
    return list(range(begin, begin + tree.node_lengths[node]))


def path(tree: TreeLists, node: int) -> list[int]:
    """Return the row indices of all tokens from the node's root to its last token."""
    parent = tree.node_parents[node]
    return ([] if parent < 0 else path(tree, parent)) + own_tokens(tree, node)


def position_ids(tree: TreeLists) -> list[int]:
    """Return the depth of every row token."""
    pairs = zip(tree.node_depths, tree.node_lengths, strict=True)
    return [depth + i for depth, length in pairs for i in range(length)]


def predecessors(tree: TreeLists) -> list[int]:
    """Return for every row token the row index of the token before it, -1 at roots."""
    found = []
    for node in range(len(tree.node_begins)):
        whole, own = [-1, *path(tree, node)], tree.node_lengths[node]
        found += whole[-own - 1 : -1]
    return found


def token_index(tree: TreeLists) -> list[list[int]]:
    """Return for each sequence (in order) the row index of every position."""
    return [path(tree, node) for node in tree.sequence_nodes]


def occurrences(tree: TreeLists) -> list[list[int]]:
    """Return for every row token its places in the concatenation of ``token_index``."""
    places: list[list[int]] = [[] for _ in range(sum(tree.node_lengths))]
    flat = [row for sequence in token_index(tree) for row in sequence]
    for place, row in enumerate(flat):
        places[row].append(place)
    return places


def ancestors_mask(tree: TreeLists) -> list[list[bool]]:
    """Return the attention mask of the row: [query][key] is True if the key is on its path."""
    size = sum(tree.node_lengths)
    mask = [[False] * size for _ in range(size)]
    for node in range(len(tree.node_begins)):
        whole = path(tree, node)
        for query in own_tokens(tree, node):
            for key in whole[: whole.index(query) + 1]:
                mask[query][key] = True
    return mask


def least_objective(
    sequences: list[list[int]],
    num_ranks: int,
    max_tokens: int,
    linear_cost_tokens: int,
    balance: str,
) -> tuple[float, int]:
    """Return the minimum of what ``plan_trees`` minimizes, over all partitions of the sequences
    into trees, and the fewest micro batches that hold one."""
    size = 1 << len(sequences)
    tokens, cost = [0] * size, [0] * size
    for subset in range(1, size):
        members = [s for i, s in enumerate(sequences) if subset >> i & 1]
        prefixes = {tuple(s[:end]) for s in members for end in range(1, len(s) + 1)}
        tokens[subset] = len(prefixes)
        cost[subset] = sum(2 * len(p) - 1 + linear_cost_tokens for p in prefixes)

    def partitions(remaining: int, most: int) -> Iterator[list[int]]:
        if not remaining:
            yield []
        elif most:
            first = remaining & -remaining
            part = others = remaining ^ first
            while True:
                if tokens[first | part] <= max_tokens:
                    for trees in partitions(others ^ part, most - 1):
                        yield [first | part, *trees]
                if not part:
                    break
                part = (part - 1) & others

    def objective(trees: list[int]) -> float:
        costs = sorted((cost[tree] for tree in trees), reverse=True)
        longest = sum(costs[::num_ranks]) if balance == "micro_batches" else costs[0]
        return sum(tokens[t] for t in trees) / tokens[-1] + num_ranks * longest / cost[-1]

    for num_micro_batches in range(1, len(sequences) + 1):
        found = [objective(t) for t in partitions(size - 1, num_micro_batches * num_ranks)]
        if found:
            return min(found), num_micro_batches
    raise AssertionError("a sequence exceeds a tree")

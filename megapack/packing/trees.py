"""Strategy ``tree``: documents that share prefixes become samples of unique tokens.

- ``pack_trees``: cut, assign and store the trees; called by ``pack``.
- ``tokens_of``: the tokens of a dataset, as ``pack`` needs them for this strategy.

Three documents in one sample of 8 tokens; every segment is a node of a prefix tree:

    documents              7 8 1 2,  7 8 3,  7 8 3 4
    segments               7 8 | 1 2 | 3 | 4            6 tokens instead of 11
    segment_document       0     0     1   2            any document through the node
    segment_begin          0     2     2   3            tokens of the path to it
    segment_parent        -1     0     0   2
    segment_end_offsets    0 0 1 2 3                    document 0 ends with segment 1, ...
    end_document           0 1 2

A document is whole and in one sample. Documents of two samples repeat the prefix that they share
(``megapack.planning.plan_trees`` explains the method, and does the same for a step at run time).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError
from megapack.packing.metrics import Lengths, array_checksum
from megapack.storage.address import is_remote

Ids = NDArray[np.int64]


class DocumentTokens(NamedTuple):
    """Tokens of documents, which ``tree`` compares."""

    flat: NDArray[Any]  # of all documents
    offsets: Ids  # (num_documents + 1,): document i is flat[offsets[i] : offsets[i + 1]]
    lengths: Lengths  # (num_documents,), 0 for documents that are not packed
    groups: Ids | None  # (num_documents,)

    @staticmethod
    def of(tokens: tuple[ArrayLike, ArrayLike] | None, lengths: Lengths, groups: Ids | None) -> Any:
        """Check the argument ``tokens`` of ``pack``. Raises ConfigError, DataError."""
        if tokens is None:
            raise ConfigError(
                "strategy 'tree' compares the tokens of documents, and here only their lengths are "
                "known: pack the dataset with megapack-build pack --strategy tree"
            )
        flat, offsets = np.asarray(tokens[0]), np.ascontiguousarray(tokens[1], np.int64)
        if flat.dtype not in (np.uint16, np.int32, np.int64):
            flat = flat.astype(np.int64)
        sizes = np.diff(offsets)
        if sizes.shape != lengths.shape or ((lengths != sizes) & (lengths > 0)).any():
            raise DataError(
                f"the offsets of tokens ({len(offsets) - 1:,} documents) and lengths "
                f"({len(lengths):,}) differ; give both for the same documents"
            )
        return DocumentTokens(np.ascontiguousarray(flat), offsets, lengths, groups)


def tokens_of(dataset: Any, strategy: str) -> dict[str, Any]:
    """Return arguments of ``pack`` for an IndexedDataset: its tokens, if the strategy needs them.
    Raises ConfigError for a remote dataset."""
    if strategy != "tree":
        return {}
    if is_remote(dataset.prefix):
        raise ConfigError(
            f"strategy 'tree' reads all tokens of {dataset.prefix}: pack a local copy, then "
            "megapack-build upload both"
        )
    offsets = np.append(0, np.cumsum(dataset.document_lengths, dtype=np.int64))
    return {"tokens": (dataset.tokens, offsets)}


def tokens_checksum(arguments: dict[str, Any]) -> str | None:
    """Return the checksum of the result of ``tokens_of`` that an index records, or None."""
    return array_checksum(arguments["tokens"][0]) if arguments else None


def check_tree(buckets: list[int], parameters: Any) -> None:
    """Raise ConfigError for options that trees do not support."""
    del buckets
    for name, reason in (
        ("alignment", "context parallelism divides segments, and a node needs its whole path"),
        ("fim_room", "fill-in-the-middle moves tokens, so prefixes would differ"),
    ):
        if name in parameters:
            raise ConfigError(f"{name} is {parameters[name]} with strategy 'tree': {reason}")


def pack_trees(
    documents: DocumentTokens, capacity: int, *, max_depth: int | None = None
) -> dict[str, Any]:
    """Return the arrays of an index of prefix trees of at most ``capacity`` tokens.

    Documents of one group are in one sample if their tree fits. ``max_depth`` limits the nodes on a
    path; documents that branch below it get copies of a node. With groups, also their
    ``GROUP_COUNTS``. Raises DataError for a document longer than the capacity, ValueError if all
    paths together have more than 256 times as many tokens as the capacity.
    """
    lengths, groups = documents.lengths, documents.groups
    if lengths.max(initial=0) > capacity:
        i, longer = int(np.argmax(lengths)), int((lengths > capacity).sum())
        raise DataError(
            f"document {i} has {lengths[i]:,} tokens, and a sample has {capacity:,}: a tree holds "
            f"whole documents, so give a larger bucket, or leave out the {longer:,} longer than a "
            "sample (--documents)"
        )
    order, shared = _core.sort_sequences(documents.flat, documents.offsets)
    packed = np.flatnonzero(lengths[order] > 0)
    order, shared = order[packed], _shared_of(packed, shared)
    sizes = lengths[order].astype(np.int64)
    if max_depth is not None:
        shared = _core.limit_depth(sizes, shared, max_depth)
    group_of = np.zeros(0, np.int64) if groups is None else _numbered(groups)[order]
    _, offsets, members, in_tree = _core.plan_trees(
        sizes,
        shared,
        group_of,
        balance="step",
        num_ranks=1,
        max_tokens_per_rank=capacity,
        linear_cost_tokens=0,
        micro_batch_multiple=1,
        token_multiple=1,
    )
    bounds = [(b, e) for b, e in pairwise(offsets.tolist()) if e > b]
    samples = [members[b:e] for b, e in bounds]
    nodes = [_core.tree_nodes(sizes[members[b:e]], in_tree[b:e]) for b, e in bounds]
    arrays = _index_arrays([order[part] for part in samples], nodes)
    arrays["bucket_capacity"] = np.array([capacity], np.int64)
    if groups is not None:
        arrays["groups"] = _count_groups(group_of, samples, sizes, shared, capacity)
    return arrays


def _shared_of(members: Ids, shared: Ids) -> Ids:
    """Return how many tokens each member (position in sorted order) shares with the previous one:
    the minimum of ``shared`` over all neighbors between the two."""
    result = np.zeros(len(members), np.int64)
    if len(members) > 1:
        first = members[0]
        result[1:] = np.minimum.reduceat(shared[first : members[-1] + 1], members[:-1] + 1 - first)
    return result


def _numbered(groups: Ids) -> Ids:
    """Return group numbers; a document without a group becomes a group."""
    alone = groups < 0
    numbers = np.unique(groups, return_inverse=True)[1].reshape(-1)
    return np.where(alone, len(groups) + np.arange(len(groups)), numbers)


def _index_arrays(samples: list[Ids], nodes: list[Any]) -> dict[str, Any]:
    """Return the arrays of samples: documents ordered by content, and results of ``tree_nodes``."""
    columns: dict[str, list[NDArray[Any]]] = {
        name: [np.zeros(0, np.int64)]
        for name in ("document", "parent", "begin", "length", "ends", "last")
    }
    for part, (_, lengths, parents, depths, first, last) in zip(samples, nodes, strict=True):
        columns["document"].append(part[first])
        columns["parent"].append(parents)
        columns["begin"].append(depths)
        columns["length"].append(lengths)
        columns["ends"].append(np.bincount(last, minlength=len(lengths)))
        columns["last"].append(part)
    joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    num_segments = np.array([0, *(len(lengths) for _, lengths, *_ in nodes)], np.int64)
    return {
        "bucket_sample_offsets": np.array([0, len(samples)], np.int64),
        "sample_segment_offsets": np.cumsum(num_segments),
        "segment_document": joined["document"],
        "segment_begin": joined["begin"].astype(np.int32),
        "segment_length": joined["length"].astype(np.int32),
        "segment_parent": joined["parent"].astype(np.int32),
        "segment_end_offsets": np.append(0, np.cumsum(joined["ends"])).astype(np.int64),
        "end_document": joined["last"],
        "dropped_tokens": 0,
        "repeated_tokens": 0,
    }


def _count_groups(
    group_of: Ids, samples: list[Ids], sizes: Ids, shared: Ids, capacity: int
) -> dict[str, int]:
    """Return the ``GROUP_COUNTS``; a group's size is that of its tree."""
    sample_of = np.empty(len(group_of), np.int64)
    for i, part in enumerate(samples):
        sample_of[part] = i
    groups = list(_members(group_of))
    trees = [int(sizes[g].sum() - _shared_of(g, shared).sum()) for g in groups]
    return {
        "num_groups": len(groups),
        "num_cut_groups": sum(len(np.unique(sample_of[g])) > 1 for g in groups),
        "num_groups_longer_than_largest_bucket": sum(tree > capacity for tree in trees),
    }


def _members(group_of: Ids) -> Iterator[Ids]:
    """Yield the ascending positions of every group of at least two."""
    order = np.argsort(group_of, kind="stable")
    cuts = np.flatnonzero(np.diff(group_of[order])) + 1
    return (part for part in np.split(order, cuts) if len(part) > 1)

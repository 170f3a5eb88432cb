"""A packed tree as a batch: tokens, weights, columns and indices are those of its sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.trees import fields, occurrences, predecessors, token_index, tree_of

from megapack.data import TreeBatch, tree_batch
from megapack.planning import Tree

Sequences = dict[int, list[int]]
forests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=8).map(
    lambda listed: {2 * i + 1: tokens for i, tokens in enumerate(listed)}
)


def planned(sequences: Sequences) -> Tree:
    return Tree(**fields(tree_of(sequences)))


def weights_of(sequences: Sequences) -> dict[int, np.ndarray]:
    return {n: np.arange(len(tokens)) + n / 4 for n, tokens in sequences.items()}


@settings(max_examples=50)
@given(sequences=forests, padding=st.integers(0, 3))
def test_a_batch_is_its_sequences(sequences: Sequences, padding: int) -> None:
    lists, size = tree_of(sequences), planned(sequences).num_tokens
    row, weights = max(1, size + padding), weights_of(sequences)
    # A column of one value per prefix: sequences that share a token agree.
    column = {n: np.cumsum(tokens).reshape(-1, 1) * [1, 2] for n, tokens in sequences.items()}
    batch = tree_batch(
        planned(sequences), sequences, weights=weights, columns={"sums": column}, pad_to=row
    )
    index, places = token_index(lists), occurrences(lists)
    assert batch["sequences"].tolist() == lists.sequences
    assert batch["token_index"].tolist() == [i for rows in index for i in rows]
    ends = batch["token_offsets"].tolist()
    assert np.diff(ends).tolist() == [len(rows) for rows in index]
    rows = np.split(batch["occurrences"].numpy(), batch["occurrence_offsets"].numpy()[1:-1])
    assert [x.tolist() for x in rows] == places + [[]] * (row - size)
    expected = predecessors(lists)
    assert batch["predecessors"].tolist() == expected + [-1] * (row - size)
    total = [0.0] * row
    for number, of_sequence in zip(lists.sequences, index, strict=True):
        for depth, i in enumerate(of_sequence):
            assert batch["tokens"][0, i] == sequences[number][depth]
            assert batch["position_ids"][0, i] == depth
            assert batch["sums"][0, i].tolist() == column[number][depth].tolist()
            total[i] += weights[number][depth] * (depth > 0)
    assert batch["loss_weights"][0].tolist() == total
    assert batch["position_ids"][0, size:].tolist() == list(range(row - size))
    assert batch["cu_seqlens_q"][-1] == row and batch["cu_seqlens_k"][-1] == len(batch["kv_index"])
    assert batch["kv_index"][len(batch["kv_index"]) - (row - size) :].tolist() == [
        *range(size, row)
    ]
    assert batch["max_seqlen_q"] == batch["cu_seqlens_q"].diff().max()
    assert batch["max_seqlen_k"] == batch["cu_seqlens_k"].diff().max()


def test_the_example_of_the_module() -> None:
    sequences = {0: [5, 6, 7, 8], 1: [5, 6, 9]}
    batch = tree_batch(planned(sequences), sequences)
    found = {name: batch[name].flatten().tolist() for name in batch if torch.is_tensor(batch[name])}
    assert found["tokens"] == [5, 6, 7, 8, 9] and found["position_ids"] == [0, 1, 2, 3, 2]
    assert found["predecessors"] == [-1, 0, 1, 2, 1] and found["loss_weights"] == [0, 2, 1, 1, 1]
    assert found["token_index"] == [0, 1, 2, 3, 0, 1, 4]
    kinds = {name: value.dtype for name, value in batch.items() if torch.is_tensor(value)}
    nodes = {"cu_seqlens_q", "cu_seqlens_k", "kv_index"}
    assert {name for name, kind in kinds.items() if kind == torch.int32} == nodes
    assert kinds["loss_weights"] == torch.float32 and batch["max_seqlen_k"] == 4
    moved = batch.to("meta")
    assert isinstance(moved, TreeBatch) and moved["tokens"].device.type == "meta"
    assert moved.keys() == batch.keys() and moved["max_seqlen_q"] == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_are_under_the_logits_of_the_predecessor(dtype: torch.dtype) -> None:
    sequences = {0: [5, 6, 7, 8], 1: [5, 6, 9], 2: [3]}
    batch = tree_batch(planned(sequences), sequences, pad_to=8)
    torch.manual_seed(0)
    logits = torch.randn(1, 8, 10).to(dtype).requires_grad_()
    log_probs = batch.log_probs(logits)
    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    table = logits[0].double().log_softmax(-1)
    before = batch["predecessors"].tolist()
    for i, token in enumerate(batch["tokens"][0].tolist()):
        expected = 0.0 if before[i] < 0 else float(table[before[i], token])
        assert float(log_probs[i]) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(log_probs, batch.log_probs(logits[0]))
    log_probs.sum().backward()
    assert logits.grad is not None
    # Both branches begin after token 6; ends of sequences, roots alone and padding predict nothing.
    used = logits.grad[0].abs().sum(-1) > 0
    assert used.nonzero().flatten().tolist() == sorted({i for i in before if i >= 0})


def test_values_go_to_sequences_and_back() -> None:
    sequences = {0: [5, 6, 7], 1: [5, 6, 9], 2: [5, 6, 7]}
    batch = tree_batch(planned(sequences), sequences, pad_to=6)
    values = torch.arange(12.0, requires_grad=True)
    flat = batch.per_sequence(values.view(6, 2))
    parts = flat.split(batch["token_offsets"].diff().tolist())
    by_number = dict(zip(batch["sequences"].tolist(), parts, strict=True))
    assert by_number[0].tolist() == by_number[2].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert by_number[1].tolist() == [[0, 1], [2, 3], [6, 7]]
    back = batch.per_token(torch.ones(9))
    assert back.tolist() == [3, 3, 2, 1, 0, 0]
    (grad,) = torch.autograd.grad(flat.sum(), values)
    assert grad.view(6, 2)[:, 0].tolist() == back.tolist(), "per_token is the transpose"


def test_a_tree_without_sequences_is_one_token_of_padding() -> None:
    batch = tree_batch(planned({}), {})
    assert batch["tokens"].tolist() == [[0]] and batch["loss_weights"].tolist() == [[0]]
    assert batch["cu_seqlens_q"].tolist() == batch["cu_seqlens_k"].tolist() == [0, 1]
    assert batch.log_probs(torch.randn(1, 1, 4)).tolist() == [0]
    assert batch.per_sequence(torch.zeros(1)).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_to": 4}, "has 5 tokens and pad_to is 4; raise it to at least 5"),
        ({"sequences": [[5, 6, 7, 8], [5, 6]]}, "sequences of sequence 1 has 2 entries.* 3"),
        ({"weights": [[1.0] * 3, [1.0] * 3]}, "weights of sequence 0 has 3 entries.* 4"),
        ({"columns": {"age": [[0] * 4, [0] * 4]}}, "age of sequence 1 has 4 entries.* 3"),
    ],
)
def test_wrong_lengths_are_refused(changes: dict[str, Any], message: str) -> None:
    sequences = [[5, 6, 7, 8], [5, 6, 9]]
    tree = planned(dict(enumerate(sequences)))
    with pytest.raises(ValueError, match=message):
        tree_batch(tree, **{"sequences": sequences, **changes})

"""Packed prefix trees: attention, losses and gradients equal those of separate rows."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from reference.trees import ancestors_mask, tree_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import (
    TreeSegments,
    register,
    tree_arguments,
    tree_attention,
    tree_mask,
)
from megapack.attention.problem import ScoreRule
from megapack.data import tree_batch

from .tree_cases import (
    KINDS,
    Decoder,
    Rule,
    as_batch,
    assert_same,
    forest,
    planned,
    run_tree_case,
    separate_rows,
    tree_row,
)

NUM_FORESTS, IN_THE_GATE = 5000, 16
RULES = {
    "plain": Rule(),
    "window": Rule(window=3),
    "window 1": Rule(window=1),
    "ALiBi": Rule(alibi=True),
    "window and ALiBi": Rule(window=5, alibi=True),
    "soft cap": Rule(softcap=0.8),
    "soft cap, window, ALiBi": Rule(softcap=0.8, window=4, alibi=True),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
def test_attention_of_a_tree_is_the_definition(backend: str, name: str) -> None:
    rule, flex = RULES[name], backend == "flex"  # without a backward pass on the CPU
    for seed in range(len(KINDS) * (1 if flex else 2)):
        batch = as_batch(forest(seed), seed)
        if backend == "sdpa" and rule.softcap:
            with pytest.raises(ValueError, match="'sdpa' cannot apply a soft cap"):
                run_tree_case(batch, rule, backend, torch.float64)
            return
        dtype = torch.float32 if flex else torch.float64
        shape = (4, 2, 16) if flex else [(4, 2, 8), (4, 4, 4), (3, 1, 8)][seed % 3]
        run_tree_case(batch, rule, backend, dtype, shape=shape, backward=not flex)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_long_nodes_and_bfloat16(backend: str) -> None:
    draw = np.random.default_rng(0)
    prompt, long, short = (draw.integers(0, 8, n).tolist() for n in (40, 530, 20))
    sequences = {0: prompt + long, 1: prompt + short}  # one node is longer than a block of rows
    batch = tree_batch(planned(sequences), sequences)
    run_tree_case(batch, Rule(), backend, torch.bfloat16)
    run_tree_case(batch, Rule(window=33, alibi=True), backend, torch.float32)


# ---- Models: loss, parameter gradients and log-probabilities


@cache
def decoder(dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder().to(dtype)


def check_forest(seed: int) -> None:
    """Compare the tree with separate rows, in float64 within 1e-10, in float32 within 1e-5."""
    sequences, rule = forest(seed), Rule(window=[0, 3, 1, 0, 7][seed % 5])
    expected = separate_rows(decoder(torch.float64), sequences, seed, rule)
    for backend in ("eager", "sdpa", "dense", "flex"):
        backward = backend != "flex"  # FlexAttention has none on the CPU
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            if dtype == torch.float32 or backward:
                ours = tree_row(decoder(dtype), sequences, seed, rule, backend, backward=backward)
                assert_same(ours, expected, tolerance, backward=backward)


def test_trees_train_like_separate_rows() -> None:
    for seed in range(IN_THE_GATE):
        check_forest(seed)


@pytest.mark.pages
def test_thousands_of_trees_train_like_separate_rows() -> None:
    for seed in range(NUM_FORESTS):
        check_forest(seed)


def test_forests_are_of_every_kind() -> None:
    trees = [planned(forest(seed)) for seed in range(IN_THE_GATE)]
    depths = [max(tree.node_depths, default=0) for tree in trees]
    assert 0 in {tree.num_tokens for tree in trees} and max(depths) > 10
    assert max(np.bincount(tree.node_parents + 1, minlength=1).max() for tree in trees) > 5
    assert any(len(set(tree.sequence_nodes)) < len(tree.sequences) for tree in trees)
    inner = [set(tree.sequence_nodes) & set(tree.node_parents) for tree in trees]
    assert any(inner), "no sequence is a prefix of another"


# ---- transformers


def _model(name: str, implementation: str, **fields: Any) -> Any:
    small = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    configuration = AutoConfig.for_model(name, **small, **heads, **fields)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configuration, attn_implementation=implementation)


@pytest.mark.parametrize("implementation", ["megapack", "sdpa"])
@pytest.mark.parametrize(("name", "window"), [("llama", 0), ("mistral", 3)])
def test_transformers_models_train_on_trees(name: str, window: int, implementation: str) -> None:
    register("sdpa")
    fields = {"sliding_window": window} if window else {}
    model, reference = (_model(name, kind, **fields) for kind in (implementation, "eager"))
    reference.load_state_dict(model.state_dict())
    for seed in (0, 1, 2, 8):
        sequences = forest(seed)
        batch = as_batch(sequences, seed)
        segments, total = TreeSegments.of(batch), batch["tokens"].shape[1]
        how = tree_arguments(segments)
        if implementation == "sdpa":
            how = {"attention_mask": tree_mask(segments, total, window=window)}
        logits = model(input_ids=batch["tokens"], position_ids=batch["position_ids"], **how).logits
        log_probs = batch.log_probs(logits)
        parts = []
        for number in batch["sequences"].tolist():
            tokens = torch.tensor([sequences[number]])
            alone = reference(input_ids=tokens).logits.log_softmax(-1)
            picked = alone[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
            parts += [picked.new_zeros(1), picked]
        expected = torch.cat(parts)
        assert (batch.per_sequence(log_probs) - expected).abs().max() < 1e-5
        weights = torch.randn(len(expected))
        found, wanted = (
            torch.autograd.grad(loss, list(of.parameters()))
            for loss, of in (
                ((batch.per_token(weights) * log_probs).sum(), model),
                ((weights * expected).sum(), reference),
            )
        )
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


def test_incomplete_arguments_are_refused() -> None:
    register("eager")
    batch = as_batch(forest(0), 0)
    how = {**tree_arguments(TreeSegments.of(batch)), "cu_seq_lens_k": None}
    with pytest.raises(ValueError, match="kv_index without cu_seq_lens_k"):
        _model("llama", "megapack")(input_ids=batch["tokens"], **how)


# ---- Masks, graphs and errors


@pytest.mark.parametrize("window", [0, 3])
def test_the_dense_mask_is_the_definition(window: int) -> None:
    for seed in range(IN_THE_GATE):
        sequences = forest(seed)
        tree = tree_of(sequences)
        batch = tree_batch(planned(sequences), sequences)
        size, depth = sum(tree.node_lengths), batch["position_ids"][0]
        mask = tree_mask(TreeSegments.of(batch), max(size, 1), window=window)[0, 0]
        expected = torch.tensor(ancestors_mask(tree), dtype=torch.bool).view(size, size)
        if window:
            expected &= depth[:size, None] - depth[:size] < window
        assert torch.equal(mask[:size, :size], expected)


def test_documents_are_a_forest_of_roots() -> None:
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    documents = TreeSegments.of_documents(ends, 5)
    index = torch.arange(8, dtype=torch.int32)
    for one, other in zip(
        documents.spans(8), documents._replace(kv_index=index).spans(8), strict=True
    ):
        assert torch.equal(one, other)
    assert documents.spans(8)[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    q = torch.randn(8, 2, 4, dtype=torch.float64)
    for backend in ("eager", "sdpa"):
        ours = [
            tree_attention(q, q, q, segments, backend=backend)
            for segments in (documents, documents._replace(kv_index=index))
        ]
        assert torch.allclose(*ours, rtol=0, atol=1e-12)


def test_one_graph_serves_every_tree() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True, dynamic=True)
    def layer(x: Tensor, segments: TreeSegments) -> Tensor:
        q = (x * 2).view(-1, 2, 8)
        return tree_attention(q, q, q, segments, backend="sdpa").square().sum()

    for seed in (0, 1, 2, 8, 9, 10):
        batch = as_batch(forest(seed), seed)
        segments = TreeSegments.of(batch)
        x = torch.randn(batch["tokens"].shape[1], 16, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x, segments), x)
        q = (x * 2).view(-1, 2, 8)
        plain = tree_attention(q, q, q, segments, backend="sdpa").square().sum()
        (expected,) = torch.autograd.grad(plain, x)
        assert torch.allclose(grad, expected, atol=1e-5)
    assert len(graphs) <= 2


def test_autograd_keeps_no_gathered_keys() -> None:
    """Forty branches repeat a prompt forty times among the keys, and not in memory."""
    sequences = {i: [*range(8)] * 12 + [i % 8, i // 8] for i in range(40)}
    batch = tree_batch(planned(sequences), sequences)
    total, saved = batch["tokens"].shape[1], []
    q = torch.randn(total, 2, 8, requires_grad=True)
    assert len(batch["kv_index"]) > 20 * total
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        tree_attention(q, q, q, TreeSegments.of(batch), backend="sdpa")
    assert saved and max(x.numel() for x in saved if x.is_floating_point()) <= q.numel()


TREE = TreeSegments(*(torch.IntTensor(x) for x in ([0, 2, 4], [0, 2, 6], [0, 1, 0, 1, 2, 3])), 2, 4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_k": torch.IntTensor([0, 2, 5])}, "cu_seqlens_k .*ascend from 0 to 6"),
        ({"cu_seqlens_q": torch.IntTensor([0, 2, 3])}, "cu_seqlens_q .*ascend from 0 to 4"),
        ({"cu_seqlens_k": torch.IntTensor([0, 1, 6])}, "rows 0 to 2 has a path of 1 tokens"),
        ({"cu_seqlens_k": torch.IntTensor([0, 2, 3, 6])}, "every node has one path"),
        ({"kv_index": torch.arange(6)}, "kv_index is torch.int64"),
    ],
)
def test_invalid_trees_are_refused(changes: Any, message: str, backend: str) -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=message):
        tree_attention(q, q, q, TREE._replace(**changes), backend=backend)


def test_spans_wait_for_no_device() -> None:
    on_device = TreeSegments(*(x.to("meta") for x in TREE[:3]), 2, 4)
    assert [x.shape for x in on_device.spans(4)] == [(4,), (4,)]
    depth, end = TREE.spans(4)
    assert (depth.tolist(), end.tolist()) == ([0, 1, 2, 3], [4, 4, 4, 4])
    assert deepcopy(TREE)._fields == TreeSegments._fields and ScoreRule(scale=1.0).causal
    assert [b - a for a, b in pairwise(TREE.cu_seqlens_k.tolist())] == [2, 4]

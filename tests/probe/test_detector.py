"""``probe`` finds every dependence between documents, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from integrations.harness import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megapack.probe import LeakError, probe
from megapack.probe.boundaries import groups
from probe.modules import Attention, Edge, Model, batch_of, numbers


@st.composite
def edges(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=7))
    document = st.integers(0, len(lengths) - 1)
    pairs = st.tuples(document, document).filter(lambda pair: pair[0] != pair[1])
    found = draw(st.lists(pairs, max_size=3, unique=True))
    return lengths, [(a, b, draw(st.integers(0, lengths[b] - 1))) for a, b in found]


@given(edges())
def test_every_dependence_is_found(drawn: tuple[list[int], list[tuple[int, int, int]]]) -> None:
    lengths, leaks = drawn
    model = Model(*(Edge(*leak) for leak in leaks))
    report = probe(model, batch_of(lengths))
    assert report.ok == (not leaks) and report.forwards <= 5 and not report.notes
    assert {leak.to_document for leak in report.leaks} <= {to for _, to, _ in leaks}
    assert json.loads(json.dumps(report.as_dict()))["ok"] == report.ok
    if len(leaks) != 1:
        return
    ((source, to, skip),) = leaks
    (leak,) = report.leaks
    assert (leak.from_document, leak.to_document, leak.layer) == (source, to, "layers.1")
    assert leak.direction == ("forward" if source < to else "backward")
    assert leak.first_position == sum(lengths[:to]) + skip
    assert f"document {source} -> {to} ({leak.direction}" in str(report)
    with pytest.raises(LeakError, match=f"document {source} -> {to}"):
        report.raise_if_leaking()


def test_a_function_of_the_batch_has_layers_too() -> None:
    model = Model(Edge(0, 2))
    report = probe(lambda batch: model(**batch), batch_of([5, 4, 6]))
    assert [leak.layer for leak in report.leaks] == ["Model.layers.1"]


def test_nothing_of_the_model_changes() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
            del of_token
            self.calls += 1
            return x

    model, batch = Model(Counter()), batch_of([5, 6])
    kept = {name: value.clone() for name, value in batch.items()}
    state = torch.get_rng_state()
    assert probe(model, batch).ok
    assert torch.equal(state, torch.get_rng_state()) and float(model.layers[1].calls) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(batch[name], value) for name, value in kept.items())
    assert not torch.nn.modules.module._has_any_global_hook()


def test_random_layers_are_no_leak() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
            del of_token
            return nn.functional.dropout(x, 0.1)

    with pytest.raises(LeakError, match=r"two equal passes differ .* dropout"):
        probe(Model(Noise()), batch_of([5, 6]))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda batch: batch["input_ids"] * torch.nan, "not finite"),
        (lambda batch: torch.ones(1, 11, 3), "same outputs when tokens change"),
        (lambda batch: torch.ones(2, 3), "no float tensor of 1 x 11 tokens"),
    ],
)
def test_what_cannot_be_told_is_an_error(target: Any, message: str) -> None:
    with pytest.raises(LeakError, match=message):
        probe(target, batch_of([5, 6]))
    with pytest.raises(LeakError, match="the probe needs two"):
        probe(target, batch_of([11]))


class Repeated(nn.Module):
    """A layer whose backward pass repeats its forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.layer, x, of_token, use_reentrant=False)
        return made


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("how", ["bfloat16", "checkpoint", "compile"])
def test_precision_checkpoints_and_compiled_code(how: str, leaks: bool) -> None:
    layer: nn.Module = Edge(0, 1) if leaks else Attention()
    model = Model(Repeated(layer) if how == "checkpoint" else layer)
    target: Any = model.bfloat16() if how == "bfloat16" else model
    if how == "compile":
        target = torch.compile(model, backend="eager")
    report = probe(target, batch_of([5, 6, 4]))
    assert report.ok != leaks and not report.notes
    if leaks:
        (leak,) = report.leaks
        assert leak.layer is not None and "layers.1" in leak.layer


class Steep(nn.Module):
    """A layer whose kernel rounds in another way in a row, and that amplifies rounding."""

    def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
        in_row = int(of_token.max()) > 0
        rounded = (x.double() * (1 + in_row * torch.finfo(x.dtype).eps / 3)).to(x.dtype)
        return torch.sin(32 * rounded)


class Place(nn.Module):
    """A layer that adds a number for the place in the row."""

    def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
        del of_token
        return torch.arange(x.shape[1]).view(1, -1, 1).to(x.dtype).expand_as(x) / x.shape[1]


@pytest.mark.parametrize("layer", [Steep(), Place()])
def test_rounding_of_half_precision_is_no_leak(layer: nn.Module) -> None:
    """A document alone may be computed by another kernel; where it is in the row is a leak."""
    report = probe(Model(layer).bfloat16(), batch_of([5, 6, 4]))
    assert report.ok == isinstance(layer, Steep), report
    assert report.ok or report.leaks[0].layer == "layers.1"


@pytest.mark.parametrize("target", ["module", "function", "layer"])
def test_a_probe_compiles_no_code_again(target: str) -> None:
    """Training goes through the code that was compiled before the probe; buffers are restored."""

    class Counter(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x, of_token)

    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    model, batch = Model(Counter()), batch_of([5, 6, 4])
    run: Any = torch.compile(
        (lambda batch: model(**batch)) if target == "function" else model, backend=backend
    )
    if target == "layer":
        model.layers[1].compile(backend=backend)
        run = model

    def call() -> Tensor:
        made: Tensor = run(**batch) if target != "function" else run(batch)
        return made

    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    call().sum().backward()
    with torch.no_grad():  # the probe's mode, for which torch compiles separately
        call()
    before = len(compiled)
    assert probe(run, batch).ok and float(model.layers[1].calls) == 2
    call().sum().backward()
    assert len(compiled) == before > 0


class Wrong(torch.autograd.Function):
    """Identity whose gradient is that of other tokens, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        del ctx
        return grad + grad.roll(1, dims=1)


class WrongLayer(nn.Module):
    def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
        del of_token
        return Wrong.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_a_leak_of_the_backward_pass_is_found() -> None:
    report = probe(Model(WrongLayer()), batch_of([5, 6, 4]))
    assert {(leak.kind, leak.layer) for leak in report.leaks} == {("gradient", "layers.1")}
    assert probe(Model(WrongLayer()), batch_of([5, 6, 4]), gradients=False).ok


def test_a_head_of_many_ids_computes_few_logits() -> None:
    widths = set()

    class Named(Model):
        def get_output_embeddings(self) -> nn.Linear:
            return self.lm_head

        def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            made = super().forward(input_ids, cu_seqlens)
            widths.add(made.shape[-1])
            return made

    model, batch = Named(Edge(1, 0), ids=129_000), batch_of([5, 6], ids=129_000)
    assert len(probe(model, batch).leaks) == 1
    assert widths == {256} and model(**batch).shape[-1] == 129_000


def test_labels_of_another_document_are_a_leak() -> None:
    """By losses per token, by the gradient of their mean, or by the labels of the batch."""
    model, batch = Model(), batch_of([5, 6])

    def losses(logits: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="none")

    labels = batch["input_ids"].roll(-1, dims=1).index_fill(1, torch.tensor([10]), -100)
    wrong = {**batch, "labels": labels}
    right = {**batch, "labels": labels.index_fill(1, torch.tensor([4]), -100)}
    how: list[Any] = [losses, lambda *args: losses(*args).mean(), None]
    for loss in how:
        call = None if loss is None else arguments
        assert probe(model, right, loss=loss, call=call).ok
        (leak,) = probe(model, wrong, loss=loss, call=call).leaks
        assert (leak.kind, leak.from_document, leak.to_document) == ("loss_mask", 1, 0)
        assert (leak.direction, leak.first_position) == ("backward", 4)


def test_a_fused_loss_that_counts_labels_of_another_document_is_a_leak() -> None:
    """A fused loss returns no logits; the entries of hidden states say nothing about labels."""
    model = Model(ids=10)  # fewer ids than hidden states have entries

    def loss(target: Any, batch: Any) -> Tensor:
        hidden = {}
        hook = target.norm.register_forward_hook(lambda *of: hidden.update(value=of[2]))
        logits = target(batch["input_ids"], batch["cu_seqlens"])
        hook.remove()
        labels = batch["input_ids"][0, 1:].index_fill(0, torch.tensor(batch["masked"]).long(), -100)
        return hidden["value"], nn.functional.cross_entropy(logits[0, :-1], labels)

    for masked in ([4], []):
        batch = {**batch_of([5, 6], ids=10), "masked": masked}
        report = probe(model, batch, call=loss, loss=lambda output, batch: output[1])
        assert [leak.kind for leak in report.leaks] == ([] if masked else ["loss_mask"])


@pytest.mark.parametrize("content", [0, 7])
def test_tokens_change_although_few_ids_occur(content: int) -> None:
    """Documents of begin token 1, end token 2 and one other id, in which a model may find ends."""
    batch = batch_of([4, 5, 6])
    ids = torch.full((1, 15), content)
    ids[0, [0, 4, 9]], ids[0, [3, 8, 14]] = 1, 2
    assert not probe(Model(Edge(0, 2)), {**batch, "input_ids": ids}).ok


def test_sets_of_documents_separate_pairs() -> None:
    sets = torch.stack(groups(300)).T
    same = (sets[:, None] == sets).all(dim=2)
    near = [same.diagonal(distance) for distance in range(2, 20, 2)]
    assert not any(bool(pairs.any()) for pairs in near)
    assert not any(bool(same.diagonal(distance).all()) for distance in range(1, 200))
    within = torch.stack([torch.arange(300) // 20 == part for part in range(15)]).float()
    assert int(same.float().mul(within.T @ within).sum()) == 300  # each with itself


def arguments(target: Any, batch: Any) -> Any:
    return target(batch["input_ids"], batch["cu_seqlens"])


# ---- Ranks


def stage(rank: int, size: int, faulty: int) -> list[Any]:
    """A pipeline of two stages; the one of rank ``faulty`` leaks."""
    batch = batch_of([5, 6, 4])
    of_token = numbers(batch["cu_seqlens"], 15)
    layer = Edge(0, 1) if rank == faulty else Attention()
    model = Model(layer)

    def forward(batch: Any) -> Tensor | None:
        if rank == 0:
            x = model.embed(batch["input_ids"])
            x = x + model.layers[1](x, of_token)
            dist.send(x.detach().contiguous(), 1)
            return None
        x = torch.empty(1, 15, 16)
        dist.recv(x, 0)
        x = model.norm(x)
        return x + model.layers[1](x, of_token)  # type: ignore[no-any-return]

    del size
    return [probe(forward, batch, gradients=False).leaks]


@pytest.mark.parametrize("faulty", [0, 1])
def test_the_stage_of_a_pipeline_is_named(faulty: int, free_port: int) -> None:
    first, second = run_ranks(stage, 2, free_port, faulty)
    assert first == second
    ((leak,),) = first
    assert (leak.from_document, leak.to_document) == (0, 1)
    assert (leak.rank, leak.stage) == (faulty, faulty) and leak.layer == "Edge"


def shared(rank: int, size: int, leaks: bool) -> Any:
    """Ranks that share the documents of a row: tokens are gathered for attention."""
    batch = batch_of([5, 7, 4])
    of_token = numbers(batch["cu_seqlens"], 16)
    own = slice(rank * 16 // size, (rank + 1) * 16 // size)
    model = Model(Edge(1, 0) if leaks else Attention())

    def forward(batch: Any) -> Tensor:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, batch["input_ids"])
        x = model(torch.cat(parts, dim=1), torch.tensor([0, 5, 12, 16]))
        return x[:, own]

    mine = {"input_ids": batch["input_ids"][:, own], "document_ids": of_token[None, own] + 20}
    return probe(forward, mine, gradients=False)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_documents(size: int, free_port: int) -> None:
    assert all(report.ok for report in run_ranks(shared, size, free_port, False))
    reports = run_ranks(shared, size, free_port, True)
    assert len({replace(report, seconds=0) for report in reports}) == 1
    ranks = sorted({leak.rank for leak in reports[0].leaks})
    assert ranks == ([0] if size == 2 else [0, 1])
    assert {(leak.from_document, leak.to_document) for leak in reports[0].leaks} == {(1, 0)}


ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numpy", "yaml", "rich", "xxhash") or name == "megapack._core":
            raise ModuleNotFoundError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import torch, megapack.probe as p
batch = {"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 4, 9])}
print(p.probe(torch.nn.Embedding(9, 4), batch, call=lambda m, b: m(b["input_ids"])))
"""


def test_the_package_needs_torch_only() -> None:
    ran = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert "2 documents are independent" in ran.stdout, ran.stderr

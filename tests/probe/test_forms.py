"""Batches and outputs in unusual forms: leaks are found, and right models are not accused.

{"input_ids": ..., "cu_seqlens": [0, 9, 16, 30]}     a list, an array, ends without the first 0
losses[1, T - 1]                                     outputs without the last token of a row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megapack.probe import LeakError, probe

from .bugs.parts import (
    WIDTH,
    Attention,
    Decoder,
    block_causal,
    causal,
    offsets_of,
    packed_batch,
    segments_of,
    token_losses,
)

LENGTHS = [9, 7, 14]
ROW = packed_batch("cu_seqlens", lengths=LENGTHS)
ENDS = torch.tensor([0, 9, 16, 30])
IDS = segments_of(ENDS)[None]


class Leaking(Attention):
    def visible(self, length: int, **given: Any) -> Tensor:
        return causal(length)


def check(make: Callable[[bool], Any], batch: dict[str, Any], **options: Any) -> Any:
    """Assert that the right model passes all checks; return the first leak of the other one."""
    right = probe(make(False), batch, **options)
    assert right.ok and not right.notes, str(right)
    return probe(make(True), batch, **options).leaks[0]


# ---- Batches


@pytest.mark.parametrize(
    ("given", "boundaries"),
    [
        ({"cu_seqlens": ENDS.tolist()}, None),
        ({"cu_seqlens": ENDS.numpy()}, None),
        ({"cu_seqlens": ENDS[1:]}, None),
        ({"ends": ENDS}, LENGTHS),
        ({"sizes": LENGTHS}, "sizes"),
        ({"rows": [LENGTHS]}, "rows"),
        ({"position_ids": offsets_of(ENDS)[None].numpy()}, None),
    ],
    ids=["list", "array", "ends", "value", "lengths", "nested", "positions"],
)
def test_boundaries_in_any_form_are_cut_to_a_document(
    given: dict[str, Any], boundaries: Any
) -> None:
    def ends_of(given: dict[str, Any]) -> Tensor:
        ((name, value),) = given.items()
        flat = torch.as_tensor(value).flatten()
        if name == "position_ids":
            return F.pad((flat == 0).nonzero()[:, 0], (0, 1), value=len(flat))
        if name in ("sizes", "rows"):
            return F.pad(flat.cumsum(0), (1, 0))
        return flat if flat[0] == 0 else F.pad(flat, (1, 0))

    def make(leaks: bool) -> Any:
        model = Decoder(Leaking if leaks else Attention)

        def run(batch: dict[str, Any]) -> Tensor:
            rest = {name: value for name, value in batch.items() if name != "input_ids"}
            made: Tensor = model(batch["input_ids"], cu_seqlens=ends_of(rest))
            return made

        return run

    leak = check(make, {"input_ids": ROW["input_ids"], **given}, boundaries=boundaries)
    assert (leak.from_document, leak.to_document) == (0, 1)
    assert leak.layer == "Decoder.layers.1.self_attn"


def test_an_entry_that_cannot_be_cut_is_no_leak() -> None:
    model = Decoder()
    batch = {"input_ids": ROW["input_ids"], "plan": [[3, 9], [3, 16], [3, 30]], "segment_ids": IDS}

    def run(batch: dict[str, Any]) -> Tensor:
        ends = torch.tensor([0, *(end for _, end in batch["plan"])])
        ends = ends.clamp(max=batch["input_ids"].shape[1])
        made: Tensor = model(batch["input_ids"], cu_seqlens=torch.tensor(sorted({*ends.tolist()})))
        return made

    report = probe(run, batch)
    assert report.ok and "cannot cut plan to it; pass cu_seqlens" in report.notes[0]


def test_positions_may_begin_at_two() -> None:
    """As RoBERTa's do: a document alone begins at 2, too."""

    class Learned(Decoder):
        def __init__(self, mixer: Any) -> None:
            super().__init__(mixer)
            self.places = nn.Embedding(40, WIDTH)
            self.embed.register_forward_hook(lambda *given: given[2] + self.added)

        def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
            self.added = self.places(given["position_ids"])
            begins = (given["position_ids"][0] == 2).nonzero()[:, 0]
            ends = F.pad(begins, (0, 1), value=input_ids.shape[1])
            return super().forward(input_ids, cu_seqlens=ends)

    batch = {"input_ids": ROW["input_ids"], "position_ids": offsets_of(ENDS)[None] + 2}
    leak = check(lambda leaks: Learned(Leaking if leaks else Attention), batch)
    assert leak.layer == "layers.1.self_attn"


def test_a_module_may_take_the_batch_as_one_argument() -> None:
    class Whole(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.inner = Decoder(Leaking if leaks else Attention)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            made: Tensor = self.inner(**batch)
            return made

    assert check(Whole, ROW).layer == "inner.layers.1.self_attn"


def test_a_batch_of_an_encoder_and_a_decoder_is_refused() -> None:
    with pytest.raises(LeakError, match=r"decoder_input_ids: the probe checks one sequence"):
        probe(Decoder(), {**ROW, "decoder_input_ids": ROW["input_ids"]})


# ---- Outputs


@dataclass
class Output:
    loss: Tensor | None
    scores: Tensor


def centered(values: Tensor, leaks: bool) -> Tensor:
    return values - values.mean(dim=1, keepdim=True) if leaks else values


@pytest.mark.parametrize("form", ["dataclass", "short", "losses", "flat losses"])
def test_a_leak_after_the_last_module_is_found(form: str) -> None:
    """A fallback to the output of the last module would not see it."""
    labels = ROW["input_ids"].roll(-1, dims=1).index_fill(1, ENDS[1:] - 1, -100)
    batch = {**ROW, "targets": labels}

    def make(leaks: bool) -> Any:
        model = Decoder()

        def run(batch: dict[str, Tensor]) -> Any:
            logits = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])
            if form == "dataclass":
                return Output(None, centered(logits, leaks))
            if form == "short":
                return centered(logits, leaks)[:, :-1]
            losses = token_losses(logits, batch["targets"])
            losses = centered(losses, leaks)[:, :-1]
            return losses.flatten() if form == "flat losses" else losses

        return run

    leak = check(make, batch)
    assert leak.layer is None and leak.kind in ("attention_mask", "row_statistics")


def test_a_loss_without_the_last_token_is_checked() -> None:
    def losses(masked: bool) -> Any:
        def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
            ids, ends = batch["input_ids"], batch["cu_seqlens"].long()
            labels = ids.index_fill(1, ends[1:-1], -100) if masked else ids
            return token_losses(logits[:, :-1], labels[:, 1:])

        return loss

    assert probe(Decoder(), ROW, loss=losses(True)).ok
    leaks = probe(Decoder(), ROW, loss=losses(False)).leaks
    assert [(leak.kind, leak.from_document, leak.to_document) for leak in leaks] == [
        ("loss_mask", 1, 0),
        ("loss_mask", 2, 1),
    ]


# ---- Findings


class Chunks(Attention):
    """Attention inside chunks of 4 tokens, counted from the begin of the row."""

    def visible(self, length: int, **given: Any) -> Tensor:
        chunks = torch.arange(length) // 4
        return block_causal(given["cu_seqlens"]) & (chunks[:, None] == chunks)


class DocumentChunks(Chunks):
    def visible(self, length: int, **given: Any) -> Tensor:
        chunks = offsets_of(given["cu_seqlens"]) // 4
        return block_causal(given["cu_seqlens"]) & (chunks[:, None] == chunks)


def test_chunks_that_begin_with_the_row_are_found() -> None:
    """The shortest and the longest document begin at multiples of 4."""
    batch = packed_batch("cu_seqlens", lengths=[9, 7, 4, 20])
    leak = check(lambda leaks: Decoder(Chunks if leaks else DocumentChunks), batch)
    assert (leak.kind, leak.layer, leak.to_document) == ("position_ids", "layers.1.self_attn", 1)


def test_the_next_token_of_a_short_document_is_one_of_the_next_document() -> None:
    class NextTokens(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.inner, self.leaks = Decoder(), leaks

        def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            states, of_token = self.inner(input_ids, cu_seqlens=cu_seqlens), segments_of(cu_seqlens)
            following = self.inner.head(self.inner.embed(input_ids.roll(-1, dims=1)))
            inside = F.pad(of_token[1:] == of_token[:-1], (0, 1))
            kept = F.pad(torch.ones_like(inside[1:]), (0, 1)) if self.leaks else inside
            made: Tensor = states + following * kept[:, None]
            return made

    batch = packed_batch("cu_seqlens", lengths=[4, 5, 6])
    check(NextTokens, batch)
    leaks = probe(NextTokens(True), batch).leaks
    assert [(leak.from_document, leak.to_document) for leak in leaks] == [(1, 0), (2, 1)]


def test_a_leak_below_rounding_has_the_kind_of_its_layer() -> None:
    """Only its gradient is above rounding; "only the backward pass" would be wrong."""

    class Ripple(Attention):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            made: Tensor = super().forward(x, **given)
            mean = made[:, : LENGTHS[0]].mean(dim=1, keepdim=True)
            after = (torch.arange(x.shape[1]) >= LENGTHS[0])[:, None]
            return made + 1e-5 * (1e5 * mean).sin() * after

    leak = probe(Decoder(Ripple), ROW).leaks[0]
    assert (leak.kind, leak.layer) == ("attention_mask", "layers.1.self_attn")


def test_a_module_that_runs_once_more_in_the_first_pass_is_named() -> None:
    """Pipelines call a stage with an example first, to learn the shapes of its outputs."""
    model = Decoder(Leaking)
    seen: list[Any] = []

    def run(batch: dict[str, Tensor]) -> Tensor:
        if not seen:
            model(torch.zeros_like(batch["input_ids"]), cu_seqlens=batch["cu_seqlens"])
        seen.append(batch)
        made: Tensor = model(**batch)
        return made

    assert probe(run, ROW).leaks[0].layer == "Decoder.layers.1.self_attn"


def test_gradients_that_cannot_be_compared_are_noted() -> None:
    class NotFinite(Attention):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            hidden: Tensor = (x.abs() * 0).sqrt()
            return super().forward(x, **given) + hidden

    model, table = Decoder(), torch.randn(64, WIDTH)
    targets: list[tuple[Any, str]] = [
        (
            torch.inference_mode()(lambda batch: model(**batch)),
            "have no gradient at the embedded tokens",
        ),
        (lambda batch: table[batch["input_ids"]], "have no gradient at the embedded tokens"),
        (Decoder(NotFinite), "they are not finite"),
    ]
    for target, message in targets:
        report = probe(target, ROW)
        assert report.ok and len(report.notes) == 1, str(report)
        assert f"gradients are not checked: {message}" in report.notes[0].replace(
            "the outputs ", ""
        )

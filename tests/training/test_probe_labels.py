"""The probe at the start of a run computes logits at a few positions of every document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.probe import LeakError, check_rows
from megapack.probe.rows import probed_labels

from .packing_helpers import documents, pack_documents, tiny_model

LENGTHS = [700, 2, 150, 1, 40, 1100]


def packed() -> dict[str, Any]:
    batch = pack_documents(documents(LENGTHS), padding=55)
    mask = (batch.labels >= 0).float()
    return {**batch.arguments(), "loss_mask": mask, "dataset_ids": torch.zeros(7).int()}


def test_losses_at_few_positions_are_those_of_all() -> None:
    torch.manual_seed(0)
    model = tiny_model("llama_tiny").eval()
    batch = pack_documents(documents(LENGTHS), padding=55)
    few = torch.where(torch.rand(batch.labels.shape) < 0.1, batch.labels, -100)
    with torch.no_grad():
        _, every, *_ = model(**batch.arguments())
        loss, losses, *_ = model(**{**batch.arguments(), "labels": few}, few_labels=True)
    kept = few.flatten() >= 0
    assert 50 < kept.sum() < 400
    torch.testing.assert_close(losses[kept], every[kept])
    assert (losses[~kept] == 0).all() and loss == pytest.approx(float(losses.sum()), rel=1e-5)


def test_every_document_keeps_its_ends_and_its_middle() -> None:
    batch = packed()
    few = probed_labels(batch)
    kept = few >= 0
    assert torch.equal(few[kept], batch["labels"][kept])
    assert 6 * kept.sum() < (batch["labels"] >= 0).sum()
    begin = 0
    for length in LENGTHS:
        inside = kept[0, begin : begin + length - 1]
        assert inside[:4].all() and inside[-2:].all(), "begin and end, if there are labels"
        assert length < 3 or inside[length // 2 - 1], "the token before the one that is changed"
        begin += length
    answers = batch["labels"].clone()
    answers[0, :400] = answers[0, 420:] = -100  # a chat, of which one answer has labels
    few = probed_labels({**batch, "labels": answers})
    assert (few >= 0).any()


class Decoder(torch.nn.Module):
    """Running mean of its document's embeddings; ``ahead`` tokens of the future leak."""

    def __init__(self, *, ahead: int = 0, across: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(300, 16)
        self.ahead, self.across = ahead, across

    def losses(self, batch: dict[str, Any]) -> Tensor:
        """Return losses at the probed labels, as the training model does."""
        states = self.embedding(batch["tokens"][0]).double()
        ends = batch["cu_seqlens"].long()
        if self.across:
            ends = ends[[0, -1]]
        lengths = ends.diff()
        means = [
            piece.cumsum(0) / torch.arange(1, len(piece) + 1)[:, None]
            for piece in states.split(lengths.tolist())
        ]
        hidden = torch.cat(means).roll(-self.ahead, 0)
        labels = probed_labels(batch).flatten()
        losses = torch.nn.functional.cross_entropy(
            hidden @ self.embedding.weight.double().T, labels.clamp(min=0), reduction="none"
        )
        return losses.where(labels >= 0, 0.0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Decoder(), None),
        (Decoder(ahead=1), "lets token|another document"),
        (Decoder(across=True), "another document"),
    ],
    ids=["correct", "one token ahead", "across documents"],
)
def test_the_probe_finds_leaks_at_few_positions(model: Decoder, message: str | None) -> None:
    def check() -> None:
        with torch.no_grad():
            check_rows(
                model.losses,
                packed(),
                counted=lambda variant: probed_labels(variant) >= 0,
                any_length=True,
            )

    if message is None:
        check()
        return
    with pytest.raises(LeakError, match=message):
        check()

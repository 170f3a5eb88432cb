"""Record of one rank: arguments of its model, and rows that it read, in a file."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapack.storage import IndexedDataset

SPLITS = ("train", "valid", "test")  # in the order in which they are first read


class Recorder:
    """Calls of the model, and rows read, in the order in which they happened."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.reads: list[dict[str, Any]] = []
        self.probed: list[dict[str, Any]] = []
        """Calls by which the launcher tries the model, on changed tokens."""

    def watch_probe(self, module: Any) -> None:
        stock = module.probe_step

        def probe_step(*args: Any) -> Any:
            calls, self.calls = self.calls, self.probed
            try:
                return stock(*args)
            finally:
                self.calls = calls

        module.probe_step = probe_step

    def note_call(self, **call: Any) -> None:
        self.calls.append({key: _kept(value) for key, value in call.items()})

    def save(self, folder: Path, **where: int) -> None:
        """Write ``rank<n>.pt``, of virtual pipeline stages one each.

        Args:
            folder: exists.
            where: the rank's place along each kind of parallelism: data, tensor, pipeline,
                context.
        """
        rank = int(os.environ["RANK"])
        names = ("calls", "reads", "probed")
        records = {"where": where, **{name: vars(self)[name] for name in names}}
        torch.save(records, folder / f"rank{rank}-{where['pipeline']}.pt")


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class TextRecorder(Recorder):
    """Recorder of a host whose model gets segments only in its attention.

    A call begins with the embedding. Every layer's attention adds the boundaries that it gets, and
    recomputation adds them again. Labels and mask come with the loss. Loaders read row by row.
    """

    def watch_embedding(self, module_class: Any) -> None:
        stock = module_class.forward

        def forward(module: Any, input_ids: Any, position_ids: Any, *args: Any, **kw: Any) -> Any:
            given = {"training": module.training, "tokens": input_ids, "position_ids": position_ids}
            self.note_call(**given, labels=None, loss_mask=None, attention=[])
            return stock(module, input_ids, position_ids, *args, **kw)

        module_class.forward = forward

    def note_attention(self, cu_seqlens: Any, max_seqlen: Any) -> None:
        self.calls[-1]["attention"].append((_kept(cu_seqlens), max_seqlen))

    def note_loss(self, labels: Any, loss_mask: Any) -> None:
        self.calls[-1] |= {"labels": _kept(labels), "loss_mask": _kept(loss_mask)}

    def note_losses(self, losses: Any) -> None:
        """Record every token of the micro batch, in the order of its labels."""
        if not self.calls[-1]["training"]:
            self.calls[-1]["losses"] = _kept(losses)

    def note_read(self, rows: Any, numbers: Any) -> None:
        """Rows of a ``RowDataset``, one row or more."""
        buckets = sorted({rows.bucket_of(i) for i in numbers})
        read = {"dataset": id(rows), "rows": [int(i) for i in numbers], "buckets": buckets}
        self.reads.append(read)

    def watch_rows(self, text_class: Any) -> None:
        """``TextRowDataset``."""
        stock = text_class.__getitem__

        def read(dataset: Any, number: int) -> Any:
            self.note_read(dataset.rows, [number % len(dataset.rows)])
            return stock(dataset, number)

        text_class.__getitem__ = read

    def save(self, folder: Path, **where: int) -> None:
        """One read per micro batch, and what the first layer was given as the call's boundaries."""
        self._name_splits_and_bounds()
        rows, self.reads = self.reads, []
        for call in self.calls:
            size = len(call["tokens"])
            micro_batch, rows = rows[:size], rows[size:]
            if micro_batch:
                self.reads.append(_together(micro_batch))
        self.reads += rows
        super().save(folder, context=0, **where)

    def run_script(self, host: str, script: str, watch: Callable[[], None]) -> None:
        """The guide's script of the working folder; its model is watched when it is installed."""
        self.watch_rows(
            importlib.import_module("megapack.integrations.rows.text_rows").TextRowDataset
        )
        integration: Any = importlib.import_module(f"megapack.integrations.hosts.{host}")
        stock = integration.install

        def install(**kwargs: Any) -> None:
            stock(**kwargs)
            watch()

        integration.install = install
        with contextlib.suppress(SystemExit):  # so an exit interval ends a run
            runpy.run_path(script, run_name="__main__")

    def _name_splits_and_bounds(self) -> None:
        datasets = dict.fromkeys(row["dataset"] for row in self.reads)
        splits = dict(zip(datasets, SPLITS, strict=False))
        for read in self.reads:
            read["split"] = splits[read["dataset"]]
        for call in self.calls:
            bounds, longest = (call["attention"] or [(None, None)])[0]
            call |= {"cu_seqlens": bounds, "max_seqlen": longest}


class LoaderRecorder(TextRecorder):
    """Record a host that iterates over ``RankRows``, a micro batch at a time.

    Attributes:
        paused: calls are not recorded, because the probe makes them.
    """

    paused = False

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Any] = []

    def watch_rank_rows(self, ranks_class: Any) -> None:
        """``RankRows``: what is read, and when the model is probed."""
        iterate, probe = ranks_class.__iter__, ranks_class.probe

        def iterated(ranks: Any) -> Any:
            for told in iterate(ranks):
                begin = ranks.consumed_rows - ranks.rows_per_micro_step
                begin += ranks.data_parallel_rank * ranks.micro_batch_rows
                self.note_read(ranks.rows, range(begin, begin + ranks.micro_batch_rows))
                self.opened.append(ranks.rows)  # or another has its id later
                yield told

        def probed(*args: Any, **kwargs: Any) -> None:
            self.paused = True
            probe(*args, **kwargs)
            self.paused = False

        ranks_class.__iter__, ranks_class.probe = iterated, probed

    def note_call(self, **call: Any) -> None:
        if not self.paused:
            super().note_call(**call, labels=None, loss_mask=None, attention=[])

    def note_attention(self, cu_seqlens: Any, max_seqlen: Any) -> None:
        if not self.paused:
            super().note_attention(cu_seqlens, max_seqlen)

    def note_labels(self, labels: Any) -> None:
        """Labels of which -100 are none."""
        if not self.paused:
            self.note_loss(labels, (labels != -100).float())

    def save(self, folder: Path, **where: int) -> None:
        self._name_splits_and_bounds()
        Recorder.save(self, folder, context=0, **where)


def _together(reads: list[dict[str, Any]]) -> dict[str, Any]:
    splits = {read["split"] for read in reads}
    if len(splits) != 1:
        raise AssertionError("a micro batch was read from several datasets")
    return {
        "split": splits.pop(),
        "rows": [row for read in reads for row in read["rows"]],
        "buckets": sorted({bucket for read in reads for bucket in read["buckets"]}),
    }


# ---- Expected results of a host's training run: those of its documents, each alone


def flat_gradient(model: Any) -> Tensor:
    gradients = [weight.grad for weight in model.parameters()]
    whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in gradients]
    return torch.cat([part.flatten() for part in whole])


def print_one_by_one(
    model: Any, told: dict[str, Any], bounds: list[int], loss_of: Callable[..., Tensor]
) -> None:
    """Return the distance of a row's loss and gradient from those of its single documents."""
    assert len(bounds) > 4, "a row of several documents was expected"
    of_tokens = [name for name, x in told.items() if np.shape(x)[1:] == (bounds[-1],)]
    parts = [{name: told[name][:, a:b] for name in of_tokens} for a, b in pairwise(bounds)]

    def made(pieces: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        total = torch.zeros(())
        for piece in pieces:
            loss = loss_of(**piece)
            loss.backward()
            total += loss.detach()
        return total, flat_gradient(model)

    (loss, gradient), (losses, gradients) = made([told]), made(parts)
    far = (gradient - gradients).abs().max() / gradients.abs().max()
    print(f"one by one: {float((loss - losses).abs() / losses):.2e} {float(far):.2e}")


def print_validated(found: float, prefix: str, losses_of: Callable[[Tensor], Tensor]) -> None:
    """A loss of validation, and that of the documents, each alone, over all their labels."""
    dataset = IndexedDataset(prefix)
    texts = [torch.from_numpy(dataset[i].astype("int64")) for i in range(len(dataset))]
    with torch.no_grad():
        losses = torch.cat([losses_of(text) for text in texts]).double()
    print(f"validated: {found:.9f} {float(losses.mean()):.9f} {len(losses)}", flush=True)

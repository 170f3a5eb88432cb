"""The loss of every source of a blend, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megapack.data import Step
from megapack.data.source import SampleSource
from megapack.training.run.engine import StepResult
from megapack.training.run.world import World

__all__ = ["SourceLosses", "mean_by_source", "named_means"]

_SHOWN = 8  # in a log line; log.jsonl and TensorBoard have all


class SourceLosses:
    """Mean loss per label token of every source that a step holds.

    Args:
        samples: of the run.
        world: this process.
    """

    def __init__(self, samples: SampleSource, world: World) -> None:
        self.samples, self.world = samples, world
        self.names = list(dict.fromkeys(samples.names))
        place = {name: i for i, name in enumerate(self.names)}
        self._place = np.array([place[name] for name in samples.names])  # of two of one name, one

    def label_tokens(self, content: Step) -> dict[str, int]:
        """Label tokens of a step by source, over all ranks."""
        source = self._place[self.samples.locate(content.sample_ids)[0]]
        counts = np.bincount(source, content.label_counts)
        return {self.names[place]: int(counts[place]) for place in np.unique(source).tolist()}

    def add_losses(self, lines: Sequence[dict[str, Any]], results: Sequence[StepResult]) -> None:
        """Give lines with ``source_label_tokens`` a ``source_loss``; collective.

        Samples are summed one by one and on the host, so the figures are the same on every device
        and differ between numbers of ranks by no more than the losses do.
        """
        width = len(self.names)
        losses = torch.cat([result.sample_losses for result in results])
        row = np.repeat(np.arange(len(results)), [len(result.source) for result in results])
        place = self._place[np.concatenate([result.source for result in results])]
        table = np.bincount(
            row * width + place, losses.to("cpu", torch.float64).numpy(), len(results) * width
        )
        sums = torch.from_numpy(table).view(-1, width).to(self.world.device)
        dist.all_reduce(sums)
        for line, of_step in zip(lines, sums.tolist(), strict=True):
            loss = dict(zip(self.names, of_step, strict=True))
            line["source_loss"] = {
                name: _finite(loss[name] / labels)
                for name, labels in line["source_label_tokens"].items()
                if labels
            }


def mean_by_source(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Source -> its mean loss over lines of ``log.jsonl`` and the label tokens it is of.

    Sources by falling number of label tokens; lines without ``source_loss`` give nothing, and so
    does a loss that is no number.
    """
    sums: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for line in lines:
        for name, loss in line.get("source_loss", {}).items():
            if loss is not None:
                labels = line["source_label_tokens"][name]
                sums[name] = sums.get(name, 0.0) + loss * labels
                tokens[name] = tokens.get(name, 0) + labels
    falling = sorted(tokens, key=lambda name: -tokens[name])
    return {name: (sums[name] / tokens[name], tokens[name]) for name in falling}


def named_means(means: Mapping[str, tuple[float, int]]) -> str:
    """`` (web 3.1, code 2.0)``, of the sources with the most label tokens; empty for none."""
    shown = [f"{name} {loss:.4f}" for name, (loss, _) in list(means.items())[:_SHOWN]]
    if len(means) > _SHOWN:
        shown.append(f"{len(means) - _SHOWN} more")
    return f" ({', '.join(shown)})" if shown else ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Several datasets in one run: the manifest that lists them, and what a run makes of it.

    datasets:                      # YAML or JSON; paths are relative to this file
      - {name: web,  prefix: web/docs,  index: web/docs.samples,  weight: 0.7}
      - {name: code, prefix: code/docs, index: code/docs.samples, weight: 0.2}
      - {name: chat, prefix: chat/docs, index: chat/docs.samples, weight: 0.1, labels: chat/turns}
    max_epochs: 4                  # refuse to repeat a dataset more often

Weights are shares of tokens. Labels are a dataset beside the documents (see ``PackedDataset``);
``auto``, the default, is <prefix>.labels where that exists, ``none`` gives every token its label.

The blend happens inside every bucket, so that all ranks still have the same bucket at every micro
step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megapack.config import load_config
from megapack.data.dataset import PackedDataset
from megapack.errors import ConfigError

__all__ = ["BlendConfig", "BlendEntry", "load_blend"]


@dataclass(frozen=True, kw_only=True)
class BlendEntry:
    """One dataset: prefix of its documents, path of its .samples, share of tokens, name, labels.

    ``labels`` is the prefix of a label dataset, ``auto`` or ``none``.
    """

    prefix: str
    index: str
    weight: float
    name: str | None = None
    labels: str = "auto"

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(
                f"weight of {self.name or self.prefix} is {self.weight}; it must be positive: "
                "leave out what shall not be used"
            )


@dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """Datasets and how often each may be repeated (None: as often as the weights ask for)."""

    datasets: tuple[BlendEntry, ...]
    max_epochs: float | None = None

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ConfigError("a blend needs at least one dataset")

    def open(self, **options: Any) -> PackedDataset:
        """The blend as one dataset; options are those of ``PackedDataset``."""
        return PackedDataset(
            [entry.prefix for entry in self.datasets],
            [entry.index for entry in self.datasets],
            weights=[entry.weight for entry in self.datasets],
            names=[entry.name or entry.prefix for entry in self.datasets],
            max_epochs=self.max_epochs,
            label_dataset=[
                None if entry.labels == "none" else entry.labels for entry in self.datasets
            ],
            **options,
        )


def load_blend(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> BlendConfig:
    """Read a manifest. Raises ConfigError and OSError as ``load_config`` does."""
    config = load_config(BlendConfig, Path(path), overrides)
    base = Path(path).parent
    return replace(config, datasets=tuple(_placed(entry, base) for entry in config.datasets))


def _placed(entry: BlendEntry, base: Path) -> BlendEntry:
    """The entry with paths relative to the manifest."""
    labels = entry.labels
    return replace(
        entry,
        prefix=str(base / entry.prefix),
        index=str(base / entry.index),
        labels=labels if labels in ("auto", "none") else str(base / labels),
    )

"""nanotron: packed rows as micro batches of its trainer; positions that restart mark documents.

    trainer = DistributedTrainer("config.yaml")           # data_stages: one, with dataset: null
    trainer.train(packed(trainer, "corpus.json"))

nanotron's Qwen2 derives the boundaries of its flash-attention from ``position_ids`` that are 0. Its
loss is the mean over the labels of each micro batch, averaged over micro batches and ranks. Packed
rows have different numbers of labels, so ``packed`` divides by the step's mean number of labels:

    labels         100      300      sum of losses 600 over 400 labels
    nanotron       300/100  300/300  mean of means 2
    ``packed``     300/200  300/200  mean over labels 1.5

docs/guides/nanotron.md lists the limitations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from nanotron.models import qwen
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megapack.errors import ConfigError
from megapack.integrations.dialects import NANOTRON
from megapack.integrations.host import Rebinding, check_options
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_data_path
from megapack.integrations.rows.rank_rows import RankRows, seen_losses

__all__ = ["PackedBatches", "packed"]


class PackedBatches:
    """Micro batches of one rank, from the trainer's count of consumed samples to its last step.

    nanotron counts tokens under ``data_path``, and calls ``get_consumption_stats`` of ``dataset``,
    which is this object. ``labels`` is the mean label count of the step's micro batches.
    """

    def __init__(self, ranks: RankRows, data_path: str) -> None:
        self.ranks = ranks
        self.labels = 1.0
        self.data_path, self.dataset = data_path, self
        self._probed: list[Tensor] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield input_ids, position_ids, label_ids int64 and label_mask bool, all ``(rows, R)``."""
        rows, current_block = self.ranks.rows, -1
        size = rows.options.rows_per_block
        for batch in self.ranks:
            block = (self.ranks.consumed_rows - 1) // size
            if block != current_block:
                current_block, num_labels = block, rows.schedule.step(block).num_label_tokens
                self.labels = max(1, num_labels) * self.ranks.micro_batch_rows / size
            yield batch

    def get_consumption_stats(self) -> dict[str, dict[str, int]]:
        """Return the tokens by data path; nanotron cannot load a checkpoint without them."""
        tokens = self.ranks.consumed_rows * self.ranks.rows.options.sequence_length
        return {self.data_path: {"tokens": tokens}}

    def masked_mean(self, loss: Tensor, label_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of losses ``(rows, R)`` divided by ``labels``: replaces the mean."""
        if self._probed is not None:
            self._probed.append(seen_losses(loss * label_mask, label_mask))
        return (loss * label_mask).sum(dtype=dtype) / self.labels

    def probe_at_first(self, module: Any) -> None:
        """Probe the model (without DistributedDataParallel) at its first call: 7 forward passes."""

        def hook(module: Any, args: Any, received: dict[str, Any]) -> None:
            del args
            handle.remove()
            self.ranks.probe(lambda batch: self._losses(module, batch), received, module=module)

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def _losses(self, module: Any, batch: dict[str, Any]) -> Tensor:
        """Return the loss of every token from the model's forward, in the dtype of its weights."""
        weight = next(module.parameters())
        self._probed = []
        module(**{key: value.to(weight.device) for key, value in batch.items()})
        losses, self._probed = self._probed[0], None  # the second entry, if any, is the z-loss
        return losses.to(weight.dtype)


def packed(
    trainer: Any,
    data_path: str,
    *,
    seed: int = 1234,
    split: tuple[float, float] = (0.0, 1.0),
    cache_directory: str | None = None,
    num_workers: int = 0,
    probe: bool = True,
) -> dict[str, PackedBatches]:
    """Return the batches of the trainer's one data stage, for ``trainer.train``.

    Makes the loss of the ``DistributedTrainer`` a mean over labels until the process ends. Raises
    ConfigError for a model without position_ids, for pipeline or context parallelism, for several
    data stages, for sizes that contradict each other, and as ``open_rows``.

    Args:
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        seed: seed of the order of samples.
        split: part of every source's documents, as fractions.
        cache_directory: directory of packed indices; None: in the folder of the first source.
        num_workers: worker processes that prefetch.
        probe: probe the model on its first micro batch.
    """
    model = trainer.model
    model = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(model, qwen.Qwen2ForTraining):
        raise ConfigError(
            f"{type(model).__name__} of nanotron takes no position_ids, so documents of a row "
            "would see each other: take its Qwen2 (is_qwen2_config: true in model_config)"
        )
    sizes, stages = trainer.config.parallelism, trainer.config.data_stages
    check_options({
        "parallelism.pp": (sizes.pp, 1, "only the first stage of nanotron's Qwen2 has positions"),
        "parallelism.context_parallel_size": (sizes.context_parallel_size, 1, "it is not tested"),
        "the number of data_stages": (len(stages), 1, "the manifest has stages (docs/concepts.md)"),
    })  # fmt: skip
    rows = open_data_path(
        data_path,
        RowOptions(
            sequence_length=trainer.sequence_length,
            rows_per_block=trainer.global_batch_size,
            seed=seed,
        ),
        split=split,
        num_rows=trainer.config.tokens.train_steps * trainer.global_batch_size,
        cache_directory=cache_directory,
    )
    group = trainer.parallel_context.dp_pg
    ranks = RankRows(
        rows,
        NANOTRON,
        data_parallel_rank=group.rank(),
        data_parallel_size=group.size(),
        micro_batch_rows=trainer.micro_batch_size,
        num_workers=num_workers,
    )
    ranks.consumed_rows = trainer.metadata.data_stages[0].consumed_train_samples
    batches = PackedBatches(ranks, data_path)
    Rebinding("nanotron").replace(qwen, "masked_mean", batches.masked_mean)
    if probe:
        batches.probe_at_first(model)
    return {stages[0].name: batches}

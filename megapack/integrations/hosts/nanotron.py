"""nanotron: packed rows as its trainer's micro batches, documents told by positions that restart.

    trainer = DistributedTrainer("config.yaml")           # data_stages: one, with dataset: null
    trainer.train(packed(trainer, "corpus.json"))

nanotron's Qwen2 finds where a document begins by ``position_ids`` that are 0 and makes its
flash-attention's boundaries of them; labels and their mask are arguments of its own.

Its loss is a mean of means: of every micro batch over its labels, then of micro batches and ranks.
Packed rows have unequally many labels; with two micro batches of a step,

    labels         100      300      sum of losses 600 over 400 labels
    nanotron       300/100  300/300  mean of means 2
    ``packed``     300/200  300/200  mean over labels 1.5

so a micro batch is divided by the step's mean, which the schedule knows. docs/guides/nanotron.md
has the limits.
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
    """What one rank takes, from the trainer's count of consumed samples to its last step.

    Args:
        ranks: the ``RankRows`` that it iterates over.
        data_path: what nanotron counts its tokens under.

    Attributes:
        dataset: itself, where nanotron looks for ``get_consumption_stats``.
        labels: of a micro batch, in the mean over the step that is trained.
    """

    def __init__(self, ranks: RankRows, data_path: str) -> None:
        self.ranks = ranks
        self.labels = 1.0
        self.data_path, self.dataset = data_path, self
        self._probed: list[Tensor] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """input_ids, position_ids, label_ids int64 and label_mask bool, all ``(rows, R)``."""
        rows, block = self.ranks.rows, -1
        size = rows.options.rows_per_block
        for told in self.ranks:
            begun = (self.ranks.consumed_rows - 1) // size
            if begun != block:
                block, num_labels = begun, rows.schedule.step(begun).num_label_tokens
                self.labels = max(1, num_labels) * self.ranks.micro_batch_rows / size
            yield told

    def get_consumption_stats(self) -> dict[str, dict[str, int]]:
        """Tokens by data path, as nanotron asks its datasets after each step: a checkpoint without
        them could not be loaded."""
        tokens = self.ranks.consumed_rows * self.ranks.rows.options.sequence_length
        return {self.data_path: {"tokens": tokens}}

    def masked_mean(self, loss: Tensor, label_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """In place of nanotron's: the sum of a micro batch over the labels of the mean one.

        Args:
            loss, label_mask: ``(rows, R)``.
            dtype: of the sum.
        """
        if self._probed is not None:
            self._probed.append(seen_losses(loss * label_mask, label_mask))
        return (loss * label_mask).sum(dtype=dtype) / self.labels

    def probe_at_first(self, module: Any) -> None:
        """Try the model when it is called first (``megapack.integrations.probe``): seven forwards.

        Args:
            module: the model, without DistributedDataParallel around it.
        """

        def hook(module: Any, args: Any, arrived: dict[str, Any]) -> None:
            del args
            handle.remove()
            self.ranks.probe(lambda told: self._losses(module, told), arrived, module=module)

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def _losses(self, module: Any, told: dict[str, Any]) -> Tensor:
        """The loss of every token by the model's own forward, in the dtype of its weights."""
        weight = next(module.parameters())
        self._probed = []
        module(**{key: value.to(weight.device) for key, value in told.items()})
        losses, self._probed = self._probed[0], None  # behind it the z-loss, where there is one
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
    """What ``trainer.train`` takes: the batches of its one data stage.

    The trainer's loss becomes a mean over labels, for the rest of this process.

    Args:
        trainer: a ``DistributedTrainer``.
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        seed: of the order of samples.
        split: part of every source's documents, as fractions.
        cache_directory: of packed indices; None: beside the first source.
        num_workers: processes that read ahead.
        probe: whether the model is tried on its first micro batch.

    Raises:
        ConfigError: a model that is not told of documents, pipelines, context parallelism, several
            data stages, sizes that exclude each other; what ``open_rows`` refuses.
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

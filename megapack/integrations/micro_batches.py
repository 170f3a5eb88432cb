"""Micro batches as transformers' models take them, and as a dataset of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from megapack.attention import varlen_arguments
from megapack.data import (
    BatchLayout,
    BucketBatchSampler,
    MicroBatch,
    PackedDataset,
    Schedule,
)
from megapack.data.fetch_ahead import fetching_ahead
from megapack.errors import ConfigError

__all__ = ["MicroBatches", "model_inputs"]

IGNORED = -100


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A megapack batch under the names of a transformers model's forward.

    Args:
        batch: of ``build_loader`` or ``PackedDataset.micro_batch``, layout "stream".

    Returns:
        input_ids and position_ids int64 ``(1, tokens)``; shift_labels, the label of every
        position, and labels, the same moved to the token it names (what the model would shift
        itself); cu_seq_lens_q, cu_seq_lens_k int32, max_length_q, max_length_k; use_cache False.
        No attention_mask: it would switch the boundaries off.
    """
    shift_labels = batch["labels"]
    labels = torch.nn.functional.pad(shift_labels[:, :-1], (1, 0), value=IGNORED)
    return {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "labels": labels,
        "shift_labels": shift_labels,
        **varlen_arguments(batch["cu_seqlens"], batch["max_seqlen"]),
    }


class MicroBatches(Dataset[dict[str, Any]]):
    """The micro batches of one rank, in order: item i is the input of the i-th forward.

    Args:
        dataset: what to gather from.
        schedule: made of the dataset, the same on all ranks.
        micro_batch_tokens: tokens of one forward of one rank.
        data_parallel_rank, data_parallel_size: this rank; ``PackedTrainer`` sets them.
        num_steps: optimizer steps offered, from the beginning of the run; None: one epoch.
        options: of ``BucketBatchSampler`` (dealing, uneven).

    Raises:
        ConfigError: sizes that do not fit, or sources with loss weights.
    """

    # TRL asks datasets for their columns.
    column_names = ("input_ids", "labels", "position_ids")

    def __init__(
        self,
        dataset: PackedDataset,
        schedule: Schedule,
        *,
        micro_batch_tokens: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        num_steps: int | None = None,
        **options: Any,
    ) -> None:
        self.dataset, self.schedule = dataset, schedule
        self.layout = BatchLayout(micro_batch_tokens=micro_batch_tokens)
        self.sampler = BucketBatchSampler(
            schedule,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            micro_batch_tokens=micro_batch_tokens,
            num_steps=num_steps,
            count_labels=dataset.count_labels,
            **options,
        )
        self._options = options
        self._step: tuple[int, list[MicroBatch]] = (-1, [])
        self._coming: tuple[int, Iterator[MicroBatch]] = (-1, iter(()))

    def of_rank(
        self, data_parallel_rank: int, data_parallel_size: int, num_steps: int | None
    ) -> MicroBatches:
        """The same run as another rank sees it."""
        return MicroBatches(
            self.dataset,
            self.schedule,
            micro_batch_tokens=self.layout.micro_batch_tokens,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            num_steps=num_steps,
            **self._options,
        )

    @property
    def num_micro_steps(self) -> int:
        """Forwards of a rank per optimizer step: ``gradient_accumulation_steps``.

        Raises:
            ConfigError: stages differ in it, and Trainer has one number for all steps.
        """
        stages = self.schedule.stages
        counts = {stage.begin: self.sampler.num_micro_steps(stage.begin) for stage in stages}
        if len(set(counts.values())) > 1:
            raise ConfigError(
                f"stages (first step: micro steps) take {counts}, and Trainer accumulates the same "
                "number at every step: keep tokens_per_step the same in all stages"
            )
        return counts[0]

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """See ``model_inputs``. Raises IndexError behind the last one."""
        if not 0 <= i < len(self):
            raise IndexError(f"micro batch {i} of {len(self)}")
        chosen = self._fetched(i) if self.dataset.remote_reads.any else self._chosen(i)
        return model_inputs(
            self.dataset.micro_batch(
                chosen.sample_ids,
                layout=self.layout,
                capacity=chosen.capacity,
                attention_window=chosen.attention_window,
                num_lists=chosen.num_lists,
            )
        )

    def _chosen(self, i: int) -> MicroBatch:
        step, micro_step = divmod(i, self.num_micro_steps)
        if self._step[0] != step:
            self._step = (step, self.sampler.micro_batches(step))
        return self._step[1][micro_step]

    def _fetched(self, i: int) -> MicroBatch:
        """The same; what follows is fetched ahead where they are taken one after the other."""
        expected, coming = self._coming
        if i != expected:
            rest = map(self._chosen, range(i, len(self)))
            coming = fetching_ahead(rest, self.dataset.remote_reads)
        self._coming = (i + 1, coming)
        return next(coming)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coming": (-1, iter(()))}

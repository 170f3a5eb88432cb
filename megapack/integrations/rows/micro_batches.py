"""Micro batches as transformers' models take them, and as a dataset of them.

- ``model_inputs``: a batch of megapack under the names of a model's forward.
- ``MicroBatches``: those of one rank in order, for Trainer and its kin.

Two documents of 3 and 2 tokens and 3 of padding, in one row of 8:

    input_ids      5  6  7 | 8  9 | 0  0  0
    shift_labels   6  7  - | 9  - | -  -  -     of every position the next token
    labels         -  6  7 | -  9 | -  -  -     the same, for models that shift by themselves
    position_ids   0  1  2 | 0  1 | 0  1  2
    cu_seq_lens_q  0         3      5        8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch.utils.data import Dataset

from megapack.attention.experts import token_mask
from megapack.data import (
    Batch,
    BatchLayout,
    BucketBatchSampler,
    MicroBatch,
    PackedDataset,
    Schedule,
)
from megapack.data.loader import prefetch_remote
from megapack.errors import ConfigError
from megapack.integrations.dialects import IGNORED, TRANSFORMERS, emit

__all__ = ["MicroBatches", "model_inputs"]


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
    return {**emit(batch, TRANSFORMERS), "use_cache": False}


class MicroBatches(Dataset[dict[str, Any]]):
    """The micro batches of one rank, in order: item i is the input of the i-th forward.

    Args:
        dataset: what to gather from.
        schedule: made of the dataset, the same on all ranks.
        micro_batch_tokens: tokens of one forward of one rank.
        data_parallel_rank, data_parallel_size: this rank; ``PackedTrainer`` sets them.
        num_steps: optimizer steps offered, from the beginning of the run; None: one epoch.
        options: of ``BucketBatchSampler`` (dealing, pad_last).

    Attributes:
        with_token_mask: items say which tokens are no padding (``token_mask``, bool (tokens,)), for
            the load-balancing loss of a mixture of experts; ``PackedTrainer`` asks for it.
        with_loss_weights: items of a step with loss weights have them, ``loss_weights`` float32
            (1, tokens): the loss of the step is the sum of losses times these over all its items
            and ranks. ``PackedTrainer`` asks for it; without it such an item is a ConfigError.
        for_own_shift: a row's last token has no label (that of a document cut there): a loss that
            shifts ``labels`` is not told it, and would divide by it. ``PackedTrainer`` asks for it.

    Raises:
        ConfigError: sizes that do not fit.
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
        row_tokens = schedule.config.row_tokens
        self.layout = BatchLayout(micro_batch_tokens=micro_batch_tokens, row_tokens=row_tokens)
        self.sampler = BucketBatchSampler(
            schedule,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            micro_batch_tokens=micro_batch_tokens,
            num_steps=num_steps,
            samples=dataset.samples,
            weighted_loss=True,
            **options,
        )
        self._options = options
        self.with_token_mask = self.with_loss_weights = self.for_own_shift = False
        self._step: tuple[int, list[MicroBatch]] = (-1, [])
        self._coming: tuple[int, Iterator[MicroBatch]] = (-1, iter(()))

    def of_rank(
        self,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_steps: int | None,
        *,
        evaluated: bool = False,
    ) -> MicroBatches:
        """The same run as another rank sees it; evaluated: every sample once, and the last micro
        batches have fewer, or none."""
        schedule, options = self.schedule, self._options
        if evaluated:
            schedule = Schedule(self.dataset, schedule.config, finite=True)
            options = {**options, "pad_last": True}
        return MicroBatches(
            self.dataset,
            schedule,
            micro_batch_tokens=self.layout.micro_batch_tokens,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            num_steps=num_steps,
            **options,
        )

    @cached_property
    def mean_labels(self) -> float:
        """Tokens with a label of a micro batch, the mean over all ranks.

        Raises:
            ConfigError: there is none.
        """
        steps = range(self.sampler.num_steps)
        labels = sum(self.schedule.step(i).num_label_tokens for i in steps)
        if not labels:
            raise ConfigError(
                f"{self.dataset}: no token has a label, so there is no loss to evaluate: documents "
                "are of one token each, or masked by their labels; give others"
            )
        return labels / (len(self) * self.sampler.data_parallel_size)

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
        batch = self.batch(i)
        inputs = model_inputs(batch)
        weights = batch.get("loss_weights")
        if weights is not None and not self.with_loss_weights:
            raise ConfigError(
                "the run has loss weights, and this loop would take the plain mean of its labels: "
                "train with PackedTrainer, or say with_loss_weights and sum losses times the "
                "items' loss_weights"
            )
        if weights is not None:
            inputs["loss_weights"] = weights
        if self.with_token_mask:
            tokens = batch["tokens"].numel()
            inputs["token_mask"] = token_mask(batch["cu_seqlens"], batch["dataset_ids"], tokens)
        return inputs

    def batch(self, i: int) -> Batch:
        """The same as ``PackedDataset.micro_batch`` gives it, but that loss weights, if there are
        some, are ``loss_weights`` and loss_mask says which labels there are."""
        if not 0 <= i < len(self):
            raise IndexError(f"micro batch {i} of {len(self)}")
        chosen = self._fetched(i) if self.dataset.remote_reads.any else self._chosen(i)
        batch = self.dataset.micro_batch(**chosen.gathered_by, layout=self.layout)
        if chosen.step_label_weight is not None:
            if not self.schedule.finite:  # what is held out is not weighted
                batch["loss_weights"] = batch["loss_mask"] / (chosen.step_label_weight or 1.0)
            batch["loss_mask"] = (batch["labels"] >= 0).float()
        elif self.for_own_shift:
            batch["labels"][:, -1], batch["loss_mask"][:, -1] = IGNORED, 0
        return batch

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
            coming = prefetch_remote(rest, self.dataset.remote_reads)
        self._coming = (i + 1, coming)
        return next(coming)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coming": (-1, iter(()))}

"""Micro batches of one rank: as an iterable with a state, and as a dataset for Trainer.

- ``RankRows``: for torchtitan, OLMo-core and nanotron, which iterate over batches and save the
  iterator's state. Yields consecutive rows of a ``RowDataset`` in the host's dialect.
- ``MicroBatches``: for transformers' Trainer and its subclasses, which index a dataset.
- ``model_inputs``: a batch under the argument names of a transformers model.

The rows of a step do not depend on ranks or micro batch size, so a checkpoint of ``RankRows`` has
only their count and the program. Two ranks with micro batches of 3 rows, then three with 2, in
blocks of 12 rows (one step, all of one bucket):

    micro step   0        1        saved: consumed_rows 12     0       1
    rank 0       0 1 2    6 7 8                                12 13   18 19
    rank 1       3 4 5    9 10 11                              14 15   20 21
    rank 2                                                     16 17   22 23

``model_inputs`` of documents of 3 and 2 tokens and 3 tokens of padding, in one row of 8:

    input_ids      5  6  7 | 8  9 | 0  0  0
    shift_labels   6  7  - | 9  - | -  -  -     the next token of every position
    labels         -  6  7 | -  9 | -  -  -     the same, for models that shift labels themselves
    position_ids   0  1  2 | 0  1 | 0  1  2
    cu_seq_lens_q  0         3      5        8
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megapack.attention import TreeSegments, tree_arguments
from megapack.attention.experts import token_mask
from megapack.calls import checked_call
from megapack.data import Batch, BatchLayout, BucketBatchSampler, MicroBatch, PackedDataset
from megapack.data.loader import LoaderState, prefetch_remote
from megapack.data.resume import refuse_damage
from megapack.data.schedule import Schedule
from megapack.errors import ConfigError, ResumeError
from megapack.integrations import dialects
from megapack.integrations.dialects import IGNORED, TRANSFORMERS, Dialect, check_columns, emit
from megapack.integrations.rows.dataset import RowDataset
from megapack.probe import check_rows

logger = logging.getLogger(__name__)

PROBED_BLOCKS = 32


class RankRows:
    """Iterable over the micro batches of one rank, in the dialect of its host.

    Raises ConfigError if a block is not a multiple of a micro step, or the dialect does not support
    the attention windows of the manifest.

    Args:
        data_parallel_rank, data_parallel_size: place of this rank; ranks that share documents
            (tensor, context parallelism) have the same data_parallel_rank.
        micro_batch_rows: rows of a micro batch.
        num_workers: worker processes that prefetch; 0: gather rows when the host needs them.

    Attributes:
        consumed_rows: rows of all ranks up to the last yielded batch.
    """

    def __init__(
        self,
        rows: RowDataset,
        dialect: Dialect,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batch_rows: int,
        num_workers: int = 0,
    ) -> None:
        self.rows, self.dialect = rows, dialect
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_rows = micro_batch_rows
        self.num_workers = num_workers
        self.consumed_rows = 0
        self._state = LoaderState(rows.schedule, rows.packed)
        block = rows.options.rows_per_block
        if micro_batch_rows < 1 or block % self.rows_per_micro_step:
            raise ConfigError(
                f"a step has {block} rows, which is not a multiple of {data_parallel_size} ranks x "
                f"{micro_batch_rows} rows (of {rows.options.sequence_length} tokens) per micro "
                "batch: choose sizes whose product divides it"
            )
        check_columns(rows.packed.columns, dialect)
        if dialect.restart:
            reason = f"{dialect.name} finds boundaries by positions, which do not show windows"
            dialects.refuse_windows(rows.packed.samples.windows, reason)

    @property
    def rows_per_micro_step(self) -> int:
        """Rows of all ranks in a micro step."""
        return self.micro_batch_rows * self.data_parallel_size

    def micro_batch(self, consumed_rows: int) -> dict[str, Tensor]:
        """Return this rank's micro batch that follows ``consumed_rows``, with megapack's keys."""
        return self.rows.micro_batch(self._row_numbers(consumed_rows))

    def _row_numbers(self, consumed_rows: int) -> range:
        begin = consumed_rows + self.data_parallel_rank * self.micro_batch_rows
        return range(begin, begin + self.micro_batch_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches in the dialect, from ``consumed_rows`` to the last row."""
        begins = range(
            self.consumed_rows,
            len(self.rows) - self.rows_per_micro_step + 1,
            self.rows_per_micro_step,
        )
        loader = DataLoader(
            self.rows,
            batch_sampler=(list(self._row_numbers(begin)) for begin in begins),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            # Count before the host gets the batch: it saves its checkpoint after training on it.
            self.consumed_rows += self.rows_per_micro_step
            yield emit(batch, self.dialect)

    def state_dict(self) -> dict[str, Any]:
        """Return consumed_rows, and as JSON the program of the schedule with digests of the data;
        the same on all ranks."""
        begun = -(-self.consumed_rows // self.rows.options.rows_per_block)
        program = json.dumps(self._state.save(begun))
        return {"consumed_rows": self.consumed_rows, "program": program}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the consumed rows; numbers of ranks and workers and the micro batch size
        may differ. Raises ResumeError if the schedule of these rows or the bytes of the data differ
        (``megapack.data.resume``), or if they end inside a micro step of the new sizes."""
        with refuse_damage("the saved state of the rows"):
            consumed_rows, program = int(state["consumed_rows"]), json.loads(state["program"])
        self._state.resume_step(program)
        block = self.rows.options.rows_per_block
        if consumed_rows % block % self.rows_per_micro_step:
            raise ResumeError(
                f"{consumed_rows} rows are consumed, {consumed_rows % block} of a block of {block},"
                f" and a micro step takes {self.rows_per_micro_step} now: save between steps to "
                "change ranks or micro batches"
            )
        self.consumed_rows = consumed_rows

    # ---- Probe of the host's own forward pass on its first micro batch

    def probe(
        self,
        forward: Callable[[dict[str, Any]], Tensor],
        received: Mapping[str, Any],
        *,
        module: nn.Module,
        consumed_rows: int | None = None,
    ) -> None:
        """Raise ConfigError if documents of a micro batch depend on each other in a host, or if the
        host shifts masks or changes the micro batch.

        The probe uses a micro batch of the smallest bucket in the next blocks. Every rank must
        call it. It switches dropout off, and restores the module's mode and buffers.

        Args:
            forward: maps a batch in the dialect to the loss of every token
                (``megapack.probe.check_rows``).
            received: the micro batch as it reached the host's model, ``module``.
            consumed_rows: rows before ``received``; None: ``received`` is the last yielded batch.
        """
        if consumed_rows is None:
            consumed_rows = self.consumed_rows - self.rows_per_micro_step
        sent = emit(self.micro_batch(consumed_rows), self.dialect)
        for key, value in received.items():
            if isinstance(value, Tensor) and not torch.equal(value.cpu(), sent[key]):
                raise ConfigError(
                    f"{key!r} of the first micro batch differs from what megapack gave "
                    f"{self.dialect.name} for rows {list(self._row_numbers(consumed_rows))}: "
                    "something between the loader and the model changes it"
                )
        with _evaluating(module):
            seconds = check_rows(
                lambda batch: forward(emit(batch, self.dialect)),
                self.micro_batch(self._block_of_short_documents(consumed_rows)),
                counted=lambda batch: dialects.loss_terms(batch, self.dialect).weights != 0,
                host=type(module).__name__,
                longest=self.micro_batch(consumed_rows),
            )
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)

    def _block_of_short_documents(self, consumed_rows: int) -> int:
        # The first step has the longest documents, often one per row, so no boundary to check.
        block = self.rows.options.rows_per_block
        begins = range(consumed_rows // block * block, len(self.rows) - block + 1, block)
        return min(begins[:PROBED_BLOCKS], key=self.rows.bucket_of)


def seen_losses(losses: Tensor, counts: Tensor) -> Tensor:
    """Return losses for the probe, which treats 0 as masked: losses that count are above 0."""
    return torch.where(counts, losses.clamp(min=1e-30), losses)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode; restore the mode and all buffers (such as token counts of experts)."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)


# ---- Micro batches of transformers models


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a megapack batch (layout "stream") under the argument names of a transformers model.

    Returns:
        input_ids and position_ids int64 ``(1, tokens)``; shift_labels, the label of every position;
        labels, the same at the position of the predicted token (the model shifts them);
        cu_seq_lens_q, cu_seq_lens_k int32, max_length_q, max_length_k; use_cache False. No
        attention_mask: with one, models ignore the boundaries. Of prefix trees, instead of labels:
        the arguments of ``tree_arguments``, and ``predecessors``, which the model does not take.
    """
    if "kv_index" not in batch:
        return {**emit(batch, TRANSFORMERS), "use_cache": False}
    return {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "shift_labels": batch["labels"],
        "predecessors": batch["predecessors"],
        **tree_arguments(TreeSegments.of(batch)),
    }


class MicroBatches(Dataset[dict[str, Any]]):
    """Micro batches of one rank in order: item i is the input of the i-th forward pass.
    Raises ConfigError if sizes do not fit.

    Args:
        schedule: schedule of the dataset, the same on all ranks.
        micro_batch_tokens: tokens of one forward pass of one rank.
        data_parallel_rank, data_parallel_size: place of this rank; ``PackedTrainer`` sets them.
        num_steps: optimizer steps from the beginning of the run; None: one epoch.
        dealing, pad_last: see ``BucketBatchSampler``.

    Attributes:
        with_token_mask: add ``token_mask``, bool (tokens,), False for padding, for the
            load-balancing loss of a mixture of experts. ``PackedTrainer`` sets all attributes.
        with_loss_weights: add ``loss_weights``, float32 (1, tokens), in steps that have them: the
            loss of the step is the sum of losses times weights over all items and ranks. If False,
            such steps raise ConfigError.
        for_own_shift: drop the label of a row's last token (where a document is cut), for losses
            that shift ``labels`` themselves and so never use it.
        settings, allow_change: other settings of the trainer, and keys that may differ at a resume.
    """

    # TRL reads the columns of datasets.
    column_names = ("input_ids", "labels", "position_ids")

    @checked_call
    def __init__(
        self,
        dataset: PackedDataset,
        schedule: Schedule,
        *,
        micro_batch_tokens: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        num_steps: int | None = None,
        dealing: Literal["balanced", "in_order"] = "balanced",
        pad_last: bool = False,
    ) -> None:
        check_columns(dataset.columns, TRANSFORMERS)
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
            dealing=dealing,
            pad_last=pad_last,
        )
        self._pad_last = pad_last
        self.with_token_mask = self.with_loss_weights = self.for_own_shift = False
        self.settings: dict[str, Any] = {}
        self.allow_change: tuple[str, ...] = ()
        self._step: tuple[int, list[MicroBatch]] = (-1, [])
        self._prefetched: tuple[int, Iterator[MicroBatch]] = (-1, iter(()))

    def of_rank(
        self,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_steps: int | None,
        *,
        evaluated: bool = False,
    ) -> MicroBatches:
        """Return the micro batches of a rank. With ``evaluated``, every sample occurs once, and the
        last micro batches may be empty."""
        schedule, dealing = self.schedule, self.sampler.dealing
        if evaluated:
            schedule = Schedule(self.dataset, schedule.config, finite=True)
        return MicroBatches(
            self.dataset,
            schedule,
            micro_batch_tokens=self.layout.micro_batch_tokens,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            num_steps=num_steps,
            dealing=dealing,
            pad_last=self._pad_last or evaluated,
        )

    @cached_property
    def mean_labels(self) -> float:
        """Mean number of labels per micro batch of all ranks. Raises ConfigError if it is 0."""
        steps = range(self.sampler.num_steps)
        labels = sum(self.schedule.step(i).num_label_tokens for i in steps)
        if not labels:
            raise ConfigError(
                f"{self.dataset}: no token has a label (documents have one token each, or their "
                "masks hide all labels), so there is nothing to evaluate; give other documents"
            )
        return labels / (len(self) * self.sampler.data_parallel_size)

    @property
    def num_micro_steps(self) -> int:
        """Forward passes of a rank per optimizer step: ``gradient_accumulation_steps``. Raises
        ConfigError if it differs between stages; Trainer has one number for all steps."""
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
        """Return ``model_inputs`` of micro batch i. Raises IndexError past the end."""
        batch = self.batch(i)
        inputs = model_inputs(batch)
        weights = batch.get("loss_weights")
        if weights is not None and not self.with_loss_weights:
            raise ConfigError(
                "the run has loss weights, and this loop would take the plain mean of its labels: "
                "train with PackedTrainer, or set with_loss_weights and use the items' loss_weights"
            )
        if weights is not None:
            inputs["loss_weights"] = weights
        if self.with_token_mask:
            tokens = batch["tokens"].numel()
            inputs["token_mask"] = token_mask(batch["cu_seqlens"], batch["dataset_ids"], tokens)
        return inputs

    def batch(self, i: int) -> Batch:
        """Return micro batch i in the format of ``PackedDataset.micro_batch``. Loss weights, if
        any, are in ``loss_weights``; then loss_mask is 1 for every label."""
        if not 0 <= i < len(self):
            raise IndexError(f"micro batch {i} does not exist; there are {len(self)}, from 0 on")
        chosen = self._prefetch(i) if self.dataset.remote_reads.any else self._choose(i)
        batch = self.dataset.micro_batch(**chosen.gathered_by, layout=self.layout)
        if chosen.step_label_weight is not None:
            if not self.schedule.finite:  # evaluation has no weights
                batch["loss_weights"] = batch["loss_mask"] / (chosen.step_label_weight or 1.0)
            batch["loss_mask"] = (batch["labels"] >= 0).float()
        elif self.for_own_shift:
            batch["labels"][:, -1], batch["loss_mask"][:, -1] = IGNORED, 0
        return batch

    def _choose(self, i: int) -> MicroBatch:
        step, micro_step = divmod(i, self.num_micro_steps)
        if self._step[0] != step:
            self._step = (step, self.sampler.micro_batches(step))
        return self._step[1][micro_step]

    def _prefetch(self, i: int) -> MicroBatch:
        """Return ``_choose(i)``; prefetch the next items for callers that read in order."""
        expected, micro_batches = self._prefetched
        if i != expected:
            following = map(self._choose, range(i, len(self)))
            micro_batches = prefetch_remote(following, self.dataset.remote_reads)
        self._prefetched = (i + 1, micro_batches)
        return next(micro_batches)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefetched": (-1, iter(()))}

"""build_loader: the batches of one rank, prepared ahead by a thread.

The gather holds no GIL, so a thread keeps up with any trainer; worker processes would copy every
batch between processes instead. Whoever wants them all the same gives PackedDataset and
BucketBatchSampler to torch's DataLoader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from megapack.data.batch import Batch, BatchLayout, MicroBatch, allocate
from megapack.data.dataset import PackedDataset
from megapack.data.fetch_ahead import fetching_ahead
from megapack.data.prefetch import ThreadPrefetcher, to_device
from megapack.data.rank_check import RankChecker
from megapack.data.read_ahead import read_indices, reading_ahead
from megapack.data.report import plan_run
from megapack.data.sampler import BucketBatchSampler
from megapack.data.schedule import Schedule
from megapack.data.sequence_parallel import cut_slice
from megapack.errors import ConfigError, IndexMismatchError

__all__ = ["PackedLoader", "build_loader"]

log = logging.getLogger(__name__)


def build_loader(
    dataset: PackedDataset,
    schedule: Schedule,
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
    micro_batch_tokens: int,
    start_step: int = 0,
    num_steps: int | None = None,
    dealing: Literal["balanced", "in_order"] = "balanced",
    uneven: Literal["error", "pad"] = "error",
    sequence_parallel_size: int = 1,
    layout: Literal["stream", "rows"] = "stream",
    row_tokens: int | None = None,
    cu_seqlens: Literal["exact", "padded"] = "exact",
    num_cu_seqlens: int | None = None,
    cu_seqlens_per_row: bool = False,
    prefetch: int = 2,
    read_ahead: int = 16,
    pin_memory: bool = False,
    reuse_buffers: bool = False,
    device: torch.device | str | None = None,
    check_ranks_every: int = 0,
    weighted_loss: bool = False,
) -> PackedLoader:
    """A loader of the micro batches of one rank.

    Args:
        dataset: what to gather from; made of the schedule's index.
        schedule: the same on all ranks.
        data_parallel_rank .. sequence_parallel_size: see ``BucketBatchSampler``.
        layout .. cu_seqlens_per_row: see ``BatchLayout``; row_tokens is the schedule's by default.
        prefetch: batches that the thread prepares ahead; 0: none, and no thread.
        read_ahead: micro batches whose documents the system is asked to read before they are
            prepared (``megapack.data.read_ahead``); 0: each only just before. Of object stores
            64 MiB are fetched ahead, whatever it is (``megapack.data.fetch_ahead``).
        pin_memory: batches in page-locked memory, where there is CUDA.
        reuse_buffers: write into the same few buffers again and again. A batch is then valid until
            the next one is asked for. Not with a device, nor with sequence_parallel_size.
        device: move the tensors there, one batch ahead on a CUDA stream of its own.
        check_ranks_every: compare ranks every so many steps (``RankChecker``); 0: never. Needs
            torch.distributed.

        weighted_loss: see ``BucketBatchSampler``.

    Returns:
        A loader; iterating over it gives dicts of

        - tokens, labels, position_ids (int64), loss_mask (float32): (1, micro_batch_tokens) or
          (rows, row_tokens);
        - cu_seqlens, dataset_ids int32, max_seqlen int, and where asked for cu_seqlens_padded (see
          ``PackedDataset.micro_batch``). Of a micro batch that ranks share these are the rank's
          slice, but for cu_seqlens, dataset_ids and max_seqlen, which are of the whole, and it says
          which: sequence_parallel_rank, sequence_parallel_size
          (``megapack.data.sequence_parallel``);
        - step, micro_step, num_micro_steps, bucket, capacity, row_tokens, num_step_label_tokens
          (ints), imbalance, imbalance_undealt (floats), and where the step has loss weights
          step_label_weight, the sum of loss_mask over the whole step and all ranks (float); where
          it has an attention_window (int), cu_seqlens and max_seqlen are those of the pieces;
        - sample_ids, source (int64 tensors, on the host): of every sample its id and the number of
          its dataset. In a stream, too, samples lie in rows of row_tokens.

    Raises:
        ConfigError: the sizes do not fit, the run would repeat data too often, or it has loss
            weights and the caller no use for them.
        IndexMismatchError: dataset and schedule have different indices.
    """
    if schedule.samples is not dataset.samples:
        _check_same_samples(dataset, schedule)
    if reuse_buffers and device is not None:
        raise ConfigError(
            "reuse_buffers is for batches that stay in host memory: a copy to a device may still "
            "be reading; leave out one of the two"
        )
    if sequence_parallel_size > 1 and (layout != "stream" or reuse_buffers):
        raise ConfigError(
            "sequence_parallel_size cuts streams of new memory: leave out layout='rows' and "
            "reuse_buffers"
        )
    sampler = BucketBatchSampler(
        schedule,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_tokens=micro_batch_tokens,
        start_step=start_step,
        num_steps=num_steps,
        dealing=dealing,
        uneven=uneven,
        sequence_parallel_size=sequence_parallel_size,
        weighted_loss=weighted_loss,
        count_labels=dataset.count_labels,
    )
    shape = BatchLayout(
        micro_batch_tokens=micro_batch_tokens,
        kind=layout,
        row_tokens=row_tokens or schedule.config.row_tokens,
        cu_seqlens=cu_seqlens,
        num_cu_seqlens=num_cu_seqlens,
        cu_seqlens_per_row=cu_seqlens_per_row,
    )
    layouts = {}
    for capacity in schedule.capacities:
        shared = sampler.ranks_per_micro_batch(capacity)
        own = replace(shape, micro_batch_tokens=micro_batch_tokens * shared)
        own.rows(capacity)  # refuse now what would be refused at some step
        if cu_seqlens == "padded" and num_cu_seqlens is None:  # one shape per bucket
            entries = dataset.max_cu_seqlens(own, capacity, schedule.smallest_window)
            own = replace(own, num_cu_seqlens=entries)
        layouts[capacity] = own
    if data_parallel_rank == 0 and log.isEnabledFor(logging.INFO):
        log.info("%s", plan_run(schedule, sampler.start_step + sampler.num_steps))
    return PackedLoader(
        dataset,
        sampler,
        layouts,
        prefetch=prefetch,
        read_ahead=read_ahead,
        pin_memory=pin_memory,
        reuse_buffers=reuse_buffers,
        device=device,
        check_ranks_every=check_ranks_every,
    )


def _check_same_samples(dataset: PackedDataset, schedule: Schedule) -> None:
    theirs, ours = schedule.samples.fingerprints, dataset.samples.fingerprints
    if theirs != ours:
        raise IndexMismatchError(
            f"the schedule was made of index {', '.join(theirs)} and the dataset of "
            f"{', '.join(ours)}; make the schedule from the dataset"
        )


class PackedLoader:
    """See ``build_loader``, which makes it. Every iteration begins at ``sampler.start_step``."""

    def __init__(
        self,
        dataset: PackedDataset,
        sampler: BucketBatchSampler,
        layouts: Mapping[int, BatchLayout],
        *,
        prefetch: int = 2,
        read_ahead: int = 16,
        pin_memory: bool = False,
        reuse_buffers: bool = False,
        device: torch.device | str | None = None,
        check_ranks_every: int = 0,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.layouts = layouts  # by capacity
        self.schedule = sampler.schedule
        self._prefetch = prefetch
        self._read_ahead = read_ahead
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._reuse_buffers = reuse_buffers
        self._device = None if device is None else torch.device(device)
        self._check_ranks_every = check_ranks_every

    def __len__(self) -> int:
        """Micro batches of this rank."""
        return len(self.sampler)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps before ``step`` is taken; whatever was prepared."""
        return self.schedule.state_dict(step)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._from_thread() if self._prefetch else self._gathered()
        if self._check_ranks_every:
            batches = self._checked(batches)
        return batches if self._device is None else to_device(batches, self._device)

    def _checked(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """In the consumer's thread, since it communicates; before the first batch of a step."""
        checker = RankChecker(self.sampler, every=self._check_ranks_every)
        for batch in batches:
            if batch["micro_step"] == 0:
                checker.check(batch["step"])
            yield batch

    def _from_thread(self) -> Iterator[Batch]:
        ahead = ThreadPrefetcher(self._gathered(), self._prefetch)
        try:
            yield from ahead
        finally:
            ahead.close()

    def _gathered(self) -> Iterator[Batch]:
        # One is read by the trainer, one is written, the others wait.
        ring = [
            allocate(self.sampler.micro_batch_tokens, pin_memory=self._pin_memory)
            for _ in range(self._prefetch + 2 if self._reuse_buffers else 0)
        ]
        indices = read_indices(self.dataset)
        coming: Iterable[MicroBatch] = self.sampler
        if self.dataset.remote_reads.any:
            coming = fetching_ahead(coming, self.dataset.remote_reads)
        for i, item in enumerate(reading_ahead(coming, self.dataset, self._read_ahead)):
            layout, shared = self.layouts[item.capacity], item.sequence_parallel_size
            size = layout.micro_batch_tokens
            out = ring[i % len(ring)] if ring else allocate(size, pin_memory=self._pin_memory)
            batch = self.dataset.micro_batch(
                item.sample_ids,
                layout=layout,
                capacity=item.capacity,
                out=out,
                loss_weight=item.loss_weight,
                attention_window=item.attention_window,
                num_lists=item.num_lists,
            )
            _, row_tokens = layout.rows(item.capacity)
            if shared > 1:
                batch = cut_slice(batch, self.sampler.data_parallel_rank % shared, shared)
            yield {**batch, **item.about(), "row_tokens": row_tokens}
            next(indices, None)

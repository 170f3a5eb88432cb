"""build_loader: the batches of one rank, prepared ahead by a thread or by worker processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from megapack.data.batch import Batch, BatchLayout, MicroBatch, SharedBuffers, allocate
from megapack.data.dataset import PackedDataset
from megapack.data.prefetch import ThreadPrefetcher, to_device
from megapack.data.rank_check import RankChecker
from megapack.data.report import plan_run
from megapack.data.sampler import BucketBatchSampler
from megapack.data.schedule import Schedule
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
    layout: Literal["stream", "rows"] = "stream",
    row_tokens: int | None = None,
    cu_seqlens: Literal["exact", "padded"] = "exact",
    num_cu_seqlens: int | None = None,
    cu_seqlens_per_row: bool = False,
    num_workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
    reuse_buffers: bool = False,
    device: torch.device | str | None = None,
    timeout_seconds: float = 0,
    check_ranks_every: int = 0,
) -> PackedLoader:
    """A loader of the micro batches of one rank.

    Args:
        dataset: what to gather from; made of the schedule's index.
        schedule: the same on all ranks.
        data_parallel_rank .. uneven: see ``BucketBatchSampler``.
        layout .. cu_seqlens_per_row: see ``BatchLayout``; row_tokens is the schedule's by default.
        num_workers: worker processes; 0: a thread of this process, which is faster unless Python
            itself is the bottleneck (the gather holds no GIL).
        prefetch: batches prepared ahead (per worker); 0 (without workers): none.
        pin_memory: batches in page-locked memory, where there is CUDA.
        reuse_buffers: write into the same few buffers again and again. A batch is then valid until
            the next one is asked for. Not with a device; with workers the memory is not pinned.
        device: move the tensors there, one batch ahead on a CUDA stream of its own.
        timeout_seconds: a worker that prepares a batch for longer is an error; 0: none.
        check_ranks_every: compare ranks every so many steps (``RankChecker``); 0: never. Needs
            torch.distributed.

    Returns:
        A loader; iterating over it gives dicts of

        - tokens, labels, position_ids (int64), loss_mask (float32): (1, micro_batch_tokens) or
          (rows, row_tokens);
        - cu_seqlens int32, max_seqlen int, and where asked for cu_seqlens_padded, dataset_ids (see
          ``PackedDataset.micro_batch``);
        - step, micro_step, num_micro_steps, bucket, capacity, num_step_label_tokens (ints),
          imbalance, imbalance_undealt (floats), sample_ids (int64 tensor).

    Raises:
        ConfigError: the sizes do not fit, or the run would repeat data too often.
        IndexMismatchError: dataset and schedule have different indices.
    """
    if schedule.samples is not dataset.samples:
        _check_same_samples(dataset, schedule)
    if reuse_buffers and device is not None:
        raise ConfigError(
            "reuse_buffers is for batches that stay in host memory: a copy to a device may still "
            "be reading; leave out one of the two"
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
    for stream in schedule.buckets:
        shape.rows(stream.capacity)  # refuse now what would be refused at some step
    if data_parallel_rank == 0 and log.isEnabledFor(logging.INFO):
        log.info("%s", plan_run(schedule, sampler.start_step + sampler.num_steps))
    return PackedLoader(
        dataset,
        sampler,
        shape,
        num_workers=num_workers,
        prefetch=prefetch,
        pin_memory=pin_memory,
        reuse_buffers=reuse_buffers,
        device=device,
        timeout_seconds=timeout_seconds,
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
        layout: BatchLayout,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        reuse_buffers: bool = False,
        device: torch.device | str | None = None,
        timeout_seconds: float = 0,
        check_ranks_every: int = 0,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.layout = layout
        self.schedule = sampler.schedule
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._reuse_buffers = reuse_buffers
        self._device = None if device is None else torch.device(device)
        self._timeout = timeout_seconds
        self._check_ranks_every = check_ranks_every

    def __len__(self) -> int:
        """Micro batches of this rank."""
        return len(self.sampler)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps before ``step`` is taken; whatever was prepared."""
        return self.schedule.state_dict(step)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._from_workers() if self._num_workers > 0 else self._from_thread()
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

    # --- without workers ------------------------------------------------------------------------

    def _from_thread(self) -> Iterator[Batch]:
        if self._prefetch == 0:
            yield from self._gathered()
            return
        ahead = ThreadPrefetcher(self._gathered(), self._prefetch)
        try:
            yield from ahead
        finally:
            ahead.close()

    def _gathered(self) -> Iterator[Batch]:
        tokens = self.layout.micro_batch_tokens
        # One is read by the trainer, one is written, the others wait.
        ring = [
            allocate(tokens, pin_memory=self._pin_memory)
            for _ in range(self._prefetch + 2 if self._reuse_buffers else 0)
        ]
        warm = self.dataset.warm()
        for i, item in enumerate(self.sampler):
            out = ring[i % len(ring)] if ring else allocate(tokens, pin_memory=self._pin_memory)
            batch = self.dataset.micro_batch(
                item.sample_ids, layout=self.layout, capacity=item.capacity, out=out
            )
            yield {**batch, **item.about()}
            next(warm, None)

    # --- with workers ---------------------------------------------------------------------------

    def _from_workers(self) -> Iterator[Batch]:
        ahead = max(1, self._prefetch)
        # As many as the loader has under way, and one that is read by the trainer.
        ring = SharedBuffers(ahead * self._num_workers + 1, self.layout.micro_batch_tokens)
        loader: DataLoader[Any] = DataLoader(
            _WorkerDataset(self.dataset, self.layout, ring),
            sampler=((i % len(ring), item) for i, item in enumerate(self.sampler)),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            prefetch_factor=ahead,
            timeout=self._timeout,
        )
        batches = iter(loader)
        warm = self.dataset.warm()
        count = 0
        while True:
            try:
                slot, item, rest = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not _is_death(error):
                    raise
                step = self.sampler.start_step + count // self.sampler.num_micro_steps
                cause = error.__cause__ or error.__context__
                raise RuntimeError(
                    f"rank {self.sampler.data_parallel_rank}: a data worker failed before step "
                    f"{step}: {error}" + (f" ({cause})" if cause else "") + ". Killed by signal 9 "
                    "mostly means that the node ran out of memory, signal 7 (bus error) that "
                    "shared memory did or that a mapped file became shorter"
                ) from error
            count += 1
            big = ring[slot] if self._reuse_buffers else ring[slot].copy(self._pin_memory)
            small = {name: _as_tensor(value) for name, value in rest.items()}
            yield {**big.shaped(self.layout.shape(item.capacity)), **small, **item.about()}
            next(warm, None)


def _is_death(error: RuntimeError) -> bool:
    """Of the worker, or its silence; errors that it raised come with their own type and message."""
    return "DataLoader worker (pid" in str(error) or "DataLoader timed out" in str(error)


class _WorkerDataset(Dataset[Any]):
    """Of worker processes: the big tensors come over in memory that is shared from the start."""

    def __init__(self, dataset: PackedDataset, layout: BatchLayout, ring: SharedBuffers) -> None:
        self.dataset = dataset
        self.layout = layout
        self.ring = ring

    def __getitem__(self, task: tuple[int, MicroBatch]) -> tuple[int, MicroBatch, Batch]:
        slot, item = task
        out = self.ring[slot]
        batch = self.dataset.micro_batch(
            item.sample_ids, layout=self.layout, capacity=item.capacity, out=out
        )
        # Small arrays are pickled: a shared file for each would cost more than they do.
        rest = {
            name: value.numpy() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name not in out
        }
        return slot, item, rest


def _as_it_is(value: Any) -> Any:
    return value


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, int) else torch.from_numpy(value)

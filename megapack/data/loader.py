"""build_loader: the batches of one rank, prepared ahead by a thread.

- ``build_loader``, ``PackedLoader``: a schedule and its data -> batches, in this order:

    micro batches -> fetching_ahead -> reading_ahead -> gather -> ThreadPrefetcher -> to_device
    of the sampler   object stores     disks                      a thread            a CUDA stream

- ``RankChecker``: ranks that no longer agree on what a step contains are stopped, not averaged.

The gather holds no GIL, so a thread keeps up with any trainer; worker processes would copy every
batch between processes instead. Whoever wants them all the same gives PackedDataset and
BucketBatchSampler to torch's DataLoader.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megapack import _core
from megapack.config import check_range
from megapack.data.batch import Batch, BatchLayout, MicroBatch, allocate, cut_slice
from megapack.data.dataset import PackedDataset
from megapack.data.documents import RemoteReads
from megapack.data.report import plan_run
from megapack.data.resume import OPTIONAL
from megapack.data.sampler import BucketBatchSampler
from megapack.data.schedule import Schedule
from megapack.errors import ConfigError, IndexMismatchError, RankMismatchError

T = TypeVar("T")


class ThreadPrefetcher(Iterator[T]):
    """Runs an iterable in a thread: beside the item that is taken, ``depth`` wait and one is made.

    An exception of the iterable is raised where its item would have been. ``close`` (also called
    at the end and on an exception) ends the thread and waits for it; a thread whose iterator is
    collected ends by itself, since the collector may run in a thread that it waits for.
    """

    _interpreter_ends = staticmethod(sys.is_finalizing)  # modules are gone when it is asked

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._items = iter(items)
        self._thread = ThreadPoolExecutor(1, "megapack-prefetch")
        self._ahead = deque(self._thread.submit(next, self._items) for _ in range(depth + 1))

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        try:
            item = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._ahead.append(self._thread.submit(next, self._items))
        return item

    def close(self) -> None:
        """Stop and join the thread; harmless when it has ended."""
        self._ahead.clear()
        if not self._interpreter_ends():  # which has joined all threads of pools by then
            self._thread.shutdown(cancel_futures=True)


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches with their tensors on ``device``, one batch ahead on a stream of its own.

    On the CPU batches pass as they are. Tensors should be pinned, or the copies wait.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = _copy(batch, device), stream.record_event()
        if ahead is not None:
            yield _hand_over(*ahead, device)
        ahead = copied
    if ahead is not None:
        yield _hand_over(*ahead, device)


def _copy(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor) and name not in ("sample_ids", "source")
        else value
        for name, value in batch.items()
    }


def _hand_over(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """The trainer's stream waits for this batch's copies, and they live as long as it uses them."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(current)
    return batch


_PORTIONS = 8
_IN_TIME = 0.25  # of what is taken, where nobody waited for it: so much more is asked for
_LEAST_BYTES = 1 << 14  # that a micro batch counts, also one that needs nothing from far away


def fetching_ahead(micro_batches: Iterable[MicroBatch], reads: RemoteReads) -> Iterator[MicroBatch]:
    """The micro batches; before each is given, what the next ones need is on its way.

    A store answers after tens of milliseconds, whatever it is asked for. So some tens of megabytes
    are always here or on their way; and since it is known what they are, what lies side by side in
    a file is asked for as one range although it belongs to several micro batches. They are asked
    for in portions, so that the line does not rest in between.

    It begins with one portion, and adds to it what is taken, a quarter of it where it was there in
    time: whatever is on its way shares the line, never quite fairly, and what is needed next shall
    not wait for what is needed last. Nor for shards that later ones have opened.
    """
    items = iter(micro_batches)
    coming: deque[tuple[MicroBatch, float]] = deque()  # and the bytes that it needs
    portion = reads.ahead_bytes / _PORTIONS
    ahead, room, num_asked = 0.0, portion, 1
    while True:
        while ahead <= room and (group := list(islice(items, num_asked))):
            num_open = reads.num_open
            ids = np.concatenate([np.asarray(item.sample_ids, np.int64) for item in group])
            each = max(reads.want(ids) / len(group), _LEAST_BYTES)
            coming.extend((item, each) for item in group)
            ahead += each * len(group)
            most = max(1, int(portion / each))
            if reads.num_open > num_open:
                num_asked = min(2 * num_asked, most)
                break
            num_asked = most
        if not coming:
            return
        item, num_bytes = coming.popleft()
        growth = num_bytes * (_IN_TIME if reads.are_here(item.sample_ids) else 1)
        yield item
        ahead -= num_bytes
        room = min(room + growth, (_PORTIONS - 1) * portion)


_CHUNK_BYTES = 64 << 20
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # only Linux counts per thread
# A request for what is in memory already costs about a microsecond per document. So after this many
# micro batches for which no disk was read none is asked for, until one has to wait.
_QUIET = 256


def reading_ahead(
    micro_batches: Iterable[MicroBatch], dataset: PackedDataset, depth: int
) -> Iterator[MicroBatch]:
    """The micro batches; before each is given, the documents of the next ``depth`` are asked for.

    So their pages are on their way from the disk, many at a time, while earlier batches are made.
    And only they: left to itself a system reads 128 KiB or more around every page that is missing.
    Advice changes when bytes are read and nothing else.

    Between two of them the caller is to gather the first, in the thread that iterates: whether a
    disk was read meanwhile decides whether asking goes on.
    """
    dataset.disable_readahead()
    coming: deque[MicroBatch] = deque()
    items = iter(micro_batches)
    quiet = reach = 0
    while True:
        before = _reads()
        for item in islice(items, reach + 1 - len(coming)):
            coming.append(item)
            if quiet < _QUIET:
                dataset.prefetch(item.sample_ids)
        if not coming:
            return
        yield coming.popleft()
        was_read = _reads() > before
        if was_read and quiet >= _QUIET:
            for item in coming:
                dataset.prefetch(item.sample_ids)
        quiet = 0 if was_read else quiet + 1
        reach = min(depth, 2 * reach + 1)  # the first batch is not kept waiting for later ones


def _reads() -> int:
    """Grows with what this thread has read from disks: pages it waited for, blocks it asked for."""
    usage = resource.getrusage(_WHOSE)
    return usage.ru_majflt + usage.ru_inblock


def read_indices(dataset: PackedDataset) -> Iterator[None]:
    """Have the indices read into memory, in order, a chunk per ``next``.

    A step looks up thousands of segments at random; from a cold disk that is one read each, and the
    whole index read in order costs less than a few steps of it. Shards that are not open are left.
    """
    shards = dataset.samples.shards
    for shard in filter(shards.is_open, range(len(shards))):
        documents = dataset.documents(shard)
        for array in (*shards.index(shard).segment_arrays(), documents.index_bytes):
            for begin in range(0, array.nbytes, _CHUNK_BYTES):
                _core.will_need(array, begin, _CHUNK_BYTES)
                yield


log = logging.getLogger(__name__)


def build_loader(
    dataset: PackedDataset,
    schedule: Schedule,
    *,
    micro_batch_tokens: int,
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
    **dealt: Any,
) -> PackedLoader:
    """A loader of the micro batches of one rank.

    Args:
        dataset: what to gather from; made of the schedule's index.
        schedule: the same on all ranks.
        micro_batch_tokens: tokens of one forward of one rank, padding included.
        layout .. cu_seqlens_per_row: see ``BatchLayout``; row_tokens is the schedule's by default.
        prefetch: batches that the thread prepares ahead; 0: none, and no thread.
        read_ahead: micro batches whose documents the system is asked to read before they are
            prepared; 0: each only just before. Of object stores 64 MiB are fetched ahead, whatever
            it is.
        pin_memory: batches in page-locked memory, where there is CUDA.
        reuse_buffers: write into the same few buffers again and again. A batch is then valid until
            the next one is asked for. Not with a device, nor with sequence_parallel_size.
        device: move the tensors there, one batch ahead on a CUDA stream of its own.
        check_ranks_every: compare ranks every so many steps (``RankChecker``); 0: never. Needs
            torch.distributed.
        dealt: of ``BucketBatchSampler``: data_parallel_rank, data_parallel_size, start_step,
            num_steps, dealing, pad_last, sequence_parallel_size, weighted_loss.

    Returns:
        A loader; iterating over it gives dicts of

        - tokens, labels, position_ids (int64), loss_mask (float32): (1, micro_batch_tokens) or
          (rows, row_tokens);
        - cu_seqlens, dataset_ids int32, max_seqlen int, and where asked for cu_seqlens_padded (see
          ``PackedDataset.micro_batch``). Of a micro batch that ranks share these are of the whole,
          and the tensors above the rank's slice (``cut_slice``); it says which:
          sequence_parallel_rank, sequence_parallel_size;
        - step, micro_step, num_micro_steps, bucket, capacity, row_tokens, num_step_label_tokens
          (ints), imbalance, imbalance_in_order (floats), and where the step has loss weights
          step_label_weight, the sum of loss_mask over the whole step and all ranks (float); where
          it has an attention_window (int), cu_seqlens and max_seqlen are those of the pieces;
        - sample_ids, source (int64 tensors, on the host): of every sample its id and the number of
          its source. In a stream, too, samples lie in rows of row_tokens.

    Raises:
        ConfigError: the sizes do not fit, the run would repeat data too often, or it has loss
            weights and the caller no use for them.
        IndexMismatchError: dataset and schedule have different indices.
    """
    theirs, ours = schedule.samples, dataset.samples
    if theirs is not ours and theirs.fingerprints != ours.fingerprints:
        raise IndexMismatchError(
            f"the schedule was made of index {', '.join(theirs.fingerprints)} and the dataset of "
            f"{', '.join(ours.fingerprints)}; make the schedule from the dataset"
        )
    ahead = {"prefetch": prefetch, "read_ahead": read_ahead}
    check_range("loader", at_least=0, check_ranks_every=check_ranks_every, **ahead)
    if reuse_buffers and device is not None:
        raise ConfigError(
            "reuse_buffers is for batches that stay in host memory: a copy to a device may still "
            "be reading; leave out one of the two"
        )
    sampler = BucketBatchSampler(
        schedule,
        micro_batch_tokens=micro_batch_tokens,
        samples=dataset.samples,
        **dealt,
    )
    if sampler.sequence_parallel_size > 1 and (layout != "stream" or reuse_buffers):
        raise ConfigError(
            "sequence_parallel_size cuts streams of new memory: leave out layout='rows' and "
            "reuse_buffers"
        )
    shape = BatchLayout(
        micro_batch_tokens=micro_batch_tokens,
        kind=layout,
        row_tokens=schedule.config.row_tokens if row_tokens is None else row_tokens,
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
    if sampler.data_parallel_rank == 0 and log.isEnabledFor(logging.INFO):
        log.info("%s", plan_run(schedule, sampler.start_step + sampler.num_steps))
    return PackedLoader(
        dataset=dataset,
        sampler=sampler,
        layouts=layouts,
        prefetch=prefetch,
        read_ahead=read_ahead,
        pin_memory=pin_memory and torch.cuda.is_available(),
        reuse_buffers=reuse_buffers,
        device=None if device is None else torch.device(device),
        check_ranks_every=check_ranks_every,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLoader:
    """See ``build_loader``, which makes it. Every iteration begins at ``sampler.start_step``."""

    dataset: PackedDataset
    sampler: BucketBatchSampler
    layouts: Mapping[int, BatchLayout]
    """By capacity."""
    prefetch: int
    read_ahead: int
    pin_memory: bool
    reuse_buffers: bool
    device: torch.device | None
    check_ranks_every: int

    @property
    def schedule(self) -> Schedule:
        """The sampler's."""
        return self.sampler.schedule

    def __len__(self) -> int:
        """Micro batches of this rank."""
        return len(self.sampler)

    def state_dict(self, step: int) -> dict[str, Any]:
        """State for a checkpoint before ``step`` is taken, whatever was prepared."""
        return self.schedule.state_dict(step)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._from_thread() if self.prefetch else self._gathered()
        if self.check_ranks_every:
            batches = self._checked(batches)
        return batches if self.device is None else to_device(batches, self.device)

    def _checked(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """In the consumer's thread, since it communicates; before the first batch of a step."""
        checker = RankChecker(self.sampler, every=self.check_ranks_every)
        for batch in batches:
            if batch["micro_step"] == 0:
                checker.check(batch["step"])
            yield batch

    def _from_thread(self) -> Iterator[Batch]:
        ahead = ThreadPrefetcher(self._gathered(), self.prefetch)
        try:
            yield from ahead
        finally:
            ahead.close()

    def _gathered(self) -> Iterator[Batch]:
        # One is read by the trainer, one is written, the others wait.
        ring = [
            allocate(self.sampler.micro_batch_tokens, pin_memory=self.pin_memory)
            for _ in range(self.prefetch + 2 if self.reuse_buffers else 0)
        ]
        indices = read_indices(self.dataset)
        coming: Iterable[MicroBatch] = self.sampler
        if self.dataset.remote_reads.any:
            coming = fetching_ahead(coming, self.dataset.remote_reads)
        for i, item in enumerate(reading_ahead(coming, self.dataset, self.read_ahead)):
            layout, shared = self.layouts[item.capacity], item.sequence_parallel_size
            size = layout.micro_batch_tokens
            out = ring[i % len(ring)] if ring else allocate(size, pin_memory=self.pin_memory)
            batch = self.dataset.micro_batch(**item.gathered_by, layout=layout, out=out)
            _, row_tokens = layout.rows(item.capacity)
            if shared > 1:
                batch = cut_slice(batch, self.sampler.data_parallel_rank % shared, shared)
            yield {**batch, **item.about(), "row_tokens": row_tokens}
            next(indices, None)


class RankChecker:
    """Compares the ranks of a torch.distributed group.

    A rank with another seed, file or step would train on, silently, on batches of other shapes and
    counts. Every ``every`` steps the ranks exchange a few integers that say what they are about to
    do.

    Args:
        sampler: of this rank.
        every: steps between comparisons; the first step is always compared.
        group: process group; None: the default one.

    ``check`` counts its own calls, so that ranks that stand at different steps still meet.
    """

    def __init__(
        self,
        sampler: BucketBatchSampler,
        *,
        every: int = 100,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._sampler = sampler
        self._every = every
        self._group = group
        self._calls = 0
        self._fixed: dict[str, Any] = {
            "check_ranks_every": every,
            **sampler.launch,
            "last_step": sampler.start_step + sampler.num_steps,
            **dict.fromkeys(OPTIONAL),  # the same fields on all ranks, whatever each was given
            **sampler.schedule.identity(),
        }

    def check(self, step: int) -> None:
        """Before ``step`` is taken; all ranks of the group call it equally often.

        Raises:
            RankMismatchError: on every rank, naming the ranks and the fields that differ.
        """
        due = self._calls % self._every == 0
        self._calls += 1
        if not due:
            return
        content = self._sampler.schedule.step(step)
        fields = {
            "step": step,
            **self._fixed,
            "num_micro_steps": self._sampler.num_micro_steps(step),
            "bucket": content.bucket,
            "sample_ids": xxhash.xxh3_64_intdigest(content.sample_ids.tobytes()),
        }
        table = _gather([_code(value) for value in fields.values()], self._group)
        problems = [
            _describe(name, [row[i] for row in table])
            for i, name in enumerate(fields)
            if len({row[i] for row in table}) > 1
        ]
        if problems:
            raise RankMismatchError(
                f"ranks disagree at step {step}: "
                + "; ".join(problems)
                + ". Start all ranks with the same files and configuration"
            )


def _code(value: Any) -> int:
    """Small numbers as they are, everything else by a 62-bit hash."""
    if isinstance(value, int) and 0 <= value < 1 << 40:
        return value
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 2 | 1 << 61


def _gather(codes: list[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    on_gpu = dist.get_backend(group) == "nccl"
    mine = torch.tensor(codes, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    return [row.tolist() for row in table]


def _describe(name: str, codes: list[int]) -> str:
    """``seed is 8 on rank 2 and 7 on the other 3``."""
    common, _ = Counter(codes).most_common(1)[0]
    odd = [f"{_shown(code)} on rank {rank}" for rank, code in enumerate(codes) if code != common]
    others = sum(code == common for code in codes)
    return f"{name} is {', '.join(odd[:8])} and {_shown(common)} on the other {others}"


def _shown(code: int) -> str:
    return str(code) if code < 1 << 40 else f"#{code & 0xFFFFFFFF:08x}"

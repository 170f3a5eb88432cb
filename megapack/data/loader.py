"""build_loader: batches of one rank, prepared in advance by a thread.

- ``build_loader``, ``PackedLoader``: a schedule and its data -> batches, in this order:

    micro batches -> prefetch_remote -> prefetch_local -> gather -> ThreadPrefetcher -> to_device
    of the sampler   object stores      disks                       a thread            (tensors.py)

- ``LoaderState``: saves and resumes a loop over batches.

The gather releases the GIL, so one thread keeps up with any trainer; worker processes would copy
every batch between processes. To use them anyway, pass PackedDataset and BucketBatchSampler to
torch's DataLoader.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from megapack import _core
from megapack.calls import checked_call
from megapack.config import check_range
from megapack.data.batch import Batch, BatchLayout, MicroBatch, cut_slice, wrapper
from megapack.data.dataset import PackedDataset
from megapack.data.documents import RemoteReads
from megapack.data.report import plan_run
from megapack.data.resume import check_record, content_digests, refuse_damage
from megapack.data.sampler import BucketBatchSampler
from megapack.data.schedule import Schedule
from megapack.errors import ConfigError, IndexMismatchError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ThreadPrefetcher(Iterator[T]):
    """Iterator over an iterable that runs in a thread, up to ``depth`` finished items ahead.
    An exception of the iterable is raised in place of its item. ``close`` joins the thread; the
    iterator calls it at the end and on an exception."""

    # No __del__: the garbage collector may run in the very thread that close() joins.
    _interpreter_ends = staticmethod(sys.is_finalizing)  # ``sys`` may be gone by then

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
        """Stop and join the thread; a second call does nothing."""
        self._ahead.clear()
        if not self._interpreter_ends():  # the interpreter joins the threads of pools itself
            self._thread.shutdown(cancel_futures=True)


_PORTIONS = 8
_GROWTH_IF_READY = 0.25  # part of the consumed bytes by which a sufficient lookahead grows
_LEAST_BYTES = 1 << 14  # counted even for a micro batch that needs nothing remote


def prefetch_remote(
    micro_batches: Iterable[MicroBatch], reads: RemoteReads, *, copy_ahead: bool = False
) -> Iterator[MicroBatch]:
    """Yield micro batches; meanwhile fetch the bytes of later ones from the object store. A request
    takes tens of milliseconds regardless of its size. So up to ``reads.ahead_bytes`` are local or
    in flight, and neighboring ranges of several micro batches become one request. ``copy_ahead``:
    meanwhile copy whole shards, since most of their bytes will be needed."""
    upcoming = iter(micro_batches)
    requested: deque[tuple[MicroBatch, float]] = deque()  # micro batch, bytes it needs
    # Request in portions, so that the connection is never idle between two requests.
    portion = reads.ahead_bytes / _PORTIONS
    bytes_ahead, allowance, batches_per_request = 0.0, portion, 1
    while True:
        while bytes_ahead <= allowance and (group := list(islice(upcoming, batches_per_request))):
            num_open = reads.num_open
            ids = np.concatenate([np.asarray(item.sample_ids, np.int64) for item in group])
            bytes_each = max(
                reads.prefetch(ids, whole_chunks=copy_ahead) / len(group), _LEAST_BYTES
            )
            requested.extend((item, bytes_each) for item in group)
            bytes_ahead += bytes_each * len(group)
            batches_per_portion = max(1, int(portion / bytes_each))
            if reads.num_open > num_open:
                # Opening shards took time: serve the next micro batch before more are opened.
                batches_per_request = min(2 * batches_per_request, batches_per_portion)
                break
            batches_per_request = batches_per_portion
        if not requested:
            return
        if copy_ahead:
            reads.copy_ahead()
        item, num_bytes = requested.popleft()
        # In-flight requests share the bandwidth unevenly, and data that is needed next must not
        # wait for data that is needed much later: grow by the consumed bytes, or by a quarter of
        # them if the data had already arrived.
        growth = num_bytes * (_GROWTH_IF_READY if reads.are_local(item.sample_ids) else 1)
        yield item
        bytes_ahead -= num_bytes
        allowance = min(allowance + growth, (_PORTIONS - 1) * portion)


_CHUNK_BYTES = 64 << 20
_USAGE_OF = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # per thread on Linux only
# Advice about pages that are in memory costs about a microsecond per document. After this many
# micro batches without a disk read, prefetch_local gives no advice until the next disk read.
_QUIET = 256
_LOCAL_BYTES = 1 << 28


def prefetch_local(
    micro_batches: Iterable[MicroBatch], dataset: PackedDataset, depth: int
) -> Iterator[MicroBatch]:
    """Yield micro batches; before each, ask the system to read the documents of the next ``depth``,
    or of fewer if they have more than 256 MiB (wide columns).

    The caller gathers each micro batch in the iterating thread before it takes the next one: its
    disk reads decide whether later documents need to be requested.
    """
    # By default Linux reads 128 KiB or more around every missing page.
    dataset.disable_readahead()
    requested: deque[tuple[MicroBatch, int]] = deque()  # micro batch, bytes it needs
    upcoming = iter(micro_batches)
    num_quiet = lookahead = bytes_ahead = 0
    while True:
        reads_before = _num_reads()
        while len(requested) <= lookahead and bytes_ahead <= _LOCAL_BYTES:
            item = next(upcoming, None)
            if item is None:
                break
            num_bytes = dataset.prefetch(item.sample_ids) if num_quiet < _QUIET else 0
            requested.append((item, num_bytes))
            bytes_ahead += num_bytes
        if not requested:
            return
        item, num_bytes = requested.popleft()
        bytes_ahead -= num_bytes
        yield item
        has_read = _num_reads() > reads_before
        if has_read and num_quiet >= _QUIET:
            for waiting, _ in requested:
                dataset.prefetch(waiting.sample_ids)
        num_quiet = 0 if has_read else num_quiet + 1
        lookahead = min(depth, 2 * lookahead + 1)  # start small: the first batch is needed soon


def _num_reads() -> int:
    """Return a counter of this thread's disk reads: major page faults and blocks."""
    usage = resource.getrusage(_USAGE_OF)
    return usage.ru_majflt + usage.ru_inblock


def read_indices(dataset: PackedDataset) -> Iterator[None]:
    """Ask the system to read the indices of all open shards in order, one chunk per ``next``: on a
    cold disk, a step's random lookups of segments cost thousands of reads."""
    shards = dataset.samples.shards
    for shard in filter(shards.is_open, range(len(shards))):
        documents = dataset.documents(shard)
        for array in (*shards.index(shard).segment_arrays(), documents.index_bytes):
            for begin in range(0, array.nbytes, _CHUNK_BYTES):
                _core.read_ahead(array, begin, _CHUNK_BYTES)
                yield


log = logging.getLogger(__name__)


# Arguments of torch's DataLoader and DistributedSampler, and of torchtitan's loader.
_INSTEAD = {
    "batch_size": "the size of a batch is micro_batch_tokens: give that",
    "rank": "did you mean 'data_parallel_rank'?",
    "world_size": "did you mean 'data_parallel_size'?",
    "num_replicas": "did you mean 'data_parallel_size'?",
    "dp_rank": "did you mean 'data_parallel_rank'?",
    "dp_world_size": "did you mean 'data_parallel_size'?",
    "drop_last": "no sample is dropped: leave it out",
    "num_workers": "one thread prepares `prefetch` batches in advance: leave it out",
    "shuffle": "order and seed belong to Schedule, which shuffles by default: leave it out",
}


@partial(checked_call, instead=_INSTEAD)
def build_loader(
    dataset: PackedDataset,
    schedule: Schedule,
    *,
    micro_batch_tokens: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    start_step: int = 0,
    num_steps: int | None = None,
    dealing: Literal["balanced", "in_order"] = "balanced",
    pad_last: bool = False,
    sequence_parallel_size: int = 1,
    weighted_loss: bool = False,
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
) -> PackedLoader:
    """Return a loader of the micro batches of one rank.

    Args:
        dataset: the data, opened with the schedule's index.
        schedule: the same on all ranks.
        micro_batch_tokens: tokens of one forward pass of one rank, padding included.
        data_parallel_rank .. weighted_loss: see ``BucketBatchSampler``.
        layout .. cu_seqlens_per_row: see ``BatchLayout``; row_tokens is the schedule's by default.
        prefetch: batches that the thread prepares in advance; 0: no thread.
        read_ahead: micro batches for which documents are requested from the disk in advance.
            From object stores 64 MiB are prefetched in any case.
        pin_memory: batches in page-locked memory, if CUDA is available.
        reuse_buffers: write into the same few buffers. A batch is then valid until the next one is
            requested. Not with a device, nor with sequence_parallel_size.
        device: copy the tensors there, one batch ahead on a separate CUDA stream.
        check_ranks_every: steps between comparisons of the ranks (``RankChecker``); 0: never. Needs
            torch.distributed.

    Returns:
        A loader; iterating over it yields dicts of

        - tokens, labels, position_ids (int64), loss_mask (float32): (1, micro_batch_tokens) or
          (rows, row_tokens), and the columns of the data, (..., *shape of a row);
        - cu_seqlens, dataset_ids int32, max_seqlen int, and with alignment cu_seqlens_padded (see
          ``PackedDataset.micro_batch``). If ranks share a micro batch, these describe the whole,
          and the tensors above are the rank's slice (``cut_slice``), numbered by
          sequence_parallel_rank of sequence_parallel_size;
        - step, micro_step, num_micro_steps, bucket, capacity, row_tokens, num_step_label_tokens
          (ints), imbalance, imbalance_in_order (floats), and if the step has loss weights
          step_label_weight, the sum of loss_mask over the whole step and all ranks (float); if the
          step has an attention window, attention_window (int), and cu_seqlens and max_seqlen
          describe the pieces into which it cuts the segments;
        - sample_ids, source (int64 tensors, on the host): id and source number of every sample.
          In a stream, too, samples lie in rows of row_tokens.

    Raises:
        ConfigError: the sizes do not fit, the device does not exist, the run would repeat data too
            often, or it has loss weights that the caller does not apply.
        IndexMismatchError: dataset and schedule have different indices.
    """
    scheduled, available = schedule.samples, dataset.samples
    if scheduled is not available and scheduled.fingerprints != available.fingerprints:
        raise IndexMismatchError(
            f"the schedule has index {', '.join(scheduled.fingerprints)} and the dataset "
            f"has {', '.join(available.fingerprints)}; make the schedule from the dataset"
        )
    counts = {"check_ranks_every": check_ranks_every, "prefetch": prefetch}
    check_range("loader", at_least=0, **counts, read_ahead=read_ahead)
    if reuse_buffers and device is not None:
        raise ConfigError(
            "reuse_buffers overwrites memory that the copy to the device may still read: leave out "
            "reuse_buffers or device"
        )
    sampler = BucketBatchSampler(
        schedule,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_tokens=micro_batch_tokens,
        start_step=start_step,
        num_steps=num_steps,
        dealing=dealing,
        pad_last=pad_last,
        sequence_parallel_size=sequence_parallel_size,
        samples=dataset.samples,
        weighted_loss=weighted_loss,
    )
    if sampler.sequence_parallel_size > 1 and (layout != "stream" or reuse_buffers):
        raise ConfigError(
            f"sequence_parallel_size {sampler.sequence_parallel_size} needs streams in new memory: "
            "leave out layout='rows' and reuse_buffers"
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
        of_bucket = replace(shape, micro_batch_tokens=micro_batch_tokens * shared)
        of_bucket.rows(capacity)  # raises now rather than at some step
        if cu_seqlens == "padded" and num_cu_seqlens is None:  # one shape per bucket
            entries = dataset.max_cu_seqlens(of_bucket, capacity, schedule.smallest_window)
            of_bucket = replace(of_bucket, num_cu_seqlens=entries)
        layouts[capacity] = of_bucket
    if sampler.data_parallel_rank == 0 and log.isEnabledFor(logging.INFO):
        log.info("%s", plan_run(schedule, sampler.start_step + sampler.num_steps))
    if dataset.framework == "numpy" and (pin_memory or device is not None):
        raise ConfigError(
            "pin_memory and device are for tensors, and the dataset has framework='numpy': leave "
            "both out, and copy batches with jax.device_put"
        )
    if pin_memory:
        from torch.cuda import is_available  # noqa: PLC0415

        pin_memory = is_available()
    if device is not None:
        from megapack.data.tensors import check_device  # noqa: PLC0415 (needs torch)

        check_device(device)
    return PackedLoader(
        dataset=dataset,
        sampler=sampler,
        layouts=layouts,
        prefetch=prefetch,
        read_ahead=read_ahead,
        pin_memory=pin_memory,
        reuse_buffers=reuse_buffers,
        device=device,
        check_ranks_every=check_ranks_every,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedLoader:
    """Loader made by ``build_loader``. Every iteration begins at ``sampler.start_step``."""

    dataset: PackedDataset
    sampler: BucketBatchSampler
    layouts: Mapping[int, BatchLayout]  # by capacity
    prefetch: int
    read_ahead: int
    pin_memory: bool
    reuse_buffers: bool
    device: torch.device | str | None
    check_ranks_every: int

    @property
    def schedule(self) -> Schedule:
        return self.sampler.schedule

    def __len__(self) -> int:
        return len(self.sampler)

    def __repr__(self) -> str:
        return f"PackedLoader({self.sampler!r}, on {self.device or 'the CPU'})"

    def __iter__(self) -> Iterator[Batch]:
        batches = self._from_thread() if self.prefetch else self._gathered()
        if self.check_ranks_every:
            batches = self._checked(batches)
        if self.device is None:
            return batches
        from megapack.data.tensors import to_device  # noqa: PLC0415 (needs torch)

        return to_device(batches, self.device)

    def _checked(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Compare the ranks before the first batch of a step, in the consumer's thread."""
        from megapack.data.tensors import RankChecker  # noqa: PLC0415 (needs torch)

        checker = RankChecker(self.sampler, every=self.check_ranks_every)
        for batch in batches:
            if batch["micro_step"] == 0:
                checker.check(batch["step"])
            yield batch

    def _from_thread(self) -> Iterator[Batch]:
        prefetcher = ThreadPrefetcher(self._gathered(), self.prefetch)
        try:
            yield from prefetcher
        finally:
            prefetcher.close()

    def _reads_a_quarter(self) -> bool:
        """Return whether the ranks of this node, which share a cache, draw at least a quarter of an
        epoch: random samples then touch most blocks."""
        ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_steps = self.sampler.num_steps * ranks_of_node
        return 4 * num_steps >= self.schedule.num_steps() * self.sampler.data_parallel_size

    def _gathered(self) -> Iterator[Batch]:
        # The trainer reads one, the gather writes one, ``prefetch`` are ready.
        ring = [
            self.dataset.allocate(self.sampler.micro_batch_tokens, pin_memory=self.pin_memory)
            for _ in range(self.prefetch + 2 if self.reuse_buffers else 0)
        ]
        indices, wrap = read_indices(self.dataset), wrapper(self.dataset.framework)
        upcoming: Iterable[MicroBatch] = self.sampler
        if self.dataset.remote_reads.any:
            reads = self.dataset.remote_reads
            upcoming = prefetch_remote(upcoming, reads, copy_ahead=self._reads_a_quarter())
        for i, item in enumerate(prefetch_local(upcoming, self.dataset, self.read_ahead)):
            layout, shared = self.layouts[item.capacity], item.sequence_parallel_size
            batch = self.dataset.micro_batch(
                **item.gathered_by,
                layout=layout,
                out=ring[i % len(ring)] if ring else None,
                pin_memory=self.pin_memory,
            )
            _, row_tokens = layout.rows(item.capacity)
            if shared > 1:
                batch = cut_slice(batch, self.sampler.data_parallel_rank % shared, shared)
            about = item.about()
            about |= {name: wrap(about[name]) for name in ("sample_ids", "source")}
            yield {**batch, **about, "row_tokens": row_tokens}
            next(indices, None)


class LoaderState:
    """State of a loader: a step, the order of samples, and digests of the bytes of the data."""

    def __init__(self, schedule: Schedule, dataset: PackedDataset) -> None:
        self._schedule, self._dataset = schedule, dataset

    @cached_property
    def _content(self) -> dict[str, Any]:
        return {"data.content": content_digests(self._dataset)}

    def save(self, step: int) -> dict[str, Any]:
        """Return the state before ``step``; JSON."""
        return {**self._schedule.state_dict(step), **self._content}

    def resume_step(self, state: Mapping[str, Any]) -> int:
        """Return the step to continue with; log changes to later steps. Raises ResumeError if
        earlier steps or the bytes of the data differ, or if the state is damaged."""
        with refuse_damage("the saved state of the data"):
            changes = self._schedule.check_state(state)
            saved = {key: state[key] for key in self._content}
            check_record(self._content, saved, option=None)
        for change in changes:
            log.warning("the run has changed: %s", change)
        return int(state["step"])

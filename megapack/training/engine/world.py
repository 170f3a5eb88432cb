"""Processes of a run: who they are, how they start, how they agree, how they stop.

The same script works under ``deepspeed``, ``torchrun``, ``srun`` (one task per device) and as one
plain process; they differ only in the environment variables they set.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megapack.errors import ConfigError, MegapackError, ResumeError
from megapack.storage.files import files_below

T = TypeVar("T")


class RankProgress:
    """How far this process is: places that all ranks reach alike, counted and in words; and signs
    that it gets on between two of them, where every rank has work of its own."""

    def __init__(self) -> None:
        self.count, self.signs, self.place = 0, 0, "the start"

    def at(self, place: str) -> None:
        """The next place that all ranks reach."""
        self.count, self.place = self.count + 1, place

    def inside(self, place: str) -> None:
        """On the way there, at work on something that other ranks have less or more of."""
        self.signs, self.place = self.signs + 1, place

    def wait(self, work: Future[Any], thread: RankProgress) -> None:
        """Until a thread's work is done. Raises what it raised.

        Args:
            thread: what the thread reports; its signs become those of this rank.
        """
        seen = thread.signs
        while not wait([work], timeout=1.0).done:
            if thread.signs > seen:
                seen = thread.signs
                self.inside(thread.place)
        work.result()

    @contextmanager
    def while_written(self, folder: Path, place: str) -> Iterator[None]:
        """Between two places: what others write into a folder meanwhile is a sign."""
        done = threading.Event()

        def look() -> None:
            before = 0
            while not done.wait(1.0):
                if (now := sum(file.num_bytes for file in files_below(folder))) != before:
                    before = now
                    self.inside(place)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host: str
    group: Any = None
    """Process group for CPU messages between ranks (gloo), on which waiting is free; None: the
    default group."""
    sequence_group: Any = None
    """Process group of the ranks that share long samples with this one; None: no sharing."""
    progress: RankProgress = field(default_factory=RankProgress)
    """Progress of this rank, which the heartbeat reports to the others."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files that only one may write."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def fail_together(
        self, problem: str | None, what: str, error: type[Exception] = ResumeError
    ) -> None:
        """Raise ``error`` on all ranks when any of them has a problem; collective."""
        found = sorted({text for text in self.gather(problem) if text})
        if found:
            raise error(f"{what}: {'; '.join(found)}")

    def on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the first rank while the others wait; what it gives, on all ranks.

        Raises:
            MegapackError, OSError: of ``action``, of its class and on all ranks.
        """
        value: Any = None
        problem: Exception | None = None
        if self.is_first:
            try:
                value = action()
            except (OSError, MegapackError) as error:
                problem = error
        found, raised = self.gather((value, problem))[0]
        if raised is not None:
            raise raised
        result: T = found
        return result


@contextmanager
def world(*, timeout_minutes: float, sequence_parallel_size: int = 1) -> Iterator[World]:
    """Join the other processes, after ``megapack.training.command.join``; leave them in order.

    Args:
        timeout_minutes: of collectives.
        sequence_parallel_size: of groups that share samples; divides the number of ranks.

    Every rank waits for the others at the end, so that none is killed by its launcher while it
    still writes. After an exception nobody waits: the others may be gone.
    """
    import deepspeed  # noqa: PLC0415
    import deepspeed.ops  # noqa: PLC0415

    # This operator serves inference only, and building it takes a compiler and a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        # Slurm may show every task one device only; DeepSpeed reads the variable again.
        local_rank %= torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(local_rank)
        torch.cuda.set_device(local_rank)
    try:
        deepspeed.init_distributed(
            "nccl" if use_cuda else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(minutes=timeout_minutes),
        )
    except RuntimeError as error:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            raise
        raise ConfigError(
            f"torchrun has restarted this job, and its ranks do not find each other ({error}): its "
            "store still has the addresses of those before. Start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend c10d"
        ) from error
    sequence_group = None  # of so many consecutive ranks
    if sequence_parallel_size > 1:
        divide: Any = dist.new_subgroups  # which has no types
        sequence_group, _ = divide(sequence_parallel_size)
    yield World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        device=torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"),
        host=socket.gethostname(),
        # Without a limit of its own: the heartbeat ends a run in which somebody is lost.
        group=dist.new_group(backend="gloo", timeout=timedelta(days=7)),
        sequence_group=sequence_group,
    )
    dist.barrier()
    dist.destroy_process_group()

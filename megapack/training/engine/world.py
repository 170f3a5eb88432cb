"""Processes of a run: connect them, let them agree and fail together, and track their progress.

The same script runs under ``deepspeed``, ``torchrun``, ``srun`` (one task per device) and as one
plain process; these differ only in the environment variables that they set.
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
    """Progress of this process, in two counters. ``count`` advances at places that all ranks reach
    equally often; ``signs`` advances in between, where the amount of work differs by rank.
    ``place`` describes the last place in words."""

    def __init__(self) -> None:
        self.count, self.signs, self.place = 0, 0, "the start"

    def at(self, place: str) -> None:
        """Record that this rank has reached the next place that all ranks reach."""
        self.count, self.place = self.count + 1, place

    def inside(self, place: str) -> None:
        """Record progress on work whose amount differs by rank."""
        self.signs, self.place = self.signs + 1, place

    def wait(self, work: Future[Any], thread: RankProgress) -> None:
        """Wait for the work of a thread, whose signs count for this rank. Raises the errors of the
        work."""
        seen = thread.signs
        while not wait([work], timeout=1.0).done:
            if thread.signs > seen:
                seen = thread.signs
                self.inside(thread.place)
        work.result()

    @contextmanager
    def while_written(self, folder: Path, place: str) -> Iterator[None]:
        """Count writes of another process into ``folder`` as progress, until the block ends."""
        done = threading.Event()

        def watch() -> None:
            last_size = 0
            while not done.wait(1.0):
                if (size := sum(file.num_bytes for file in files_below(folder))) != last_size:
                    last_size = size
                    self.inside(place)

        thread = threading.Thread(target=watch, daemon=True)
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
    """Process group for messages on the CPU (gloo); None: the default group."""
    sequence_group: Any = None
    """Process group of the ranks that share long samples with this one; None: no sharing."""
    progress: RankProgress = field(default_factory=RankProgress)  # the heartbeat reports it

    @property
    def is_first(self) -> bool:
        """True for the rank that writes the files that only one rank may write."""
        return self.rank == 0

    def is_first_of_host(self) -> bool:
        """Return True for one rank of every host; collective."""
        return self.rank == self.gather(self.host).index(self.host)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def fail_together(
        self, problem: str | None, what: str, error: type[Exception] = ResumeError
    ) -> None:
        """Raise ``error`` on all ranks if any of them has a problem; collective."""
        problems = sorted({text for text in self.gather(problem) if text})
        if problems:
            raise error(f"{what}: {'; '.join(problems)}")

    def on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the first rank; return its result, or raise its MegapackError or
        OSError, on all ranks. Collective."""
        value: Any = None
        problem: Exception | None = None
        if self.is_first:
            try:
                value = action()
            except (OSError, MegapackError) as error:
                problem = error
        result, raised = self.gather((value, problem))[0]
        if raised is not None:
            raise raised
        returned: T = result
        return returned


@contextmanager
def connect_ranks(*, timeout_minutes: float, sequence_parallel_size: int = 1) -> Iterator[World]:
    """Connect this process to the other ranks, after ``command.set_rank_environment``.

    At the end every rank waits for the others, so that no launcher kills a rank that still writes;
    after an exception no rank waits, because the others may be gone. ``timeout_minutes`` is that of
    collectives; ``sequence_parallel_size`` consecutive ranks share samples.
    """
    import deepspeed  # noqa: PLC0415
    import deepspeed.ops  # noqa: PLC0415

    # This operator is for inference only; building it needs a compiler and takes a minute.
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
            f"torchrun has restarted this job, and its ranks cannot connect ({error}): its "
            "store still has the addresses of the former ranks. Start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend c10d"
        ) from error
    sequence_group = None
    if sequence_parallel_size > 1:
        divide: Any = dist.new_subgroups  # untyped
        sequence_group, _ = divide(sequence_parallel_size)
    yield World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        device=torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"),
        host=socket.gethostname(),
        # A long timeout, because the heartbeat ends a run that lost a rank.
        group=dist.new_group(backend="gloo", timeout=timedelta(days=7)),
        sequence_group=sequence_group,
    )
    dist.barrier()
    dist.destroy_process_group()

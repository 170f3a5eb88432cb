"""Signals that stop all ranks after the same step; traces of a few steps.

Launchers may signal only some ranks, but the others would wait for a rank that stops alone.
``StopSignals`` records a signal; ``Agreement`` shares it with all ranks, by an all-reduce of a few
bytes on the CPU that starts at one step and is read at the next, so that no step waits for it.
``StepProfiler`` runs torch's profiler over steps chosen at the start or by a signal.
"""

from __future__ import annotations

import logging
import os
import signal
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megapack.training.engine.world import World

logger = logging.getLogger("megapack")

PREEMPTED = 75
"""Exit code of a run that saved after a signal (EX_TEMPFAIL: start it again)."""


class StopSignals:
    """Records SIGTERM, SIGINT or SIGUSR1 (Slurm's warning) without interrupting the step. A second
    SIGINT raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> StopSignals:
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._remember) for number in handled}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        again = "; a second one exits without saving" if number == signal.SIGINT else ""
        os.write(2, f"megapack: {self.received}: saving after this step{again}\n".encode())


class Agreement:
    """Logical "or" of flags over all ranks. Every rank calls ``any`` once per step."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pending: tuple[Any, torch.Tensor] | None = None

    def any(self, *flags: bool) -> list[bool] | None:
        """Send this rank's flags; return those of the previous call, set if any rank set them. All
        ranks get the same answer; the first call returns None."""
        answers = None
        if self._pending is not None:
            work, message = self._pending
            work.wait()
            answers = message.bool().tolist()
        message = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, message)
        return answers


ON_SIGNAL = 5  # steps traced after SIGUSR2


class StepProfiler:
    """Traces of steps: ``<directory>/step_00000100_rank_00000.json.gz``. One rank per node traces
    ``steps``; a rank that gets SIGUSR2 traces its next five steps. No method is collective.
    Chrome's about:tracing and Perfetto show the files."""

    def __init__(self, directory: Path, world: World, steps: range | None) -> None:
        self.directory, self.world = directory, world
        self._steps = steps if steps is not None and world.local_rank == 0 else None
        self._asked = False
        self._open: Any = None
        signal.signal(signal.SIGUSR2, self._ask)

    def _ask(self, number: int, frame: types.FrameType | None) -> None:
        del number, frame
        self._asked = True

    def begin(self, step: int) -> None:
        if self._asked and self._open is None:
            self._asked, self._steps = False, range(step, step + ON_SIGNAL)
        if self._open is not None or self._steps is None or step not in self._steps:
            return
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._open = profile(activities=activities, record_shapes=True)
        self._open.start()

    def end(self, step: int) -> None:
        if self._open is not None and self._steps is not None and step >= self._steps[-1]:
            self.close()

    def close(self) -> None:
        if self._open is None or self._steps is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self._open.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"step_{self._steps[0]:08d}_rank_{self.world.rank:05d}.json.gz"
        self._open.export_chrome_trace(str(self.directory / name))
        logger.info("profile: %s", self.directory / name)
        self._open = self._steps = None

"""Signals: heard by one rank and obeyed by all after the same step; and traces of a few steps.

Slurm and launchers signal ranks one by one, and a rank that stopped alone would leave the others
waiting. ``StopSignals`` remembers that one came, and ``Agreement`` tells all ranks: a few bytes are
reduced over them at every step, on the CPU, started at a step and read at the next one, so that no
device and no rank waits for them. ``StepProfiler`` is torch's profiler over steps that were asked
for at the start, or by a signal later.
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
"""Exit code of a run that saved its state because of a signal (EX_TEMPFAIL: start it again)."""


class StopSignals:
    """Remembers that SIGTERM, SIGINT or SIGUSR1 (Slurm's warning) arrived; the step goes on.

    A second SIGINT raises KeyboardInterrupt as usual.
    """

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
        again = "; once more leaves without saving" if number == signal.SIGINT else ""
        os.write(2, f"megapack: {self.received}: saving after this step{again}\n".encode())


class Agreement:
    """Whether any rank says so. All ranks ask the same questions once per step."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pending: tuple[Any, torch.Tensor] | None = None

    def any(self, *says: bool) -> list[bool] | None:
        """Send what this rank says.

        Returns:
            Whether any rank said so in the previous call: the same answers on every rank. None in
            the first call.
        """
        answers = None
        if self._pending is not None:
            work, message = self._pending
            work.wait()
            answers = message.bool().tolist()
        message = torch.tensor(says, dtype=torch.uint8)
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, message)
        return answers


ON_SIGNAL = 5  # steps


class StepProfiler:
    """Traces of steps: ``<directory>/step_00000100_rank_00000.json.gz``.

    One rank per node writes the steps that were asked for at the start; a rank that gets SIGUSR2
    its next five. Nothing is collective. Chrome's about:tracing and Perfetto show the files.

    Args:
        directory: made when it is needed.
        steps: to profile; None: only on a signal.
    """

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
        """Before a step is taken."""
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
        """After it was; writes when it was the last."""
        if self._open is not None and self._steps is not None and step >= self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what there is."""
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

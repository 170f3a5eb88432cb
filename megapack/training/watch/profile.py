"""torch's profiler over a few steps, asked for at the start, or by a signal later."""

from __future__ import annotations

import logging
import signal
import types
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megapack.training.run.world import World

__all__ = ["StepProfiler"]

logger = logging.getLogger("megapack")

ON_SIGNAL = 5  # steps


class StepProfiler:
    """Traces of steps: ``<directory>/step_00000100_rank_00000.json.gz``.

    One rank per node writes the steps that were asked for at the start; a rank that gets SIGUSR2
    its next five. Nothing is collective. Chrome's about:tracing and Perfetto show the files.

    Args:
        directory: made when it is needed.
        world: this process.
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

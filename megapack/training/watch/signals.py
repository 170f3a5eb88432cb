"""Signals, heard by one rank and obeyed by all after the same step.

Slurm and launchers signal ranks one by one, and a rank that stopped alone would leave the others
waiting. A few bytes are reduced over all ranks at every step, on the CPU, started at a step and
read at the next one, so that no device and no rank waits for them.
"""

from __future__ import annotations

import os
import signal
import types
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PREEMPTED", "Agreement", "StopSignals"]

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
    """Whether any rank says so. All ranks ask the same questions once per step.

    Args:
        group: of CPU messages (``World.group``).
    """

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

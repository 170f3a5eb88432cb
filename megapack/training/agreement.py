"""What all ranks must know of each other at every step, in one small message.

One all-reduce of three integers on the CPU, started at a step and read at the next one, so that no
device and no rank waits for it. It carries: a signal arrived somewhere (everybody stops after the
same step), and a digest of what the step contains (everybody trains on the same bucket).
"""

from __future__ import annotations

import signal
import types
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megapack.errors import RankMismatchError

__all__ = ["PREEMPTED", "Agreement", "StopSignals", "step_digest"]

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


def step_digest(step: int, bucket: int, sample_ids: NDArray[np.int64]) -> int:
    """31 bits that differ when two ranks mean different samples by the same step."""
    ids = np.ascontiguousarray(sample_ids, dtype=np.int64)
    return zlib.crc32(ids.tobytes(), zlib.crc32(f"{step} {bucket}".encode())) >> 1


class Agreement:
    """The message of every step. All ranks call ``exchange`` once per step, in step."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[int, Any, torch.Tensor] | None = None

    def exchange(self, step: int, digest: int, *, stop: bool) -> bool:
        """Send this step's message and read the one before.

        Returns:
            Whether any rank asked to stop by the previous step: the same answer on every rank.

        Raises:
            RankMismatchError: ranks did not mean the same samples by the previous step.
        """
        answer = self.collect()
        # The maximum of -digest is the minimum of digest, negated.
        message = torch.tensor([int(stop), digest, -digest], dtype=torch.int64)
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (step, work, message)
        return answer

    def collect(self) -> bool:
        """Read the pending message, if there is one; see ``exchange``."""
        if self._pending is None:
            return False
        step, work, message = self._pending
        self._pending = None
        work.wait()
        stop, highest, negated_lowest = message.tolist()
        if highest != -negated_lowest:
            raise RankMismatchError(
                f"ranks disagree about the samples of step {step}: they run with different data, "
                "seed or configuration; check that all nodes see the same files"
            )
        return bool(stop)

"""How long a device was at work between two points, without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """``with watch:`` around calls; their time is known later.

    Args:
        device: of the work; on CUDA, events in its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *exception: object) -> None:
        self._spans.append((self._begin, self._now()))

    def seconds(self) -> float:
        """Of all calls together; waits for the last one."""
        if not self._cuda:
            return float(sum(end - begin for begin, end in self._spans))
        for _, end in self._spans[-1:]:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._spans)) / 1000

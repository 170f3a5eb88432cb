"""One function per strategy: checked parameters in, the arrays of the C++ core out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core

__all__ = ["Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a runner works on; ``lengths`` is int32 or int64, ``buckets`` ascends."""

    lengths: NDArray[np.int32] | NDArray[np.int64]
    buckets: list[int]
    parameters: dict[str, Any]
    seed: int
    threads: int
    progress: Callable[[int, int], None] | None
    wide_ids: bool

    @property
    def common(self) -> dict[str, Any]:
        return {
            "buckets": self.buckets,
            "seed": self.seed,
            "threads": self.threads,
            "wide_ids": self.wide_ids,
            "progress": self.progress,
        }


def run_concat(request: Request) -> dict[str, Any]:
    return _core.pack_streams(
        request.lengths,
        shuffle=request.parameters["shuffle"],
        drop_last=request.parameters["last"] == "drop",
        **request.common,
    )


def run_bucket_naive(request: Request) -> dict[str, Any]:
    return _core.pack_streams(
        request.lengths, shuffle=request.parameters["shuffle"], drop_last=False, **request.common
    )


def run_bucket(request: Request) -> dict[str, Any]:
    return _core.pack_buckets(
        request.lengths,
        pool_size=request.parameters["pool_size"],
        promote=request.parameters["promote"] == "on",
        **request.common,
    )

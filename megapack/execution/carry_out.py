"""Shards built by whom one chose: this process, several of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from megapack.execution.processes import run_processes
from megapack.execution.ray_cluster import run_ray
from megapack.execution.work import Report, Worker

__all__ = ["carry_out"]

R = TypeVar("R")


def carry_out(
    worker: Worker[R],
    indices: Sequence[int],
    report: Report,
    *,
    executor: Literal["local", "ray"] = "local",
    num_processes: int = 1,
    ray_address: str | None = None,
    remedy: str = "fewer --workers",
) -> list[R]:
    """Records of the shards, in the order of ``indices``.

    Args:
        executor: processes of this machine, or one task per shard of a Ray cluster.
        num_processes: of this machine; 1: this one.
        ray_address, remedy: see ``run_ray`` and ``run_processes``.

    Raises:
        MegapackError: a worker was killed, or ray is not installed.
        Exception: what a worker raised.
    """
    if executor == "ray":
        return run_ray(worker, indices, report, address=ray_address)
    if num_processes == 1:
        return [worker.build(index, report) for index in indices]
    return run_processes(worker, indices, report, num_processes=num_processes, remedy=remedy)

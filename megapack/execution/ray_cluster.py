"""Shards on a Ray cluster: one task each, tried again where a node dies.

Every node must see the inputs and the output directory under the same paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from megapack.execution.work import Counted, Report, Worker
from megapack.optional import require

__all__ = ["run_ray"]

R = TypeVar("R")

_RETRIES = 10  # of a task whose process or node died; an error in the data is not tried again


def run_ray(
    worker: Worker[R], indices: Sequence[int], report: Report, *, address: str | None
) -> list[R]:
    """Build shards on the cluster at ``address``, records in the order of ``indices``.

    Args:
        address: as ``ray.init`` takes it; None is Ray's own rule (RAY_ADDRESS, or a cluster of this
            machine alone). A connection that exists already is used.

    Raises:
        DataError, OSError: what a task raised; the tasks that have not begun are cancelled.
        MegapackError: ray is not installed.
    """
    ray = require("ray", "--executor ray")
    own_connection = not ray.is_initialized()
    if own_connection:
        ray.init(address=address, log_to_driver=False)
    try:
        return _run(ray, worker, indices, report)
    finally:
        if own_connection:
            ray.shutdown()


def _run(ray: Any, worker: Worker[R], indices: Sequence[int], report: Report) -> list[R]:
    task = ray.remote(num_cpus=worker.threads, max_retries=_RETRIES)(_build)
    everywhere = ray.put(worker)
    running = [task.remote(everywhere, index) for index in indices]
    pending = list(running)
    try:
        while pending:
            done, pending = ray.wait(pending)
            for _, counted in ray.get(done):
                report(counted)
        return [record for record, _ in ray.get(running)]
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else error) from None
    finally:
        for reference in pending:
            ray.cancel(reference)


# Of a process, which Ray uses for many tasks.
_worker: Worker[Any] | None = None


def _build(worker: Worker[R], index: int) -> tuple[R, Counted]:
    """The record, and what was done."""
    global _worker  # noqa: PLW0603 (a task has no other place that outlives it)
    if _worker is None or _worker != worker:
        _worker = worker
    done = [Counted()]
    record = _worker.build(index, lambda more: done.append(done.pop().plus(more)))
    return record, done[0]

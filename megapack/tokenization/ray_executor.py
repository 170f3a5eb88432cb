"""Shards on a Ray cluster: one task each, tried again where a node dies.

Every node must see the inputs and the output directory under the same paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megapack.tokenization.coding import Coder
from megapack.tokenization.executors import Report
from megapack.tokenization.job import Job, open_coder
from megapack.tokenization.optional import require
from megapack.tokenization.plan import Shard
from megapack.tokenization.record import ShardRecord
from megapack.tokenization.shard import Counted, build_shard

__all__ = ["run_ray"]

_RETRIES = 10  # of a task whose process or node died; an error in the data is not tried again


def run_ray(
    job: Job, shards: Sequence[Shard], report: Report, *, address: str | None
) -> list[ShardRecord]:
    """Build ``shards`` on the cluster at ``address``, records in the order of the shards.

    Args:
        address: as ``ray.init`` takes it; None is Ray's own rule (RAY_ADDRESS, or a cluster of this
            machine alone). A connection that exists already is used.

    Raises:
        DataError, OSError: what a task raised; the tasks that have not begun are cancelled.
        MegapackError: ray is not installed.
    """
    ray = require("ray", "ray", "--executor ray")
    own_connection = not ray.is_initialized()
    if own_connection:
        ray.init(address=address, log_to_driver=False)
    try:
        return _run(ray, job, shards, report)
    finally:
        if own_connection:
            ray.shutdown()


def _run(ray: Any, job: Job, shards: Sequence[Shard], report: Report) -> list[ShardRecord]:
    task = ray.remote(num_cpus=job.limits.threads, max_retries=_RETRIES)(_build)
    everywhere = ray.put(job)
    running = [task.remote(everywhere, shard) for shard in shards]
    pending = list(running)
    try:
        while pending:
            done, pending = ray.wait(pending)
            for record in ray.get(done):
                report(Counted(record.num_documents, record.num_text_bytes, record.num_tokens))
        records: list[ShardRecord] = ray.get(running)
        return records
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else error) from None
    finally:
        for reference in pending:
            ray.cancel(reference)


# The coder of a worker process, which Ray uses for many tasks.
_loaded: tuple[Job, Coder] | None = None


def _build(job: Job, shard: Shard) -> ShardRecord:
    global _loaded  # noqa: PLW0603 (a task has no other place that outlives it)
    if _loaded is None or _loaded[0] != job:
        _loaded = (job, open_coder(job))
    return build_shard(job, shard, _loaded[1], lambda _: None)

"""Real processes under gloo: ``run_ranks(function, world_size, port, *args)``.

Ranks are forks of the process that has imported torch and the hosts (``tests/training/zygote.py``),
so a group of four starts in a fraction of a second; as a script this file is one of them. Functions
that run in ranks must be importable by name.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(function: Callable[..., Any], world_size: int, port: int, *args: Any) -> list[Any]:
    """``[function(rank, world_size, *args) for rank in range(world_size)]``, in parallel.

    Every rank has joined a gloo group of ``world_size`` first. A rank that raises fails the call
    with its traceback.
    """
    return _run(function, world_size, port, args, joined=True)


def run_forked(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` in a new process without a process group."""
    return _run(function, 1, None, args, joined=False)[0]


def _run(
    function: Callable[..., Any], world_size: int, port: int | None, args: Any, joined: bool
) -> list[Any]:
    from training.processes import shared_zygote  # noqa: PLC0415  # nothing that a rank needs

    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        # Plain pickle: the default for tensors shares memory with a process that may have ended.
        job.write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, args, joined)))
        ranks = shared_zygote().start([__file__, str(job)], world_size, job, port=port)
        ranks.wait()
        answers = [job.with_suffix(f".answer{rank}") for rank in range(world_size)]
        results = [
            pickle.loads(path.read_bytes()) if path.exists() else ("died without an answer", None)
            for path in answers
        ]
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(results) if text]
        assert not problems, "\n".join([*problems, ranks.output()[-4000:]])
    return [result for _, result in results]


def _main(job: Path) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with job.open("rb") as file:
            sys.path[:] = pickle.load(file)
            function, args, joined = pickle.load(file)
        if joined:
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            args = (rank, world_size, *args)
        answer = (None, function(*args))
        if joined:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answer = (traceback.format_exc(), None)
    job.with_suffix(f".answer{rank}").write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))

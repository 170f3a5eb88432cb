"""Real processes under gloo: ``run_ranks(function, world_size, port, *args)``.

A fork server imports torch and the hosts once; every rank is a fork of it, so a group of four
starts in a fraction of a second. Functions that run in ranks must be importable by name.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from patience import PATIENCE

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("torch", "megatron.core.parallel_state", "megatron.core.datasets.gpt_dataset"),
        *("deepspeed", "transformers.trainer", "transformers.models.llama.modeling_llama"),
    ]
)


def run_ranks(
    function: Callable[..., Any], world_size: int, port: int, *args: Any, timeout: float = PATIENCE
) -> list[Any]:
    """``[function(rank, world_size, *args) for rank in range(world_size)]``, in parallel.

    Every rank has joined a gloo group of ``world_size`` first. A rank that raises fails the call
    with its traceback.
    """
    # Plain pickle: the default for tensors shares memory with a process that may have ended.
    payload = pickle.dumps(args)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_rank_main, args=(function, rank, world_size, port, sender, payload)
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results, problems = [], []
    for rank, receiver in enumerate(pipes):
        try:
            problem, result = ("no answer in time", None)
            if receiver.poll(timeout):
                problem, result = pickle.loads(receiver.recv_bytes())
        except EOFError:
            problem, result = "died without an answer", None
        if problem:
            problems.append(f"rank {rank}: {problem}")
        results.append(result)
    for process in processes:
        process.join(timeout=5 if problems else timeout)
        if process.is_alive():
            process.kill()
    assert not problems, "\n".join(problems)
    return results


def run_forked(function: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> Any:
    """``function(*args)`` in a process of its own, without a process group."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_forked_main, args=(function, sender, pickle.dumps(args)))
    process.start()
    sender.close()
    assert receiver.poll(timeout), "no answer in time"
    problem, result = pickle.loads(receiver.recv_bytes())
    process.join(timeout)
    assert problem is None, problem
    return result


def _forked_main(function: Callable[..., Any], sender: Any, payload: bytes) -> None:
    try:
        answer = (None, function(*pickle.loads(payload)))
    except BaseException:
        answer = (traceback.format_exc(), None)
    sender.send_bytes(pickle.dumps(answer))


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    sender: Any,
    payload: bytes,
) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
        answer = (None, function(rank, world_size, *pickle.loads(payload)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (traceback.format_exc(), None)
    sender.send_bytes(pickle.dumps(answer))
    sender.close()

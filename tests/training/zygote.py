"""Starts many real processes that share their imports.

This process imports torch, DeepSpeed and transformers once and forks a child for every request
(JSON, one per line). Children are ordinary processes with their own environment, which can be
killed; they run a script as ``__main__``.

With the path of a socket, it serves all test processes of a session: each connects to a fork of its
own, until the test process that started it ends.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

# All imports of the scripts, before the first fork and before any thread exists.
import deepspeed
import deepspeed.module_inject.auto_ep_config
import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer  # every engine needs it; imports inductor
import hypothesis  # noqa: F401
import megatron.core.datasets.gpt_dataset  # noqa: F401
import pytest  # noqa: F401
import sabotage
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.trainer  # noqa: F401
from forked import fork_modules, leave_after
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

import megapack.training.dry_run
import megapack.training.engine.export
import megapack.training.model.modeling_gpt2_alibi
import megapack.training.start  # noqa: F401
from megapack.training.monitoring.heartbeat import Heartbeat


def run_child(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    if "TORCH_STANCE" in os.environ:  # as in force_eager: compile nothing
        torch.compiler.set_stance(os.environ["TORCH_STANCE"])
    sys.argv = request["argv"]
    for fault, arguments in request.get("faults", {}).items():
        getattr(sabotage, fault)(*arguments)
    leave_after(lambda: runpy.run_path(request["argv"][0], run_name="__main__"))


def answer(requests: Iterable[str], answers: TextIO) -> None:
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run_child(request)
        print(pid, file=answers, flush=True)


def share(address: Path) -> None:
    """Fork a process for every connection; it sends its process id, then answers requests."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        if os.fork():  # a timeout of the test process that started it must not end others' ranks
            return
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                with connection.makefile("r") as requests, connection.makefile("w") as answers:
                    print(os.getpid(), file=answers, flush=True)
                    answer(requests, answers)
                return
            connection.close()
    shutil.rmtree(address.parent, ignore_errors=True)


def main() -> None:
    torch.set_num_threads(1)
    # For inference only; every group of ranks would compile it for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if sys.argv[1:2] == ["hurry"]:  # not in benchmarks, which measure defaults
        fork_modules()
        assert Heartbeat.__init__.__kwdefaults__ is not None
        Heartbeat.__init__.__kwdefaults__["interval"] = 0.5  # detect lost ranks sooner
    gc.collect()
    gc.freeze()  # or children would scan the imported objects and copy their pages
    if sys.argv[2:]:
        share(Path(sys.argv[2]))
    else:
        print("ready", flush=True)
        answer(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
    os._exit(0)  # tearing down the imports takes a second

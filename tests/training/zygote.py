"""Starts many real processes without paying for their imports again and again.

This process imports torch, DeepSpeed and transformers once and forks a child for every request
(JSON, one per line). Children are ordinary processes: they can be killed, they have their own
environment, and they run a script as ``__main__``.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

# Everything the scripts need, imported before the first fork and before any thread exists.
import deepspeed  # noqa: F401
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

import megapack.training.dry_run
import megapack.training.run.export  # noqa: F401
from megapack.training.watch.batches import TimedBatches


def run_child(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    if "kill_before_step" in request:
        kill_before_step(request["kill_before_step"])
    code = 1
    try:
        runpy.run_path(request["argv"][0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def kill_before_step(victim: int) -> None:
    """kill -9 of this process, exactly when it is about to take a step."""
    original = TimedBatches.steps

    def steps(self: TimedBatches) -> Iterator[tuple[int, Any]]:
        for step, batches in original(self):
            if step == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            yield step, batches

    TimedBatches.steps = steps  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run_child(request)
        print(pid, flush=True)


if __name__ == "__main__":
    main()

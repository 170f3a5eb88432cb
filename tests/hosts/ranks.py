"""All ranks of a run, forked from one process that has imported the host already.

A host takes ten seconds to import and four iterations of a tiny model take three, so a process of
each checkout imports once. Ranks have the environment that torchrun would give them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Ranks:
    """The process of one checkout; ``run`` one after the other, then ``close``."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def run(self, patience: float, **job: Any) -> bool:
        """Return whether all ranks succeed. Jobs have ranks, port, folder, ``run_rank`` arguments.

        Raises:
            TimeoutError: they did not end; they are killed.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], patience)[0]:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise TimeoutError(f"ranks did not end within {patience} seconds")
        return self.process.stdout.readline() == "0\n"

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Jobs from standard input, one JSON object per line; the exit status of each as a line."""
    from cpu import on_cpu  # noqa: PLC0415 - in this process alone

    on_cpu()
    for name in ("megatron.core.models.gpt", "megatron.training", "launch"):
        importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):  # from 0.17 on, by the first tokenizer
        importlib.import_module("megatron.core.tokenizers.text.text_tokenizer")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(f"{int(_run(json.loads(line)))}\n")
        answers.flush()


def _run(job: dict[str, Any]) -> bool:
    """Return whether a rank failed; if one did, end the other ranks, which would wait for it."""
    running = {_fork(job, rank) for rank in range(job["ranks"])}
    failed = False
    while running:
        pid, status = os.wait()
        if pid in running and status and not failed:
            failed = True
            for other in running - {pid}:
                os.kill(other, signal.SIGKILL)
        running.discard(pid)
    return failed


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(Path(job["folder"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["folder"])
        world = {"WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
        here = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job["port"]}
        os.environ |= {name: str(value) for name, value in {**world, **here, **port}.items()}
        given = [job[name] for name in ("folder", "script", "arguments", "helpers")]
        more = {name: job[name] for name in ("options", "fault") if name in job}
        importlib.import_module("launch").run_rank(*given, **more)
        status = 0
    except BaseException:  # the process ends here after any error
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()

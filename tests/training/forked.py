"""Replacement of ``python -m`` subprocesses with forks, which need no imports.

``fork_modules`` patches ranks and their subprocesses (the converter of checkpoints). As a script,
it runs a launcher whose ranks start at once:

    forked.py torch.distributed.run --standalone --nproc-per-node 2 -m megapack.training.pretrain
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn


def leave_after(run: Callable[[], Any]) -> NoReturn:
    """Run, then end this process as Python does after a script."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_module(words: list[str]) -> None:
    """Run ``python -m`` with these arguments."""
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def fork_modules() -> None:
    original = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, args: Any, *more: Any) -> None:
        words = list(args)
        if "-m" not in words[1:3] or words[0] != sys.executable:
            original(self, args, *more)
            return
        env, out, error = more[5], more[12], more[14]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*more[9:15])
            return
        os.setsid()
        for file, number in ((out, 1), (error, 2)):
            if file != -1:
                os.dup2(file, number)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        leave_after(lambda: run_module(words[words.index("-m") + 1 :]))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_module(sys.argv[1:])

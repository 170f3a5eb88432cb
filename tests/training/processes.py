"""Real processes of a run: start, signal and kill ranks, and read their results."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from patience import PATIENCE
from ports import free_port

from megapack.training.engine.directory import read_jsonl

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "launch" / "pretrain.py"
FORKED = str(Path(__file__).with_name("forked.py"))
ZYGOTE = Path(__file__).with_name("zygote.py")


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a worker: one thread, the CPU, this checkout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # several ranks cannot share one device
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    env["TOKENIZERS_PARALLELISM"] = "false"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return {**env, **more}


# A line of DeepSpeed's logger, of our own log, or a note: no error.
_LOGGED = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[\w+\] |\[\d\d:\d\d:\d\d\] |note: ")


def not_logged(lines: Iterable[str]) -> list[str]:
    """Return the lines of a program's output that its loggers did not write."""
    return [line for line in lines if not _LOGGED.match(line)]


# Forks of a shared zygote. Another process started them, but their ranks belong to this one.
SERVERS: set[int] = set()


class Zygote:
    """Process that forks ranks (``zygote.py``).

    ``hurry``: also fork their ``python -m`` subprocesses, and shorten the heartbeat.
    """

    _requests: IO[str]
    _answers: IO[str]

    def __init__(self, *, hurry: bool = False) -> None:
        self._options = ["hurry"] if hurry else []
        self._start()

    def _start(self) -> None:
        self._process = self._spawn()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def _spawn(self, *address: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(ZYGOTE), *self._options, *address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            assert process.poll() is None, "the zygote died while importing"
        return process

    def ask(self, request: dict[str, Any]) -> int:
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            return int(self._answers.readline())
        except BaseException:  # after a timeout: the next request would read this answer
            self._kill()
            self._start()
            raise

    def _kill(self) -> None:
        self._process.kill()

    def start(
        self,
        argv: list[str],
        world_size: int,
        log: Path,
        of_rank: dict[int, dict[str, Any]] | None = None,
        port: int | None = None,
        env: dict[str, str] | None = None,
    ) -> Ranks:
        """Start all ranks of a run; their output goes to ``log.<rank>``.

        ``of_rank`` changes the request of single ranks (``argv``, ``faults`` of sabotage.py);
        ``port`` is the rendezvous port (default: a free one); ``env`` adds variables.
        """
        port = port or free_port()
        ranks = Ranks(self, [log.with_suffix(f".{rank}") for rank in range(world_size)])
        for rank in range(world_size):
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            request = {"argv": argv, "env": {**world, **place, **(env or {})}}
            request |= {"log": str(ranks.logs[rank]), **(of_rank or {}).get(rank, {})}
            ranks.pids.append(self.ask(request))
        return ranks

    def close(self) -> None:
        self._requests.close()
        self._process.wait(timeout=PATIENCE)


class SharedZygote(Zygote):
    """A fork of the zygote of all test processes of a session, which the first of them starts."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._started: list[subprocess.Popen[str]] = []  # it ends when their stdin is closed
        super().__init__(hurry=True)

    def _start(self) -> None:
        with ZYGOTE.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one test process starts it, the others wait
            connection = self._connect()
        with connection:
            self._requests, self._answers = connection.makefile("w"), connection.makefile("r")
        self._pid = int(self._answers.readline())
        SERVERS.add(self._pid)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._address))
        except OSError:  # it was not started, or the test process that started it has ended
            shutil.rmtree(self._address.parent, ignore_errors=True)
            self._address.parent.mkdir(mode=0o700)
            self._started.append(self._spawn(str(self._address)))
            connection.connect(str(self._address))
        return connection

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        SERVERS.discard(self._pid)

    def close(self) -> None:
        self._requests.close()
        self._answers.close()
        for process in self._started:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=PATIENCE)


@cache
def shared_zygote() -> Zygote:
    """Return the zygote of this test process, which shares its imports with those of the other test
    processes of pytest-xdist; it is closed at exit."""
    if session := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        key = hashlib.sha256(f"{ROOT} {session}".encode()).hexdigest()[:20]
        zygote: Zygote = SharedZygote(Path(tempfile.gettempdir(), f"zygote-{key}", "socket"))
    else:
        zygote = Zygote(hurry=True)
    atexit.register(zygote.close)
    return zygote


@dataclass
class Ranks:
    """Started ranks."""

    zygote: Zygote
    logs: list[Path]
    pids: list[int] = field(default_factory=list)

    def wait(self) -> list[int]:
        """Return the exit codes; negative: killed by that signal."""
        return [self.zygote.ask({"wait": pid}) for pid in self.pids]

    def succeed(self, *texts: str) -> str:
        """Wait, require success and these texts in the output, return the output."""
        return self.end_with(0, *texts)

    def end_with(self, code: int, *texts: str) -> str:
        """Wait, require this exit code of all ranks and these texts, return the output."""
        codes, output = self.wait(), self.output()
        assert codes == [code] * len(codes), f"exit codes {codes}\n{output[-4000:]}"
        for text in texts:
            assert text in output, f"missing: {text}\n{output[-4000:]}"
        return output

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        for rank in ranks if ranks is not None else range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())


def start_run(
    zygote: Zygote, config: Path, name: str, *overrides: str, ranks: int = 2, **more: Any
) -> Ranks:
    """Start ranks of launch/pretrain.py; ``more``: see ``Zygote.start``."""
    argv = [str(PRETRAIN), "--config", str(config)]
    for override in overrides:
        argv += ["--set", override]
    return zygote.start(argv, ranks, config.with_name(f"{config.stem}-{name}.log"), **more)


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run_dir / "log.jsonl"))


def wait_for_step(run_dir: Path, step: int, ranks: int = 1) -> None:
    """Wait until this many ranks have the batches of a step."""
    logs = [run_dir / "batches" / f"rank_{rank:05d}.jsonl" for rank in range(ranks)]
    wait_for(lambda: all(p.exists() and f'"step": {step}' in p.read_text() for p in logs), "steps")


def wait_for(
    condition: Callable[[], bool], what: str, seconds: float = PATIENCE, pause: float = 0.02
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(pause)

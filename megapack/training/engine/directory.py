"""The directory of a run: everything needed to say later what was run, on what, with what.

``config.yaml`` the resolved configuration, ``starts.jsonl`` one line per start (versions, git,
hosts, fingerprints, command), ``log.jsonl`` one line per step, ``evaluation.jsonl``,
``checkpoints/``, ``tensorboard/``, ``model/`` and ``model_average/`` (what ``from_pretrained``
loads), ``end.json`` (why and where the run ended), and when asked for ``batches/``, what every rank
was fed, ``profile/``, traces of steps, and ``run_id``, the name of its curves on a server and the
owner of its mirror.
``flight/`` has the collectives of every rank after a timeout of NCCL.

Whoever reads a run, as ``megapack-build report`` does, needs no torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import megapack
from megapack.config import read_yaml, to_dict
from megapack.errors import FormatError
from megapack.records import parse_json
from megapack.storage.files import atomic_write
from megapack.storage.locks import WriterLock

if TYPE_CHECKING:
    from megapack.training.engine.world import World

RUN_ID = "run_id"
LOGS = ("log.jsonl", "evaluation.jsonl")
_PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "flash-attn", "triton")


class RunDirectory:
    """Paths of a run, and the files one process writes once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.model_average = self.path / "model_average"
        self.log, self.evaluation = (self.path / name for name in LOGS)
        self.batches = self.path / "batches"
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"
        self.flight = self.path / "flight"
        self.at: dict[str, int] = {}
        """``step`` and ``saved``: steps done and steps in a checkpoint, for ``end.json``."""
        self.config = self.path / "config.yaml"
        self.starts = self.path / "starts.jsonl"
        self.ended = self.path / "end.json"
        self._lock: WriterLock | None = None
        self._is_held = False

    @property
    def known_id(self) -> str | None:
        """The id of this run, None where nobody has asked for one yet."""
        path = self.path / RUN_ID
        return path.read_text(encoding="utf-8").strip() if path.exists() else None

    def own_id(self, given: str | None = None) -> str:
        """An id of this run that no other directory has; the same at every start. ``given``: that
        of the run that it goes on with, where it has none yet."""
        found = self.known_id or given or uuid.uuid4().hex
        if self.known_id is None:
            with atomic_write(self.path / RUN_ID, "w") as file:
                file.write(found)
        return found

    @contextmanager
    def held(self, world: World) -> Iterator[None]:
        """Nobody else trains into this directory meanwhile; collective.

        The lock is the first rank's and the kernel's: it ends with that process, however it ends.
        ``end.json`` says "running" until something better is known, also after a SIGKILL.

        Raises:
            LockedError: another run does; names its host and process.
        """
        world.on_first(self._hold)
        self._is_held = True
        try:
            yield
        finally:
            if self._lock is not None:
                self._lock.release()

    def _hold(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(self.path, what="training")
        self.end("running")

    def settings(self) -> dict[str, Any]:
        """What ``config.yaml`` says; empty where it cannot be read."""
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            tree = read_yaml(self.config.read_text(encoding="utf-8"))
            return tree if isinstance(tree, dict) else {}
        return {}

    def begin(self, config: Any, facts: dict[str, Any]) -> None:
        """Record a start: the configuration in full, and one line of facts."""
        with atomic_write(self.config, "w") as file:
            yaml.safe_dump(to_dict(config), file, sort_keys=False)
        append_jsonl(self.starts, {"time": time.time(), **environment(), **facts})

    def record_flight(self) -> None:
        """Have NCCL write the last collectives of every rank here when one of them times out;
        before the process group is made. What the environment says already stays."""
        self.flight.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, str(self.flight / "rank_"))

    def fail(self, message: str) -> None:
        """Record why this process gives up; the first one that says so is believed."""
        if not self._is_held:
            return  # the directory is another run's
        with contextlib.suppress(OSError, ValueError):  # "running" is all that can be said
            if json.loads(self.ended.read_text(encoding="utf-8"))["reason"] == "running":
                self.end("error", message=message)

    def end(self, reason: str, **facts: Any) -> None:
        """Record how the run ended: "done", "signal", "stop_at", "error"; or that it runs."""
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        with atomic_write(self.ended, "w") as file:
            json.dump({"time": time.time(), "reason": reason, **where, **self.at, **facts}, file)

    def take_logs(self, trunk: Path) -> None:
        """The lines that another run wrote, where this one branches from it and has none."""
        for path in (self.log, self.evaluation):
            if (trunk / path.name).exists() and not path.exists():
                with (trunk / path.name).open("rb") as theirs, atomic_write(path) as ours:
                    shutil.copyfileobj(theirs, ours)

    def forget_after(self, tokens: int) -> list[str]:
        """Drop the lines that a run which continues after these tokens writes again.

        Returns:
            Sentences about damaged lines, which are dropped from a log that is kept under another
            name, and about lines that are missing at the end. Nothing in a log decides a resume.
        """
        problems = []
        for path in (self.log, self.evaluation, *self.batches.glob("*.jsonl")):
            if not path.exists():
                continue
            damaged: list[int] = []
            seen = [(line["tokens_seen"], line) for line in read_jsonl(path, damaged)]
            if damaged:
                aside = path.with_name(f"{path.name}.damaged")
                shutil.copyfile(path, aside)
                numbers = ", ".join(map(str, damaged[:5]))
                problems.append(
                    f"{path}: line {numbers} is damaged ({len(damaged)} in all); the run continues "
                    f"without them, and a copy of the damaged log is {aside}"
                )
            last = max((count for count, _ in seen), default=0)
            if path == self.log and last < tokens:
                problems.append(
                    f"{path} ends after {last:,} tokens, and the checkpoint has seen {tokens:,}: "
                    "lines at its end are missing"
                )
            with atomic_write(path, "w") as file:
                file.writelines(json.dumps(line) + "\n" for count, line in seen if count <= tokens)
        return problems

    def check_writable(self) -> None:
        """Make the directory. Raises OSError: nothing can be written there."""
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            if folder.exists():
                with tempfile.TemporaryFile(dir=folder):
                    pass


def tags_in(directory: Path) -> list[str]:
    """Names of the checkpoints by tokens seen, damaged ones included.

    Not by steps: they count anew when a run goes on with other ``tokens_per_step``.
    """
    found = (path.name for path in directory.glob("step_*") if path.is_dir())
    return sorted((name for name in found if "." not in name), key=tokens_of)


def step_of(tag: str) -> int:
    """Optimizer steps of a checkpoint's name."""
    return int(tag.split("_")[1])


def tokens_of(tag: str) -> int:
    """Tokens seen of a checkpoint's name; -1: it has none."""
    number = tag.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def append_jsonl(path: Path, *lines: dict[str, Any]) -> None:
    """Add lines to a log, in place of a last one that a kill or a full disk cut short. Raises
    OSError with the path, which that of a full disk does not have."""
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.writelines(json.dumps(line).encode() + b"\n" for line in lines)
    except OSError as error:
        text = os.strerror(error.errno or 0)
        raise OSError(error.errno, f"{text} while writing", str(path)) from error


def read_jsonl(path: str | Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log. A last line cut short by a kill is left out.

    Args:
        path: of the log.
        damaged: list to append the numbers of damaged lines to; these lines are left out.

    Raises:
        FormatError: a line is damaged, and ``damaged`` is None.
        OSError: the file cannot be read.
    """
    remedy = "remove the line; a run that is started again does so itself"
    with Path(path).open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                line = parse_json(text, f"{path}, line {number}", remedy=remedy)
            except FormatError:
                if damaged is None:
                    raise
                line = None
            if damaged is not None and not (
                isinstance(line, dict) and type(line.get("tokens_seen")) is int
            ):
                damaged.append(number)
                continue
            yield line


def is_lost(line: Mapping[str, Any]) -> bool:
    """Whether the loss of a line of ``log.jsonl`` is no number. A step without a label that counts
    has none either, and no gradient."""
    return line.get("loss") is None and line.get("grad_norm") != 0


def environment() -> dict[str, Any]:
    """Versions, devices, host, and the state of the working tree (None outside of a repository)."""
    import torch  # noqa: PLC0415 - whoever starts a run has it

    versions = {"python": platform.python_version(), "megapack": megapack.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        versions["cuda"] = str(torch.version.cuda)
    commit = _git("rev-parse", "HEAD")
    dirty = commit and bool(_git("status", "--porcelain"))
    return {
        "versions": versions,
        "device": device,
        "host": platform.node(),
        "command": sys.argv,
        "git": commit and {"commit": commit, "dirty": dirty},
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

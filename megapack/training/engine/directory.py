"""Directory of a run: its configuration, logs, checkpoints, exported model and final state.

    config.yaml            resolved configuration
    starts.jsonl           one line per start: versions, git, hosts, fingerprints, command
    log.jsonl              one line per step
    evaluation.jsonl       one line per validation
    checkpoints/           checkpoints, each with a ``manifest.json`` (``CheckpointManifest``)
    model/, model_average/ models for ``from_pretrained``
    end.json               why and where the run ended
    run_id                 id of the run for Weights & Biases, and for its checkpoint mirror
    tensorboard/, batches/, profile/  curves, samples of every rank, traces, if requested
    flight/                last collectives of every rank, written after an NCCL timeout

Reading a run (``megapack-build report``) does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

import megapack
from megapack.config import check_range, read_yaml, to_dict
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.records import check_inside, parse_json, read_record
from megapack.storage.files import atomic_write
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import file_checksum

if TYPE_CHECKING:
    from megapack.training.engine.world import World

RUN_ID = "run_id"
LOGS = ("log.jsonl", "evaluation.jsonl")
MANIFEST = "manifest.json"
_REMEDY = "restore it from a copy, or set checkpoint.fallback=true to use the previous checkpoint"
Verify = Literal["size", "checksum"]
_PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "flash-attn", "triton")


class RunDirectory:
    """Paths in the directory of a run; methods that write its files (lock, logs, end.json)."""

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
        self.steps: dict[str, int] = {}
        """``step`` (steps done) and ``saved`` (steps in a checkpoint), for ``end.json``."""
        self.config = self.path / "config.yaml"
        self.starts = self.path / "starts.jsonl"
        self.ended = self.path / "end.json"
        self._lock: WriterLock | None = None
        self._is_held = False

    @property
    def known_id(self) -> str | None:
        """Id of this run; None before ``create_id``."""
        path = self.path / RUN_ID
        return path.read_text(encoding="utf-8").strip() if path.exists() else None

    def create_id(self, given: str | None = None) -> str:
        """Return the id of this run; create it at the first call, from ``given`` or at random."""
        run_id = self.known_id or given or uuid.uuid4().hex
        if self.known_id is None:
            with atomic_write(self.path / RUN_ID, "w") as file:
                file.write(run_id)
        return run_id

    @contextmanager
    def held(self, world: World) -> Iterator[None]:
        """Lock the directory against other runs; collective. Raises LockedError, which names the
        other run. The kernel releases the first rank's lock when the process exits. ``end.json``
        contains "running" until the run ends, and still does after a SIGKILL."""
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
        """Return the content of ``config.yaml``; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            tree = read_yaml(self.config.read_text(encoding="utf-8"))
            return tree if isinstance(tree, dict) else {}
        return {}

    def begin(self, config: Any, facts: dict[str, Any]) -> None:
        with atomic_write(self.config, "w") as file:
            yaml.safe_dump(to_dict(config), file, sort_keys=False)
        append_jsonl(self.starts, {"time": time.time(), **environment(), **facts})

    def record_flight(self) -> None:
        """Let NCCL write the last collectives of every rank to ``flight/`` after a timeout, unless
        environment variables say otherwise. Call this before the process group is created."""
        self.flight.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, str(self.flight / "rank_"))

    def fail(self, message: str) -> None:
        """Record the error that ends this process, unless ``end.json`` has a reason already."""
        if not self._is_held:
            return  # the directory belongs to another run
        with contextlib.suppress(OSError, ValueError):  # leave "running" on a full disk
            if json.loads(self.ended.read_text(encoding="utf-8"))["reason"] == "running":
                self.end("error", message=message)

    def end(self, reason: str, **facts: Any) -> None:
        """Record the state: "done", "signal", "stop_at", "error" or "running"."""
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        with atomic_write(self.ended, "w") as file:
            json.dump({"time": time.time(), "reason": reason, **where, **self.steps, **facts}, file)

    def copy_logs(self, trunk: Path) -> None:
        """Copy the logs of ``trunk``, the run that this run branches from. Logs that this run
        already has are not replaced."""
        for path in (self.log, self.evaluation):
            if (trunk / path.name).exists() and not path.exists():
                with (trunk / path.name).open("rb") as source, atomic_write(path) as target:
                    shutil.copyfileobj(source, target)

    def truncate_logs(self, tokens: int) -> list[str]:
        """Drop the log lines after ``tokens`` tokens, which the resumed run will write again.
        Returns warnings about damaged lines (they are dropped, and a copy of the log is kept under
        another name) and about missing last lines. Resuming does not need the logs."""
        problems = []
        for path in (self.log, self.evaluation, *self.batches.glob("*.jsonl")):
            if not path.exists():
                continue
            damaged: list[int] = []
            lines = [(line["tokens_seen"], line) for line in read_jsonl(path, damaged)]
            if damaged:
                names = (f"{path.name}.damaged{n or ''}" for n in itertools.count())
                aside = next(p for p in map(path.with_name, names) if not p.exists())
                shutil.copyfile(path, aside)
                numbers = ", ".join(map(str, damaged[:5]))
                problems.append(
                    f"{path}: line {numbers} is damaged ({len(damaged)} in all); the run continues "
                    f"without them, and a copy of the damaged log is {aside}"
                )
            last = max((count for count, _ in lines), default=0)
            if path == self.log and last < tokens:
                problems.append(
                    f"{path} ends at {last:,} tokens, but the checkpoint was saved at {tokens:,}: "
                    "the last lines of the log are missing"
                )
            with atomic_write(path, "w") as file:
                file.writelines(json.dumps(line) + "\n" for count, line in lines if count <= tokens)
        return problems

    def check_writable(self) -> None:
        """Create the directory and check that files can be written there. Raises ConfigError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.checkpoints):
                if folder.exists():
                    tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(
                f"run_dir is {self.path}, where no files can be written: {error.strerror}. Choose "
                "a folder that this user may write to, with --set run_dir=FOLDER"
            ) from error


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size and checksum (xxh3_128, hexadecimal) of a file."""

    bytes: int
    xxh3: str

    def problem(self, path: Path, verify: Verify, progress: Callable[[], object]) -> str | None:
        """Return how the file at ``path`` differs, as a predicate ("is missing"); None: equal.
        ``size`` does not detect other bytes of the same length; ``checksum`` reads the file and
        calls ``progress`` for every part."""
        try:
            size = path.stat().st_size
        except OSError:
            return "is missing"
        if size != self.bytes:
            return f"has {size} bytes instead of {self.bytes}"
        if verify == "checksum" and file_checksum(path, progress) != self.xxh3:
            return "has a different checksum than when it was written"
        return None


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Facts about a checkpoint."""

    step: int  # optimizer steps done
    world_size: int
    zero_stage: int
    state: dict[str, Any]  # of the trainer: order of samples, record of the run, decisions
    files: dict[str, FileFacts]  # path relative to the checkpoint -> facts
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        check_range("manifest", at_least=0, step=self.step, zero_stage=self.zero_stage)
        check_range("manifest", at_least=1, world_size=self.world_size)
        for name in self.files:
            check_inside("a name in files", name)

    @staticmethod
    def read(directory: Path, path: Path | None = None) -> CheckpointManifest:
        """Read the manifest of checkpoint ``directory``, whose name has its step, or from ``path``.
        Raises ResumeError if it cannot be read, is damaged, or belongs to another step."""
        path = path or directory / MANIFEST
        try:
            manifest = read_record(CheckpointManifest, path, remedy=_REMEDY, error=ResumeError)
        except OSError as error:
            raise ResumeError(f"{path} cannot be read: {error}") from error
        if not directory.name.startswith(f"step_{manifest.step:08d}_"):
            raise ResumeError(
                f"{path}: step is {manifest.step}, but the checkpoint is named {directory.name}; "
                "rename the directory to its original name"
            )
        return manifest

    def write(self, directory: Path) -> None:
        with atomic_write(directory / MANIFEST, "w") as file:
            json.dump(asdict(self), file, indent=1)


def tags_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints, damaged ones included, sorted by tokens seen: a run
    resumed with another ``tokens_per_step`` numbers its steps differently."""
    names = (path.name for path in directory.glob("step_*") if path.is_dir())
    return sorted((name for name in names if "." not in name), key=tokens_of)


def step_of(tag: str) -> int:
    """Return the number of optimizer steps that a checkpoint's name states."""
    return int(tag.split("_")[1])


def tokens_of(tag: str) -> int:
    """Return the number of tokens seen that a checkpoint's name states; -1: it states none."""
    number = tag.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def append_jsonl(path: Path, *lines: dict[str, Any]) -> None:
    """Append lines to a log; replace a last line that a kill or a full disk cut short. Raises
    OSError with the path (Python's error for a full disk has none)."""
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
    """Yield the lines of a log, without a last line that a kill cut short. Numbers of damaged lines
    are appended to ``damaged``, and these lines left out; if that is None, a damaged line raises
    FormatError. Raises OSError if the file cannot be read."""
    remedy = "remove the line; a resumed run removes it, too"
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
    """Return True if the step of a line of ``log.jsonl`` had a NaN or infinite loss, stored as
    null. A step without labels has loss null, too, but its gradient norm is 0."""
    return line.get("loss") is None and line.get("grad_norm") != 0


def environment() -> dict[str, Any]:
    """Return versions, device, host, and the git commit (None outside a repository)."""
    import torch  # noqa: PLC0415 - readers of a run need no torch

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

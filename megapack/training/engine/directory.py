"""Directory of a run: its configuration, logs, checkpoints, exported model and final state.

    config.yaml            resolved configuration
    starts.jsonl           one line per start: versions, git, hosts, fingerprints, command
    log.jsonl              one line per step
    evaluation.jsonl       one line per validation
    audit.jsonl            checksums of all these files and of the data, at every start, checkpoint
                           and end (``Record``), for ``megapack-build audit``
    checkpoints/           checkpoints, each with a ``manifest.json`` (``CheckpointManifest``)
    model/, model_average/ models for ``from_pretrained``
    end.json               why and where the run ended
    run_id                 id of the run for Weights & Biases, and for its checkpoint mirror
    tensorboard/, batches/, profile/  curves, samples of every rank, traces, if requested
    flight/                last collectives of every rank, written after an NCCL timeout

Each line of a .jsonl ends with ``chain``, the SHA-256 of the previous line's ``chain`` (64 zeros
for the first line) followed by the line up to ``, "chain"``. So no line can change or disappear
unnoticed, and a resumed run continues the chain:

    {"step": 0, "loss": 4.2, "chain": "5c1e..."}   # sha256(b"0" * 64 + b'{"step": 0, "loss": 4.2')

Reading a run (``megapack-build report``) does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

import megapack
from megapack.config import check_range, from_dict, read_yaml, to_dict
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.records import check_inside, parse_json, read_record
from megapack.storage.files import atomic_write, open_regular
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import stretch_checksum

if TYPE_CHECKING:
    from megapack.training.engine.world import World

RUN_ID = "run_id"
LOGS = ("log.jsonl", "evaluation.jsonl")
AUDIT = "audit.jsonl"
MANIFEST = "manifest.json"
STATEMENT = "statement.json"
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
        self.audit = self.path / AUDIT
        self._hashed: dict[str, tuple[tuple[int, int], FileFacts]] = {}  # with size and mtime
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
        if reason != "running":
            self.record("end")

    @property
    def has_ended(self) -> bool:
        """True if the run ended in order: no rank writes any more. A killed run leaves "running" in
        ``end.json``, and after an error other ranks may still write."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return json.loads(self.ended.read_bytes())["reason"] not in ("running", "error")
        return False

    def record(self, event: str, inputs: Mapping[str, FileFacts] | None = None) -> None:
        """Append a ``Record`` of all files that changed since the last one to ``audit.jsonl``."""
        before = Record.empty()
        with contextlib.suppress(FormatError):  # a damaged line fails audits, not the training
            before = Record.total(self.audit)
        files, logs = {}, {}
        for name in self.recorded_names():
            with contextlib.suppress(OSError, FormatError):  # removed or cut short meanwhile
                if name in (self.starts.name, *LOGS) or Path(name).parent.name == self.batches.name:
                    logs[name] = LogFacts.of(self.path / name)
                else:
                    files[name] = self._facts(name)
        removed = (before.files.keys() | before.logs.keys()) - (files.keys() | logs.keys())
        record = Record(
            event=event,
            time=time.time(),
            step=self.steps.get("step"),
            files={n: facts for n, facts in files.items() if facts != before.files.get(n)},
            logs={n: facts for n, facts in logs.items() if facts != before.logs.get(n)},
            inputs=dict(inputs or {}),
            removed=tuple(sorted(removed)),
        )
        append_jsonl(self.audit, to_dict(record))

    def recorded_names(self) -> list[str]:
        """Return the relative names of the files that a ``Record`` lists, in order: all but those
        of ``audit`` and ``report``, unfinished ones, and files that a checkpoint's manifest lists.
        """
        names = []
        for folder, folders, files in os.walk(self.path):
            if Path(folder) == self.checkpoints:
                folders[:] = [name for name in folders if "." not in name]  # see ``tags_in``
            is_checkpoint = Path(folder).parent == self.checkpoints
            if is_checkpoint:
                folders.clear()
            paths = (Path(folder, name).relative_to(self.path) for name in files)
            names += [p.as_posix() for p in paths if p.name == MANIFEST or not is_checkpoint]
        others = {AUDIT, STATEMENT, "report.html", "checkpoints/latest_universal"}
        return sorted(name for name in names if name not in others and ".tmp-" not in name)

    def _facts(self, name: str) -> FileFacts:
        """Return the facts of a file; hash it only if its size or modification time changed."""
        status = (self.path / name).stat()
        stamp = status.st_size, status.st_mtime_ns
        if self._hashed.get(name, (None,))[0] != stamp:
            self._hashed[name] = stamp, FileFacts.of(self.path / name)
        return self._hashed[name][1]

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
            lines = [(line["tokens_seen"], text) for text, line in _read_lines(path, damaged)]
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
            with atomic_write(path) as file:  # the same bytes, so that the chain continues
                file.writelines(text for count, text in lines if count <= tokens)
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

    @staticmethod
    def of(path: Path) -> FileFacts:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return FileFacts(bytes=size, xxh3=stretch_checksum(file, size))

    def problem(
        self,
        path: Path,
        verify: Verify,
        progress: Callable[[], object] = lambda: None,
        *,
        may_grow: bool = False,
    ) -> str | None:
        """Return how the file at ``path`` differs, as a predicate ("is missing"); None: equal.
        ``size`` does not detect other bytes of the same length; ``checksum`` reads the file and
        calls ``progress`` for every part. ``may_grow`` accepts bytes after the recorded ones."""
        try:
            size = path.stat().st_size
        except OSError:
            return "is missing"
        if size < self.bytes or (size > self.bytes and not may_grow):
            return f"has {size} bytes instead of {self.bytes}"
        if verify == "checksum":
            with open_regular(path) as file:
                if stretch_checksum(file, self.bytes, progress) != self.xxh3:
                    return "has a different checksum than when it was written"
        return None


@dataclass(frozen=True, kw_only=True)
class LogFacts:
    """Size of a .jsonl without an incomplete last line, and the ``chain`` of its last line."""

    bytes: int
    chain: str

    @staticmethod
    def of(path: Path) -> LogFacts:
        with path.open("rb") as file:
            line, end = last_line(file)
        return LogFacts(bytes=end, chain=_chain_of(line))


@dataclass(frozen=True, kw_only=True)
class Record:
    """Line of ``audit.jsonl``: the files of the run that changed since the line before, and those
    that were removed. Later lines replace entries of earlier ones (``total``)."""

    event: str  # start, decision, rollback, checkpoint, export or end
    time: float
    step: int | None  # steps done, as in end.json
    files: dict[str, FileFacts] = field(default_factory=dict)  # by path relative to the run
    logs: dict[str, LogFacts] = field(default_factory=dict)
    inputs: dict[str, FileFacts] = field(default_factory=dict)  # of data; by absolute path
    removed: tuple[str, ...] = ()

    @staticmethod
    def empty() -> Record:
        return Record(event="none", time=0.0, step=None)

    @staticmethod
    def total(path: Path) -> Record:
        """Return the state after all lines of a file, or an empty one without the file. Raises
        FormatError if a line is damaged."""
        total = Record.empty()
        for tree in read_jsonl(path) if path.exists() else ():
            try:
                line = from_dict(Record, tree, where=str(path))
            except ConfigError as error:
                raise FormatError(f"{error}: the line is damaged; restore {path}") from error
            parts: dict[str, Any] = {
                name: {**getattr(total, name), **getattr(line, name)} for name in _PARTS
            }
            for name in line.removed:
                parts["files"].pop(name, None)
                parts["logs"].pop(name, None)
            total = replace(line, **parts)
        return total


_PARTS = ("files", "logs", "inputs")


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


_CHAIN = re.compile(rb'(.*), "chain": "([0-9a-f]{64})"\}\n', re.DOTALL)
_FIRST_CHAIN = "0" * 64


def append_jsonl(path: Path, *lines: dict[str, Any]) -> None:
    """Append lines, each with its ``chain``, to a log; replace a last line that a kill or a full
    disk cut short. Raises OSError with the path (Python's error for a full disk has none)."""
    try:
        with path.open("ab+") as file:
            last, end = last_line(file)
            if end < file.seek(0, os.SEEK_END):
                file.truncate(end)
            chain = _chain_of(last) or _FIRST_CHAIN
            for line in lines:
                body = json.dumps(line).encode()[:-1]
                chain = _next_chain(chain, body)
                file.write(body + f', "chain": "{chain}"}}\n'.encode())
    except OSError as error:
        text = os.strerror(error.errno or 0)
        raise OSError(error.errno, f"{text} while writing", str(path)) from error


def _next_chain(chain: str, body: bytes) -> str:
    return hashlib.sha256(chain.encode() + body).hexdigest()


def _chain_of(line: bytes) -> str:
    """Return the chain of a line; "" for a line of an earlier version, which has none."""
    match = _CHAIN.fullmatch(line)
    return "" if match is None else match[2].decode()


def last_line(file: io.BufferedRandom | io.BufferedReader) -> tuple[bytes, int]:
    """Return the last complete line of a file, and the offset of its end."""
    size, window = file.seek(0, os.SEEK_END), 1 << 12
    while True:
        begin = max(0, size - window)
        file.seek(begin)
        tail = file.read(size - begin)
        end = tail.rfind(b"\n") + 1
        start = tail.rfind(b"\n", 0, max(0, end - 1)) + 1
        if start or not begin:
            return tail[start:end], begin + end
        window *= 8


def chain_problems(path: Path, recorded: LogFacts | None, *, may_grow: bool) -> Iterator[str]:
    """Yield the contradictions between a log and its chain, as predicates ("has ...").

    Args:
        recorded: the last ``LogFacts`` of the file; None: ``audit.jsonl`` itself.
        may_grow: the run did not end in order, so that it may have written more lines.
    """
    chain, end, num_old, num_broken, broken_at = _FIRST_CHAIN, 0, 0, 0, 0
    chain_at = {0: ""}
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if may_grow and not text.endswith(b"\n"):
                break  # the run was killed while it wrote the line
            match = _CHAIN.fullmatch(text)
            if num_old == number - 1 and b'"chain"' not in text:
                num_old += 1
            elif match is None or _next_chain(chain, match[1]) != match[2].decode():
                num_broken, broken_at = num_broken + 1, broken_at or number
            if text.endswith(b"\n"):
                chain, end = _chain_of(text) or chain, end + len(text)
                if recorded is not None and end == recorded.bytes:
                    chain_at[end] = _chain_of(text)
    if num_old:
        yield f"has {num_old} lines without a chain, written by an earlier version: not proven"
    if num_broken:
        more = f" (and {num_broken - 1} more)" if num_broken > 1 else ""
        yield f"has a changed line, or lacks the line before it: line {broken_at}{more}"
    if recorded is not None and chain_at.get(recorded.bytes) != recorded.chain:
        yield f"no longer contains the {recorded.bytes} bytes that audit.jsonl records"
    elif recorded is not None and end > recorded.bytes and not may_grow:
        yield f"has {end} bytes, and audit.jsonl records {recorded.bytes}"


def read_jsonl(path: str | Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log without their ``chain``, and without a last line that a kill cut
    short. Numbers of damaged lines are appended to ``damaged``, and these lines left out; if that
    is None, a damaged line raises FormatError. Raises OSError if the file cannot be read."""
    for _, line in _read_lines(path, damaged):
        yield line


def _read_lines(
    path: str | Path, damaged: list[int] | None = None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the bytes and the content of the lines, as ``read_jsonl``."""
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
            if isinstance(line, dict):
                line.pop("chain", None)
            yield text, line


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

"""Faults for ranks: a request names a function of this module and its arguments."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from megapack.data import run as data_run
from megapack.data.loader import PackedLoader
from megapack.data.run import Decisions
from megapack.training import teacher, trainer
from megapack.training.engine.checkpoint import WrittenFiles
from megapack.training.engine.directory import RunDirectory
from megapack.training.model.training_model import TrainingModel
from megapack.training.monitoring.heartbeat import Heartbeat
from megapack.training.teacher import Job
from megapack.training.trainer import TimedBatches

_NEW_NAMESPACE, _PRIVATE = 0x00020000, 0x44000  # CLONE_NEWNS, MS_REC | MS_PRIVATE


def _before_step(victim: int, action: Callable[[], object]) -> None:
    original = TimedBatches.steps

    def steps(self: TimedBatches) -> Iterator[tuple[int, Any]]:
        for step, batches in original(self):
            if step == victim:
                action()
            yield step, batches

    TimedBatches.steps = steps  # type: ignore[method-assign]


def kill_before_step(victim: int) -> None:
    """Kill this process (-9) just before a step."""
    _before_step(victim, lambda: os.kill(os.getpid(), signal.SIGKILL))


def kill_at_first_start(rank: int, victim: int) -> None:
    """Kill one rank of a launcher just before a step, at its first start only."""

    def kill() -> None:
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (str(rank), "0"):
            os.kill(os.getpid(), signal.SIGKILL)

    _before_step(victim, kill)


def kill_after_decision() -> None:
    """Kill this process (-9) as soon as a decision is on disk."""
    original = Decisions.write

    def write(self: Decisions, run_dir: str | Path) -> None:
        original(self, run_dir)
        os.kill(os.getpid(), signal.SIGKILL)

    Decisions.write = write  # type: ignore[method-assign]


def decisions_seen_late() -> None:
    """Simulate a slow shared disk: this rank does not see the decisions at first."""
    original, calls = data_run.read_decisions, iter([None])

    def read(run_dir: str | Path) -> Decisions | None:
        return next(calls, original(run_dir))

    data_run.read_decisions = read


def hang_before_step(victim: int) -> None:
    """Block the main thread; other threads continue, also the heartbeat."""
    _before_step(victim, lambda: time.sleep(3600))


def stall_limit_from_step(first: int, seconds: float) -> None:
    """Set a short ``engine.hang_timeout_seconds`` after all ranks have started."""
    original, hearts = Heartbeat.__init__, []

    def __init__(self: Heartbeat, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        hearts.append(self)

    Heartbeat.__init__ = __init__  # type: ignore[method-assign]
    _before_step(first, lambda: setattr(hearts[0], "hang_timeout", seconds))


def nan_gradients(steps: list[int]) -> None:
    """Set gradients to NaN in these calls of ``train_step``; the loss is finite."""
    original, calls = trainer.train_step, count()

    def train_step(around: Any, *args: Any, **kwargs: Any) -> Any:
        weight = next(iter(around.module.parameters()))
        bad = next(calls) in steps
        hook = weight.register_hook(lambda g: g * float("nan") if bad else g)
        result = original(around, *args, **kwargs)
        hook.remove()
        return result

    trainer.train_step = train_step


def nan_weight_after(step: int) -> None:
    """Set a weight to NaN after this call of ``train_step``."""
    original, calls = trainer.train_step, count()

    def train_step(around: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(around, *args, **kwargs)
        if next(calls) == step:
            with torch.no_grad():
                next(iter(around.module.parameters())).view(-1)[0] = float("nan")
        return result

    trainer.train_step = train_step


def slow_record(seconds: float) -> None:
    """Delay the record of this start in the run directory."""
    original = RunDirectory.begin

    def begin(self: RunDirectory, *args: Any) -> None:
        time.sleep(seconds)
        original(self, *args)

    RunDirectory.begin = begin  # type: ignore[method-assign]


def small_disk(directory: str, size: str) -> None:
    """Mount a small disk on the directory, visible to this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    Path(directory).mkdir(parents=True)
    options = f"size={size}".encode()
    failed = libc.unshare(_NEW_NAMESPACE)
    failed |= libc.mount(b"none", b"/", None, _PRIVATE, None)
    failed |= libc.mount(b"none", directory.encode(), b"tmpfs", 0, options)
    assert not failed, os.strerror(ctypes.get_errno())


def slow_forward(seconds: float) -> None:
    """Delay every forward pass."""
    original = TrainingModel.forward

    def forward(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(self, *args, **kwargs)

    TrainingModel.forward = forward  # type: ignore[method-assign]


def slow_first_batch(seconds: float) -> None:
    """Delay the first batch of a loader."""
    original = PackedLoader.__iter__

    def batches(self: PackedLoader) -> Iterator[Any]:
        time.sleep(seconds)
        yield from original(self)

    PackedLoader.__iter__ = batches  # type: ignore[method-assign]


def writes_wait_for(gate: str, tag: str) -> None:
    """Block writes of this checkpoint until a file exists."""
    original = WrittenFiles._write

    def write(self: WrittenFiles, state_dict: Any, path: str) -> None:
        while tag in path and not Path(gate).exists():
            time.sleep(0.02)
        original(self, state_dict, path)

    WrittenFiles._write = write  # type: ignore[method-assign]


def kill_in_part(count: int) -> None:
    """Kill this process (-9) when it has computed this many parts of a teacher's outputs, before
    it writes the last one."""
    original, calls = Job.write, iter(range(1, count + 1))

    def write(self: Job, *args: Any) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args)

    Job.write = write  # type: ignore[method-assign]


def kill_between_columns() -> None:
    """Kill this process (-9) when it has added the first column of a teacher."""
    original, calls = teacher.add_column, iter([True])

    def add(*args: Any, **kwargs: Any) -> bool:
        if not next(calls, False):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    teacher.add_column = add

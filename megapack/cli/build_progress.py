"""How a build shows its progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megapack.cli.report import Work, counted, note, short, size
from megapack.tokenization.build.worker import Counted

__all__ = ["BuildProgress"]

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2


class BuildProgress:
    """Documents/s, MB/s, tokens/s and the time left, on stderr."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._documents = self._text_bytes = self._tokens = 0
        self._begin = self._shown = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._join: Work | None = None

    def note(self, text: str) -> None:
        note(text)

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        written = f"; about {size(disk_bytes)} of shards to write" if disk_bytes else ""
        print(f"{size(num_bytes)} in {counted(num_shards, 'shard')}{written}", file=sys.stderr)
        self._num_bytes = num_bytes
        self._begin = self._shown = time.monotonic()
        if sys.stderr.isatty():
            columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %  {task.fields[rates]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("tokenize", total=num_bytes, rates="")
            self._bar.start()

    def advance(self, more: Counted) -> None:
        self._documents += more.documents
        self._text_bytes += more.text_bytes
        self._tokens += more.tokens
        now = time.monotonic()
        pause = _SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_BETWEEN_DRAWINGS
        if now - self._shown < pause:
            return
        self._shown = now
        rates = self._rates(now - self._begin)
        if self._bar is None:
            print(f"{self._share():4.0%}  {rates}", file=sys.stderr)
        else:
            done = self._share() * self._num_bytes
            self._bar.update(self._task, completed=done, rates=rates)

    def join(self, done: int, total: int) -> None:
        if self._join is None:
            self._close()
            self._join = Work("joining the shards").__enter__()
        self._join(done, total)

    def stop(self) -> None:
        self._close()
        if self._join is not None:
            self._join.__exit__(None, None, None)
            self._join = None

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _share(self) -> float:
        # The plan only estimates how much text compressed files hold.
        return min(1.0, self._text_bytes / max(1, self._num_bytes))

    def _rates(self, seconds: float) -> str:
        share = self._share()
        left = f"{seconds / share - seconds:,.0f} s left" if share else "..."
        return (
            f"{short(self._documents / seconds)} documents/s  "
            f"{size(int(self._text_bytes / seconds))}/s  "
            f"{short(self._tokens / seconds)} tokens/s  {left}"
        )

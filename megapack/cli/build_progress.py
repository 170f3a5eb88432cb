"""How a build shows its progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megapack.cli.report import note, short
from megapack.tokenization.shard import Counted

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

    def note(self, text: str) -> None:
        note(text)

    def start(self, num_bytes: int, num_shards: int) -> None:
        print(f"{num_bytes / 1e6:,.1f} MB in {num_shards:,} shards", file=sys.stderr)
        self._num_bytes = num_bytes
        self._begin = self._shown = time.monotonic()
        if sys.stderr.isatty():
            columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %  {task.fields[rates]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("tokenize", total=num_bytes, rates="")
            self._bar.start()

    def advance(self, counted: Counted) -> None:
        self._documents += counted.documents
        self._text_bytes += counted.text_bytes
        self._tokens += counted.tokens
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

    def stop(self) -> None:
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
            f"{self._text_bytes / 1e6 / seconds:,.1f} MB/s  "
            f"{short(self._tokens / seconds)} tokens/s  {left}"
        )

"""The look all commands share: tables and numbers on stdout, progress on stderr."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = [
    "Screen",
    "Work",
    "count",
    "counted",
    "note",
    "percent",
    "print_table",
    "short",
    "size",
]

_SECONDS_BETWEEN_LINES = 10.0


class Screen(Console):
    """stdout. A reader that left early (``| head``) is an error here; main() ends quietly on it."""

    def __init__(self) -> None:
        # On a pipe rich would cut at 80 columns; whoever reads a file wants all of it.
        super().__init__(highlight=False, width=None if sys.stdout.isatty() else 10_000)

    def write_line(self, text: str, style: str | None = None) -> None:
        """Text as it is: no markup is looked for, and no end of line is put in."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
) -> None:
    """A table on stdout. The first column is left-aligned, numbers right-aligned."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    Screen().print(table)


def note(text: str) -> None:
    """A remark on stderr."""
    print(f"note: {text}", file=sys.stderr)


def count(number: int) -> str:
    """1234567 -> 1,234,567"""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """1, "shard" -> 1 shard; 1234, "shard" -> 1,234 shards"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: int) -> str:
    """512 -> 512 B; 1234567 -> 1.23 MB"""
    return f"{num_bytes} B" if num_bytes < 1000 else f"{short(num_bytes)}B"


def short(number: float) -> str:
    """1234567 -> 1.23 M"""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def percent(fraction: float, digits: int = 2) -> str:
    """0.00123 -> 0.12 %"""
    return f"{100 * fraction:.{digits}f} %"


class Work:
    """How far a long run has come: a bar on a terminal, a line now and then elsewhere.

    Use as a context manager and hand it to whoever calls ``progress(done, total)``.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown = self._begin = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Work:
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            share = done / total if total else 1.0
            print(f"{self._title}: {share:4.0%} after {now - self._begin:,.0f} s", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

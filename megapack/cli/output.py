"""The look all commands share: tables and JSON on stdout, progress and remarks on stderr."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megapack.errors import printable
from megapack.executors import Counted

_SECONDS_BETWEEN_LINES = 10.0


class Screen(Console):
    """stdout or stderr with styles; every other control character is made visible.

    A reader that left early (``| head``) is an error here; main() ends quietly on it.
    """

    def __init__(self, stream: Any = None, width: int | None = 10_000) -> None:
        stream = stream or sys.stdout
        # rich would cut the cells of a table at the width of the terminal, or at 80 on a pipe.
        super().__init__(highlight=False, width=width, file=getattr(stream, "unfiltered", stream))

    def render(self, *args: Any, **how: Any) -> Iterator[Segment]:
        for part in super().render(*args, **how):
            yield part if part.control else part._replace(text=printable(part.text))

    def write_line(self, text: str, style: str | None = None) -> None:
        """Text as it is: no markup is looked for, and no end of line is put in."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout, the first column left-aligned, numbers right-aligned.

    Cells are shown as they are: no markup is looked for in names; a ``Text`` keeps its style.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(c if isinstance(c, Text) else Text(printable(str(c))) for c in row))
    Screen().print(table)


def printed_as_json(args: argparse.Namespace, facts: Any) -> bool:
    """With --json print them, and that is all."""
    if args.json:
        print(json.dumps(facts, indent=2))
    return bool(args.json)


def note(text: str) -> None:
    """A remark on stderr."""
    print(f"note: {text}", file=sys.stderr)


def is_part(args: argparse.Namespace, done: str, whole: str) -> bool:
    """Whether --part was given: then say what is done, and who writes ``whole``."""
    if args.part is not None:
        i, n = args.part
        note(
            f"part {i}/{n}: {done}; when all parts are, run the command without --part, which "
            f"writes {whole}"
        )
    return args.part is not None


class Work:
    """How far a long run has come: a bar on a terminal, a line now and then elsewhere.

    ``with Work(title) as work:`` and hand it to whoever calls ``progress(done, total)``.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown = self._begin = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            shown = "{task.percentage:3.0f} %  {task.fields[said]}"
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(shown))
            self._bar = Progress(*columns, console=Screen(sys.stderr, None), transient=True)
            self._task = self._bar.add_task(title, total=None, said="")
            self._bar.start()

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def counting(self, total: int, of: Callable[[Counted], int]) -> Callable[[Counted], None]:
        """A callback to report every piece that is done; ``of`` says what is counted."""
        done = 0

        def report(more: Counted) -> None:
            nonlocal done
            done += of(more)
            self(done, total)

        return report

    def __call__(self, done: int, total: int, rates: str = "") -> None:
        """``rates`` are shown beside the share that is done."""
        now = time.monotonic()
        seconds, share = now - self._begin, min(1.0, done / total) if total else 1.0
        left = f"{seconds / share - seconds:,.0f} s left" if share else ""
        if self._bar is not None:
            said = f"{rates}  {left}" if rates else left
            self._bar.update(self._task, completed=share, total=1.0, said=said)
        elif now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            more = f", {rates}, {left}" if rates else ""
            print(f"{self._title}: {share:4.0%} after {seconds:,.0f} s{more}", file=sys.stderr)

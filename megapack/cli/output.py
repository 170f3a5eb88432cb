"""Output of all commands: results on stdout, progress and notes on stderr.

- Screen: stdout or stderr with styles
- print_table: declared columns, one row per item
- print_result: facts as JSON with --json, else as text
- Work: a progress bar, or a line every ten seconds if stderr is not a terminal

    columns = {"bucket": lambda row: count(row[0]), "samples": lambda row: count(row[1])}
    print_table(columns, [(1024, 17), (2048, 1234)])
    # bucket  samples
    # 1,024        17
    # 2,048     1,234
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megapack.errors import printable
from megapack.executors import Counted

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0


class Screen(Console):
    """stdout or stderr with styles; other control characters are printed as escapes.

    Writing to a closed pipe (``| head``) raises BrokenPipeError, which main() handles.
    """

    def __init__(self, stream: Any = None, width: int | None = 10_000) -> None:
        stream = stream or sys.stdout
        # rich would cut the cells of a table at the width of the terminal, or at 80 on a pipe.
        super().__init__(highlight=False, width=width, file=getattr(stream, "unfiltered", stream))

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for part in super().render(*args, **options):
            yield part if part.control else part._replace(text=printable(part.text))

    def write_line(self, text: str, style: str | None = None) -> None:
        """Print text without interpreting markup and without wrapping it."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(
    columns: Mapping[str, Callable[[T], Any]], rows: Iterable[T], styles: Iterable[str] = repeat("")
) -> None:
    """Print a table on stdout, the first column left-aligned, the others right-aligned.
    ``columns``: heading -> function that returns the cell of a row; ``styles``: a rich style for
    each row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(columns):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row, style in zip(rows, styles, strict=False):
        # Text, because rich would look for markup in a str.
        table.add_row(*(Text(printable(str(cell(row))), style) for cell in columns.values()))
    Screen().print(table)


def print_result(
    args: argparse.Namespace, facts: Any, text: str | Callable[[], None], indent: int | None = 2
) -> None:
    """Print facts as JSON with --json, otherwise a text, or what the function ``text`` prints."""
    if args.json:
        print(json.dumps(facts, indent=indent))
    elif isinstance(text, str):
        print(text)
    else:
        text()


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def is_part(args: argparse.Namespace, done: str, output: str) -> bool:
    """Return whether --part was given; if so, print what is done and how ``output`` is written."""
    if args.part is not None:
        i, n = args.part
        note(
            f"part {i}/{n}: {done}; when all parts are done, run the command without --part to "
            f"write {output}"
        )
    return args.part is not None


class Work:
    """Progress of a long command: a bar on a terminal, elsewhere a line every ten seconds. It is a
    callback ``progress(done, total)``; ``work.counting(...)`` is one for ``Counted`` pieces."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._last_line = self._begin = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            text = "{task.percentage:3.0f} %  {task.fields[text]}"
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(text))
            self._bar = Progress(*columns, console=Screen(sys.stderr, None), transient=True)
            self._task = self._bar.add_task(title, total=None, text="")
            self._bar.start()

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def counting(self, total: int, amount: Callable[[Counted], int]) -> Callable[[Counted], None]:
        """Return a callback for pieces of work; ``amount`` returns how much a piece counts."""
        done = 0

        def report(piece: Counted) -> None:
            nonlocal done
            done += amount(piece)
            self(done, total)

        return report

    def __call__(self, done: int, total: int, rates: str = "") -> None:
        """Show the progress, ``done`` of ``total``, and the text ``rates``."""
        now = time.monotonic()
        seconds, share = now - self._begin, min(1.0, done / total) if total else 1.0
        remaining = f"{seconds / share - seconds:,.0f} s left" if share else ""
        if self._bar is not None:
            text = f"{rates}  {remaining}" if rates else remaining
            self._bar.update(self._task, completed=share, total=1.0, text=text)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            more = f", {rates}, {remaining}" if rates else ""
            print(f"{self._title}: {share:4.0%} after {seconds:,.0f} s{more}", file=sys.stderr)

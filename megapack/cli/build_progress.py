"""How a build shows its progress: first the shards, then how they are joined."""

from __future__ import annotations

import sys
import time

from megapack.cli.report import Work, note
from megapack.execution.work import Counted
from megapack.units import counted, short, size

__all__ = ["BuildProgress"]


class BuildProgress:
    """Documents/s, MB/s, tokens/s and the time left, on stderr."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._joins = False

    def note(self, text: str) -> None:
        note(text)

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        written = f"; about {size(disk_bytes)} of shards to write" if disk_bytes else ""
        print(f"{size(num_bytes)} in {counted(num_shards, 'shard')}{written}", file=sys.stderr)
        self._num_bytes, self._done = num_bytes, Counted()
        self._begin, self._joins = time.monotonic(), False
        self._work = Work("tokenizing")

    def advance(self, more: Counted) -> None:
        done = self._done = self._done.plus(more)
        seconds = max(1e-3, time.monotonic() - self._begin)
        rates = (
            f"{short(done.documents / seconds)} documents/s  "
            f"{size(int(done.text_bytes / seconds))}/s  {short(done.tokens / seconds)} tokens/s"
        )
        if self._work is not None:
            self._work(done.text_bytes, self._num_bytes, rates)

    def join(self, done: int, total: int) -> None:
        if not self._joins:
            self.stop()
            self._work, self._joins = Work("joining the shards"), True
        if self._work is not None:
            self._work(done, total)

    def stop(self) -> None:
        if self._work is not None:
            self._work.__exit__()
            self._work = None

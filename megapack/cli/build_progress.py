"""How a build shows its progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from megapack.tokenization.shard import Counted

__all__ = ["BuildProgress"]

_SECONDS_BETWEEN_LINES = 10.0


class BuildProgress:
    """Documents/s, MB/s, tokens/s and the time left, on stderr."""

    def __init__(self) -> None:
        self._begin = self._shown = time.monotonic()
        self._num_bytes = 0
        self._documents = self._text_bytes = self._tokens = 0

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    def start(self, num_bytes: int, num_shards: int) -> None:
        print(f"{num_bytes / 1e6:,.1f} MB in {num_shards:,} shards", file=sys.stderr)
        self._num_bytes = num_bytes
        self._begin = self._shown = time.monotonic()

    def advance(self, counted: Counted) -> None:
        self._documents += counted.documents
        self._text_bytes += counted.text_bytes
        self._tokens += counted.tokens
        now = time.monotonic()
        if now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            print(self._line(now - self._begin), file=sys.stderr)

    def stop(self) -> None:
        pass

    def _line(self, seconds: float) -> str:
        share = min(1.0, self._text_bytes / max(1, self._num_bytes))
        left = seconds / share - seconds if share else float("inf")
        return (
            f"{share:6.1%}  {self._documents / seconds:,.0f} documents/s  "
            f"{self._text_bytes / 1e6 / seconds:,.1f} MB/s  "
            f"{self._tokens / 1e6 / seconds:,.2f} M tokens/s  {left:,.0f} s left"
        )

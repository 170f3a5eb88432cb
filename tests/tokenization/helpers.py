"""What the tests of this room share besides fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megapack.executors import Counted

WriteJsonl = Callable[[Path, Iterable[Any]], Path]


class Silence:
    """A build's progress, remembered instead of shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counted: list[Counted] = []
        self.joined: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        pass

    def advance(self, more: Counted) -> None:
        self.counted.append(more)

    def join(self, done: int, total: int) -> None:
        self.joined.append((done, total))

    def stop(self) -> None:
        pass

"""What the tests of this room share besides fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megapack.tokenization.shard import Counted

WriteJsonl = Callable[[Path, Iterable[Any]], Path]


class Silence:
    """A build's progress, remembered instead of shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counted: list[Counted] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, num_bytes: int, num_shards: int) -> None:
        pass

    def advance(self, counted: Counted) -> None:
        self.counted.append(counted)

    def stop(self) -> None:
        pass

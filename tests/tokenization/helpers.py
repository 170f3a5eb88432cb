"""Helpers of the tokenization tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megapack.executors import Counted
from megapack.tokenization.corpus.documents import TextBlock
from megapack.tokenization.pipeline.run import BuildResult
from megapack.tokenization.tokenizers.encoders import Encoder

Build = Callable[..., BuildResult]


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """Write records as JSON Lines; return the path."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def files_of(prefix: object) -> tuple[bytes, bytes]:
    """Return the bytes of a dataset's files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def encoded(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    """Return the ids of every text."""
    ids, offsets = encoder.encode(TextBlock.of_texts(texts))
    assert len(offsets) == len(texts) + 1
    return [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]


class Silence:
    """Progress of a build, recorded instead of shown."""

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

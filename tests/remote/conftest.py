"""A real S3 server for the session, a line to it and an empty cache for every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from object_store import Line, serve_objects, use_store
from ports import free_port


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with serve_objects(free_port()) as url:
        yield url


@pytest.fixture
def line(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """What clients of this process and of its children talk to; their cache is empty."""
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEGAPACK_CACHE_SIZE", raising=False)
    before = dict(os.environ)
    with Line(free_port(), server).open() as line:
        use_store(line.url)
        yield line
    os.environ.clear()
    os.environ.update(before)

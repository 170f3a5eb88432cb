"""Real servers for the session; for every test a proxy to one of them and an empty cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from object_store import BUCKET, Line, serve_objects
from ports import free_port

from tests.remote import far, stores


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with serve_objects(free_port()) as url:
        yield url


@pytest.fixture(scope="session")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stores.serve_buckets(free_port(), tmp_path_factory.mktemp("buckets")) as url:
        yield url


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    program = os.environ.get("AZURITE")
    if not program:
        pytest.skip("AZURITE names no azurite-blob; `make test-clouds` installs one")
    with stores.serve_blobs(free_port(), program) as url:
        yield url


@pytest.fixture
def line(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Line]:
    """Yield the proxy that clients of this process and its children use; their cache is empty.

    It leads to a store of s3, or of the kind that the test asks for (``stores.EVERY_STORE``), which
    is then where ``far`` has its addresses.
    """
    scheme, _, make = getattr(request, "param", "s3").partition(" ")
    server = request.getfixturevalue(make or ("azurite" if scheme == "az" else "server"))
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEGAPACK_CACHE_SIZE", raising=False)
    monkeypatch.setattr(far, "ROOT", f"{scheme}://{BUCKET}")
    before = dict(os.environ)
    with Line(free_port(), server).open() as line:
        stores.use(scheme, line.url)
        yield line
    os.environ.clear()
    os.environ.update(before)

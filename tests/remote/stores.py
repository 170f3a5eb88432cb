"""Local servers for each store's protocol, and the settings of a client for them.

- s3: moto's server, and nanio, which checks signatures and ignores If-Match: two servers, so
  that an error of one of them does not hide an error of ours.
- gs: moto's server. The client uses Google's XML API, whose requests and responses equal those of
  S3 except for the signature; Google's emulators implement the JSON API and little of this one.
- az: Azurite, Microsoft's emulator, which checks signatures. ``make test-clouds`` installs it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import sys
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from object_store import BUCKET, running, use_store

__all__ = ["EVERY_CLOUD", "EVERY_STORE", "serve_blobs", "serve_buckets", "use"]

EVERY_STORE = pytest.mark.parametrize("line", ["s3", "s3 nanio", "gs", "az"], indirect=True)
EVERY_CLOUD = pytest.mark.parametrize(
    "line", ["s3", "gs", "az"], indirect=True
)  # one server for each protocol

# The one account of every Azurite, and its published key.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def use(scheme: str, url: str) -> None:
    """Do the same as ``use_store`` for a store of any kind at a URL."""
    if scheme == "s3":
        use_store(url)
    elif scheme == "gs":
        os.environ.update(GOOGLE_BASE_URL=url, GOOGLE_BEARER_TOKEN="token")
    else:
        os.environ.update(
            AZURE_STORAGE_ACCOUNT_NAME=ACCOUNT,
            AZURE_STORAGE_ACCOUNT_KEY=KEY,
            AZURE_STORAGE_ENDPOINT=f"{url}/{ACCOUNT}",
        )


@contextlib.contextmanager
def serve_buckets(port: int, folder: Path) -> Iterator[str]:
    """Run nanio on a folder with one empty bucket; yield its URL."""
    pytest.importorskip("nanio", reason="nanio needs Python 3.11 or newer")
    (folder / BUCKET).mkdir()
    keys = ["NANIO_ACCESS_KEY=key", "NANIO_SECRET_KEY=secret"]  # as in ``use_store``
    where = ["--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with running(port, "env", *keys, sys.executable, "-m", "nanio", "serve", *where) as url:
        yield url


@contextlib.contextmanager
def serve_blobs(port: int, azurite: str) -> Iterator[str]:
    """Run Azurite's blob service (the program's path) with one empty container; yield its URL."""
    memory = ("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent")
    with running(port, azurite, *memory, "--blobHost", "127.0.0.1", "--blobPort", str(port)) as url:
        urllib.request.urlopen(_create_container(url), timeout=60).close()
        yield url


def _create_container(url: str) -> urllib.request.Request:
    """Create a container, which the client cannot; the request is signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    resource = f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    text = f"PUT{12 * chr(10)}{signed}{resource}".encode()
    digest = hmac.new(base64.b64decode(KEY), text, hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    address = f"{url}/{ACCOUNT}/{BUCKET}?restype=container"
    return urllib.request.Request(address, method="PUT", headers=headers)

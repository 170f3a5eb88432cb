"""What cannot pass is an error at once, with its reason; what may pass is tried again, said aloud,
for a time that is known."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from object_store import Line

from megapack.errors import ConfigError, FormatError
from megapack.storage import IndexedDataset
from megapack.storage.remote import client
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.client import find_object, retry_seconds
from tests.remote.far import put_dataset, write_packed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(client, "_said", {})


class Whole(SimpleHTTPRequestHandler):
    """Python's file server, which knows no ranges and answers every one with 200 and all."""

    requests = 0

    def log_message(self, *_: object) -> None:
        type(self).requests += 1


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """A server of the files of a dataset ``docs``."""
    write_packed(tmp_path / "docs", 50)
    Whole.requests = 0
    handler = partial(Whole, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_server_that_ignores_ranges_is_named_at_once(files: ThreadingHTTPServer) -> None:
    with pytest.raises(ConfigError, match=r"docs\.[a-z.]*: the server ignores ranges"):
        IndexedDataset(f"http://127.0.0.1:{files.server_port}/docs")
    assert Whole.requests < 10


OPENS = """
import sys
from megapack.storage.remote.client import find_object
try:
    print(find_object(sys.argv[1]).num_bytes)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_certificate_that_is_not_trusted_is_named_at_once(
    files: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And trusted with SSL_CERT_FILE, as the error says."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = "-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
    how = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here {names}".split()
    subprocess.run(
        ["openssl", *how, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    files.socket = context.wrap_socket(files.socket, server_side=True)
    address = f"https://127.0.0.1:{files.server_port}/docs.idx"

    def said() -> str:
        done = subprocess.run(
            [sys.executable, "-c", OPENS, address], check=True, capture_output=True, text=True
        )
        assert not done.stderr, "tried again"
        return done.stdout

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert said().startswith(f"ConfigError {address}: the server's certificate is not trusted")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert int(said()) == (tmp_path / "docs.idx").stat().st_size


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("https://no-such-host.invalid/docs.idx", "the server's name does not resolve"),
        ("https://127.0.0.1:{port}/docs.idx", r"does not speak TLS: write http://"),
    ],
)
def test_a_name_or_kind_that_cannot_be_is_named_at_once(
    files: ThreadingHTTPServer, address: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_object(address.format(port=files.server_port))
    assert not caplog.records, "tried again"


class Answers(BaseHTTPRequestHandler):
    """The same status for every request."""

    status, requests = 500, 0

    def do_HEAD(self) -> None:
        type(self).requests += 1
        self.send_response(self.status)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def answers() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Answers.requests = 0
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("status", [400, 401, 403, 410, 501])
def test_what_a_server_refuses_is_not_asked_again(answers: str, status: int) -> None:
    Answers.status = status
    with pytest.raises(ConfigError, match=f"the store refuses the request.*{status}"):
        find_object(f"{answers}/docs.idx")
    assert Answers.requests == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again_within_a_limit_that_is_said(
    answers: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "1")
    Answers.status = status
    with pytest.raises(ConnectionError, match=r"for 1 seconds"):
        find_object(f"{answers}/docs.idx")
    assert Answers.requests >= 3
    [record] = caplog.records  # one line, of the first attempt
    assert record.levelno == logging.WARNING
    assert f"{answers}/docs.idx: attempt 1 failed" in record.message
    assert str(status) in record.message
    assert record.message.endswith("it is tried again, for 1 s (MEGAPACK_RETRY_SECONDS)")


def test_a_pause_ends_with_the_limit(answers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever waits for the request loses patience before the client says what failed."""
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "0.2")
    monkeypatch.setattr("megapack.storage.remote.client.random.uniform", lambda *ends: ends[1])
    monkeypatch.setattr("megapack.storage.remote.client.FIRST_PAUSE", 1e6)
    Answers.status = 503
    with pytest.raises(ConnectionError, match="could not be read"):
        find_object(f"{answers}/docs.idx")
    assert Answers.requests >= 2, "not tried again when the time was up"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_limit_that_cannot_be_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", text)
    with pytest.raises(ConfigError, match=f"MEGAPACK_RETRY_SECONDS is '{text}'"):
        retry_seconds()


def test_whole_files_and_ranges_are_asked_for_equally_often(line: Line, tmp_path: Path) -> None:
    """What comes with wrong bytes: a range of .bin, and a whole file, by one rule."""
    address, asked = put_dataset(tmp_path / "docs"), []

    def wrong(_: object) -> None:
        asked.append(1)
        raise FormatError("it is not what it should be")

    found = find_object(f"{address}.samples")
    assert found is not None
    cache = open_cache()
    with pytest.raises(FormatError, match=r"docs\.samples is damaged, or changed on the way 5 ti"):
        cache.fetch(found, cache.entry("samples", address, found) / "samples", wrong)
    assert len(asked) == client.WRONG_ATTEMPTS
    asked.clear()

    def wrong_bytes(_: memoryview) -> None:
        asked.append(1)
        raise client.WrongBytesError("they are wrong")

    with pytest.raises(FormatError, match=r"docs\.samples is damaged, or changed on the way 5 ti"):
        found.read(0, 10, wrong_bytes)
    assert len(asked) == client.WRONG_ATTEMPTS


def test_full_disk_is_no_store(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything else that goes wrong on this machine tried again."""
    found = find_object(f"{put_dataset(tmp_path / 'docs')}.samples")
    assert found is not None

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    line.counts.clear()
    cache = open_cache()
    with pytest.raises(OSError, match="the disk of the cache is full"):
        cache.fetch(found, cache.entry("samples", "s3://x/y", found) / "samples")
    assert line.counts["GET"] == 1

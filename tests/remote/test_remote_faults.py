"""Failing stores and connections: no damaged batch, and an error message for every failure."""

from __future__ import annotations

import contextlib
import logging
import shutil
import ssl
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import Faults, Line, serve_objects
from ports import free_port
from programs import PYTHON, ended, on_small_disk

from megapack.data import PackedDataset
from megapack.errors import ConfigError, FormatError
from megapack.storage import IndexedDataset
from megapack.storage.remote import client
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.checksums import write_checksums
from megapack.storage.remote.client import find_object, put_object, retry_seconds
from megapack.storage.remote.copies import upload_dataset
from megapack.storage.remote.reader import fetch_file
from megapack.storage.verify import find_duplicates
from tests.remote.far import address_of, flip, put_dataset, run, write_packed
from tests.remote.stores import EVERY_STORE


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limit and the pauses of retries."""
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.6)
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)


@EVERY_STORE
def test_temporary_errors_change_no_batch(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of five requests fail, far more than in a store, so that each kind of error occurs."""
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(client, "WRONG_ATTEMPTS", 20)
    monkeypatch.setattr("megapack.storage.remote.reader.GAP_BLOCKS", 0)  # more requests
    address = put_dataset(tmp_path / "docs", 4000)
    kinds = dict.fromkeys(("slow_down", "cut", "short", "flip"), 0.2)
    line.faults = Faults(**kinds)
    assert run(address) == run(tmp_path / "docs")
    assert all(line.counts[kind] > 0 for kind in kinds), "a kind of error never occurred"


def test_slow_line_is_not_an_error(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 4 MiB takes longer than the timeout without data."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "30")
    (tmp_path / "docs").write_bytes(data := np.random.default_rng(0).bytes(8 << 20))
    line.bandwidth = 2e6
    put_object(address_of(tmp_path / "docs"), tmp_path / "docs")
    assert fetch_file(address_of(tmp_path / "docs")).read_bytes() == data


def test_damaged_bytes_reach_a_batch_without_checksums(line: Line, tmp_path: Path) -> None:
    """Check that the proxy really damages bytes: without checksums they reach a batch."""
    address = put_dataset(tmp_path / "docs")
    client.remove_object(f"{address}.checksums")
    far, near = IndexedDataset(address), IndexedDataset(tmp_path / "docs")
    line.faults = Faults(flip=1.0)
    assert far[0].tolist() != near[0].tolist()


@EVERY_STORE
def test_damaged_objects_are_named(line: Line, tmp_path: Path, impatient: None) -> None:
    address = put_dataset(tmp_path / "docs")
    damaged = Path(shutil.copyfile(tmp_path / "docs.bin", tmp_path / "damaged"))
    tokens = flip(damaged, 100_000)
    put_object(f"{address}.bin", damaged)
    far, near = IndexedDataset(address), IndexedDataset(tmp_path / "docs")
    assert far[0].tolist() == near[0].tolist(), "a block that is whole was refused"
    with pytest.raises(FormatError, match=r"docs\.bin is damaged.* differ from"):
        np.asarray(far.tokens)
    damaged.write_bytes(tokens[:-1])
    put_object(f"{address}.bin", damaged)
    with pytest.raises(FormatError, match="upload the dataset again"):
        IndexedDataset(address)


@pytest.mark.parametrize("suffix", [".idx", ".checksums", ".samples"])
def test_damaged_file_is_named(line: Line, tmp_path: Path, impatient: None, suffix: str) -> None:
    address = put_dataset(tmp_path / "docs")
    local = tmp_path / f"docs{suffix}"
    if suffix == ".checksums":
        write_checksums(str(tmp_path / "docs"), local)
    flip(local, -9)
    put_object(f"{address}{suffix}", local)
    with pytest.raises(FormatError, match=rf"^s3://.*docs\{suffix} is damaged") as failed:
        PackedDataset(address, f"{address}.samples")
    assert ".tmp" not in str(failed.value)
    assert not list((tmp_path / "cache").glob(f"*/docs{suffix}"))


@EVERY_STORE
def test_a_replaced_object_ends_the_run(line: Line, tmp_path: Path, impatient: None) -> None:
    address = put_dataset(tmp_path / "docs", 4000)
    far = PackedDataset(address, f"{address}.samples")
    far[0]
    (tmp_path / "new").mkdir()
    write_packed(tmp_path / "new" / "docs", 4000, seed=1)
    upload_dataset(str(tmp_path / "new" / "docs"), address)
    with pytest.raises(FormatError, match=r"docs\.bin was replaced after it was opened"):
        for i in range(1, len(far)):
            far[i]
    # A reader that opens it now has a new cache entry and reads the new object.
    near = IndexedDataset(tmp_path / "new" / "docs")
    assert IndexedDataset(address)[7].tolist() == near[7].tolist()
    client.remove_object(f"{address}.bin")
    with pytest.raises(FileNotFoundError, match=r"docs\.bin does not exist"):
        far[len(far) - 1]


def test_meta_file_of_a_replaced_dataset_is_removed(line: Line, tmp_path: Path) -> None:
    """A dataset without a meta file must not use the old dataset's checksums."""
    address = put_dataset(tmp_path / "docs")
    (tmp_path / "docs.meta.json").unlink()
    upload_dataset(str(tmp_path / "docs"), address)
    assert client.find_object(f"{address}.meta.json") is None
    assert IndexedDataset(address)[0].tolist() == IndexedDataset(tmp_path / "docs")[0].tolist()


def test_listing_of_a_bucket_is_retried(line: Line, impatient: None) -> None:
    line.faults = Faults(slow_down=1.0)
    with pytest.raises(ConnectionError, match=r"^s3://bucket: the store throttles"):
        client.names_in("s3://bucket")


@EVERY_STORE
def test_failing_store_is_named(line: Line, tmp_path: Path, impatient: None) -> None:
    """Permanent errors raise at once."""
    far = IndexedDataset(put_dataset(tmp_path / "docs"))
    for kind, error, reason in (
        ("expired", ConfigError, r"docs\.bin: the store refuses.*ExpiredToken"),
        ("slow_down", ConnectionError, r"docs\.bin: the store throttles"),
        ("cut", ConnectionError, r"docs\.bin could not be read or written for 1 seconds"),
    ):
        line.faults = Faults(**{kind: 1.0})
        line.counts.clear()
        with pytest.raises(error, match=reason):
            far[0]
        assert (line.counts["GET"] == 1) == (kind == "expired")
    line.faults = Faults()
    assert far[0].tolist() == IndexedDataset(tmp_path / "docs")[0].tolist()


def test_run_continues_when_the_server_restarts(line: Line, server: str, tmp_path: Path) -> None:
    """The server is killed in the middle of a run; another one with its objects starts later."""
    write_packed(tmp_path / "docs", 4000)
    address = address_of(tmp_path / "docs")
    with serve_objects(free_port()) as first:
        for line.server in (server, first):
            upload_dataset(str(tmp_path / "docs"), address)
        far, near = IndexedDataset(address), IndexedDataset(tmp_path / "docs")
        assert far[0].tolist() == near[0].tolist()
    requests = line.counts["requests"]
    later = threading.Timer(1.0, setattr, (line, "server", server))
    later.start()
    assert far[-1].tolist() == near[-1].tolist()
    assert later.finished.is_set(), "the server answered before it was started"
    assert line.counts["requests"] > requests
    later.join()


FULL = """
import os, sys
from megapack.storage import IndexedDataset
from megapack.storage.remote.reader import fetch_file
os.environ["MEGAPACK_CACHE"] = sys.argv[2]
far = IndexedDataset(sys.argv[1])
for read in (lambda: far.tokens[:], lambda: fetch_file(f"{sys.argv[1]}.samples")):
    try:
        read()
    except OSError as error:
        print(error)
"""


def test_a_full_cache_disk_is_named(line: Line, tmp_path: Path) -> None:
    """Fill the disk with blocks and with a whole file; neither is requested again."""
    address = put_dataset(tmp_path / "docs", 20_000)
    (tmp_path / "disk").mkdir()
    done = on_small_disk(tmp_path / "disk", 1, *PYTHON, FULL, address, tmp_path / "disk")
    assert done.stdout.count("the disk of the cache is full") == 2
    assert done.stdout.count("MEGAPACK_CACHE_SIZE") == 2 and not done.stderr


# ---- Permanent errors raise at once with a reason; temporary errors are logged and retried for a
# known time


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(client, "_logged_at", {})


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Whole(SimpleHTTPRequestHandler):
    """Python's file server, which ignores ranges and returns the whole file with status 200."""

    requests = 0

    def log_message(self, *_: object) -> None:
        type(self).requests += 1


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """Serve the files of a dataset ``docs``."""
    write_packed(tmp_path / "docs", 50)
    Whole.requests = 0
    with serving(partial(Whole, directory=str(tmp_path))) as server:
        yield server


def test_server_that_ignores_ranges_is_an_error_at_once(files: ThreadingHTTPServer) -> None:
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


def test_untrusted_certificate_is_an_error_at_once(
    files: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSL_CERT_FILE makes it trusted, as the error says."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = "-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
    how = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here {names}".split()
    ended("openssl", *how, "-keyout", key, "-out", certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    files.socket = context.wrap_socket(files.socket, server_side=True)
    address = f"https://127.0.0.1:{files.server_port}/docs.idx"

    def said() -> str:
        done = ended(*PYTHON, OPENS, address)
        assert not done.stderr, "it was retried"
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
def test_wrong_host_or_scheme_is_an_error_at_once(
    files: ThreadingHTTPServer, address: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_object(address.format(port=files.server_port))
    assert not [r for r in caplog.records if "docs.idx" in r.message], "it was retried"


class Answers(BaseHTTPRequestHandler):
    """Reply with the same status to every request."""

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
    Answers.requests = 0
    with serving(Answers) as server:
        yield f"http://127.0.0.1:{server.server_port}"


class WeakTags(Answers):
    """Serve ten bytes and their ranges, with a weak ETag, which matches nothing."""

    def do_GET(self) -> None:
        first, last = self.headers.get("Range", "bytes=0-9").removeprefix("bytes=").split("-")
        self.send_response(412 if "If-Match" in self.headers else 206)
        self.send_header("ETag", 'W/"1"')
        self.send_header("Content-Range", f"bytes {first}-{last}/10")
        self.send_header("Content-Length", str(int(last) + 1 - int(first)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"0123456789"[int(first) : int(last) + 1])

    def do_HEAD(self) -> None:
        self.do_GET()


def test_object_with_weak_tag_is_read() -> None:
    """Regression: every range of an object with a weak tag was reported as a replaced object."""
    with serving(WeakTags) as server:
        root = f"http://127.0.0.1:{server.server_port}"
        found = find_object(f"{root}/docs.idx")
        assert found is not None and found.etag == 'W/"1"'
        assert bytes(found.read(2, 5)) == b"234"
        others = [f"{root}/{name}" for name in "ab"]
        assert find_duplicates(others) == {}, "equal tags of two addresses mean nothing"


@pytest.mark.parametrize("status", [400, 401, 403, 410, 501])
def test_refused_requests_are_not_retried(answers: str, status: int) -> None:
    Answers.status = status
    with pytest.raises(ConfigError, match=f"the store refuses the request.*{status}"):
        find_object(f"{answers}/docs.idx")
    assert Answers.requests == 1


@pytest.mark.parametrize("status", [408, 429, 500, 504])
def test_temporary_errors_are_retried_and_logged(
    answers: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "0.6")
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    Answers.status = status
    with pytest.raises(ConnectionError, match=r"for 1 seconds"):
        find_object(f"{answers}/docs.idx")
    assert Answers.requests >= 3
    [record] = [r for r in caplog.records if answers in r.message]  # about the first attempt
    assert record.levelno == logging.WARNING
    assert f"{answers}/docs.idx: attempt 1 failed" in record.message
    assert str(status) in record.message
    assert record.message.endswith("retrying for 1 s (MEGAPACK_RETRY_SECONDS)")


def test_pauses_end_at_the_time_limit(answers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the waiting reader would time out before the client reports its error."""
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "0.2")
    monkeypatch.setattr("megapack.storage.remote.client.random.uniform", lambda *ends: ends[1])
    monkeypatch.setattr("megapack.storage.remote.client.FIRST_PAUSE", 1e6)
    Answers.status = 503
    with pytest.raises(ConnectionError, match="could not be read"):
        find_object(f"{answers}/docs.idx")
    assert Answers.requests >= 2, "no last attempt at the deadline"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", text)
    with pytest.raises(ConfigError, match=f"MEGAPACK_RETRY_SECONDS is '{text}'"):
        retry_seconds()


def test_whole_files_and_ranges_have_equal_retries(line: Line, tmp_path: Path) -> None:
    """Damage a range of .bin and a whole file: both have the same number of attempts."""
    address, asked = put_dataset(tmp_path / "docs"), []

    def wrong(error: type[Exception], _: object) -> None:
        asked.append(1)
        raise error("it is not what it should be")

    found = find_object(f"{address}.samples")
    assert found is not None
    cache = open_cache()
    path = cache.entry("samples", address, found) / "samples"
    for ask in (
        lambda: cache.fetch(found, path, partial(wrong, FormatError)),
        lambda: found.read(0, 10, partial(wrong, client.WrongBytesError)),
    ):
        asked.clear()
        with pytest.raises(FormatError, match=r"docs\.samples is damaged, .* in transit 5 times"):
            ask()
        assert len(asked) == client.WRONG_ATTEMPTS == 5


def test_unreadable_local_file_is_not_a_store_error(line: Line, tmp_path: Path) -> None:
    """The error names the missing local file, and no object is removed before it."""
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/nobody'"):
        put_object(f"{address_of(tmp_path / 'docs')}.samples", tmp_path / "nobody")
    with pytest.raises(IsADirectoryError):
        put_object(f"{address_of(tmp_path / 'docs')}.samples", tmp_path)
    address = put_dataset(tmp_path / "docs", 50)
    for suffix in (".idx", ".meta.json"):
        (tmp_path / f"docs{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"'{tmp_path}/docs\.idx'"):
        upload_dataset(str(tmp_path / "docs"), address)
    assert IndexedDataset.exists(address)

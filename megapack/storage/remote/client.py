"""Client of object stores (obstore): reads ranges of one version of an object.

Temporary errors are logged and retried after random pauses that grow; permanent errors
(certificate, host name, credentials, ranges) are raised at once. Damaged bytes are requested again
a few times. obstore itself finds credentials and endpoints (docs/guides/object_storage.md).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from megapack.errors import ConfigError, FormatError, redacted
from megapack.storage.address import split_address

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 180.0  # default of MEGAPACK_RETRY_SECONDS: time limit of all retries
WRONG_ATTEMPTS = 5  # attempts to read a range or small file with wrong checksum
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds
REQUEST_TIMEOUT = timedelta(seconds=30)  # longest time without a received byte
PART_BYTES = 5 << 20  # size of an upload's parts; the smallest that stores accept
MAX_PARTS = 10_000  # limit of S3 and Google
LOG_SECONDS = 30.0  # between two log lines about failed attempts in one folder

ending = threading.Event()  # set when the program ends: no more retries

# Permanent errors: pattern in the client's error, and the message.
_PERMANENT = (
    (
        r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)",
        "the server's certificate is not trusted ({}): set SSL_CERT_FILE to a file with the "
        "certificate of its authority (PEM)",
    ),
    (r"InvalidContentType", "the server does not speak TLS: write http:// instead of https://"),
    (
        r"(Name or service not known|No address associated with hostname)",
        "the server's name does not resolve ({}): check its spelling and the endpoint's",
    ),
    (
        r"NotPartial|RangeNotSupported",
        "the server ignores ranges (it returns the whole object): use one that supports ranges, or "
        "copy the dataset to this machine",
    ),
    (
        r"^(?:PermissionDenied|PermissionError|Unauthenticated)|BareRedirect|"
        r"status code: (?:4(?!08|29)\d\d (?!.*RequestTimeout)|501|505)",
        "the store refuses the request: check that credentials are set, sufficient and not "
        "expired, and check the region, the endpoint and this machine's clock",
    ),
)
_WRONG_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
_TOKEN_REQUEST = re.compile(r"token request|/latest/api/token|/latest/meta-data/")
_THROTTLED = re.compile(r"\b429 |SlowDown|ServerBusy|TooManyRequests|RequestLimitExceeded")


def retry_seconds() -> float:
    """Return MEGAPACK_RETRY_SECONDS. Raises ConfigError if it is not a positive number."""
    text = os.environ.get("MEGAPACK_RETRY_SECONDS")
    if not text:
        return RETRY_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"MEGAPACK_RETRY_SECONDS is {text!r}; it must be a positive number of seconds, as 180"
        )
    return seconds


def raise_if_ending() -> None:
    if ending.is_set():
        raise RuntimeError("the program is ending")


class WrongBytesError(Exception):
    """Received bytes are wrong; another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class RemoteObject:
    """One version of an object; reading never returns bytes of another version."""

    url: str
    num_bytes: int
    etag: str | None
    modified: datetime

    @property
    def version(self) -> str:
        """String that differs between versions of the object."""
        return f"{self.num_bytes} {self.etag or self.modified.isoformat()}"

    def read(
        self, begin: int, end: int, check: Callable[[memoryview], object] = lambda _: None
    ) -> memoryview:
        """Return bytes ``[begin, end)``, with retries; ``check`` raises WrongBytesError for damage.

        Raises FormatError if the object was replaced or its bytes are repeatedly wrong; ConfigError
        if the store refuses the request (credentials are missing, expired or not sufficient, ...);
        FileNotFoundError if the object was removed; and ConnectionError if the store cannot be
        reached, or keeps throttling.
        """

        def attempt() -> memoryview:
            data = _retry(self.url, lambda: self._get(begin, end))
            check(data)
            return data

        return retry_wrong_bytes(self.url, attempt)

    def _get(self, begin: int, end: int) -> memoryview:
        store, name = _store_of(self.url)
        options: dict[str, Any] = {"range": (begin, end)}
        if self.etag is not None and not self.etag.startswith("W/"):  # weak tags never match
            options["if_match"] = self.etag
        answer = _client().get(store, name, options=options)
        if _object(self.url, answer.meta).version != self.version:
            raise _replaced(self.url)
        data = memoryview(answer.bytes())
        if answer.range != (begin, end) or len(data) != end - begin:
            raise WrongBytesError(
                f"requested bytes [{begin}, {end}), received {len(data)} of {answer.range}"
            )
        return data


def find_object(url: str) -> RemoteObject | None:
    """Return the object at an address, or None. Raises the errors of ``RemoteObject.read``."""
    try:
        store, name = _store_of(url)
        return _object(url, _retry(url, lambda: _client().head(store, name)))
    except FileNotFoundError:
        return None


class _Upload(io.FileIO):
    """File that calls ``progress`` at every read."""

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[], object]) -> None:
        super().__init__(path)
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        self._progress()
        return super().read(size)


def put_object(
    url: str, path: str | os.PathLike[str], progress: Callable[[], object] = lambda: None
) -> None:
    """Upload a file; the object appears when it is complete. ``progress`` is called for every part.
    Raises the errors of ``RemoteObject.read``."""
    if url.startswith("file:"):  # other stores have no directories
        folder = unquote(urlsplit(split_address(url)[0]).path)
        Path(folder).mkdir(parents=True, exist_ok=True)

    with _Upload(path, progress) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        part = max(PART_BYTES, -(-num_bytes // MAX_PARTS))

        def attempt() -> None:
            file.seek(0)
            # The client itself retries single parts.
            store, name = _store_of(url, part / PART_BYTES if num_bytes > part else 0)
            _client().put(store, name, file, chunk_size=part)

        _retry(url, attempt)


def remove_object(url: str) -> None:
    """Delete an object if it exists. Raises the other errors of ``RemoteObject.read``."""
    with contextlib.suppress(FileNotFoundError):
        store, name = _store_of(url)
        _retry(url, lambda: _client().delete(store, name))


def names_in(folder: str) -> list[str]:
    """Return the sorted names of objects in a folder, with the errors of ``RemoteObject.read``."""
    refuse_fork()

    def attempt() -> list[str]:
        listing = _client().list_with_delimiter(_open_store(folder, retry_seconds(), 0))
        return sorted(entry["path"] for entry in listing["objects"])

    return _retry(folder, attempt)


def _object(url: str, meta: Any) -> RemoteObject:
    return RemoteObject(
        url=url, num_bytes=meta["size"], etag=meta["e_tag"], modified=meta["last_modified"]
    )


def retry_wrong_bytes(url: str, attempt: Callable[[], T]) -> T:
    """Call ``attempt`` until it returns without WrongBytesError, at most ``WRONG_ATTEMPTS`` times;
    then raise FormatError."""
    for number in range(1, WRONG_ATTEMPTS + 1):
        try:
            return attempt()
        except WrongBytesError as error:
            if number == WRONG_ATTEMPTS:
                raise FormatError(
                    f"{url} is damaged, or was damaged in transit {number} times: {error}; check a "
                    "copy with `megapack-build verify`, and upload it again"
                ) from error
            _log_attempt(url, number, str(error), f"at most {WRONG_ATTEMPTS} times")
    raise AssertionError


def _retry(url: str, attempt: Callable[[], T]) -> T:
    """Call ``attempt`` until it returns, for at most ``retry_seconds()``; translate its errors."""
    limit = retry_seconds()
    deadline = time.monotonic() + limit
    pause, number = FIRST_PAUSE, 1
    while True:
        try:
            return attempt()
        except FileNotFoundError as error:
            raise missing(url) from error
        except _client().exceptions.PreconditionError as error:  # Azure: also for removed objects
            raise (_replaced(url) if find_object(url) else missing(url)) from error
        except (_client().exceptions.BaseError, OSError) as error:
            _raise_if_permanent(url, error)
            # A slow transfer may exceed the limit at the first attempt: always try twice.
            if (time.monotonic() > deadline and number > 1) or ending.is_set():
                raise _unreachable(url, error, limit) from error
            retries = f"for {limit:.0f} s (MEGAPACK_RETRY_SECONDS)"
            _log_attempt(url, number, _summary(error), retries)
        # Pauses are random, so that readers do not all retry at the same time; the last pause ends
        # at the deadline.
        ending.wait(min(random.uniform(0, pause), max(0.0, deadline - time.monotonic())))
        pause, number = min(2 * pause, LONGEST_PAUSE), number + 1


_logged_at: dict[str, float] = {}  # folder -> time of the last log line about it
_logging = threading.Lock()


def _log_attempt(url: str, number: int, why: str, retries: str) -> None:
    """Log a failed attempt, at most once per folder and ``LOG_SECONDS``: many may fail."""
    folder = url.rpartition("/")[0]
    with _logging:
        now = time.monotonic()
        if now < _logged_at.get(folder, -math.inf) + LOG_SECONDS:
            return
        _logged_at[folder] = now
    log.warning("%s: attempt %d failed (%s); retrying %s", url, number, why, retries)


def missing(url: str) -> FileNotFoundError:
    return FileNotFoundError(f"{url} does not exist (or is not visible)")


def _replaced(url: str) -> FormatError:
    return FormatError(
        f"{url} was replaced after it was opened (another size or ETag); start the run again with "
        "the new object, or restore the old one"
    )


def _raise_if_permanent(url: str, error: Exception) -> None:
    text = f"{type(error).__name__} {error}"
    if _WRONG_RANGE.search(text):
        raise WrongBytesError(_summary(error)) from error
    for pattern, remedy in _PERMANENT:
        match = re.search(pattern, text, re.DOTALL)
        if match is not None and _TOKEN_REQUEST.search(text):
            raise _no_credentials(url, error) from error
        if match is not None:
            what = remedy.format(*match.groups())
            raise ConfigError(f"{url}: {what} ({_summary(error)})") from error


def _unreachable(url: str, error: Exception, limit: float) -> Exception:
    why = _summary(error)
    if _TOKEN_REQUEST.search(str(error)):
        return _no_credentials(url, error)
    if _THROTTLED.search(str(error)):
        return ConnectionError(
            f'{url}: the store throttles (it replied "slow down" for {limit:.0f} seconds): spread '
            f"the data over more prefixes, or read with fewer nodes ({why})"
        )
    return ConnectionError(
        f"{url} could not be read or written for {limit:.0f} seconds "
        f"(MEGAPACK_RETRY_SECONDS; raise it for a slow connection): {why}"
    )


def _no_credentials(url: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{url}: no credentials are set, and the cloud's metadata service returned none: set them "
        f"as docs/guides/object_storage.md describes ({_summary(error)})"
    )


def _summary(error: Exception) -> str:
    line, _, more = str(error).partition("\n\nDebug source")[0].partition("\n")
    code = "".join(re.findall(r"^<Error>.*?</Message>", more, re.DOTALL))
    return redacted(line)[:300] + redacted(code)[:300]


# ---- The client --------------------------------------------------------------------------------


@cache
def _client() -> Any:
    try:
        module = importlib.import_module("obstore")
        importlib.import_module("obstore.store")
        importlib.import_module("obstore.exceptions")
    except ImportError as error:
        raise ConfigError("object stores are read with obstore: pip install obstore") from error
    return module


def _store_of(url: str, parts: float = 0) -> tuple[Any, str]:
    folder, name = split_address(url)
    refuse_fork()
    return _open_store(folder, retry_seconds(), parts), name


@cache
def _open_store(folder: str, limit: float, parts: float) -> Any:
    """Return the client of a folder; all objects in it share its connections.

    Concurrent requests (64 of 4 MiB, or 12 parts) share the bandwidth, so on a slow connection each
    takes long although nothing fails. So a request that receives nothing times out early, but a
    slow one late. An upload does not show its progress, so the timeout of a part is half of the
    retry time (at least ``REQUEST_TIMEOUT``), and longer for larger parts.

    ``parts`` is the size of an upload's parts in units of ``PART_BYTES``: the client then retries
    parts itself. If it is 0, the client does not retry, since it would hide errors and cannot check
    bytes. Raises ConfigError if the address or the store's settings are invalid.
    """
    if folder.startswith("file:"):
        try:
            return _client().store.from_url(folder)
        except _client().exceptions.BaseError as error:
            raise missing(folder) from error
    retry_time = timedelta(seconds=limit)
    if parts:
        timeouts = {"timeout": parts * max(REQUEST_TIMEOUT, retry_time / 2)}
    else:
        timeouts = {"timeout": REQUEST_TIMEOUT + retry_time, "read_timeout": REQUEST_TIMEOUT}
    options = {**timeouts, "allow_http": True}  # for endpoints with http://
    first_pause, max_pause = timedelta(seconds=FIRST_PAUSE), timedelta(seconds=LONGEST_PAUSE)
    retries = {
        "max_retries": 1000 if parts else 0,
        "retry_timeout": max(1, parts) * retry_time,
        "backoff": {"init_backoff": first_pause, "max_backoff": max_pause, "base": 2},
    }
    if not folder.startswith("http"):  # keys are not URLs: %20 is three characters
        folder = folder.replace("%", "%25")
    try:
        return _client().store.from_url(folder, client_options=options, retry_config=retries)
    except (_client().exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"{folder}: {_summary(error)}; docs/guides/object_storage.md describes addresses and "
            "the settings of each store"
        ) from error


_users: list[int] = []  # id of the first process that used the client; inherited by forks


def refuse_fork() -> None:
    """Raise ConfigError if this process was forked from one that has used the client: the client's
    threads do not survive a fork, so the child would wait forever."""
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        raise ConfigError(
            f"process {os.getpid()} was forked from one that reads an object store already, which "
            "the client does not allow: use build_loader, or torch's DataLoader without workers "
            "(num_workers=0, Megatron's --num-workers 0) or with multiprocessing_context='spawn'"
        )

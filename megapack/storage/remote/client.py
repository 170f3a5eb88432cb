"""The client of object stores (obstore): one version of an object, read by ranges.

What may pass is tried again with growing, random pauses, and said after the first time; what cannot
(a certificate, a name, credentials, ranges) is an error at once. Bytes that are wrong are asked for
again a few times. Credentials and endpoints come from the client's usual places.
"""

from __future__ import annotations

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

RETRY_SECONDS = 180.0  # after these, what still fails is an error; MEGAPACK_RETRY_SECONDS
WRONG_ATTEMPTS = 5  # to read what comes with wrong bytes: a range, or a small file
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds
REQUEST_TIMEOUT = timedelta(seconds=30)  # without a byte of an answer; of all: ``_open_store``
PART_BYTES = 5 << 20  # of an upload in parts: the least that stores take
MOST_PARTS = 10_000  # that S3 and Google take
SAY_SECONDS = 30.0  # between lines of failed attempts, of one folder

ending = threading.Event()  # the program ends: nothing is tried again

# What will fail as it failed: in the client's error, and what to say of it.
_PERMANENT = (
    (
        r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)",
        "the server's certificate is not trusted ({}): let SSL_CERT_FILE name a file with the "
        "certificate of its authority (PEM)",
    ),
    (r"InvalidContentType", "the server does not speak TLS: write http:// instead of https://"),
    (
        r"(Name or service not known|No address associated with hostname)",
        "the server's name does not resolve ({}): is it, or the endpoint, spelled right?",
    ),
    (
        r"NotPartial|RangeNotSupported",
        "the server ignores ranges (it answers with the whole object): use one that serves ranges, "
        "or copy the dataset to this machine",
    ),
    (
        r"^(?:PermissionDenied|PermissionError|Unauthenticated)|BareRedirect|"
        r"status code: (?:4(?!08|29)\d\d (?!.*RequestTimeout)|501|505)",
        "the store refuses the request. Are the credentials there, not expired and sufficient, the "
        "region, the endpoint and this machine's clock right?",
    ),
)
_WRONG_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
_TOKEN_REQUEST = re.compile(r"token request|/latest/api/token|/latest/meta-data/")
_THROTTLED = re.compile(r"\b429 |SlowDown|ServerBusy|TooManyRequests|RequestLimitExceeded")


def retry_seconds() -> float:
    """For how long what fails is tried again. Raises ConfigError: it is set to no such number."""
    text = os.environ.get("MEGAPACK_RETRY_SECONDS")
    if not text:
        return RETRY_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"MEGAPACK_RETRY_SECONDS is {text!r}; it must be a number of seconds above 0, as 180"
        )
    return seconds


def raise_if_ending() -> None:
    """Raises RuntimeError: the program ends, and nobody is to wait any more."""
    if ending.is_set():
        raise RuntimeError("the program ends")


class WrongBytesError(Exception):
    """An answer that is not what was asked for; asking again may help."""


@dataclass(frozen=True, kw_only=True)
class RemoteObject:
    """One version of an object; another that takes its name is never read in its place."""

    url: str
    num_bytes: int
    etag: str | None
    modified: datetime

    @property
    def version(self) -> str:
        """Identity of the object's version."""
        return f"{self.num_bytes} {self.etag or self.modified.isoformat()}"

    def read(
        self, begin: int, end: int, check: Callable[[memoryview], object] = lambda _: None
    ) -> memoryview:
        """Bytes ``[begin, end)``, tried again until they are there and right.

        Args:
            check: raises WrongBytesError where they are not what they should be.

        Raises:
            FormatError: the object was replaced, or its bytes stay wrong.
            ConfigError: credentials are missing, expired or not sufficient.
            FileNotFoundError: the object is gone.
            ConnectionError: the store cannot be reached, or throttles all the time.
        """

        def attempt() -> memoryview:
            data = _until_it_works(self.url, lambda: self._get(begin, end))
            check(data)
            return data

        return until_right(self.url, attempt)

    def _get(self, begin: int, end: int) -> memoryview:
        store, name = _store_of(self.url)
        options: dict[str, Any] = {"range": (begin, end)}
        if self.etag is not None and not self.etag.startswith("W/"):  # which never match
            options["if_match"] = self.etag
        answer = _client().get(store, name, options=options)
        if _object(self.url, answer.meta).version != self.version:
            raise _replaced(self.url)
        data = memoryview(answer.bytes())
        if answer.range != (begin, end) or len(data) != end - begin:
            raise WrongBytesError(
                f"asked for bytes [{begin}, {end}), answered with {len(data)} of {answer.range}"
            )
        return data


def find_object(url: str) -> RemoteObject | None:
    """The object at an address, None where there is none. Raises as ``RemoteObject.read``."""
    try:
        store, name = _store_of(url)
        return _object(url, _until_it_works(url, lambda: _client().head(store, name)))
    except FileNotFoundError:
        return None


class _Upload(io.FileIO):
    """A file, and what is called whenever some of it is read."""

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[], object]) -> None:
        super().__init__(path)
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        self._progress()
        return super().read(size)


def put_object(
    url: str, path: str | os.PathLike[str], progress: Callable[[], object] = lambda: None
) -> None:
    """Upload a file. The object appears when it is complete.

    Args:
        progress: called for every part that is sent.

    Raises:
        OSError: the file cannot be opened.
        ConfigError, ConnectionError: as of ``RemoteObject.read``.
    """
    if url.startswith("file:"):  # stores of other kinds have no directories
        folder = unquote(urlsplit(split_address(url)[0]).path)
        Path(folder).mkdir(parents=True, exist_ok=True)

    with _Upload(path, progress) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        part = max(PART_BYTES, -(-num_bytes // MOST_PARTS))

        def attempt() -> None:
            file.seek(0)
            # A part that fails is sent again by the client, not all of them by us.
            store, name = _store_of(url, part / PART_BYTES if num_bytes > part else 0)
            _client().put(store, name, file, chunk_size=part)

        _until_it_works(url, attempt)


def remove_object(url: str) -> None:
    """Delete an object, if it is there. Raises as ``RemoteObject.read``."""
    try:
        store, name = _store_of(url)
        _until_it_works(url, lambda: _client().delete(store, name))
    except FileNotFoundError:
        return


def names_in(folder: str) -> list[str]:
    """Names of the objects directly in a folder, sorted. Raises as ``RemoteObject.read``."""
    refuse_fork()

    def attempt() -> list[str]:
        found = _client().list_with_delimiter(_open_store(folder, retry_seconds(), 0))
        return sorted(each["path"] for each in found["objects"])

    return _until_it_works(folder, attempt)


def _object(url: str, meta: Any) -> RemoteObject:
    return RemoteObject(
        url=url, num_bytes=meta["size"], etag=meta["e_tag"], modified=meta["last_modified"]
    )


def until_right(url: str, attempt: Callable[[], T]) -> T:
    """Ask again for what comes with wrong bytes, whole files and ranges alike.

    Args:
        url: of the object.
        attempt: raises WrongBytesError where they are.

    Raises:
        FormatError: they are wrong again and again.
    """
    number = 1
    while True:
        try:
            return attempt()
        except WrongBytesError as error:
            if number == WRONG_ATTEMPTS:
                raise FormatError(
                    f"{url} is damaged, or changed on the way {number} times: {error}; upload it "
                    "again from a sound copy (`megapack-build verify` tells)"
                ) from error
            _say(url, number, str(error), f"at most {WRONG_ATTEMPTS} times")
            number += 1


def _until_it_works(url: str, attempt: Callable[[], T]) -> T:
    limit = retry_seconds()
    until = time.monotonic() + limit
    pause, number = FIRST_PAUSE, 1
    while True:
        try:
            return attempt()
        except FileNotFoundError as error:
            raise missing(url) from error
        except _client().exceptions.PreconditionError as error:  # Azure: also of what is gone
            raise (_replaced(url) if find_object(url) else missing(url)) from error
        except (_client().exceptions.BaseError, OSError) as error:
            _raise_if_permanent(url, error)
            # A request that only trickles takes longer than the limit: there is always a second.
            if (time.monotonic() > until and number > 1) or ending.is_set():
                raise _unreachable(url, error, limit) from error
            _say(url, number, _summary(error), f"for {limit:.0f} s (MEGAPACK_RETRY_SECONDS)")
        # Random: not all readers at once. The last attempt comes when the time is up, not later.
        ending.wait(min(random.uniform(0, pause), max(0.0, until - time.monotonic())))
        pause, number = min(2 * pause, LONGEST_PAUSE), number + 1


_said: dict[str, float] = {}  # folder -> when an attempt in it was last spoken of
_saying = threading.Lock()


def _say(url: str, number: int, why: str, limit: str) -> None:
    """One line for all that fails in a folder within some time: whole pools fail at once."""
    folder = url.rpartition("/")[0]  # a bucket that is listed is in none
    with _saying:
        now = time.monotonic()
        if now < _said.get(folder, -math.inf) + SAY_SECONDS:
            return
        _said[folder] = now
    log.warning("%s: attempt %d failed (%s); it is tried again, %s", url, number, why, limit)


def missing(url: str) -> FileNotFoundError:
    return FileNotFoundError(f"{url} does not exist (or is not visible)")


def _replaced(url: str) -> FormatError:
    return FormatError(
        f"{url} was replaced since it was opened (another size or ETag); start the run again with "
        "what stands there now, or restore it"
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
            f'{url}: the store throttles (it answered "slow down" for {limit:.0f} seconds): spread '
            f"the data over more prefixes, or read with fewer nodes ({why})"
        )
    return ConnectionError(
        f"{url} could not be read or written for {limit:.0f} seconds "
        f"(MEGAPACK_RETRY_SECONDS; more of them over a slow line): {why}"
    )


def _no_credentials(url: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{url}: no credentials are set, and the service that gives them to machines in a cloud "
        f"gave none: set those that docs/guides/object_storage.md names ({_summary(error)})"
    )


def _summary(error: Exception) -> str:
    """The first line, and a store's code and message; what follows those may hold a token."""
    line, _, more = str(error).partition("\n\nDebug source")[0].partition("\n")
    code = "".join(re.findall(r"^<Error>.*?</Message>", more, re.DOTALL))
    return redacted(line)[:300] + redacted(code)[:300]


# --- the client ---------------------------------------------------------------------------------


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
    """One per folder, whose connections all its objects share.

    A slow line is no failure: requests that share it take long, 64 of 4 MiB or 12 parts at a time.
    So silence ends one early, a trickle late. Silence cannot be told while a part is sent: what
    ends one is half of the time for which the client tries it again, more of a larger part.

    Args:
        folder: its address.
        limit: ``retry_seconds()``.
        parts: of an upload in parts, the size of one in ``PART_BYTES``, which the client itself
            tries again; 0: it does not, since that hides what fails and knows no wrong bytes.

    Raises:
        ConfigError: it is no address of a store, or the store's settings cannot be what they are.
    """
    if folder.startswith("file:"):
        try:
            return _client().store.from_url(folder)
        except _client().exceptions.BaseError as error:
            raise missing(folder) from error
    tried = timedelta(seconds=limit)
    if parts:
        timeouts = {"timeout": parts * max(REQUEST_TIMEOUT, tried / 2)}
    else:
        timeouts = {"timeout": REQUEST_TIMEOUT + tried, "read_timeout": REQUEST_TIMEOUT}
    options = {**timeouts, "allow_http": True}  # where the endpoint says so
    first, longest = timedelta(seconds=FIRST_PAUSE), timedelta(seconds=LONGEST_PAUSE)
    retries = {
        "max_retries": 1000 if parts else 0,
        "retry_timeout": max(1, parts) * tried,
        "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
    }
    if not folder.startswith("http"):  # keys are no URLs: %20 in one is three signs, as in names
        folder = folder.replace("%", "%25")
    try:
        return _client().store.from_url(folder, client_options=options, retry_config=retries)
    except (_client().exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"{folder}: {_summary(error)}; docs/guides/object_storage.md tells how addresses "
            "are written and which settings a store needs"
        ) from error


_users: list[int] = []  # the process that uses it first, in its children, too


def refuse_fork() -> None:
    """The client's threads do not survive a fork: a child that used it would wait for ever.

    Raises:
        ConfigError: this process was forked from one that has used it.
    """
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        raise ConfigError(
            f"process {os.getpid()} was forked from one that reads an object store already, which "
            "the client does not allow: use build_loader, or torch's DataLoader without workers "
            "(num_workers=0, Megatron's --num-workers 0) or with multiprocessing_context='spawn'"
        )

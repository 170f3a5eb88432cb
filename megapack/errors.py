r"""Exceptions of megapack, and functions that make text safe to print.

    printable("a\x1b[2Jb")  # -> "a\\u001b[2Jb": text of a corpus cannot clear the screen

A message names the subject, the value, the limit and the remedy. Arguments of a function that do
not fit its signature raise ``ArgumentError``; files that cannot be opened raise plain ``OSError``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any


def require(module: str, why: str, package: str | None = None) -> Any:
    """Import an optional module. ``package`` is the name to install; None: that of the module.
    Raises MegapackError, which says ``why`` the module is needed and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        raise MegapackError(
            f"{why} needs the package {package} ({error}): pip install {package}"
        ) from error


class MegapackError(Exception):
    """Base class of all errors below."""


class ConfigError(MegapackError, ValueError):
    """A configuration or a command line is wrong."""


class ArgumentError(ConfigError, TypeError):
    """An argument of a function has an unknown name or a wrong type (``calls.checked_call``)."""


class FormatError(MegapackError, ValueError):
    """A file is truncated, damaged, or of another format than expected."""


class DataError(MegapackError, ValueError):
    """Input documents cannot be stored or packed (bad JSON, token id out of range, ...)."""


class IndexMismatchError(MegapackError, ValueError):
    """A .samples file is opened with a dataset from which it was not built."""


class LockedError(MegapackError, RuntimeError):
    """Another process is writing the same file; the message names its host and pid."""


class ResumeError(MegapackError, RuntimeError):
    """A checkpoint and a configuration determine different orders of samples."""


class RankMismatchError(MegapackError, RuntimeError):
    """Ranks of one job compute different contents of a step."""


def check_name(name: str, what: str = "the name") -> None:
    """Raise ConfigError for text that file names (NUL) or metadata (not UTF-8) cannot contain."""
    shown = name.encode(errors="backslashreplace").decode()
    if shown != name:
        shown = shown.replace(r"\udc", r"\x")  # undecodable bytes
        raise ConfigError(
            f"{what} {shown} is not UTF-8, so metadata cannot contain it: rename it, for example "
            "with convmv -f latin1 -t utf8"
        )
    if "\0" in name:
        raise ConfigError(f"{what} {name!r} contains NUL, which no file name can: remove it")


class MegapackWarning(UserWarning):
    """A request is fulfilled in another way, or costs more than necessary."""


def is_foreign(error: BaseException) -> bool:
    """Return whether an exception comes from another library, not megapack, the system or the user.
    Rust libraries raise a PanicException, which is a BaseException, not an Exception."""
    ours = (MegapackError, OSError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
    return not isinstance(error, ours)


def first_line(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def exit_code(error: Exception) -> int:
    """Return the exit code of a command: 2 for its command line or configuration, else 1."""
    return 2 if isinstance(error, ConfigError) else 1


_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://?)[^\s/?#]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://?[^\s?#]*[?#])[^\s)]+")


def redacted(text: object) -> str:
    """Remove user, password, query and fragment from the addresses in a text."""
    return _QUERY.sub(r"\1...", _USER.sub(r"\1...@", str(text)))


def printable(text: str) -> str:
    """Return a text in which every character is visible; line breaks (``\\n``) stay. Control and
    format characters (escape sequences, bidirectional overrides, zero-width ones), lone surrogates
    and unassigned code points become ``\\u001b``, which JSON reads as well."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) == "Zs":  # no-break and ideographic spaces
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


class PrintableStream:
    """Stream that writes ``printable(text)`` to another one, ``unfiltered``. A carriage return at
    the start of a write stays: progress bars of libraries begin with one."""

    def __init__(self, stream: Any) -> None:
        self.unfiltered = getattr(stream, "unfiltered", stream)

    def write(self, text: str) -> int:
        start = "\r" if text.startswith("\r") else ""
        self.unfiltered.write(start + printable(text[len(start) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Make the text printable that the block prints or logs to stdout and stderr."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(PrintableStream, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before

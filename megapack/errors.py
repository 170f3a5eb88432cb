"""Every exception megapack raises on purpose, and how text reaches a terminal.

    printable("a\x1b[2Jb")  # -> "a\\u001b[2Jb": text of a corpus cannot clear the screen

A message names the subject, the value, the limit and the remedy. Wrong arguments of a function are
plain ``ValueError``/``TypeError``; files that cannot be opened are plain ``OSError``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

# ---- Packages that only some inputs need: imported where used, with an error that says what to do


def require(module: str, why: str) -> Any:
    """Import an optional package.

    Args:
        why: what needs it, for the message.

    Raises:
        MegapackError: it cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MegapackError(
            f"{why} needs the package {package} ({error}): pip install {package}"
        ) from error


class MegapackError(Exception):
    """Base of every error below; catching it catches them all."""


class ConfigError(MegapackError, ValueError):
    """A configuration or a command line asks for something that cannot be."""


class FormatError(MegapackError, ValueError):
    """A file is truncated, damaged, or not of the format its name promises."""


class DataError(MegapackError, ValueError):
    """Input documents that may not be stored or packed (bad JSON, token id out of range, ...)."""


class IndexMismatchError(MegapackError, ValueError):
    """A .samples file was built from another dataset than the one it is opened with."""


class LockedError(MegapackError, RuntimeError):
    """Another process writes what was to be written; the message names its host and pid."""


class ResumeError(MegapackError, RuntimeError):
    """A checkpoint and a configuration disagree about the order of samples."""


class RankMismatchError(MegapackError, RuntimeError):
    """Ranks of one job do not agree on what this step contains."""


class MegapackWarning(UserWarning):
    """Something the user asked for is done differently, or costs more than it needs to."""


def is_foreign(error: BaseException) -> bool:
    """Return whether an exception comes from another library, and not from megapack, the system or
    the user. Rust libraries raise a PanicException, which is a BaseException, not an Exception.
    """
    ours = (MegapackError, OSError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
    return not isinstance(error, ours)


def first_line(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def exit_code(error: Exception) -> int:
    """Exit code of a command: 2 for its command line or configuration, 1 for anything else."""
    return 2 if isinstance(error, ConfigError) else 1


_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://?)[^\s/?#]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://?[^\s?#]*[?#])[^\s)]+")


def redacted(text: object) -> str:
    """A text without what addresses in it may hide: user and password, query and fragment."""
    return _QUERY.sub(r"\1...", _USER.sub(r"\1...@", str(text)))


def printable(text: str) -> str:
    """Return a text in which every character is visible; line breaks (``\\n``) stay.

    Control and format characters (escape sequences, bidirectional overrides, zero-width ones), lone
    surrogates and unassigned code points become ``\\u001b``, which JSON reads as well.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) == "Zs":  # no-break and ideographic spaces
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


class PrintableStream:
    """Output stream that writes ``printable(text)`` to another stream.

    A carriage return at the start of a write stays: progress bars of libraries begin with one.

    Attributes:
        unfiltered: the other stream, for text with styles that was made printable before.
    """

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
    """Make everything printable that the block writes to stdout and stderr, also logs."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(PrintableStream, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before

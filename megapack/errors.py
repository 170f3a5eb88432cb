"""Every exception megapack raises on purpose.

A message names the subject, the value, the limit and the remedy. Wrong arguments of a function are
plain ``ValueError``/``TypeError``; files that cannot be opened are plain ``OSError``.
"""

from __future__ import annotations

import importlib
import re
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


def exit_code(error: Exception) -> int:
    """Exit code of a command: 2 for its command line or configuration, 1 for anything else."""
    return 2 if isinstance(error, ConfigError) else 1


_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://?)[^\s/?#]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://?[^\s?#]*[?#])[^\s)]+")


def redacted(text: object) -> str:
    """A text without what addresses in it may hide: user and password, query and fragment."""
    return _QUERY.sub(r"\1...", _USER.sub(r"\1...@", str(text)))

"""Packages that only some inputs need: imported where used, with an error that says what to do."""

from __future__ import annotations

import importlib
from typing import Any

from megapack.errors import MegapackError

__all__ = ["require"]


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

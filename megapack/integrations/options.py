"""Check a trainer's options against the values that packed rows require.

check_options({"packing": (args.packing, False, "rows are packed already")})
# ConfigError: packing is True: rows are packed already. Set it to False.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapack.errors import ConfigError


def check_options(options: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Raise for the first option whose value is not the required one.

    Args:
        options: name, as the user writes it -> (value, required value, reason). A required value
            of None means that the option must be left out: then False, 0 and "" pass, too.

    Raises:
        ConfigError: with the name, the value, the reason and what to write instead.
    """
    for name, (value, required, reason) in options.items():
        if value == required or (required is None and not value):
            continue
        remedy = "Leave it out" if required is None else f"Set it to {required!r}"
        raise ConfigError(f"{name} is {value!r}: {reason}. {remedy}.")

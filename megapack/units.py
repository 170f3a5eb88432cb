"""Parsing and printing of sizes, counts and shares.

A size is a number of bytes, or of K, M, G, T, which are powers of 1024, on the command line, in the
environment and in YAML. Counts of documents and tokens use powers of 1000.

    parse_size("64M")  # -> 67108864
    size(67108864)  # -> "64 MiB"
    short(67108864)  # -> "67.1 M"
"""

from __future__ import annotations

import numbers
import re
from fractions import Fraction
from typing import Any

from megapack.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(?:I?B)?|B)?", re.ASCII)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_THOUSANDS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))


def parse_size(value: str | int) -> int:
    """Return the bytes of a size: ``64M``, ``1.5G``, ``64 MiB``, ``4096`` or a whole number. Raises
    ConfigError."""
    match = _SIZE.fullmatch(str(value).strip().upper())
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a size; write 4096, 64M or 1.5G (powers of 1024)")
    return int(Fraction(match[1]) * 1024 ** _POWERS[match[2] or ""])


def checked_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return a Python or numpy integer as int: no bool, no float that happens to be whole. Raises
    ConfigError if it is something else or outside [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} is {value!r}; it must be an integer")
    if not low <= int(value) <= high:
        raise ConfigError(f"{name} is {int(value):,}; it must be from {low:,} to {high:,}")
    return int(value)


def size(num_bytes: int) -> str:
    """Format bytes: 512 -> 512 B; 1234567 -> 1.18 MiB."""
    for power in "TGMK":
        unit = 1024 ** _POWERS[power]
        if num_bytes >= unit:
            return f"{_three_digits(num_bytes / unit)} {power}iB"
    return f"{num_bytes} B"


def count(number: int) -> str:
    """Format a number: 1234567 -> 1,234,567."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 shard; 1,234 shards."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """Format a count with three digits: 1234567 -> 1.23 M."""
    for limit, unit in _THOUSANDS:
        if abs(number) >= 0.9995 * limit:  # 999,700 is 1 M with three digits
            return f"{_three_digits(number / limit)}{unit}"
    return _three_digits(number)


def percent(fraction: float, digits: int | None = 2) -> str:
    """Format a share: 0.00123 -> 0.12 %; with None three significant digits, 0.123 %."""
    if digits is not None:
        return f"{100 * fraction:.{digits}f} %"
    return f"{_three_digits(100 * fraction)} %" if fraction < 0.9995 else f"{100 * fraction:.0f} %"


def _three_digits(number: float) -> str:
    """Format three significant digits, but keep all digits before the point: 1023.9 -> 1024."""
    return f"{number:.0f}" if abs(number) >= 999.5 else f"{number:.3g}"

"""Numbers as people read them, in messages and in what commands print."""

from __future__ import annotations

__all__ = ["count", "counted", "percent", "short", "size"]


def count(number: int) -> str:
    """1234567 -> 1,234,567"""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """1, "shard" -> 1 shard; 1234, "shard" -> 1,234 shards"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: int) -> str:
    """512 -> 512 B; 1234567 -> 1.23 MB"""
    return f"{num_bytes} B" if num_bytes < 1000 else f"{short(num_bytes)}B"


def short(number: float) -> str:
    """1234567 -> 1.23 M"""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def percent(fraction: float, digits: int = 2) -> str:
    """0.00123 -> 0.12 %"""
    return f"{100 * fraction:.{digits}f} %"

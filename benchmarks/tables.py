"""Readable tables of a benchmark's results: at most eight columns and three digits.

    body(results)               # a list of records as a table, a record of numbers as one row
    table(rows, "title")        # split by measurements, size and width; spreads in a note
    rounded(42_496_732), rounded(0.18421), rounded(131_072)    # -> "42.5M", "0.184", "131,072"

A row whose windows spread by more than 20 % of their median is marked. Negative memory is shown as
"not measurable".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

MOST_COLUMNS = 8
WIDE_SPREAD = 20  # per cent of the median, between the quartiles of the windows
LONGEST = 160  # characters of a cell; the .json has the rest
SPREAD = "spread_%"


def body(results: Any, title: str = "") -> Iterator[str]:
    """Yield a table per list of records, one row per record of numbers, then nested values."""
    if isinstance(results, list) and all(isinstance(row, dict) for row in results):
        yield from table(results, title)
    elif isinstance(results, dict):
        plain = {k: v for k, v in results.items() if not isinstance(v, (dict, list))}
        if plain:
            yield from table([plain], title)
        for key, value in results.items():
            if isinstance(value, (dict, list)):
                yield from body(value, f"{title}, {key}".lstrip(", "))


def table(rows: list[dict[str, Any]], title: str) -> Iterator[str]:
    """Yield tables of at most eight columns: split by measurements, by size, then by width."""
    rows = [{**row, **_per_document(row)} for row in rows]
    if title and any(_columns([row]) for row in rows):
        yield from (f"**{title}**", "")
    for kind in _kinds(rows):
        for heading, block in _blocks(kind):
            if heading:
                yield from (heading, "")
            yield from _narrow(block)


def _per_document(row: dict[str, Any]) -> dict[str, float]:
    if not row.get("num_documents") or not isinstance(row.get("seconds"), float):
        return {}
    return {"ns_per_document": 1e9 * row["seconds"] / row["num_documents"]}


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns that are not empty."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(row.get(key) not in (None, "", {}) for row in rows)]


def _kinds(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return groups of consecutive rows that have measurements in common."""
    kinds: list[list[dict[str, Any]]] = []
    for row in rows:
        keys = _columns([row])
        known = _columns(kinds[-1]) if kinds else []
        if keys and known[:1] == keys[:1] and set(known[1:]) & set(keys[1:]):
            kinds[-1].append(row)
        elif keys:
            kinds.append([row])
    return kinds


def _blocks(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (heading, rows): split a wide table by size if rows of one size are consecutive."""
    columns = _columns(rows)
    for column in columns[1:] if len(columns) > MOST_COLUMNS else ():
        values = [row.get(column) for row in rows]
        runs = [len(list(group)) for _, group in groupby(values)]
        if 1 < len(runs) == len(set(values)) and min(runs) > 2 and isinstance(values[0], int):
            for value, block in groupby(rows, key=lambda row: row[column]):
                yield (
                    f"**{_said(column)} {rounded(value)}**",
                    [{k: v for k, v in row.items() if k != column} for row in block],
                )
            return
    yield "", rows


def _narrow(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield one table, or several that repeat the first columns, and a note about spreads."""
    columns = _columns(rows)
    spreads = [column for column in columns if column.endswith(SPREAD)]
    columns = [column for column in columns if column not in spreads]
    if len(columns) > MOST_COLUMNS and len(rows) > 1:
        same = [c for c in columns[1:] if all(row.get(c) == rows[0].get(c) for row in rows)]
        columns = [column for column in columns if column not in same]
        if same:
            said = ", ".join(f"{_said(c)} {_cell(c, rows[0].get(c))}" for c in same)
            yield from (f"In all rows: {said}.", "")
    keys = _told_apart(rows, columns) if len(columns) > MOST_COLUMNS else []
    marks = [any((row.get(c) or 0) > WIDE_SPREAD for c in spreads) for row in rows]
    for shown in _parts([c for c in columns if c not in keys], MOST_COLUMNS - len(keys)):
        yield "| " + " | ".join(map(_said, keys + shown)) + " |"
        yield "|" + "---|" * len(keys + shown)
        for row, marked in zip(rows, marks, strict=True):
            if _columns([{column: row.get(column) for column in shown}]):
                cells = [_cell(column, row.get(column)) for column in keys + shown]
                cells[0] += " \\*" if marked else ""
                yield "| " + " | ".join(cells) + " |"
        yield ""
    if spreads:
        yield from (_spread_note(rows, spreads), "")


def _told_apart(rows: list[dict[str, Any]], columns: list[str]) -> list[str]:
    """Return the first column, and up to two more if these are needed to distinguish the rows."""
    keys = columns[:1]
    words = [c for c in columns[1:] if isinstance(rows[0].get(c), str)]
    for column in [*words, *columns[1:]]:
        if len({tuple(row.get(key) for key in keys) for row in rows}) == len(rows):
            break
        if len(keys) < 3 and column not in keys:
            keys.append(column)
    return keys


def _parts(columns: list[str], most: int) -> list[list[str]]:
    """Split columns into as few parts as possible, of about equal width."""
    width = math.ceil(len(columns) / math.ceil(len(columns) / most))
    return [columns[begin : begin + width] for begin in range(0, len(columns), width)]


def _spread_note(rows: list[dict[str, Any]], spreads: Sequence[str]) -> str:
    """Return the note: which rows are marked, and the largest spread of the others."""
    owners = {c: c.removesuffix(SPREAD).rstrip("_") for c in spreads}
    found = [
        (row.get(c) or 0.0, next(iter(row.values())) + (f" ({owner})" if owner else ""))
        for row in rows
        for c, owner in owners.items()
    ]
    others = max((value for value, _ in found if value <= WIDE_SPREAD), default=0.0)
    text = f"Spread of the windows (quartiles over the median): at most {rounded(others)} %"
    marked = ", ".join(f"{name} {value:.0f} %" for value, name in found if value > WIDE_SPREAD)
    return f"{text}." if not marked else f"{text}, but for \\*: {marked}. Do not build on these."


def _said(column: str) -> str:
    """Return the heading of a column: ``peak_bytes`` -> ``"peak MB"``."""
    return re.sub("_bytes$", "_MB", column).replace("_", " ")


def _cell(column: str, value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and value < 0 and ("bytes" in column or "mb" in column.lower()):
        return "not measurable"
    if number and column.endswith("_bytes"):
        value = value / 1e6
    text = rounded(value).replace("|", "/")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def rounded(value: Any) -> str:
    """Format with three digits; integers below 10,000, and multiples of 128 below a million, keep
    all digits."""
    if value in (None, {}):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) < (1_000_000 if value % 128 == 0 else 10_000):
        return f"{value:,}"
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(value) >= 0.9995 * size:
            return f"{_three(value / size)}{unit}"
    return _three(value)


def _three(value: float) -> str:
    """Format with three digits: ``12345.6`` -> ``"12,300"``; without decimals from 100 on."""
    if value == round(value) and abs(value) < 1000:
        return f"{value:.0f}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    digits = f"{value:#.3g}"
    return f"{float(digits):,.0f}" if abs(value) >= 99.95 else digits

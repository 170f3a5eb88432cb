"""A figure that a paper printed, beside the one measured here; and a real corpus to measure on."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of a paper.

    Attributes:
        source: paper and table, figure or section.
        corpus: which lengths it was measured on.
        item: the strategy or setting.
        quantity: what the figure is, with its unit.
        paper: the printed figure, None where there is none.
        measured: ours.
        agrees: within the tolerance; None if there is nothing to compare.
        why: the reason of a disagreement, or a remark.
    """

    source: str
    corpus: str
    item: str
    quantity: str
    paper: float | None
    measured: float
    agrees: bool | None = None
    why: str = ""


def compared(
    source: str,
    corpus: str,
    item: str,
    quantity: str,
    figures: tuple[float | None, float],
    *,
    within: float = 0.05,
    rounding: float = 0.0,
    claimed: bool = True,
    why: str = "",
    why_not: str = "",
) -> Row:
    """A row that agrees if ``|measured - paper| <= within * paper + rounding``.

    Args:
        source, corpus, item, quantity: as in ``Row``.
        figures: (the paper's or None, the measured one).
        claimed: False where the figures stand side by side without one claiming to be the other.
        why: said in any case.
        why_not: said only if the figures disagree.
    """
    paper, measured = figures[0], float(figures[1])  # not numpy's
    agrees: bool | None = None
    if claimed and paper is not None:
        agrees = abs(measured - paper) <= within * abs(paper) + rounding
    return Row(
        source=source,
        corpus=corpus,
        item=item,
        quantity=quantity,
        paper=paper,
        measured=measured,
        agrees=agrees,
        why=(why_not if agrees is False else "") or why,
    )


def python_sources(limit: int | None = None) -> tuple[str, Lengths]:
    """A real corpus that every machine has: the Python files of the interpreter and its packages.

    Tokens are runs of letters, runs of digits, line ends, blanks beyond a single one, and every
    other byte: about 3.5 bytes each, as with a trained tokenizer for code. One end-of-document
    token is added; empty files are left out.

    Returns:
        A description with the number of files, and the lengths in the order of the sorted paths.
    """
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    files = sorted({path for folder in folders if folder for path in Path(folder).rglob("*.py")})
    contents = (path.read_bytes() for path in files[:limit] if path.is_file())
    lengths = np.array(
        [len(_TOKEN.findall(content)) + 1 for content in contents if content], np.int32
    )
    return f"Python sources ({len(lengths):,} files)", lengths


# A letter outside of ASCII is several bytes, which belong together.
_TOKEN = re.compile(rb"[A-Za-z\x80-\xff]+|[0-9]+|[ \t]{2,}|[^A-Za-z\x80-\xff0-9 \t]")

"""Pictures of samples and steps for notebooks, as HTML without scripts.

    packed[7]           # a bar of the sample's documents, in the order of its row
    schedule.step(3)    # a bar per sample, by draw; the largest bucket has the full width

The length of a bar is the bucket's capacity. Its parts are pieces of documents; the remainder is
padding. Hover over a part to see its length. Colors are readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

_MOST_BARS = 32
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d")  # of neighboring documents


class Bar(NamedTuple):
    """One sample: its label, its capacity and the lengths of its documents' pieces, in tokens."""

    label: str
    capacity: int
    lengths: Sequence[int]


class Sample(dict[str, Any]):
    """Sample as ``PackedDataset`` returns it: a dict, which notebooks show as a picture."""

    def _repr_html_(self) -> str:
        ends = self["cu_seqlens_q" if "cu_seqlens_q" in self else "cu_seqlens"].tolist()
        lengths = [end - begin for begin, end in pairwise(ends)]
        is_document = (self["dataset_ids"] >= 0).tolist()
        pieces = [n for n, used in zip(lengths, is_document, strict=False) if used and n > 0]
        labels = float((np.asarray(self["loss_mask"]) != 0).mean())
        title = f"{len(pieces):,} documents; {labels:.1%} of the positions have a label"
        return picture(title, [Bar("sample", len(self["tokens"]), pieces)], 1)


def picture(title: str, bars: Iterable[Bar], num_bars: int) -> str:
    """Return the HTML of the first bars under a title; ``num_bars``: the number of all bars."""
    shown = list(islice(bars, _MOST_BARS))
    widest = max((bar.capacity for bar in shown), default=1)
    more = f"<div>and {num_bars - len(shown):,} more</div>" if num_bars > len(shown) else ""
    return (
        f"<div style='font:12px sans-serif;max-width:860px'><div>{escape(title)}</div>"
        f"{''.join(_bar(bar, widest) for bar in shown)}{more}</div>"
    )


def _bar(bar: Bar, widest: int) -> str:
    used = sum(bar.lengths)
    parts = [
        f"<span title='{length:,} tokens' style='flex:{length} 0 0;background:"
        f"{_COLORS[i % len(_COLORS)]}'></span>"
        for i, length in enumerate(bar.lengths)
    ]
    if used < bar.capacity:
        parts.append(
            f"<span title='{bar.capacity - used:,} of padding' style='flex:{bar.capacity - used} 0 "
            "0;border:1px dashed #888;box-sizing:border-box'></span>"
        )
    return (
        f"<div style='display:flex;align-items:center;margin:2px 0'><span style='width:13em'>"
        f"{escape(bar.label)}</span><span style='flex:1'><span style='display:flex;height:14px;"
        f"width:{100 * bar.capacity / widest:.4g}%'>{''.join(parts)}</span></span></div>"
    )

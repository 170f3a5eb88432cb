"""Draws packing.svg: ten documents concatenated and cut, in buckets, as the steps of two ranks.

    python docs/images/packing.py docs/images/packing.svg

What it draws is what the package makes of these ten lengths; nothing is placed by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megapack.packing import pack
from megapack.packing.sample_index import SampleIndex

LENGTHS = [4, 12, 8, 13, 8, 3, 16, 6, 2, 8]
COLORS = ["4e79a7", "f28e2b", "59a14f", "e15759", "76b7b2",
          "edc948", "b07aa1", "ff9da7", "9c755f", "86bcb6"]  # fmt: skip
UNIT, ROW, BAR = 14, 25, 18  # pixels of a token, of a row and of a bar in it
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Arial, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px }
  .small { font-size: 12px; fill: #57606a }
  .id { font-size: 11px; fill: #fff; text-anchor: middle; font-weight: 600 }
  .cut { stroke: #cf222e; stroke-width: 3 }
  .line { stroke: #8c959f; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .cut { stroke: #ff7b72 }
  }"""


def segment(x: float, y: float, document: int, begin: int, length: int) -> str:
    """A run of a document's tokens; a red edge where the document is cut."""
    width = length * UNIT
    parts = [
        f'<rect x="{x + 1:g}" y="{y}" width="{width - 2}" height="{BAR}" rx="3" '
        f'fill="#{COLORS[document]}"/>'
    ]
    if width >= 2 * UNIT:
        label = f'<text class="id" x="{x + width / 2:g}" y="{y + 13}">{document}</text>'
        parts.append(label)
    for cut, at in ((begin > 0, x), (begin + length < LENGTHS[document], x + width)):
        if cut:
            parts.append(
                f'<line class="cut" x1="{at:g}" x2="{at:g}" y1="{y - 3}" y2="{y + BAR + 3}"/>'
            )
    return "".join(parts)


def sample(index: SampleIndex, i: int, x: float, y: float) -> str:
    """The segments of a sample, one after the other."""
    parts = []
    for document, begin, length in index.sample(i)[1]:
        parts.append(segment(x, y, document, begin, length))
        x += length * UNIT
    return "".join(parts)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={kind!r}" if kind else ""}>{words}</text>'


def arrow(x: float, y: float) -> str:
    return f'<path class="line" d="M{x:g} {y:g}h24m-7 -5l7 5l-7 5"/>'


def summary(index: SampleIndex) -> str:
    """As in "4 of 10 documents cut, no padding"."""
    metrics = index.metrics()
    cut = round(metrics["truncation_ratio"] * len(LENGTHS))
    padding = f"{100 * metrics['padding_ratio']:.0f} % padding"
    return f"{cut or 'none'} of {len(LENGTHS)} documents cut, {padding}"


def draw() -> str:
    """The picture, as the text of an SVG file."""
    concatenated = pack(LENGTHS, "concat", buckets=[16])
    buckets = pack(LENGTHS, "bucket", buckets=[8, 16])
    left, middle, right, top = 16, 292, 596, 62
    parts = [text(left, 24, "documents", "title"), text(left, 43, "any length, in tokens", "small")]
    for i, length in enumerate(LENGTHS):
        parts.append(segment(left, top + i * ROW, i, 0, length))
    parts.append(arrow(left + 16 * UNIT + 14, top + 5 * ROW))

    parts += [text(middle, 24, "concatenated, the usual way", "title")]
    parts.append(text(middle, 43, summary(concatenated), "small"))
    for i in range(concatenated.num_samples):
        parts.append(sample(concatenated, i, middle, top + i * ROW))
    below = top + concatenated.num_samples * ROW + 44
    parts.append(text(middle, below, "in buckets of 8 and 16", "title"))
    parts.append(text(middle, below + 19, summary(buckets), "small"))
    below += 38
    of = [[], []]
    for i in range(buckets.num_samples):
        of[int(buckets.sample(i)[0])].append(i)
    for k, i in enumerate(of[0]):
        x, y = middle + (k % 2) * 8 * UNIT, below + (k // 2) * ROW
        parts.append(sample(buckets, i, x + (k % 2) * 8, y))
    for k, i in enumerate(of[1]):
        parts.append(sample(buckets, i, middle, below + (len(of[0]) // 2 + k) * ROW))

    parts.append(arrow(middle + 16 * UNIT + 26, below + 2.5 * ROW - 4))
    parts += [text(right, 24, "steps of two ranks", "title")]
    parts.append(text(right, 43, "one bucket a step, 16 tokens a rank and micro batch", "small"))
    y = top
    for number, ids in enumerate((of[0], of[1][:2])):
        parts.append(text(right, y + 13, f"step {number}"))
        for rank in range(2):
            parts.append(text(right + 54, y + 13, f"rank {rank}", "small"))
            x = float(right + 104)
            boundaries = [0]
            for i in ids[rank * len(ids) // 2 : (rank + 1) * len(ids) // 2]:
                parts.append(sample(buckets, i, x, y))
                for _, _, length in buckets.sample(i)[1]:
                    boundaries.append(boundaries[-1] + length)
                    x += length * UNIT
            parts.append(text(right + 104, y + BAR + 14, f"cu_seqlens {boundaries}", "small"))
            y += ROW + 20
        y += 14
    parts.append(text(right, y + 16, "Attention ends where a document ends; labels too.", "small"))
    parts.append(
        text(right, y + 34, "As many tokens on every rank, in samples of one length.", "small")
    )
    height = below + 5 * ROW + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" role="img">'
    title = "<title>Ten documents: concatenated, in buckets, and as steps of two ranks</title>"
    return "\n".join([head, title, f"<style>{STYLE}\n</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")

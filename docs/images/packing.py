"""Draw packing.svg: ten documents concatenated and cut, in buckets, and as steps of two ranks.

    python docs/images/packing.py docs/images/packing.svg

megapack packs these ten lengths, and the script draws the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megapack.packing import pack
from megapack.packing.sample_index import SampleIndex

LENGTHS = [4, 12, 8, 13, 8, 3, 16, 6, 2, 8]
COLORS = ["4e79a7", "f28e2b", "59a14f", "e15759", "76b7b2",
          "e6b422", "b07aa1", "e87ba4", "9c755f", "6b6ecf"]  # fmt: skip
UNIT, ROW, BAR = 17, 29, 22  # pixels of a token, of a row and of a bar in it
LEFT, RIGHT, WIDTH = 12, 346, 640  # chosen so that text is readable at a width of 360 pixels
STYLE = """
  text { font: 16px system-ui, "Segoe UI", Arial, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 19px }
  .small { font-size: 15px; fill: #57606a }
  .id { font-size: 14px; fill: #fff; text-anchor: middle; font-weight: 600 }
  .cut { stroke: #cf222e; stroke-width: 3 }
  .line { stroke: #8c959f; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .cut { stroke: #ff7b72 }
  }"""


def segment(x: float, y: float, document: int, begin: int, length: int) -> str:
    """Return a segment as a bar, with a red edge where its document is cut."""
    width = length * UNIT
    parts = [
        f'<rect x="{x + 1:g}" y="{y}" width="{width - 2}" height="{BAR}" rx="3" '
        f'fill="#{COLORS[document]}"/>'
    ]
    if width >= 2 * UNIT:
        label = f'<text class="id" x="{x + width / 2:g}" y="{y + 16}">{document}</text>'
        parts.append(label)
    for cut, at in ((begin > 0, x), (begin + length < LENGTHS[document], x + width)):
        if cut:
            parts.append(
                f'<line class="cut" x1="{at:g}" x2="{at:g}" y1="{y - 3}" y2="{y + BAR + 3}"/>'
            )
    return "".join(parts)


def sample(index: SampleIndex, i: int, x: float, y: float) -> str:
    """Return the bars of a sample's segments, from left to right."""
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
    """Return a caption like "4 of 10 cut (red), 0 % padding"."""
    metrics = index.metrics()
    cut = round(metrics["truncation_ratio"] * len(LENGTHS))
    padding = f"{100 * metrics['padding_ratio']:.0f} % padding"
    return f"{f'{cut} of {len(LENGTHS)} cut (red)' if cut else 'none cut'}, {padding}"


def heading(x: float, y: float, title: str, below: str) -> list[str]:
    return [text(x, y, title, "title"), text(x, y + 22, below, "small")]


def step(buckets: SampleIndex, number: int, ids: list[int], x: float, y: float) -> list[str]:
    """Draw the samples of two ranks, half each, and the boundaries for attention."""
    parts = []
    for rank in range(2):
        boundaries, at = [0], x
        for i in ids[rank * len(ids) // 2 : (rank + 1) * len(ids) // 2]:
            parts.append(sample(buckets, i, at, y + 8))
            for _, _, length in buckets.sample(i)[1]:
                boundaries.append(boundaries[-1] + length)
                at += length * UNIT
        words = f"step {number}, rank {rank}: cu_seqlens {boundaries}"
        parts.append(text(x, y, words, "small"))
        y += ROW + 25
    return parts


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    concatenated = pack(LENGTHS, "concat", buckets=[16])
    buckets = pack(LENGTHS, "bucket", buckets=[8, 16])
    top = 62
    parts = heading(LEFT, 24, "ten documents", "of 2 to 16 tokens")
    for i, length in enumerate(LENGTHS):
        parts.append(segment(LEFT, top + i * ROW, i, 0, length))
    parts.append(arrow(LEFT + 16 * UNIT + 20, top + 2.5 * ROW))

    parts += heading(RIGHT, 24, "concatenated, as usual", summary(concatenated))
    for i in range(concatenated.num_samples):
        parts.append(sample(concatenated, i, RIGHT, top + i * ROW))
    below = top + concatenated.num_samples * ROW + 36
    parts += heading(RIGHT, below, "in buckets of 8 and 16", summary(buckets))
    below += 38
    parts.append(arrow(LEFT + 16 * UNIT + 20, below + 2.5 * ROW))
    of: list[list[int]] = [[], []]
    for i in range(buckets.num_samples):
        of[int(buckets.sample(i)[0])].append(i)
    for k, i in enumerate(of[0]):
        x, y = RIGHT + (k % 2) * (8 * UNIT + 6), below + (k // 2) * ROW
        parts.append(sample(buckets, i, x, y))
    for k, i in enumerate(of[1]):
        parts.append(sample(buckets, i, RIGHT, below + (len(of[0]) // 2 + k) * ROW))

    below += 5 * ROW + 36
    parts += heading(
        LEFT, below, "two steps of two ranks", "one bucket a step, as many tokens on every rank;"
    )
    parts.append(text(LEFT, below + 43, "attention and labels stay inside documents", "small"))
    below += 76
    parts += step(buckets, 0, of[0], LEFT, below) + step(buckets, 1, of[1][:2], RIGHT, below)
    height = below + 2 * (ROW + 25) - 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" viewBox="0 0 {WIDTH} {height}" '
        'role="img">'
    )
    title = "<title>Ten documents: concatenated, in buckets, and as steps of two ranks</title>"
    return "\n".join([head, title, f"<style>{STYLE}\n</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")

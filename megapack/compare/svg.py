"""Just enough SVG for a report: elements, scales and ticks; colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Drawing", "Scale"]


@dataclass(frozen=True)
class Scale:
    """Data to pixels, linear or logarithmic; values outside the domain are clipped to its ends."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(clipped / self.low) / math.log(self.high / self.low)
        else:
            share = (clipped - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, target: int = 5) -> list[float]:
        """At most about ``target`` values in the domain: 1, 2, 5 x 10^k, or whole decades."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            decades = 1 + (last - first) // target
            return [10.0**k for k in range(first, last + 1, decades)]
        rough = (self.high - self.low) / max(1, target)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        count = math.floor((self.high - self.low) / step + 1e-9)
        first_tick = math.ceil(self.low / step - 1e-9) * step
        values = [first_tick + i * step for i in range(count + 1)]
        return [value for value in values if value <= self.high * (1 + 1e-12)]


@dataclass
class Drawing:
    """An SVG of fixed proportions that scales with the page.

    Attributes:
        width, height: user units of the view box (about pixels).
        top: where the view box begins; what is above is left out.
        label: what a screen reader says the picture shows.
    """

    width: float
    height: float
    label: str
    top: float = 0
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'
        )

    def rect(self, x: float, y: float, width: float, height: float, *, css: str, tip: str) -> None:
        """A filled rectangle that shows ``tip`` under the mouse."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.2f}" '
            f'height="{height:.1f}" class="{css}"><title>{escape(tip)}</title></rect>'
        )

    def circle(self, x: float, y: float, radius: float, css: str, tip: str) -> None:
        """A dot that shows ``tip`` under the mouse."""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{css}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def polyline(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """Connected straight lines."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" class="{css}"/>')

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        """Words; ``anchor`` is start, middle or end."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">'
            f"{escape(words)}</text>"
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Coloured squares with words, side by side: (css class, words)."""
        for css, words in entries:
            self.rect(x, y - 9, 10, 10, css=css, tip=words)
            self.text(x + 15, y, words, "tick")
            x += 15 + 5.9 * len(words) + 22

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg viewBox="0 {self.top:g} {self.width:g} {self.height - self.top:g}" role="img" '
            f'aria-label="{escape(self.label, quote=True)}">\n{body}\n</svg>'
        )

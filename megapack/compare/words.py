"""Numbers as a person reads them."""

from __future__ import annotations

__all__ = ["duration", "money", "percent", "short_number"]


def percent(share: float) -> str:
    """A share in percent with three significant digits: 0.00034 -> 0.034 %."""
    if share == 0:
        return "0 %"
    value = 100 * share
    return f"{value:.0f} %" if value >= 99.95 else f"{value:.3g} %"


def short_number(value: float, digits: int = 3) -> str:
    """A number for a label: 1024 -> 1,024; 12345678 -> 12.3M; 0.00034 -> 0.00034."""
    if value == 0:
        return "0"
    size = abs(value)
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size >= 0.9995 * scale:
            return f"{value / scale:.{digits}g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def money(amount: float) -> str:
    """Dollars, short: 1234567 -> $1.23M."""
    return f"${amount:,.2f}" if amount < 1000 else f"${short_number(amount)}"


def duration(hours: float) -> str:
    """Hours as a person says them: 0.09 -> 5.4 minutes."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"

"""Mixing rules that tests name in configurations."""

from __future__ import annotations

from typing import Any

from megapack.training.autopilot import SourceReport


def doubles(report: SourceReport) -> tuple[dict[str, float], dict[str, Any]]:
    """Double the weight of the source whose loss fell most since the last decision."""
    last = report.state.get("losses", {})
    fell = {name: last.get(name, loss) - loss for name, loss in report.losses.items()}
    best = max(fell, key=lambda name: fell[name])
    weights = {name: w * (1 + (name == best)) for name, w in report.weights.items()}
    return weights, {"losses": report.losses}


def answers(report: SourceReport, *, weights: Any, state: Any = ()) -> tuple[Any, Any]:
    return weights, state or {}

"""Online mixing with your own rule: draw more of the sources whose loss will fall fastest.

    PYTHONPATH=. megapack-pretrain --config config.yaml \
        --set mixing.rule=examples.online_mixing:ado --set mixing.every=500

The rule of ADO (Jiang et al. 2024, "Adaptive Data Optimization", arXiv 2410.11820), without its
averaging between single steps: a law e + b n^-a is fitted to the loss of every source over its
label tokens n. The preference of a source is the predicted fall of its loss per token, times its
share so far (credit) and its prior weight. Every 500 steps the run calls the rule with the mean
loss of every source since the last call, and appends the result to its program as a stage. The rule
returns its state, too, so a resumed run continues exactly. ``megapack-build trace config.yaml
--skipped`` shows every mixture that was used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megapack.training.autopilot import SourceReport

CREDIT, FLOOR = 0.5, 0.01  # power of the share so far; the least share of a source
Curves = dict[str, list[tuple[float, float]]]  # source -> (label tokens so far, loss there)


def fit(tokens: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """Fit (e, b, a) of the law e + b n^-a: the best e, with a line in logarithms for each."""
    laws = []
    for e in np.linspace(0, 0.99, 100) * losses.min():
        slope, height = np.polyfit(np.log(tokens), np.log(losses - e), 1)
        error = np.square(np.log(e + np.exp(height) * tokens**slope) - np.log(losses)).sum()
        laws.append((error, e, np.exp(height), max(0.0, -slope)))
    return min(laws)[1:]


def new_weights(curves: Curves, prior: dict[str, float]) -> dict[str, float]:
    """Return shares from the curves; a source with fewer than three points keeps its prior."""
    shares = {name: weight / sum(prior.values()) for name, weight in prior.items()}
    seen = {name: curve[-1][0] if curve else 0.0 for name, curve in curves.items()}
    preferred = {}
    for name, curve in curves.items():
        if len(curve) >= 3:
            tokens, losses = np.array(curve).T
            _, b, a = fit(tokens, losses)
            speed = a * b * tokens[-1] ** (-a - 1)  # minus the law's derivative
            preferred[name] = shares[name] * (seen[name] / sum(seen.values())) ** CREDIT * speed
    to_give = sum(shares[name] for name in preferred)
    for name, preference in preferred.items():
        shares[name] = max(FLOOR, to_give * preference / max(sum(preferred.values()), 1e-300))
    total = float(sum(shares.values()))
    return {name: round(float(share) / total, 6) for name, share in shares.items()}


def ado(report: SourceReport) -> tuple[dict[str, float], dict[str, Any]]:
    """Return weights and the rule's state, as ``mixing.rule`` requires."""
    state = report.state or {"prior": report.weights, "curves": {n: [] for n in report.weights}}
    curves: Curves = {name: [*curve] for name, curve in state["curves"].items()}
    for name, loss in report.losses.items():
        before = curves[name][-1][0] if curves[name] else 0
        curves[name].append((before + report.label_tokens[name], loss))
    return new_weights(curves, state["prior"]), {"prior": state["prior"], "curves": curves}

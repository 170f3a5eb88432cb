"""A public bug, rebuilt: what the probe must say about the broken model, and about the fixed one.

    Bug("axolotl-ai-cloud/axolotl#3796", broken=..., fixed=..., batch=..., kind="attention_mask",
        layer="layers.0.self_attn")

``check`` probes both: the first leak of the broken model has the kind and the layer of the bug, and
the fixed model has no leak. So a probe that accuses every model fails, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megapack.probe import Leak, Report, probe


@dataclass(frozen=True)
class Bug:
    """A rebuilt bug; ``issue`` is ``owner/repository#number`` on GitHub."""

    issue: str
    broken: Callable[[], Any]  # returns a target of ``probe``
    fixed: Callable[[], Any]
    batch: dict[str, Tensor]
    kind: str
    layer: str | None  # None: the bug is outside of the modules, for example in the loss
    pairs: set[tuple[int, int]] | None = None  # the only documents that leak (from, to)
    options: dict[str, Any] = field(default_factory=dict)  # of ``probe``

    def __str__(self) -> str:
        return self.issue


def check(bug: Bug) -> None:
    """Assert that the probe finds and names the bug, and accepts the fixed model."""
    report = probe(bug.broken(), bug.batch, **bug.options)
    assert not report.ok, f"{bug} was not found"
    leak = report.leaks[0]
    assert (leak.kind, leak.layer) == (bug.kind, bug.layer), str(report)
    if bug.pairs is not None:
        assert pairs_of(report) <= bug.pairs, str(report)
    assert bug.layer is None or bug.layer in str(report)
    fixed = probe(bug.fixed(), bug.batch, **bug.options)
    assert fixed.ok, f"the fixed model of {bug} was accused: {fixed}"


def pairs_of(report: Report) -> set[tuple[int | None, int | None]]:
    """Return the documents of all leaks, (from, to)."""
    return {_pair(leak) for leak in report.leaks}


def _pair(leak: Leak) -> tuple[int | None, int | None]:
    return leak.from_document, leak.to_document

"""Result of a probe: ``Report``, its ``Leak`` values, and ``LeakError``.

Leak(kind="attention_mask", from_document=0, to_document=1, direction="forward",
     first_position=37, size=0.41, noise=0.001, layer="layers.0.self_attn")
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megapack.errors import ConfigError

# Kinds of leaks, and what a report says about them.
CAUSES: dict[str, str] = {
    "attention_mask": "attention crosses documents: check its backend and the boundaries it gets",
    "position_ids": "positions, windows or chunks depend on other documents or on the row",
    "recurrent_state": "the recurrent state is not reset at a boundary",
    "convolution": "the causal convolution reads tokens of the previous document",
    "row_statistics": "a statistic (norm, scale, maximum) is taken over several documents",
    "expert_capacity": "documents compete for experts",
    "loss_mask": "the loss counts a label that belongs to another document",
    "mtp": "multi-token prediction looks across the end of a document",
    "gradient": "only the backward pass mixes documents",
}


class LeakError(ConfigError):
    """Error of a probe: documents depend on each other, or nothing can be compared."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Effect of a document on another one."""

    kind: str
    """Key of CAUSES."""
    from_document: int | None
    """Number in the batch, counted over all rows; None: the row as a whole."""
    to_document: int
    direction: Literal["forward", "backward"]
    """Forward: from an earlier document of the row to a later one."""
    first_position: int
    """Affected token, counted over all rows."""
    size: float
    """Largest change, as a fraction of the change in the documents whose tokens changed."""
    noise: float
    """Fraction that rounding explains."""
    layer: str | None = None
    """Qualified name of the first module whose output leaks; None: none was seen."""
    rank: int | None = None
    stage: int | None = None

    def __str__(self) -> str:
        source = "the row" if self.from_document is None else f"document {self.from_document}"
        place = "" if self.layer is None else f", first in {self.layer or 'the model'}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        where += "" if self.stage is None else f" (stage {self.stage})"
        return (
            f"{source} -> {self.to_document} ({self.direction}, from position "
            f"{self.first_position}): {self.size:.2g}{place}{where}: {self.kind} "
            f"({CAUSES[self.kind]})"
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings of a probe; ``notes`` list the checks that were not possible."""

    leaks: tuple[Leak, ...]
    forwards: int
    """Forward passes of the given batch."""
    seconds: float
    noise: float
    """Fraction of a change that rounding explains."""
    documents: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no document depends on another."""
        return not self.leaks

    def as_dict(self) -> dict[str, Any]:
        """Return values that json can write."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        effort = f"{self.forwards} forward passes, {self.seconds:.1f} s"
        if self.ok:
            head = f"{self.documents} documents are independent ({effort})"
        else:
            number = len({leak.to_document for leak in self.leaks})
            head = (
                f"{number} of {self.documents} documents depend on others ({effort}; rounding "
                f"explains {self.noise:.2g} of a change)"
            )
        return "\n".join([head, *map(str, self.leaks), *(f"note: {note}" for note in self.notes)])

    def raise_if_leaking(self) -> None:
        """Raise LeakError with the report if a document depends on another."""
        if self.leaks:
            raise LeakError(str(self))


def merge(ranks: list[list[Leak]]) -> list[Leak]:
    """Join the leaks of all ranks; a pipeline's last stage gets the layer from an earlier one."""
    every = [leak for leaks in ranks for leak in leaks]
    layers = [leak for leak in every if leak.to_document < 0]
    real = [leak for leak in every if leak.to_document >= 0]
    if layers:
        first = layers[0]
        where = {name: getattr(first, name) for name in ("layer", "kind", "rank", "stage")}
        real = [replace(leak, **where) for leak in real]
    return real

"""Rules of ``bucket`` for the core, decided by the histogram of lengths: promote, refine, or not.

* ``bucket_rules``: the rules, and the decisions that the index records, each with its reason.
* ``Outcome``: total capacity and number of samples of a packing, which decisions compare.
* ``exact_ratio``: a decimal as the core takes it.

    bucket_rules(lengths, [1024, 4096], 1, promote="auto", ...)
    # -> {"buckets": [1024, 4096], "max_segments": 0},
    #    {"promote": "off: documents shorter than ... padded by 0.031 % without and by ..."}

The histogram takes milliseconds; ``refine`` takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing.refine import price_of_a_sample, refine

PADDING_WORTH_SAVING = 1000  # a packing that pads at most 1 token in 1000 is not improved


def exact_ratio(share: float) -> tuple[int, int]:
    """Return the printed decimal of ``share`` as (numerator, denominator): 0.1 is (1, 10)."""
    return Fraction(repr(float(share))).limit_denominator(1 << 62).as_integer_ratio()


@dataclass(frozen=True)
class Outcome:
    """Total capacity and number of the samples for the documents of a histogram."""

    positions: int
    samples: int

    @classmethod
    def of(cls, counts: NDArray[np.int64], buckets: list[int], rules: dict[str, Any]) -> Outcome:
        samples = _core.count_bucket_samples(counts, rules)
        return cls(sum(c * n for c, n in zip(buckets, samples, strict=True)), sum(samples))

    @classmethod
    def of_packing(cls, packed: Mapping[str, Any]) -> Outcome:
        samples = np.diff(packed["bucket_sample_offsets"])
        return cls(int(packed["bucket_capacity"] @ samples), int(samples.sum()))

    def pads_too_much(self, tokens: int) -> bool:
        return (self.positions - tokens) * PADDING_WORTH_SAVING > self.positions

    def padding(self, tokens: int) -> str:
        padding = (self.positions - tokens) / self.positions if self.positions else 0.0
        return f"{100 * padding:.3f} %"


def bucket_rules(
    lengths: _core.DocumentLengths,
    buckets: list[int],
    threads: int,
    *,
    promote: str,
    padding_threshold: float,
    max_segments: int | None,
    refine: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the rules for the core, and the decisions: name -> choice and reason.

    Args:
        buckets: capacities in tokens, ascending.
        promote, padding_threshold, max_segments, refine: parameters of ``bucket``.

    Raises ConfigError: ``refine`` with ``max_segments``.
    """
    if refine and max_segments is not None:
        raise ConfigError(
            f"max_segments is {max_segments}, and refine makes samples with any number of "
            "segments; leave out one of the two"
        )
    padded: dict[str, Any] = {"buckets": buckets, "max_segments": max_segments or 0}
    threshold = exact_ratio(padding_threshold)
    promoted = padded | {"overflow": "promote", "padding_threshold": threshold}
    rules = {"off": padded, "on": promoted, "lookahead": promoted | {"lookahead": True}}
    decisions: dict[str, str] = {}
    if promote != "auto" and not refine:
        return rules[promote], decisions
    # The histogram omits full chunks of long documents, which are the same in every case.
    counts, _ = _core.length_histogram(lengths, buckets[-1], threads)
    tokens = int((counts * np.arange(len(counts))).sum())
    if promote == "auto":
        off, on = (Outcome.of(counts, buckets, rules[name]) for name in ("off", "on"))
        tried = {"off": off}
        # Promotion leaves fewer samples in small buckets, and lookahead leaves the fewest. A draw
        # that needs more samples than a bucket has repeats them, so stop at the first that pads
        # little enough.
        if off.pads_too_much(tokens):
            tried["on"] = on
            if on.pads_too_much(tokens):
                tried["lookahead"] = Outcome.of(counts, buckets, rules["lookahead"])
        promote = min(tried, key=lambda name: tried[name].positions)
        alternative = on if promote == "off" else tried[promote]
        decisions["promote"] = (
            f"{promote}: documents shorter than the largest bucket would be padded by "
            f"{off.padding(tokens)} without and by {alternative.padding(tokens)} with it"
        )
    if not refine:
        return rules[promote], decisions
    given, decisions["refine"] = _try_to_refine(counts, buckets, rules[promote], tokens)
    return rules[promote] | ({"given": given} if given else {}), decisions


def _try_to_refine(
    counts: NDArray[np.int64], buckets: list[int], rules: dict[str, Any], tokens: int
) -> tuple[list[tuple[int, int, list[tuple[int, int]]]], str]:
    """Return the patterns for the core (empty if they are not worth it) and the reason."""
    plain = Outcome.of(counts, buckets, rules)
    if not plain.pads_too_much(tokens):
        return [], f"left, not tried: {plain.padding(tokens)} padding is not worth saving"
    samples, remaining = refine(counts, buckets)
    unrefined = Outcome.of(remaining, buckets, rules)
    refined = Outcome(
        unrefined.positions + sum(buckets[s.bucket] * s.count for s in samples),
        unrefined.samples + sum(s.count for s in samples),
    )
    price = price_of_a_sample(buckets)
    worth = plain.positions - refined.positions + price * (refined.samples - plain.samples)
    better = refined.positions <= plain.positions and worth > 0
    reason = (
        f"{'taken' if better else 'left'}: {refined.padding(tokens)} padding in "
        f"{refined.samples:,} samples with it, {plain.padding(tokens)} in {plain.samples:,} without"
    )
    patterns = [(s.bucket, s.count, list(s.lengths.items())) for s in samples]
    return patterns if better else [], reason

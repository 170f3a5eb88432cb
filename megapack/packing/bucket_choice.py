"""What `bucket` decides by itself: whether to promote, and whether refined samples are better.

Both are decided on the histogram of lengths, which costs milliseconds (refine: seconds)
and makes no sample; the choice and its reason stand in the index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing.ratios import exact_ratio
from megapack.packing.refine import Refined, price_of_a_sample, refine

__all__ = ["BucketWay", "choose_bucket_way"]

# A packing that pads less than one token in so many is left alone.
PADDING_WORTH_SAVING = 1000


@dataclass(frozen=True, kw_only=True)
class BucketWay:
    """How to pack: the rules that the core is told, and why."""

    rules: dict[str, Any]
    decisions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Outcome:
    """Tokens of capacity used and samples made for the documents of a histogram."""

    slots: int
    samples: int

    def padding(self, tokens: int) -> str:
        return f"{100 * (self.slots - tokens) / self.slots if self.slots else 0.0:.3f} %"


def choose_bucket_way(
    lengths: _core.DocumentLengths,
    buckets: list[int],
    *,
    promote: str,
    padding_threshold: float,
    max_segments: int | None,
    refine: bool,
    threads: int,
) -> BucketWay:
    """Decide what is left open; the parameters are those of the strategy.

    Raises:
        ConfigError: refine and max_segments are both asked for.
    """
    if refine and max_segments is not None:
        raise ConfigError(
            f"refine looks for samples of any number of segments, and max_segments is "
            f"{max_segments}; choose one of them"
        )
    padded: dict[str, Any] = {"buckets": buckets, "max_segments": max_segments or 0}
    promoted = {"overflow": "promote", "padding_threshold": exact_ratio(padding_threshold)}
    rules = {"off": padded, "on": padded | promoted}
    if promote != "auto" and not refine:
        return BucketWay(rules=rules[promote])
    # Full chunks of long documents are the same in every case and left out.
    counts, _ = _core.length_histogram(lengths, buckets[-1], threads)
    tokens = int((counts * np.arange(len(counts))).sum())
    decisions = {}
    if promote == "auto":
        off, on = (_drained(counts, buckets, rules[name]) for name in ("off", "on"))
        worth = (off.slots - tokens) * PADDING_WORTH_SAVING > off.slots > on.slots
        promote = "on" if worth else "off"
        decisions["promote"] = (
            f"{promote}: documents shorter than the largest bucket would be padded by "
            f"{off.padding(tokens)} without and by {on.padding(tokens)} with it"
        )
    if not refine:
        return BucketWay(rules=rules[promote], decisions=decisions)
    given, decisions["refine"] = _try_to_refine(counts, buckets, rules[promote], tokens)
    patterns = {"given": given} if given else {}
    return BucketWay(rules=rules[promote] | patterns, decisions=decisions)


def _try_to_refine(
    counts: NDArray[np.int64], buckets: list[int], rules: dict[str, Any], tokens: int
) -> tuple[list[tuple[int, int, list[tuple[int, int]]]], str]:
    plain = _drained(counts, buckets, rules)
    if (plain.slots - tokens) * PADDING_WORTH_SAVING <= plain.slots:
        return [], f"left, not tried: {plain.padding(tokens)} padding is not worth saving"
    samples, left = refine(counts, buckets)
    rest = _drained(left, buckets, rules)
    refined = _Outcome(
        rest.slots + sum(buckets[s.bucket] * s.count for s in samples),
        rest.samples + sum(s.count for s in samples),
    )
    price = price_of_a_sample(buckets)
    better = refined.slots - price * refined.samples < plain.slots - price * plain.samples
    reason = (
        f"{'taken' if better else 'left'}: {refined.padding(tokens)} padding in "
        f"{refined.samples:,} samples with it, {plain.padding(tokens)} in {plain.samples:,} without"
    )
    return [_as_given(s) for s in samples] if better else [], reason


def _as_given(sample: Refined) -> tuple[int, int, list[tuple[int, int]]]:
    return sample.bucket, sample.count, list(sample.lengths.items())


def _drained(counts: NDArray[np.int64], buckets: list[int], rules: dict[str, Any]) -> _Outcome:
    samples = _core.count_bucket_samples(counts, rules)
    return _Outcome(sum(c * n for c, n in zip(buckets, samples, strict=True)), sum(samples))

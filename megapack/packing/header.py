"""What the header of a ``.samples`` file must hold: checked when it is opened, relied on later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.packing.metrics import COUNTS, LISTS, RATIOS

__all__ = ["find_fault"]

Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # not bool


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_parameter(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _mapping_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_parameters(value: Any) -> bool:
    alignment = value.get("alignment", 1) if isinstance(value, dict) else 1
    return _mapping_of(_is_parameter)(value) and _is_count(alignment) and alignment > 0


FIELDS: dict[str, Check] = {
    "created_by": _is_text,
    "strategy": _is_text,
    "parameters": _is_parameters,
    "buckets": lambda value: _list_of(_is_count)(value) and min(value, default=0) > 0,
    "seed": _is_count,
    "decisions": _mapping_of(_is_text),
    "num_documents": _is_count,
    "dropped_tokens": _is_count,
    "repeated_tokens": _is_count,
    "source": lambda value: value is None or _mapping_of(_is_text)(value),
    "metrics": lambda value: isinstance(value, dict),
    "lengths_fingerprint": _is_text,
}
METRICS: dict[str, Check] = {
    **dict.fromkeys(COUNTS, _is_count),
    **dict.fromkeys(LISTS, _list_of(_is_count)),
    **dict.fromkeys(RATIOS, _is_ratio),
}


def find_fault(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """What is wrong with a header, as half a sentence, or None: types first, then its counts
    beside each other and beside the arrays (only the small ones are read)."""
    for fields, values in ((FIELDS, header), (METRICS, header.get("metrics"))):
        for name, check in fields.items():
            if not isinstance(values, Mapping) or name not in values:
                return f"its header has no {name}"
            if not check(values[name]):
                return f"its header says {name} is {str(values[name])[:80]!r}"
    metrics = header["metrics"]
    samples = np.diff(arrays["bucket_sample_offsets"]).tolist()
    placed = metrics["placed_tokens"]
    expected = {
        "num_samples": sum(samples),
        "num_segments": len(arrays["segment_length"]),
        "samples_per_bucket": samples,
        "tokens_per_bucket": (metrics["tokens_per_bucket"] + [0] * len(samples))[: len(samples)],
        "placed_tokens": sum(metrics["tokens_per_bucket"]),
        "num_tokens": placed - metrics["repeated_tokens"] + metrics["dropped_tokens"],
        **{name: header[name] for name in ("num_documents", "dropped_tokens", "repeated_tokens")},
    }
    for name, value in expected.items():
        if metrics[name] != value:
            return f"its header says {name} is {metrics[name]}, its contents say {value}"
    return None

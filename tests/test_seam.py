"""The C++ seam trusts nobody: errors name the scalar, name, length or array that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megapack import _core
from megapack.errors import DataError, FormatError
from megapack.packing import STRATEGIES, pack

LENGTHS = np.array([5, 9, 40], np.int32)
NOT_COUNTS = [True, 1.0, 1.5, "1", None, [1]]


def common(**changed: Any) -> _core.PackingCommon:
    given: dict[str, Any] = {"seed": 0, "threads": 1, "wide_ids": False, "progress": None}
    return _core.PackingCommon(**{**given, **changed})


def documents(lengths: Any = LENGTHS) -> _core.DocumentLengths:
    return _core.DocumentLengths(np.asarray(lengths))


def rules(**changed: Any) -> _core.BucketRules:
    return _core.BucketRules(**{"capacities": [8, 16], **changed})


def gatherer(**changed: Any) -> _core.Gatherer:
    given = {"positions": "segment", "attention": "document", "labels": "document"}
    return _core.Gatherer(**{**given, "alignment": 1, "pad_token": 0, **changed})


# name of the argument -> a call with it
COUNTS: dict[str, Callable[[Any], Any]] = {
    "threads": lambda x: common(threads=x),
    "seed": lambda x: common(seed=x),
    "capacity": lambda x: _core.pack_next_fit(documents(), x, False, common()),
    "atom_size": lambda x: _core.pack_pad(documents(), 8, x, common()),
    "extra_capacity": lambda x: _core.pack_fit_decreasing(documents(), 8, x, True, common()),
    "buckets": lambda x: _core.pack_bucket_naive(documents(), [x], False, common()),
    "capacities": lambda x: rules(capacities=[x]),
    "pool_size": lambda x: _core.drain_buckets(documents(), rules(), [], x, common()),
    "alignment": lambda x: gatherer(alignment=x),
    "pad_token": lambda x: gatherer(pad_token=x),
    "itemsize": lambda x: _core.scan_lengths(LENGTHS, x, 0),
    "begin": lambda x: _core.scan_lengths(LENGTHS, 2, x),
    "vocab_size": lambda x: _core.frame_documents_int32(
        np.zeros(0, np.int32), np.zeros(1, np.int64), [], [], x
    ),
    "prefix": lambda x: _core.frame_documents_int32(
        np.zeros(0, np.int32), np.zeros(1, np.int64), [x], [], 5
    ),
    "count": lambda x: _core.permute_range(1, 9, 0, x),
    "num_documents": lambda x: _core.measure_samples(*_arrays(), x),
}


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_what_is_no_integer_is_refused_by_the_arguments_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; it must be an integer"):
        COUNTS[name](value)


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1])
def test_integers_past_64_bits_are_refused_by_the_arguments_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value}; it must be "):
        COUNTS[name](value)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_numpys_integers_are_integers(name: str) -> None:
    value = 8 if name in ("capacity", "buckets", "capacities", "num_documents") else 1
    COUNTS[name](np.int64(value))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: common(threads=0), "threads is 0; it must be from 1 to 1024"),
        (lambda: common(threads=1 << 40), "threads is 1099511627776"),
        (lambda: common(seed=-1), r"seed is -1; it must be from 0 to 2\^64 - 1"),
        (lambda: common(wide_ids=1), "wide_ids is 1; it must be True or False"),
        (lambda: common(progress=3), "progress is 3; it must be a function"),
        (lambda: rules(capacities=[]), "there are no buckets"),
        (lambda: rules(capacities=[16, 8]), "buckets must ascend; 8 follows 16"),
        (lambda: rules(capacities=[0, 8]), "a capacity is 0 tokens"),
        (lambda: rules(capacities=8), "capacities is 8; it must be a list of integers"),
        (lambda: rules(overflow="hed"), "overflow is 'hed'; it must be one of pad, head, promote"),
        (lambda: rules(overflow=None), "overflow is None; it must be one of pad, head, promote"),
        (lambda: rules(pairs="no"), "pairs is 'no'; it must be True or False"),
        (lambda: rules(padding_threshold=0.5), "padding_threshold is 0.5; it must be a list"),
        (lambda: rules(padding_threshold=(3, 2)), "3 / 2 is no share from 0 to 1"),
        (lambda: rules(padding_threshold=(1, 2, 3)), "a numerator and a denominator"),
        (
            lambda: _core.pack_seamless(documents(), 8, (1, 2), "papr", 0, False, common()),
            "placement is 'papr'; it must be one of exact, paper, published",
        ),
        (lambda: gatherer(positions="token"), "positions is 'token'; it must be one of segment, "),
        (lambda: gatherer(labels="file"), "labels is 'file'; it must be one of document, sample"),
        (lambda: gatherer(alignment=0), "alignment is 0; it must be from 1"),
        (lambda: gatherer(alignment=2.0), "alignment is 2.0; it must be an integer"),
        (lambda: _core.pack_decompose(documents(), [8, 32], common()), "bucket 32 follows 8"),
        (lambda: _core.pack_concat(documents(), 0, 1, False, False, common()), "capacity is 0"),
        (lambda: _core.length_histogram(documents(), 0, 1), "capacity is 0"),
        (lambda: _core.scan_lengths(LENGTHS, 3, 0), "itemsize is 3; it must be 1, 2, 4 or 8"),
        (lambda: _core.scan_lengths(LENGTHS, 0, 0), "itemsize is 0; it must be from 1 to 8"),
        (
            lambda: _core.drain_buckets(
                documents(), rules(), [(1, 1, [(5, 1), (5, 1)])], 9, common()
            ),
            "needs 1 times 2 documents of length 5; there are 1",
        ),
        (
            lambda: _core.drain_buckets(documents(), rules(), [(1, 1)], 9, common()),  # type: ignore[list-item]
            "given is .* it must be patterns",
        ),
        (lambda: documents(np.zeros((2, 2), np.int32)), "one dimension"),
        (lambda: documents(np.zeros(3)), "lengths has dtype float64; it must be int32, int64 or"),
        (lambda: documents(np.zeros(3, ">i4")), "lengths has dtype >i4"),
        (
            lambda: _core.extract_jsonl(np.zeros(0, np.uint8), "te\udcffxt"),
            r"key is 'te\\udcffxt'; it must be Unicode text",
        ),
        (
            lambda: _core.extract_jsonl(np.zeros(0, np.uint8), "text", "dicts"),
            "values is 'dicts'; it must be one of strings, scalars, lists",
        ),
    ],
)
def test_wrong_scalars_and_names_say_what_is_known(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_file_name_that_is_no_unicode_is_shown_with_escapes() -> None:
    with pytest.raises(FormatError, match=r"caf\\udce9.idx is not a Megatron index"):
        _core.index_header(np.frombuffer(b"nothing", np.uint8), 7, "caf\udce9.idx")


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("lengths", [[2**62] * 4, [2**62, 1], [2**63 - 1] * 3])
def test_totals_past_64_bits_are_refused_before_anything_is_packed(
    strategy: str, lengths: list[int]
) -> None:
    with pytest.raises(DataError, match=r"more than 2\^62 tokens in all"):
        pack(lengths, strategy, buckets=4096)


def test_lengths_are_counted_while_they_are_checked() -> None:
    for dtype in (np.int32, np.int64, np.uint64):
        counted = _core.DocumentLengths(np.array([0, 7, 3, 0, 8], dtype), capacity=7)
        found = (len(counted), counted.num_tokens, counted.num_empty, counted.num_longer)
        assert (*found, counted.longest) == (5, 18, 2, 1, 8)
    assert _core.DocumentLengths(np.zeros(0, np.int32)).longest == 0


def test_unsigned_lengths_are_what_they_are() -> None:
    assert pack(np.array([3, 9], np.uint64), buckets=8).num_tokens == 12
    with pytest.raises(DataError, match="the longest has 18446744073709551615"):
        pack(np.array([3, 2**64 - 1], np.uint64), buckets=8)


def test_a_negative_length_is_refused_wherever_it_stands() -> None:
    for dtype in (np.int32, np.int64):
        lengths = np.full(200_000, 3, dtype)
        lengths[150_000] = -7
        with pytest.raises(DataError, match="document 150000 has length -7"):
            documents(lengths)


# --- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("r_max", [k / 20 for k in range(21)] + [1 / 3, 0.29, 1e-9])
@pytest.mark.parametrize("capacity", [5, 100, 1000, 2000])
def test_a_document_slides_exactly_where_equation_1_says(r_max: float, capacity: int) -> None:
    share = Fraction(repr(float(r_max)))
    for n in (1, 2, 3, 7, 10):
        bound = -(-n * share * capacity // 1)  # ceil
        for overlap in {bound - 1, bound, bound + 1} & set(range(1, capacity)):
            length = (n + 1) * capacity - int(overlap)
            index = pack([length], "seamless", buckets=capacity, r_max=r_max)
            slides = index.metrics()["repeated_tokens"] > 0
            assert slides == (overlap <= bound), (length, overlap, bound)


@pytest.mark.parametrize("threshold", [0.29, 0.07, 0.1, 0.28])
def test_a_gap_of_exactly_the_threshold_does_not_exceed_it(threshold: float) -> None:
    gap = int(Fraction(repr(threshold)) * 100)
    for wider in (0, 1):  # the gap is filled with the head of the shortest document only if wider
        lengths = [100 - gap - wider, 60]
        index = pack(lengths, "bucket_v0", buckets=100, padding_threshold=threshold, pool_size=10)
        cut = index.metrics()["num_truncated_documents"]
        assert (cut > 0) == bool(wider), (threshold, wider)


# --- arrays of an index ---------------------------------------------------------------------------


def _arrays() -> tuple[Any, ...]:
    return pack(LENGTHS, "next_fit", buckets=16, shuffle=False).segment_arrays()


def test_wrong_offsets_are_refused_not_followed() -> None:
    for which, value in [(0, 1 << 40), (0, -1), (1, 1 << 40), (1, -5)]:
        arrays = [array.copy() for array in _arrays()]
        arrays[which][1] = value
        with pytest.raises(FormatError, match="claims"):
            _core.measure_samples(*arrays, 3)


def test_an_empty_deal_deals_nothing_and_wrong_sizes_are_refused() -> None:
    none = np.zeros(0, np.int64)
    assert _core.deal_evenly(none, none).tolist() == []
    assert _core.deal_evenly(none, np.zeros(3, np.int64)).tolist() == []
    for costs, sizes, message in [
        ([1], [-1, 2], "bin 0 has -1 places"),
        ([1, 2], [1], "2 items for bins of 1 places"),
        ([1], [1 << 62, 1 << 62, 1 << 62, 1 << 62, 1], "bins of more places"),
        ([-1], [1], "item 0 costs -1"),
        ([1 << 62, 1 << 62], [1, 1], "more than 2.62"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.deal_evenly(np.array(costs), np.array(sizes))


def test_no_array_of_an_index_is_accepted_with_a_wrong_number() -> None:
    """Every single number of a sound index, replaced: refused by the laws, or still lawful."""
    capacity = np.array([16])
    sound = [capacity, *_arrays()]
    _core.check_laws(*sound, LENGTHS)
    refused = 0
    for which, array in enumerate(sound):
        for at in range(len(array)):
            for value in (-1, 0, 1, 3, 17, 2**31 - 1, -(2**31)):
                arrays = [a.copy() for a in sound]
                if arrays[which][at] == value:
                    continue
                arrays[which][at] = value
                try:
                    _core.check_laws(*arrays, LENGTHS)
                except FormatError:
                    refused += 1
    assert refused > 100

"""Bindings of the C++ core: wrong arguments raise, and errors name the array or the name."""

from __future__ import annotations

import ast
import contextlib
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import _core
from megapack.data.steps import StepView
from megapack.errors import DataError, FormatError
from megapack.packing import STRATEGIES, pack

LENGTHS = np.array([5, 9, 40], np.int32)
ONE = np.zeros(1, np.int64)
NO_MARKS = np.zeros(0, np.uint8)
WRONG = [-1, 1 << 62, -(1 << 63), 1 << 64, 1.5, "1", None, [1]]


def run(**changed: Any) -> _core.Run:
    given: dict[str, Any] = {"seed": 0, "threads": 1, "wide_ids": False, "progress": None}
    return _core.Run(**{**given, **changed})


def documents(lengths: Any = LENGTHS) -> _core.DocumentLengths:
    return _core.DocumentLengths(np.asarray(lengths))


def packed(strategy: str, **rules: Any) -> dict[str, Any]:
    return _core.pack(strategy, documents(), rules, run())


def samples(**changed: Any) -> list[int]:
    """Count samples with rules of the bucket strategies."""
    return _core.count_bucket_samples(np.array([0, 1]), {"buckets": [8, 16], **changed})


def gatherer(**changed: Any) -> _core.Gatherer:
    """Return a gatherer with one shard of three samples."""
    given = {"positions": "segment", "attention": "document", "label_boundary": "document"}
    runs = {"first_ids": np.array([0, 3]), "shards": ONE, "first_samples": ONE, "sources": ONE}
    options = {"loss": "token_mean", "alignment": 1, "pad_token": 0}
    return _core.Gatherer(**{**given, **runs, **options, **changed})


CYCLE = _core.CycleOrder(np.array([2, 3]), np.ones(2), 1, "spread", False)
CHECKED = _core.CheckedArray(
    ONE, _core.block_checksums(ONE.view(np.uint8)), name="x.samples", remedy="pack again"
)


def planned(**changed: Any) -> Any:
    none = np.zeros(0, np.int64)
    given = {"num_ranks": 2, "max_tokens_per_rank": 64, "max_documents_per_rank": 3}
    given |= {
        "max_context_parallel_size": 1,
        "linear_cost_tokens": 0,
        "micro_batch_multiple": 1,
        "balance": "step",
    }
    arrays = LENGTHS.astype(np.int64), np.zeros(0), np.zeros(0), none
    return _core.plan_step(*arrays, **given | changed)


# name of the argument -> a call with it
COUNTS: dict[str, Callable[[Any], Any]] = {
    "threads": lambda x: run(threads=x),
    "seed": lambda x: run(seed=x),
    "capacity": lambda x: packed("next_fit", capacity=x, shuffle=False),
    "atom_size": lambda x: packed("pad", capacity=8, atom_size=x),
    "extra_capacity": lambda x: packed("fit_decreasing", capacity=8, extra_capacity=x, best=True),
    "buckets": lambda x: packed("bucket_naive", buckets=[x], shuffle=False),
    "pool_size": lambda x: packed("bucket", buckets=[8, 16], pool_size=x),
    "alignment": lambda x: gatherer(alignment=x),
    "pad_token": lambda x: gatherer(pad_token=x),
    "itemsize": lambda x: _core.scan_lengths(LENGTHS, x, 0),
    "begin": lambda x: _core.scan_lengths(LENGTHS, 2, x),
    "vocab_size": lambda x: _core.frame_documents_int32(LENGTHS[:0], ONE, [], [], x, NO_MARKS),
    "prefix": lambda x: _core.frame_documents_int32(LENGTHS[:0], ONE, [x], [], 5, NO_MARKS),
    "count": lambda x: _core.permute_range(1, 9, 0, x),
    "num_documents": lambda x: _core.measure_samples(*_arrays(), x),
    "size": lambda x: _core.permute_range(1, x, 0, 1),
    "first": lambda x: _core.permute_range(1, 9, x, 1),
    "end": lambda x: _core.Blend(np.array([1, 2])).range(0, x),
    "source": lambda x: _core.Blend(np.array([1, 2])).taken_of(x, 5),
    "position": CYCLE.at,
    "bucket": lambda x: CYCLE.position(x, 0),
    "rank": lambda x: CYCLE.position(0, x),
    "samples' capacity": lambda x: _core.attention_cost_of(*_arrays()[1::3], ONE, x, False),
    "element": lambda x: CHECKED.require(x, 1),
    "last element": lambda x: CHECKED.require(0, x),
    "tokens' place": lambda x: _core.store_tokens(LENGTHS, np.zeros(8, np.int32), x, 0, 99),
    "document offsets' itemsize": lambda x: _core.document_offsets(_idx(*VALID), "x.idx", x),
    "bytes of a file": lambda x: _core.index_header(_idx(*VALID), x, "x.idx"),
    "pattern's bucket": lambda x: packed("bucket", buckets=[8, 16], given=[(x, 1, [(5, 1)])]),
    "pattern's count": lambda x: packed("bucket", buckets=[8, 16], given=[(0, x, [(5, 1)])]),
    "pattern's length": lambda x: packed("bucket", buckets=[8, 16], given=[(0, 1, [(x, 1)])]),
    "max_segments": lambda x: packed("bucket", buckets=[8, 16], max_segments=x),
    "histogram's capacity": lambda x: _core.length_histogram(documents(), x, 1),
    "num_ranks": lambda x: planned(num_ranks=x),
    "max_context_parallel_size": lambda x: planned(max_context_parallel_size=x),
    "max_tokens_per_rank": lambda x: planned(max_tokens_per_rank=x),
    "micro_batch_multiple": lambda x: planned(micro_batch_multiple=x),
}


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_wrong_scalars_raise_or_do_no_harm(name: str, value: Any) -> None:
    """Python validates scalars; a wrong one in the core must not crash the process."""
    with contextlib.suppress(ValueError, TypeError, RuntimeError, MemoryError, OverflowError):
        COUNTS[name](value)
    assert packed("next_fit", capacity=8, shuffle=False)["dropped_tokens"] == 0


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_numpy_integers_are_accepted(name: str) -> None:
    with contextlib.suppress(ValueError):  # 1 is out of range for some, but never a TypeError
        COUNTS[name](np.int64(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(threads=0), "threads is 0; it must be from 1 to 1024"),
        (lambda: run(threads=1 << 40), "threads is 1099511627776"),
        (lambda: samples(buckets=[]), "there are no buckets"),
        (lambda: samples(buckets=[16, 8]), "buckets must ascend; 8 follows 16"),
        (lambda: samples(buckets=[0, 8]), "a capacity is 0 tokens"),
        (lambda: samples(overflow="hed"), "overflow is 'hed'; it must be one of pad, head, promo"),
        (lambda: samples(padding_threshold=(3, 2)), "3 / 2 is not a share from 0 to 1"),
        (
            lambda: packed("seamless", capacity=8, r_max=(1, 2), placement="papr"),
            "placement is 'papr'; it must be one of exact, paper, published",
        ),
        (lambda: gatherer(positions="token"), "positions is 'token'; it must be one of segment, "),
        (lambda: gatherer(label_boundary="file"), "label_boundary is 'file'; it must be one of d"),
        (lambda: gatherer(attention="token"), "attention is 'token'; it must be one of "),
        (lambda: gatherer(loss="mean"), "loss is 'mean'; it must be one of token_mean"),
        (lambda: packed("decompose", buckets=[8, 32]), "bucket 32 follows 8"),
        (
            lambda: packed("concat", capacity=0, atom_size=1, last="pad", shuffle=False),
            "capacity is 0",
        ),
        (lambda: packed("next_fi", capacity=8), "the core has no strategy 'next_fi'"),
        (lambda: packed("next_fit", capacity=8), "next_fit needs shuffle"),
        (
            lambda: packed("next_fit", capacity=8, shuffle=False, last="pad"),
            r"next_fit has no rule \{'last': 'pad'\}",
        ),
        (lambda: samples(promote="on"), "bucket has no rule"),
        (lambda: _core.length_histogram(documents(), 0, 1), "capacity is 0"),
        (lambda: _core.scan_lengths(LENGTHS, 3, 0), "itemsize is 3; it must be 1, 2, 4 or 8"),
        (lambda: _core.scan_lengths(LENGTHS, 0, 0), "itemsize is 0; it must be 1, 2, 4 or 8"),
        (
            lambda: packed("bucket", buckets=[8, 16], given=[(1, 1, [(5, 1), (5, 1)])]),
            "needs 1 times 2 documents of length 5; there are 1",
        ),
        (lambda: documents(np.zeros((2, 2), np.int32)), "one dimension"),
        (lambda: documents(np.zeros(3)), "lengths has dtype float64; it must be int32, int64 or"),
        (lambda: documents(np.zeros(3, ">i4")), "lengths has dtype >i4"),
        (
            lambda: _core.extract_jsonl(np.zeros(0, np.uint8), "text", "dicts"),
            "values is 'dicts'; it must be one of strings, scalars, lists",
        ),
    ],
)
def test_messages_of_wrong_names_and_ranges(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_stub_has_every_name_of_the_module() -> None:
    text = Path(_core.__file__).with_name("_core.pyi").read_text(encoding="utf-8")
    names = {getattr(node, "name", None) for node in ast.parse(text).body}
    assert {name for name in vars(_core) if not name.startswith("_")} <= names | {"BLOCK_BYTES"}
    assert not re.search(r"Supports|ArrayLike|numpy\.ndarray|megapack\.|arg0", text)
    signature = "def scan_lengths(lengths: NDArray[np.int32], itemsize: int, begin: int)"
    assert f"{signature} -> tuple[NDArray[np.int64], int]:" in text


def test_invalid_unicode_in_a_file_name_is_escaped() -> None:
    with pytest.raises(FormatError, match=r"caf\\udce9.idx is not a Megatron index"):
        _core.index_header(np.frombuffer(b"nothing", np.uint8), 7, "caf\udce9.idx")


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("lengths", [[2**62] * 4, [2**62, 1], [2**63 - 1] * 3])
def test_totals_above_64_bits_are_refused(strategy: str, lengths: list[int]) -> None:
    with pytest.raises(DataError, match=r"more than 2\^62 tokens in all"):
        pack(lengths, strategy, buckets=4096)


def test_lengths_that_exceed_memory_are_named() -> None:
    for name, parameters in (("concat", {}), ("bucket", {}), ("bucket_llm", {"pool": "stream"})):
        with pytest.raises(MemoryError, match="documents of 2,305,843,009,213,693,952 tokens"):
            pack([2**61], name, buckets=16, **parameters)


def test_progress_callback_stops_a_streamed_document() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after a tenth of a second
        pack([1 << 29], "bucket_llm", buckets=16, pool="stream", progress=stop)


def test_document_lengths_are_counted() -> None:
    for dtype in (np.int32, np.int64, np.uint64):
        counted = _core.DocumentLengths(np.array([0, 7, 3, 0, 8], dtype), capacity=7)
        counts = (len(counted), counted.num_tokens, counted.num_empty, counted.num_longer)
        assert (*counts, counted.longest) == (5, 18, 2, 1, 8)
    assert _core.DocumentLengths(np.zeros(0, np.int32)).longest == 0


def test_unsigned_lengths() -> None:
    assert pack(np.array([3, 9], np.uint64), buckets=8).num_tokens == 12
    with pytest.raises(DataError, match="the longest has 18446744073709551615"):
        pack(np.array([3, 2**64 - 1], np.uint64), buckets=8)


def test_negative_lengths_are_refused_at_any_position() -> None:
    for dtype in (np.int32, np.int64):
        lengths = np.full(200_000, 3, dtype)
        lengths[150_000] = -7
        with pytest.raises(DataError, match="document 150000 has length -7"):
            documents(lengths)


# --- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("r_max", [k / 20 for k in range(21)] + [1 / 3, 0.29, 1e-9])
@pytest.mark.parametrize("capacity", [5, 100, 1000, 2000])
def test_documents_slide_as_in_equation_1(r_max: float, capacity: int) -> None:
    share = Fraction(repr(float(r_max)))
    for n in (1, 2, 3, 7, 10):
        bound = -(-n * share * capacity // 1)  # ceil
        for overlap in {bound - 1, bound, bound + 1} & set(range(1, capacity)):
            length = (n + 1) * capacity - int(overlap)
            index = pack([length], "seamless", buckets=capacity, r_max=r_max)
            slides = index.metrics()["repeated_tokens"] > 0
            assert slides == (overlap <= bound), (length, overlap, bound)


@pytest.mark.parametrize("threshold", [0.29, 0.07, 0.1, 0.28])
def test_padding_equal_to_the_threshold_is_accepted(threshold: float) -> None:
    gap = int(Fraction(repr(threshold)) * 100)
    for wider in (0, 1):  # the gap is filled with the head of the shortest document only if wider
        lengths = [100 - gap - wider, 60]
        index = pack(lengths, "bucket_v0", buckets=100, padding_threshold=threshold, pool_size=10)
        cut = index.metrics()["num_truncated_documents"]
        assert (cut > 0) == bool(wider), (threshold, wider)


# --- arrays of an index ---------------------------------------------------------------------------


def _arrays() -> tuple[Any, ...]:
    return pack(LENGTHS, "next_fit", buckets=16, shuffle=False).segment_arrays()


def test_wrong_offsets_are_refused() -> None:
    for which, value in [(0, 1 << 40), (0, -1), (1, 1 << 40), (1, -5)]:
        arrays = [array.copy() for array in _arrays()]
        arrays[which][1] = value
        with pytest.raises(FormatError, match="claims"):
            _core.measure_samples(*arrays, 3)


def test_empty_assignments_and_wrong_sizes() -> None:
    none = np.zeros(0, np.int64)
    assert _core.assign_evenly(none, none).tolist() == []
    assert _core.assign_evenly(none, np.zeros(3, np.int64)).tolist() == []
    for costs, sizes, message in [
        ([1], [-1, 2], "bin 0 has -1 places"),
        ([1, 2], [1], "2 items for bins of 1 places"),
        ([1], [1 << 62, 1 << 62, 1 << 62, 1 << 62, 1], "bins of more places"),
        ([-1], [1], "item 0 costs -1"),
        ([1 << 62, 1 << 62], [1, 1], "more than 2.62"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.assign_evenly(np.array(costs), np.array(sizes))


def unaligned(array: Any) -> Any:
    """Return a copy at an unaligned address."""
    given = np.asarray(array)
    return np.frombuffer(bytearray(b".") + given.tobytes(), given.dtype, offset=1)


def test_unaligned_arrays_are_copied_or_refused() -> None:
    costs, sizes = np.array([5, 1, 4, 2]), np.array([2, 2])
    assigned = _core.assign_evenly(unaligned(costs), unaligned(sizes))
    assert assigned.tolist() == _core.assign_evenly(costs, sizes).tolist()
    index = pack(LENGTHS, buckets=[8, 16])
    index.verify(unaligned(LENGTHS))
    with pytest.raises(ValueError, match="segment_length must be a contiguous, aligned array"):
        _core.attention_cost(index.sample_segment_offsets, unaligned(index.segment_length))
    out = [np.zeros(8, dtype) for dtype in (np.int64, np.int64, np.float32, np.int64)]
    for which, name in enumerate(("tokens", "labels", "loss_mask", "position_ids")):
        odd = [unaligned(a) if i == which else a for i, a in enumerate(out)]
        with pytest.raises(ValueError, match=f"{name} is read-only or not aligned"):
            shape = _core.BatchShape(1, 8, 8, False, 0)
            gatherer().gather(np.zeros(1, np.int64), StepView().core, shape, *odd)


def test_check_laws_refuses_wrong_numbers() -> None:
    """Replace every number of a valid index: check_laws refuses it, or it is still valid."""
    sound = [np.array([16]), *_arrays()]
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


# --- the gather checks what the reader checks -----------------------------------------------------


def _idx(lengths: list[int], pointers: list[int], documents: list[int]) -> np.ndarray:
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8"))
    return np.frombuffer(head + b"".join(a.tobytes() for a in arrays), np.uint8)


def _gathered(idx: np.ndarray, samples: list[tuple[int, int, int]], wanted: int) -> list[int]:
    """Return the tokens of sample `wanted`; a sample is one segment (document, begin, length)."""
    document, begin, length = np.array(samples, np.int32).T.copy()
    source = gatherer()
    none, offsets = np.zeros(0, np.int64), np.arange(len(samples) + 1)
    files = {"labels": None, "weights": None, "index_bytes": idx, "index_name": "x.idx"}
    places = {"segment_document": document, "segment_begin": begin, "segment_length": length}
    places |= {"sample_segment_offsets": offsets, "excluded": none, "excluded_by": none}
    source.open(0, tokens=np.arange(1000, dtype=np.uint16), **files, **places)
    tokens, labels, positions = np.zeros((3, 16), np.int64)
    shape = _core.BatchShape(1, 16, 16, False, 0)
    out = {"tokens": tokens, "labels": labels, "position_ids": positions}
    out["loss_mask"] = np.zeros(16, np.float32)
    source.gather(np.array([wanted]), StepView().core, shape, **out)
    return tokens[: length[wanted]].tolist()


WHOLE = [(0, 0, 8), (1, 0, 4), (2, 0, 6)]  # documents of 8 (two sequences), 4 and 6 tokens
VALID = ([5, 3, 4, 6], [0, 10, 16, 24], [0, 2, 3, 4])


def test_valid_index_is_gathered() -> None:
    assert _gathered(_idx(*VALID), WHOLE, 0) == list(range(8))
    assert _gathered(_idx(*VALID), WHOLE, 2) == list(range(12, 18))


@pytest.mark.parametrize(
    ("pointers", "document", "message"),
    [
        ([0, 10, 19, 24], 1, "sequence 2 points at byte 19, but .* end at 16"),
        ([0, 10, 18, 24], 1, "sequence 2 points at byte 18, but .* end at 16"),
        ([0, 10, 14, 24], 1, "sequence 2 points at byte 14"),
        ([0, 10, 16, -8], 2, "sequence 3 points at byte -8"),
        ([0, 10, 16, 2**63 - 1], 2, "sequence 3 points at byte 9223372036854775807"),
        ([2, 10, 16, 24], 0, "sequence 0 points at byte 2, but .* end at 0"),
        ([0, 12, 16, 24], 0, "sequence 1 points at byte 12, but .* end at 10"),  # no gap inside
        ([0, 10, 18, 26], 0, "sequence 2 points at byte 18, but .* end at 16"),  # behind it
        ([0, 10, 17, 25], 2, "sequence 3 begins at byte 25, inside a token of 2 bytes"),
    ],
)
def test_gather_refuses_wrong_pointers(pointers: list[int], document: int, message: str) -> None:
    idx = _idx(VALID[0], pointers, VALID[2])
    with pytest.raises(FormatError, match="points at byte"):
        _core.document_offsets(idx, "x.idx", 2)
    with pytest.raises(FormatError, match=message):
        _gathered(idx, WHOLE, document)


def test_gather_refuses_a_document_after_the_last_token() -> None:
    with pytest.raises(FormatError, match="document 0 ends at token 2000; the file has 1000"):
        _gathered(_idx([2000], [0], [0, 1]), [(0, 0, 8)], 0)

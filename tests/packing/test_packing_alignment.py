"""Packing with alignment and with room for fill-in-the-middle; and ``refine`` of ``bucket``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_inputs import as_packing, lengths, packings, same_arrays
from reference import DEFINITIONS, aligned
from reference.buckets import Rules, drained

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, SampleIndex, bucket_rules, pack
from megapack.packing.refine import refine
from tests.packing.test_packing_strategies import check_laws, web_like

NAMES = sorted(STRATEGIES)


@st.composite
def aligned_packings(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draw arguments of any packing whose sizes are multiples of an alignment."""
    chosen = draw(packings(name))
    alignment = draw(st.sampled_from([1, 2, 4, 8] if name == "decompose" else [1, 2, 3, 8]))
    chosen["buckets"] = [capacity * alignment for capacity in chosen["buckets"]]
    for parameter in ("atom_size", "min_bucket"):
        if chosen.get(parameter) is not None:
            chosen[parameter] *= alignment
    fim_room = draw(st.integers(0, min(4, chosen["buckets"][-1])))
    return {**chosen, "alignment": alignment, "fim_room": fim_room}


def rooms(index: SampleIndex, lengths: list[int]) -> list[int]:
    """Count the tokens of every sample with aligned segments and the room of whole documents."""
    alignment = index.alignment

    def tokens(document: int, length: int) -> int:
        whole = 1 < length == lengths[document] <= index.fim_longest
        return -(-(length + whole * index.fim_room) // alignment) * alignment

    segments = [index.sample(i)[1] for i in range(index.num_samples)]
    return [sum(tokens(document, length) for document, _, length in one) for one in segments]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_core_equals_definition_with_rounded_lengths(name: str, data: st.DataObject) -> None:
    documents = data.draw(lengths, label="lengths")
    chosen: dict[str, Any] = data.draw(aligned_packings(name), label="packing")
    index = pack(np.array(documents, np.int32), name, **chosen)
    assert as_packing(index) == aligned(DEFINITIONS[name], documents, **chosen)
    check_laws(index, np.array(documents, np.int32))
    capacities = np.repeat(index.bucket_capacity, np.diff(index.bucket_sample_offsets))
    assert (np.array(rooms(index, documents), int) <= capacities).all()
    if chosen["fim_room"]:
        found = [(d, n) for i in range(len(index)) for d, _, n in index.sample(i)[1]]
        roomy = {d for d, n in found if 1 < n == documents[d] <= index.fim_longest}
        assert index.metrics()["num_documents_with_fim_room"] == len(roomy)


def test_fim_room_only_for_documents_that_then_fit(tmp_path: Path) -> None:
    documents = [0, 1, 2, 13, 14, 40]
    plain, index = (pack(documents, buckets=[8, 16], fim_room=room) for room in (0, 3))
    assert "fim_room" not in plain.parameters and plain.fim_room == 0 and plain.fim_longest == -1
    assert index.fim_room == 3 and index.fim_longest == 13
    assert index.metrics()["num_documents_with_fim_room"] == 2  # of 2 and 13 tokens
    index.save(tmp_path / "x.samples")
    loaded = SampleIndex.load(tmp_path / "x.samples")
    assert loaded.fim_longest == 13 and loaded.metrics() == index.metrics()


def test_alignment_is_recorded_if_above_1(tmp_path: Path) -> None:
    documents = web_like(300)
    plain = pack(documents, buckets=[64, 256])
    assert same_arrays(plain, pack(documents, buckets=[64, 256], alignment=1))
    assert plain.alignment == 1 and "alignment" not in plain.parameters
    index = pack(documents, buckets=[64, 256], alignment=16)
    index.save(tmp_path / "a.samples")
    loaded = SampleIndex.load(tmp_path / "a.samples")
    assert loaded.alignment == loaded.parameters["alignment"] == 16
    loaded.verify(documents)
    assert loaded.metrics() == index.metrics()
    assert plain.metrics()["padding_tokens"] < index.metrics()["padding_tokens"]


def test_lengths_near_int32_limit_are_rounded_exactly() -> None:
    longest = (1 << 31) - 1
    index = pack(np.array([longest, 3]), "pad", buckets=1 << 24, alignment=16)
    assert index.metrics()["placed_tokens"] == longest + 3
    assert index.segment_length.min() == 3 and index.metrics()["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alignment": 0}, "alignment is 0; it must be from 1"),
        ({"alignment": True}, "alignment is True"),
        ({"alignment": 2.5}, "alignment is 2.5"),
        ({"fim_room": -1}, "fim_room is -1; it must be from 0 to 16"),
        ({"fim_room": 17}, "fim_room is 17; it must be from 0 to 16"),
        ({"alignment": 3}, "bucket 8 is not a multiple of the alignment 3"),
        ({"strategy": "concat", "buckets": 8, "atom_size": 2}, "atom_size 2 is not a multiple"),
        ({"strategy": "decompose", "min_bucket": 2}, "min_bucket 2 is not a multiple"),
        (
            {"strategy": "decompose", "buckets": 512, "alignment": 512},
            "buckets of 256 tokens, not a multiple of the alignment 512; give min_bucket",
        ),
    ],
)
def test_sizes_must_be_multiples_of_alignment(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"lengths": [1, 600], "buckets": [8, 16], "alignment": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        pack(**call)


# ---- bucket with refine: whole documents, exact counts, only taken if better ---------------------


BUCKETS = [64, 128, 256, 512]


def without_short_documents(count: int) -> np.ndarray:
    """Draw lengths of mostly 35 to 70 tokens, so that two rarely share the smallest bucket."""
    generator = np.random.default_rng(0)
    documents = 35 + generator.gamma(2.0, 18.0, count)
    documents[::500] += 700
    return documents.astype(np.int32)


def test_refine_pads_less_without_more_cuts() -> None:
    documents = without_short_documents(30_000)
    plain = pack(documents, buckets=BUCKETS).metrics()
    index = pack(documents, buckets=BUCKETS, refine=True)
    refined = index.metrics()
    assert index.decisions["refine"].startswith("taken: ")
    assert refined["padding_ratio"] < plain["padding_ratio"] * 0.9
    assert refined["truncation_ratio"] == refined["truncation_floor"] > 0
    assert same_arrays(index, pack(documents, buckets=BUCKETS, refine=True, threads=3))


@pytest.mark.parametrize("promote", ["on", "off", "lookahead"])
def test_patterns_are_packed_as_defined(promote: str) -> None:
    documents = without_short_documents(2000)
    index = pack(documents, buckets=BUCKETS, refine=True, promote=promote)
    counts, _ = _core.length_histogram(_core.DocumentLengths(documents), BUCKETS[-1], 1)
    samples, left = refine(counts, BUCKETS)
    assert index.decisions["refine"].startswith("taken") and left.sum() < len(documents) / 2
    patterns = tuple((s.bucket, s.count, s.lengths) for s in samples)
    rules = Rules(BUCKETS, "pad" if promote == "off" else "promote", 0.05)
    rules.lookahead = promote == "lookahead"
    assert as_packing(index) == drained(documents.tolist(), rules, len(documents), 0, patterns)


def test_refine_is_not_taken_if_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    documents = np.exp(generator.normal(3.0, 1.2, 50_000)).astype(np.int32)  # many short documents
    index = pack(documents, buckets=BUCKETS, refine=True)
    assert index.decisions["refine"].startswith("left, not tried: ")
    assert same_arrays(index, pack(documents, buckets=BUCKETS))
    monkeypatch.setattr(bucket_rules, "PADDING_WORTH_SAVING", 1 << 40)
    tried = pack(documents, buckets=BUCKETS, refine=True)
    assert tried.decisions["refine"].startswith("left: ")
    assert same_arrays(tried, pack(documents, buckets=BUCKETS))


@given(documents=lengths, buckets=st.sets(st.integers(1, 40), min_size=1, max_size=3))
def test_refine_places_documents_once_or_leaves_them(
    documents: list[int], buckets: set[int]
) -> None:
    capacities = sorted(buckets)
    array = np.array(documents, np.int32)
    counts, _ = _core.length_histogram(_core.DocumentLengths(array), capacities[-1], 1)
    samples, left = refine(counts, capacities)
    placed = np.zeros_like(counts)
    for sample in samples:
        tokens = sum(length * copies for length, copies in sample.lengths.items())
        assert 0 < tokens <= capacities[sample.bucket] and sample.count > 0
        for length, copies in sample.lengths.items():
            placed[length] += copies * sample.count
    assert np.array_equal(placed + left, counts)
    metrics = pack(array, buckets=capacities, refine=True).metrics()  # asserts that none is lost
    assert metrics["truncation_ratio"] == metrics["truncation_floor"]


def test_refine_without_highspy_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match="pip install highspy"):
        pack([30, 40, 50], buckets=BUCKETS, refine=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(3, 1, [(5, 1)])], "has bucket 3 of 2"),  # more of them in tests/cpp/test_packing.cpp
        ([(0, 0, [(5, 1)])], "bucket 0 of 2 and count 0"),
        ([(0, 1, [(-1, 1)])], "has 1 documents of length -1"),
    ],
)
def test_core_refuses_invalid_patterns(given: list[tuple], message: str) -> None:
    run = _core.Run(seed=0, threads=1)
    documents = _core.DocumentLengths(np.array([5, 4, 3], np.int32))
    with pytest.raises(ValueError, match=message):
        _core.pack("bucket", documents, {"buckets": [8, 16], "given": given}, run)
    rules = {"buckets": [8, 16], "given": [(0, 1, [(5, 1)])], "pool_size": 1}
    with pytest.raises(ValueError, match="given patterns need one pool, not 3"):
        _core.pack("bucket", documents, rules, run)

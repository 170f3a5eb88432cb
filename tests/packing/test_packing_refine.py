"""bucket with refine: the linear program's samples are whole, exact, and only taken if better."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_inputs import ADVERSARIAL, as_packing, lengths, same_arrays
from reference.buckets import Rules, drained

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.packing import strategies as bucket_choice
from megapack.packing.refine import refine

BUCKETS = [64, 128, 256, 512]


def without_short_documents(count: int) -> np.ndarray:
    """35 to 70 tokens mostly, so that two rarely share the smallest bucket."""
    generator = np.random.default_rng(0)
    documents = 35 + generator.gamma(2.0, 18.0, count)
    documents[::500] += 700
    return documents.astype(np.int32)


def test_refined_samples_pad_less_and_cut_nothing_more() -> None:
    documents = without_short_documents(30_000)
    plain = pack(documents, buckets=BUCKETS).metrics()
    index = pack(documents, buckets=BUCKETS, refine=True)
    refined = index.metrics()
    assert index.decisions["refine"].startswith("taken: ")
    assert refined["padding_ratio"] < plain["padding_ratio"] * 0.9
    assert refined["truncation_ratio"] == refined["truncation_floor"] > 0
    assert same_arrays(index, pack(documents, buckets=BUCKETS, refine=True, threads=3))


@pytest.mark.parametrize("promote", ["on", "off"])
def test_patterns_are_carried_out_as_defined(promote: str) -> None:
    documents = without_short_documents(2000)
    index = pack(documents, buckets=BUCKETS, refine=True, promote=promote)
    counts, _ = _core.length_histogram(_core.DocumentLengths(documents), BUCKETS[-1], 1)
    samples, left = refine(counts, BUCKETS)
    taken = index.decisions["refine"].startswith("taken")
    patterns = tuple((s.bucket, s.count, s.lengths) for s in samples if taken)
    overflow = "promote" if promote == "on" else "pad"
    rules = Rules(BUCKETS, overflow, 0.05)
    defined = drained(documents.tolist(), rules, len(documents), 0, patterns)
    assert as_packing(index) == defined
    assert taken and left.sum() < len(documents) / 2


def test_a_refinement_that_is_no_better_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    documents = np.exp(generator.normal(3.0, 1.2, 50_000)).astype(np.int32)  # many short ones
    index = pack(documents, buckets=BUCKETS, refine=True)
    assert index.decisions["refine"].startswith("left, not tried: ")
    assert same_arrays(index, pack(documents, buckets=BUCKETS))
    monkeypatch.setattr(bucket_choice, "PADDING_WORTH_SAVING", 1 << 40)
    tried = pack(documents, buckets=BUCKETS, refine=True)
    assert tried.decisions["refine"].startswith("left: ")
    assert same_arrays(tried, pack(documents, buckets=BUCKETS))


@given(documents=lengths, buckets=st.sets(st.integers(1, 40), min_size=1, max_size=3))
def test_every_document_is_placed_once_or_left(documents: list[int], buckets: set[int]) -> None:
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
    pack(array, buckets=capacities, refine=True).metrics()  # asserts that no token is lost


@pytest.mark.parametrize("documents", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
def test_adversarial_lengths_are_packed(documents: list[int]) -> None:
    metrics = pack(documents, buckets=[4, 8, 16], refine=True).metrics()
    assert metrics["dropped_tokens"] == metrics["repeated_tokens"] == 0
    assert metrics["truncation_ratio"] == metrics["truncation_floor"]


def test_without_highspy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match="pip install highspy"):
        pack([30, 40, 50], buckets=BUCKETS, refine=True)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ((3, 1, [(5, 1)]), "has bucket 3 of 2"),
        ((0, 0, [(5, 1)]), "count is 0; it must be from 1"),
        ((0, 2, [(5, 1)]), "needs 2 times 1 documents of length 5"),
        ((0, 1, [(6, 1)]), "needs 1 times 1 documents of length 6"),
        ((0, 1, [(-1, 1)]), "given is -1; it must be from 1"),
        (
            (0, 1, [(5, 1), (4, 1)]),
            "1 documents of length 4 where its bucket has room for 3 tokens",
        ),
    ],
)
def test_the_core_refuses_patterns_that_cannot_be(pattern: tuple, message: str) -> None:
    rules = {"buckets": [8, 16]}
    run = _core.Run(seed=0, threads=1)
    documents = _core.DocumentLengths(np.array([5, 4, 3], np.int32))
    with pytest.raises(ValueError, match=message):
        _core.pack("bucket", documents, {**rules, "given": [pattern]}, run)
    with pytest.raises(ValueError, match="given patterns need one pool, not 3"):
        given = {"given": [(0, 1, [(5, 1)])], "pool_size": 1}
        _core.pack("bucket", documents, rules | given, run)

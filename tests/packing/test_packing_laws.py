"""The three laws of packing, for every strategy of the registry; and the metrics by brute force."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_inputs import lengths, packings, same_arrays

from megapack import _core
from megapack.packing import STRATEGIES, SampleIndex, pack

NAMES = sorted(STRATEGIES)


def web_like(count: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths around 60 tokens, a few empty, a few very long."""
    generator = np.random.default_rng(seed)
    documents = np.exp(generator.normal(4, 1, count)).astype(np.int32)
    documents[generator.random(count) < 0.01] = 0
    return documents


def times_placed(index: SampleIndex, documents: np.ndarray) -> list[np.ndarray]:
    """Per document, how often each of its tokens is placed."""
    placed = [np.zeros(length, np.int64) for length in documents]
    for i in range(index.num_samples):
        for document, begin, length in index.sample(i)[1]:
            placed[document][begin : begin + length] += 1
    return placed


def check_laws(index: SampleIndex, documents: np.ndarray) -> None:
    strategy = STRATEGIES[index.strategy]
    for i in range(index.num_samples):
        bucket, segments = index.sample(i)
        assert segments, "a sample of padding alone"
        assert sum(s[2] for s in segments) <= index.bucket_capacity[bucket]
        for document, begin, length in segments:
            assert length >= 1 and begin >= 0 and begin + length <= documents[document]
    placed = np.concatenate([np.zeros(0, np.int64), *times_placed(index, documents)])
    dropped, repeated = int((placed == 0).sum()), int((placed - 1).clip(0).sum())
    metrics = index.metrics()
    assert (metrics["dropped_tokens"], metrics["repeated_tokens"]) == (dropped, repeated)
    assert metrics["num_tokens"] == placed.sum() - repeated + dropped
    assert repeated == 0 or strategy.may_repeat
    assert dropped == 0 or strategy.may_drop


@pytest.mark.parametrize("name", NAMES)
def test_laws_hold_on_a_web_like_corpus(name: str) -> None:
    documents = web_like(3000)
    buckets = [32, 64, 128, 256] if STRATEGIES[name].many_buckets else [128]
    index = pack(documents, name, buckets=buckets, seed=4)
    check_laws(index, documents)
    twin = pack(documents, name, buckets=buckets, seed=4, threads=3)
    assert same_arrays(index, twin)
    assert index.num_samples > 500


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_laws_hold_for_any_input(name: str, data: st.DataObject) -> None:
    documents = np.array(data.draw(lengths), np.int32)
    chosen: dict[str, Any] = data.draw(packings(name))
    check_laws(pack(documents, name, **chosen), documents)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_what_brute_force_counts(name: str) -> None:
    documents = web_like(500, seed=1)
    buckets = [32, 64, 128] if STRATEGIES[name].many_buckets else [64]
    parameters = {"extra_capacity": 5} if "fit" in name and name != "next_fit" else {}
    index = pack(documents, name, buckets=buckets, seed=2, **parameters)
    metrics = index.metrics()

    samples = [index.sample(i) for i in range(index.num_samples)]
    pieces = Counter(document for _, segments in samples for document, _, _ in segments)
    placed = times_placed(index, documents)
    truncated = sum(pieces[d] > 1 or (p == 0).any() for d, p in enumerate(placed) if len(p))
    slots = sum(int(index.bucket_capacity[bucket]) for bucket, _ in samples)
    tokens = [sum(length for _, _, length in segments) for _, segments in samples]
    num_longer = int((documents > buckets[-1]).sum())
    num_filled = int((documents > 0).sum())
    assert num_filled < 500, "empty documents must not count in the ratios"
    cross = within = 0
    for _, segments in samples:
        owner = np.repeat(np.arange(len(segments)), [length for _, _, length in segments])
        same = int((owner[:, None] == owner[None, :]).sum())
        within += same
        cross += len(owner) ** 2 - same
    assert metrics == {
        "num_documents": 500,
        "num_empty_documents": int((documents == 0).sum()),
        "num_tokens": int(documents.sum()),
        "num_samples": len(samples),
        "num_segments": sum(len(segments) for _, segments in samples),
        "num_truncated_documents": truncated,
        "num_documents_longer_than_largest_bucket": num_longer,
        "placed_tokens": sum(tokens),
        "padding_tokens": slots - sum(tokens),
        "dropped_tokens": sum(int((p == 0).sum()) for p in placed),
        "repeated_tokens": sum(int((p - 1).clip(0).sum()) for p in placed),
        "tokens_per_bucket": [
            sum(t for t, (bucket, _) in zip(tokens, samples, strict=True) if bucket == b)
            for b in range(index.num_buckets)
        ],
        "samples_per_bucket": [
            sum(bucket == b for bucket, _ in samples) for b in range(index.num_buckets)
        ],
        "padding_ratio": pytest.approx(1 - sum(tokens) / slots),
        "truncation_ratio": truncated / num_filled,
        "truncation_floor": num_longer / num_filled,
        "concatenation_ratio": num_filled / len(samples),
        "utilization": sum(tokens) / slots,
        "dropped_ratio": pytest.approx(metrics["dropped_tokens"] / documents.sum()),
        "repeated_ratio": pytest.approx(metrics["repeated_tokens"] / documents.sum()),
        "segments_per_sample": metrics["num_segments"] / len(samples),
        "cross_document_share": pytest.approx(cross / (cross + within)),
        "attention_cost": within,
        "attention_cost_sample": sum(int(index.bucket_capacity[b]) ** 2 for b, _ in samples),
    }


def test_metrics_of_nothing_are_zeros_not_errors() -> None:
    metrics = pack([], "bucket", buckets=[8, 16]).metrics()
    assert metrics["tokens_per_bucket"] == [0, 0]
    assert not any(v for k, v in metrics.items() if not k.endswith("_per_bucket"))


def test_the_default_strategy_cuts_only_what_no_bucket_holds() -> None:
    documents = web_like(20_000)
    metrics = pack(documents, buckets=[64, 128, 256, 512]).metrics()
    assert metrics["num_truncated_documents"] == int((documents > 512).sum()) > 0
    assert metrics["padding_ratio"] < 0.004


def test_promote_auto_takes_the_better_way_and_says_so() -> None:
    short = web_like(20_000)
    no_short = short + 70  # nothing fits beside a document of more than half a bucket
    buckets = [128, 256, 512]
    chosen = {}
    for name, documents in (("short", short), ("no short", no_short)):
        on, off, auto = (
            pack(documents, buckets=buckets, promote=promote) for promote in ("on", "off", "auto")
        )
        chosen[name] = auto.decisions["promote"].split(":")[0]
        assert same_arrays(auto, {"on": on, "off": off}[chosen[name]])
        assert on.decisions == off.decisions == {}
    assert chosen == {"short": "off", "no short": "on"}


@pytest.mark.parametrize("promote", ["on", "off"])
def test_no_sample_has_more_segments_than_it_may(promote: str) -> None:
    documents = np.r_[web_like(5000), np.full(3000, 2)]
    buckets = [64, 128, 512]
    free = pack(documents, buckets=buckets, promote=promote)
    index = pack(documents, buckets=buckets, promote=promote, max_segments=16)
    for packed, holds in ((free, False), (index, True)):
        segments = np.diff(packed.sample_segment_offsets)
        most = [
            int(segments[a:b].max()) for a, b in itertools.pairwise(packed.bucket_sample_offsets)
        ]
        assert all(n <= limit for n, limit in zip(most, [2, 4, 16], strict=True)) is holds, most
    wide = pack(documents, buckets=buckets, promote=promote, max_segments=10**6)
    assert same_arrays(wide, free)


def test_the_core_can_count_the_samples_of_a_histogram_without_making_them() -> None:
    documents = web_like(5000)
    counts, chunks = _core.length_histogram(_core.DocumentLengths(documents), 256, 2)
    rules = {"buckets": [64, 256]}
    samples = pack(documents, buckets=[64, 256], promote="off").metrics()["samples_per_bucket"]
    planned = _core.count_bucket_samples(counts, rules)
    assert [planned[0], planned[1] + chunks] == samples
    assert int((counts * np.arange(256)).sum()) + 256 * chunks == documents.sum()

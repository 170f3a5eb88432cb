"""Blends of several sources: a source is never two samples away from its weight."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import re
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from numpy.typing import NDArray
from reference import blends

from megapack import _core
from megapack.data import (
    BlendConfig,
    PackedDataset,
    Schedule,
    Source,
    build_loader,
    load_blend,
    open_blend,
)
from megapack.data.blend import Mixture
from megapack.data.bucket_streams import bucket_streams, buckets_of, whole_shares
from megapack.errors import ConfigError, MegapackWarning
from tests.data.corpora import (
    of_rank,
    packed_documents,
    packed_index,
    packed_lengths,
    write_labels,
)


@pytest.mark.parametrize(
    "shares", [[7919, 4801, 1223, 104], [50, 30, 20], [400, 300, 200, 100], [1000, 1], [1]]
)
def test_weights_mean_the_same_as_in_megatron(shares: list[int]) -> None:
    """Compare with Megatron-core's build_blending_indices: within 2 samples of each source."""
    total = sum(shares)
    megatron_sources, megatron_ranks = np.zeros(total, np.int16), np.zeros(total, np.int64)
    weights = np.array(shares) / total
    helpers.build_blending_indices(
        megatron_sources, megatron_ranks, weights, len(shares), total, False
    )
    blend = _core.Blend(np.array(shares, np.int64))
    for end in range(0, total + 1, max(1, total // 500)):
        taken = np.bincount(megatron_sources[:end], minlength=len(shares))
        assert np.abs(blend.taken(end) - taken).max() <= 2
    assert blend.taken(total).tolist() == shares


INDICES = [packed_index(900, (16, 32, 64), 1), packed_index(400, (32, 64), 2)]


def test_order_of_a_blend_is_golden() -> None:
    """Golden: if these numbers change, every run in progress changes; raise ORDER_VERSION."""
    schedule = Schedule(INDICES, weights=[0.7, 0.3], tokens_per_step=64 * 8, seed=3)
    first = schedule.step(0)
    datasets = (first.sample_ids >= INDICES[0].num_samples).astype(int)
    assert first.capacity == 64 and datasets.tolist() == GOLDEN_DATASETS
    assert schedule.step(5).sample_ids.tolist() == GOLDEN_STEP
    far = schedule.stages[0].buckets[2].blend.taken(2**53)
    assert far.tolist() == GOLDEN_FAR


GOLDEN_DATASETS = [0, 1, 0, 0, 1, 0, 0, 1]
GOLDEN_STEP = [496, 348, 522, 231, 330, 462, 303, 524, 319, 238, 457, 344, 547, 215, 283, 454]
GOLDEN_FAR = [6190572696060434, 2816626558680558]


def _write(folder: Path, seed: int, count: int, value: int) -> Path:
    """Write a dataset whose tokens are the number of the dataset."""
    documents = [[value] * n for n in packed_lengths(count, 32, seed).tolist()]
    packed_documents(folder / f"d{value}", documents, [16, 32])
    return folder / f"d{value}"


def test_batches_of_a_manifest_name_their_sources(tmp_path: Path) -> None:
    entries = []
    for seed, (value, count, weight) in enumerate([(5, 200, 0.5), (6, 90, 0.3), (7, 150, 0.2)]):
        _write(tmp_path, seed, count, value)
        files = {"prefix": f"d{value}", "index": f"d{value}.samples"}
        entries.append({"name": f"n{value}", "weight": weight, **files})
    (tmp_path / "blend.yaml").write_text(json.dumps({"sources": entries, "max_epochs": 9}))
    config = load_blend(tmp_path / "blend.yaml", ["max_epochs=8"])
    assert config.max_epochs == 8
    packed = open_blend(config)
    assert packed.samples.names == ["n5", "n6", "n7"]
    arrays = open_blend(config, framework="numpy")[3]
    assert isinstance(arrays["tokens"], np.ndarray)
    assert np.array_equal(arrays["tokens"], packed[3]["tokens"])
    schedule = Schedule(packed, tokens_per_step=256, seed=1)
    seen_sources = set()
    for batch in build_loader(packed, schedule, **of_rank(num_steps=20)):
        ends, owners = batch["cu_seqlens"].tolist(), batch["dataset_ids"].tolist()
        for owner, begin, end in zip(owners, ends[:-1], ends[1:], strict=True):
            values = set(batch["tokens"][0, begin:end].tolist())
            assert values == {0 if owner < 0 else 5 + owner}
            seen_sources.add(owner)
    assert seen_sources >= {0, 1, 2}


def test_a_blend_opens_with_every_option_that_a_manifest_lacks() -> None:
    of_manifest = {field.name for field in fields(Mixture)}
    of_manifest |= {"dataset", "index", "mixture", "labels", "token_weights"}
    options = inspect.signature(PackedDataset).parameters.keys() - of_manifest
    assert len(options) > 5 and options <= inspect.signature(open_blend).parameters.keys()


def test_different_begin_or_end_tokens_of_sources_are_reported(tmp_path: Path) -> None:
    facts = {5: {}, 6: {"document_end_token": 6}, 7: None, 8: {"document_begin_token": 8}}
    for value, fact in facts.items():
        meta = Path(f"{_write(tmp_path, value, 20, value)}.meta.json")
        if fact is None:
            meta.unlink()
        else:
            meta.write_text(json.dumps(json.loads(meta.read_text()) | fact))

    def open_both(a: int, b: int) -> None:
        prefixes = [tmp_path / f"d{value}" for value in (a, b)]
        PackedDataset(prefixes, [f"{prefix}.samples" for prefix in prefixes])

    for other, message in (
        (6, r"end with different tokens: no token \(.*d5\), 6 \(.*d6\)"),
        (8, r"begin with different tokens: no token \(.*d5\), 8 \(.*d8\)"),
    ):
        with pytest.warns(MegapackWarning, match=message):
            open_both(5, other)
    with pytest.warns(MegapackWarning, match=r"6 \(.*d6\), unknown \(.*d7\)"):
        open_both(6, 7)
    open_both(5, 7)  # one source without a meta file, one whose meta file names no token


def test_every_dataset_of_a_blend_has_its_own_labels_or_none(tmp_path: Path) -> None:
    """Three equal datasets: labels found, ignored, absent."""
    for seed, value in enumerate((5, 7, 8)):
        _write(tmp_path, seed, 60, value)
        lengths = packed_lengths(60, 32, seed).tolist()
        masked = [[value if i % 2 else -100 for i in range(n)] for n in lengths]
        if value != 8:
            write_labels(tmp_path / f"d{value}", masked)
    entries = [
        {"prefix": f"d{v}", "index": f"d{v}.samples", "weight": 1, **more}
        for v, more in ((5, {}), (7, {"labels": "none"}), (8, {}))
    ]
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump({"sources": entries}))
    packed = open_blend(load_blend(tmp_path / "blend.yaml"))
    assert len(packed.datasets) == 3
    labelled = {5: True, 7: False, 8: False}
    for base, (value, chosen) in zip(packed.samples.bases, labelled.items(), strict=False):
        batch = packed[int(base)]
        kept = batch["loss_mask"].bool()
        assert set(batch["labels"][kept].tolist()) == {value}
        tokens = (batch["tokens"] == value).sum()
        last = batch["dataset_ids"].ge(0).sum()  # at most one unlabelled token per segment
        assert (kept.sum() < tokens - last) == chosen
        assert packed.count_labels([base]) == kept.sum()


def test_bad_manifests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        BlendConfig(sources=())
    with pytest.raises(ConfigError, match="has weight 0, no stage gives it another, and"):
        BlendConfig(sources=(Source(prefix="a", index="b", weight=0.0),))
    (tmp_path / "b.yaml").write_text("sources: [{prefix: a, index: b, wieght: 1}]")
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        load_blend(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="source 'a' has no index; make one with"):
        open_blend(BlendConfig(sources=(Source(prefix="a"),)))
    one = _write(tmp_path, 0, 9, 5)
    with pytest.raises(ConfigError, match="2 datasets and 1 indices"):
        PackedDataset([one, one], [f"{one}.samples"])
    with pytest.raises(ConfigError, match="labels is 'x'; it must be 'auto' or a list"):
        PackedDataset([one, one], [f"{one}.samples"] * 2, labels="x")  # type: ignore[arg-type]
    for labels in ([None], ["auto"] * 3, ["auto", "x"]):
        problem = re.escape(f"labels is {labels}; give 'auto' or None, or a list with one of them ")
        with pytest.raises(ConfigError, match=f"{problem}for each of 2 datasets"):
            PackedDataset([one, one], [f"{one}.samples"] * 2, labels=labels)  # type: ignore[arg-type]


BOUND = 1.69  # proven in csrc/core/schedule/blend.hpp and megapack/data/bucket_streams.py
FAR = 2**53
SMALL = packed_index(40, (16, 32), 5)

whole_weights = st.lists(
    st.one_of(st.integers(0, 9), st.integers(1, 2**53)), min_size=1, max_size=40
).filter(any)
positions = st.one_of(st.integers(0, 500), st.integers(0, FAR - 100))


def blend_of(weights: list[int]) -> _core.Blend:
    return _core.Blend(np.array(weights, np.int64))


def sources_and_ranks(blend: _core.Blend, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the source and its rank at every position, from the runs of ``range``."""
    *runs, places = (column.tolist() for column in blend.range(begin, end))
    ranks = [(s, first + i) for s, first, n in zip(*runs, strict=True) for i in range(n)]
    rank_at = dict(zip(places, ranks, strict=True))
    return [rank_at[place] for place in range(end - begin)]


@given(weights=whole_weights, begin=positions, count=st.integers(0, 60))
def test_every_position_is_as_defined(weights: list[int], begin: int, count: int) -> None:
    """Check positions against the definition, and cursors against the bound, far into a run."""
    root, blend = blends.tree(weights), blend_of(weights)
    expected = [blends.locate(root, i) for i in range(begin, begin + count)]
    assert sources_and_ranks(blend, begin, begin + count) == expected
    cursors = blends.taken(root, begin)
    assert blend.taken(begin).tolist() == [cursors[i] for i in range(len(weights))]
    assert [blend.taken_of(i, begin) for i in range(len(weights))] == blend.taken(begin).tolist()
    for weight, taken in zip(weights, blend.taken(begin).tolist(), strict=True):
        assert abs(taken - Fraction(weight, sum(weights)) * begin) < BOUND
        assert weight > 0 or taken == 0


@given(parts=st.lists(st.integers(1, 2**200), min_size=1, max_size=30))
def test_whole_shares_are_less_than_one_unit_from_the_exact_ones(parts: list[int]) -> None:
    shares = whole_shares(parts)
    assert shares.sum() == 2**62
    for share, part in zip(shares.tolist(), parts, strict=True):
        assert abs(share - Fraction(part * 2**62, sum(parts))) < 1


def weights_of(kind: str, count: int) -> NDArray[np.float64]:
    """Return adversarial or ordinary weights; "fibonacci" has the deepest trees, the worst case of
    the proof."""
    return {
        "lognormal": np.exp(np.random.default_rng(7).normal(0, 2, count)),
        "equal": np.ones(count),
        "giant": np.r_[np.full(count - 1, 1e-3 / count), 1.0],
        "fibonacci": ((1 + 5**0.5) / 2) ** (np.arange(count) % 40),
    }[kind]


def worst_error(source: NDArray[np.int64], weights: NDArray[np.float64]) -> float:
    """Return the largest |taken(n) - weight n| over positions n and sources. Between two samples of
    a source the error falls steadily, so it is largest next to a sample or at the end."""
    share = weights / weights.sum()
    order = np.argsort(source, kind="stable")
    counts = np.bincount(source, minlength=len(weights))
    rank = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    before, after = (rank + n - share[source[order]] * (order + n) for n in (0, 1))
    at_end = counts - share * len(source)
    return float(np.abs(np.concatenate([before, after, at_end])).max())


@pytest.mark.parametrize("kind", ["lognormal", "equal", "giant", "fibonacci"])
@pytest.mark.parametrize("count", [3, 20_000])
def test_every_source_is_near_its_weight_at_every_position(kind: str, count: int) -> None:
    weights = weights_of(kind, count)
    [stream, *_] = bucket_streams(buckets_of([SMALL] * count), weights.tolist(), seed=1)
    source = stream.ids(0, 200_000) // SMALL.num_samples
    error = worst_error(source, weights)
    assert error < BOUND, f"{error:.3f} samples off"
    units = whole_shares([int(Fraction(weight) * 2**1074) for weight in weights]).tolist()
    for d in range(0, count, max(1, count // 50)):
        assert abs(stream.blend.taken_of(d, FAR) - Fraction(units[d] * FAR, 2**62)) < BOUND


def test_tiny_weights_are_exact() -> None:
    """A source due once in 10^15 samples is drawn once or twice in them, not once per epoch."""
    [stream, *_] = bucket_streams(buckets_of([SMALL] * 3), [1.0, 1e-15, 5e-324], seed=0)
    assert stream.blend.taken_of(1, 10**15) in (0, 1, 2)
    assert stream.blend.taken_of(2, FAR) == 0
    with pytest.raises(ConfigError, match=r"weight of index 1 is -1.0; it must be finite"):
        bucket_streams(buckets_of([SMALL] * 2), [1.0, -1.0], seed=0)
    with pytest.raises(ConfigError, match="has weight 0 in every stage; give it a positive one"):
        Schedule([SMALL] * 2, weights=[1.0, 0.0], tokens_per_step=64)


def test_invalid_positions_and_weights_are_refused() -> None:
    blend = blend_of([1, 2])
    for call, wrong in (
        (blend.range, [(-1, 3), (5, 4), (0, FAR + 1), (0, 2**40)]),
        (blend.taken_of, [(2, 0), (-1, 0), (0, -1), (0, FAR + 1)]),
        (blend_of, [([],), ([0, 0],), ([3, -1],), ([2**62, 1],)]),
    ):
        for arguments in wrong:
            with pytest.raises(ValueError, match=r"of a blend|a blend of 0|\w+ is .* must be"):
                call(*arguments)
    assert pickle.loads(pickle.dumps(blend)).taken(7).tolist() == blend.taken(7).tolist()
    assert sources_and_ranks(blend, 4, 4) == []


def test_opening_time_is_linear_in_sources() -> None:
    """Opening 100,000 sources takes about twenty times as long as 5,000: no Python object per
    source slows down the garbage collector."""
    tracked = []
    for count in (200, 800):
        names, weights = [f"s{i}" for i in range(count)], [1.0 + i % 7 for i in range(count)]
        indices = [SMALL] * count
        gc.collect()
        before = len(gc.get_objects())
        schedule = Schedule(indices, names=names, weights=weights, tokens_per_step=64)
        schedule.step(0)
        gc.collect()
        tracked.append(len(gc.get_objects()) - before)
        del schedule
    assert tracked[1] - tracked[0] < 100

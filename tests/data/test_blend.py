"""Several datasets in one run: weights as Megatron means them, kept inside every bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from megatron.core.datasets import helpers

from megapack import _core
from megapack.data import (
    BlendConfig,
    BucketBatchSampler,
    PackedDataset,
    Schedule,
    Source,
    build_loader,
    load_blend,
    plan_run,
)
from megapack.data.program import Mixture
from megapack.data.sources import SampleSource
from megapack.errors import ConfigError
from megapack.packing import SampleIndex, pack
from tests.data.corpora import packed_index, packed_lengths, write_documents


@pytest.mark.parametrize(
    "shares", [[7919, 4801, 1223, 104], [50, 30, 20], [400, 300, 200, 100], [1000, 1], [1]]
)
def test_weights_mean_what_they_mean_to_megatron(shares: list[int]) -> None:
    """Megatron-core's own build_blending_indices has taken as much of each source, within 2."""
    total = sum(shares)
    theirs, their_rank = np.zeros(total, np.int16), np.zeros(total, np.int64)
    weights = np.array(shares) / total
    helpers.build_blending_indices(theirs, their_rank, weights, len(shares), total, False)
    blend = _core.Blend(np.array(shares, np.int64))
    for end in range(0, total + 1, max(1, total // 500)):
        taken = np.bincount(theirs[:end], minlength=len(shares))
        assert np.abs(blend.taken(end) - taken).max() <= 2
    assert blend.taken(total).tolist() == shares


INDICES = [packed_index(900, (16, 32, 64), 1), packed_index(400, (32, 64), 2)]


def blended(weights: list[float] | None, **options: Any) -> Schedule:
    return Schedule(INDICES, weights=weights, tokens_per_step=64 * 8, seed=3, **options)


def dataset_of(ids: np.ndarray) -> np.ndarray:
    return (ids >= INDICES[0].num_samples).astype(int)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.9, 0.1], [3, 1], None])
def test_weights_are_realised_in_tokens_and_within_every_bucket(
    weights: list[float] | None,
) -> None:
    schedule = blended(weights)
    num_steps = 600
    tokens, per_bucket = np.zeros(2), np.zeros((3, 2))
    for i in range(num_steps):
        step = schedule.step(i)
        taken = np.bincount(dataset_of(step.sample_ids), minlength=2)
        tokens += taken * step.capacity
        per_bucket[step.bucket] += taken
    slots = [_slots(index) for index in INDICES]
    wanted = np.array(weights or [sum(s.values()) for s in slots], float)
    assert tokens / tokens.sum() == pytest.approx(wanted / wanted.sum(), abs=0.01)
    plan = plan_run(schedule, num_steps)
    assert [d.realised for d in plan.datasets] == pytest.approx(tokens / tokens.sum(), abs=1e-9)
    # Every dataset keeps its own distribution over buckets.
    for d in range(2):
        own = np.array([slots[d].get(c, 0) for c in (16, 32, 64)], float)
        used = per_bucket[:, d] * [16, 32, 64]
        assert used / used.sum() == pytest.approx(own / own.sum(), abs=0.03)


def test_the_order_of_a_blend_is_the_same_for_ever() -> None:
    """Golden: a change of these numbers changes every run in progress; raise ORDER_VERSION."""
    schedule = blended([0.7, 0.3])
    first = schedule.step(0)
    assert first.capacity == 64 and dataset_of(first.sample_ids).tolist() == GOLDEN_DATASETS
    assert schedule.step(5).sample_ids.tolist() == GOLDEN_STEP
    far = schedule.stages[0].buckets[2].blend.taken(2**53)
    assert far.tolist() == GOLDEN_FAR


GOLDEN_DATASETS = [0, 1, 0, 0, 1, 0, 0, 1]
GOLDEN_STEP = [496, 348, 522, 231, 330, 462, 303, 524, 319, 238, 457, 344, 547, 215, 283, 454]
GOLDEN_FAR = [6190572696060434, 2816626558680558]


def _slots(index: SampleIndex) -> dict[int, int]:
    counts = np.diff(index.bucket_sample_offsets)
    return {int(c): int(c * n) for c, n in zip(index.bucket_capacity, counts, strict=True) if n}


def test_each_dataset_repeats_only_when_all_of_it_was_seen() -> None:
    schedule = blended([0.2, 0.8])
    seen = np.concatenate([schedule.step(i).sample_ids for i in range(400)])
    for d, index in enumerate(INDICES):
        ids = seen[dataset_of(seen) == d] - (INDICES[0].num_samples if d else 0)
        counts = np.bincount(ids, minlength=index.num_samples)
        for begin, end in zip(
            index.bucket_sample_offsets[:-1], index.bucket_sample_offsets[1:], strict=True
        ):
            bucket = counts[begin:end]
            assert len(bucket) == 0 or bucket.max() - bucket.min() <= 1
    for d, plan in enumerate(plan_run(schedule, 400).datasets):
        used = sum(
            step.capacity * int((dataset_of(step.sample_ids) == d).sum())
            for step in map(schedule.step, range(400))
        )
        assert plan.epochs == pytest.approx(used / sum(_slots(INDICES[d]).values()))


def test_a_source_that_would_repeat_too_often_is_refused_by_name() -> None:
    mixture = Mixture(weights=[0.2, 0.8], names=["web", "code"], max_epochs=2)
    schedule = Schedule(SampleSource(INDICES, mixture), tokens_per_step=64)

    def sampler(num_steps: int) -> BucketBatchSampler:
        return BucketBatchSampler(
            schedule,
            data_parallel_rank=0,
            data_parallel_size=1,
            micro_batch_tokens=64,
            num_steps=num_steps,
        )

    sampler(20)
    with pytest.raises(ConfigError, match=r"repeat source code \d+.* times; max_epochs is 2"):
        sampler(2000)


def test_a_tiny_weight_is_realised_and_never_zero() -> None:
    schedule = blended([1.0, 1e-9])
    for stream in schedule.stages[0].buckets[1:]:
        assert stream.blend.taken_of(1, 10**11) > 0
    with pytest.raises(ConfigError, match="positive"):
        blended([1.0, 0.0])
    with pytest.raises(ConfigError, match="3 weights for 2"):
        blended([1.0, 1.0, 1.0])


def _write(folder: Path, seed: int, count: int, value: int) -> Path:
    """A dataset whose tokens say which one it is."""
    lengths = packed_lengths(count, 32, seed)
    dataset = write_documents(folder / f"d{value}", [[value] * n for n in lengths.tolist()])
    index = pack(dataset.document_lengths, "bucket", buckets=[16, 32])
    index.save(folder / f"d{value}.samples", source=dataset)
    return folder / f"d{value}"


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_a_manifest_becomes_batches_that_say_where_segments_come_from(
    tmp_path: Path, dump: Any
) -> None:
    for seed, (value, count) in enumerate([(5, 200), (6, 90), (7, 150)]):
        _write(tmp_path, seed, count, value)
    entries = [
        {"name": f"n{v}", "prefix": f"d{v}", "index": f"d{v}.samples", "weight": w}
        for v, w in ((5, 0.5), (6, 0.3), (7, 0.2))
    ]
    (tmp_path / "blend.yaml").write_text(dump({"sources": entries, "max_epochs": 9}))
    config = load_blend(tmp_path / "blend.yaml", ["max_epochs=8"])
    assert config.max_epochs == 8
    packed = config.open()
    assert packed.samples.names == ["n5", "n6", "n7"]
    schedule = Schedule(packed, tokens_per_step=256, seed=1)
    found = set()
    for batch in build_loader(
        packed,
        schedule,
        data_parallel_rank=0,
        data_parallel_size=1,
        micro_batch_tokens=128,
        num_steps=20,
    ):
        cu_seqlens = batch["cu_seqlens"].tolist()
        owners = batch["dataset_ids"].tolist()
        assert len(owners) == len(cu_seqlens) - 1
        for owner, begin, end in zip(owners, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            values = set(batch["tokens"][0, begin:end].tolist())
            assert values == {0 if owner < 0 else 5 + owner}
            found.add(owner)
    assert found >= {0, 1, 2}


def test_every_dataset_of_a_blend_has_its_own_labels_or_none(tmp_path: Path) -> None:
    """Of four alike: labels found by name, named in the manifest, ignored, and not there."""
    for seed, value in enumerate((5, 6, 7, 8)):
        _write(tmp_path, seed, 60, value)
        lengths = packed_lengths(60, 32, seed).tolist()
        masked = [[value if i % 2 else -100 for i in range(n)] for n in lengths]
        write_documents(tmp_path / {6: "turns"}.get(value, f"d{value}.labels"), masked, "int32")
    for suffix in ("bin", "idx"):
        (tmp_path / f"d8.labels.{suffix}").unlink()
    entries = [
        {"prefix": f"d{v}", "index": f"d{v}.samples", "weight": 1, **more}
        for v, more in ((5, {}), (6, {"labels": "turns"}), (7, {"labels": "none"}), (8, {}))
    ]
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump({"sources": entries}))
    packed = load_blend(tmp_path / "blend.yaml").open()
    assert len(packed.datasets) == 4
    labelled = {5: True, 6: True, 7: False, 8: False}
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
    with pytest.raises(ConfigError, match="has weight 0 and no stage gives it another"):
        BlendConfig(sources=(Source(prefix="a", index="b", weight=0.0),))
    (tmp_path / "b.yaml").write_text("sources: [{prefix: a, index: b, wieght: 1}]")
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        load_blend(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="source 'a' has no index; make one with"):
        BlendConfig(sources=(Source(prefix="a"),)).open()
    one = _write(tmp_path, 0, 9, 5)
    with pytest.raises(ConfigError, match="2 datasets and 1 indices"):
        PackedDataset([one, one], [f"{one}.samples"])
    for labels, count in (("x", 1), ([None], 1), (["auto"] * 3, 3)):
        with pytest.raises(ConfigError, match=f"{count} label datasets for 2 datasets"):
            PackedDataset([one, one], [f"{one}.samples"] * 2, label_dataset=labels)

"""Order by score: inside every epoch of a bucket; equal scores shuffled, no sample lost."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import PackedDataset, Schedule, Scores, Stage, load_blend
from megapack.data.program import Mixture
from megapack.data.sample_order import Epochs, ScoreOrder
from megapack.data.sources import SampleSource
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.packing import SampleIndex, pack
from tests.data.corpora import packed_index, packed_lengths, random_documents, write_documents


@given(
    means=st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0, 7.0]), min_size=1, max_size=60),
    begin=st.integers(0, 300),
    count=st.integers(0, 200),
)
def test_an_epoch_ascends_and_equal_scores_are_shuffled(
    means: list[float], begin: int, count: int
) -> None:
    scores = np.array(means)
    size = len(means)
    order = Epochs(size, 9, ScoreOrder(scores))
    found = order.samples(begin, count)
    epochs = [order.samples(e * size, size) for e in range(12)]
    assert (
        np.concatenate(epochs)[begin : begin + count].tolist()
        == found[: 12 * size].tolist()[: max(0, 12 * size - begin)]
    )
    for epoch, samples in enumerate(epochs):
        assert sorted(samples.tolist()) == list(range(size))
        assert (np.diff(scores[samples]) >= 0).all()
        assert order.places(epoch, samples).tolist() == list(range(size))
    if len(set(means)) == 1 and size > 30:
        assert len({tuple(samples.tolist()) for samples in epochs}) == 12


def sample_means(index: SampleIndex, scores: np.ndarray) -> np.ndarray:
    """The definition: mean of the documents' scores, weighted by their tokens in the sample."""
    means = []
    for number in range(index.num_samples):
        _, segments = index.sample(number)
        total = 0.0
        for document, _, length in segments:
            total += scores[document] * length
        means.append(total / sum(length for _, _, length in segments))
    return np.array(means)


def schedule_of(folder: Path, scores: np.ndarray, *stages: Stage, **options: Any) -> Schedule:
    """Two sources, the first with scores; no tokens behind them."""
    indices = [packed_index(300, (16, 32)), packed_index(200, (16, 32), 1)]
    np.save(folder / "scores.npy", scores)
    by_score = Scores(
        path=str(folder / "scores.npy"), order=options.pop("score_order", "ascending")
    )
    mixture = Mixture(
        weights=[2.0, 1.0], names=["web", "code"], stages=stages, scores=[by_score, None]
    )
    samples = SampleSource(indices, mixture)
    return Schedule(samples, tokens_per_step=128, seed=3, **options)


@pytest.mark.parametrize("score_order", ["ascending", "descending"])
@pytest.mark.parametrize("values", [None, 3])
def test_a_source_with_scores_is_drawn_by_them_and_others_as_ever(
    tmp_path: Path, score_order: str, values: int | None
) -> None:
    """Through stages, with scores all different and with three values of them."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=300) if values is None else rng.integers(0, values, 300)
    stages = (Stage(from_step=7, weights={"web": 5, "code": 1}), Stage(from_step=30, skip_steps=2))
    ours = schedule_of(tmp_path, scores, *stages, score_order=score_order)
    plain = Schedule(
        ours.samples.indices, names=["web", "code"], weights=[2.0, 1.0], stages=stages,
        tokens_per_step=128, seed=3,
    )  # fmt: skip
    index = ours.samples.indices[0]
    means = sample_means(index, scores)
    streams: dict[int, list[int]] = {16: [], 32: []}
    for step in range(240):
        if step == 30:
            for passed in (30, 31):
                gather(ours, streams, ours.stages[1].step_draws(passed)[0])
        (draw,), (other,) = ours.step(step).draws, plain.step(step).draws
        assert draw.capacity == other.capacity
        second, there = (ours.samples.locate(d.sample_ids)[0] == 1 for d in (draw, other))
        assert (second == there).all()
        assert draw.sample_ids[second].tolist() == other.sample_ids[there].tolist()
        gather(ours, streams, draw)
    for capacity, seen in streams.items():
        begin, end = bounds(index, capacity)
        size = end - begin
        assert len(seen) > 2 * size
        for at in range(0, len(seen), size):
            epoch = np.array(seen[at : at + size])
            rising = np.diff(means[epoch]) * (1 if score_order == "ascending" else -1)
            assert (rising >= 0).all()
            assert len(set(epoch.tolist())) == len(epoch)
            if len(epoch) == size:
                assert sorted(epoch.tolist()) == list(range(begin, end))
        if values is not None and size > 20:
            assert seen[:size] != seen[size : 2 * size]  # ties are shuffled anew
    for sample in range(0, index.num_samples, 7):
        held = [
            step for step in range(240) for s in ours.step(step).sample_ids.tolist() if s == sample
        ]
        assert ours.steps_of(sample, 240) == held


def gather(schedule: Schedule, streams: dict[int, list[int]], draw: Any) -> None:
    source, local = schedule.samples.locate(draw.sample_ids)
    streams[draw.capacity] += local[source == 0].tolist()


def bounds(index: SampleIndex, capacity: int) -> tuple[int, int]:
    b = index.bucket_capacity.tolist().index(capacity)
    begin, end = index.bucket_sample_offsets[b : b + 2].tolist()
    return begin, end


def test_one_score_for_all_is_a_shuffle_of_its_own(tmp_path: Path) -> None:
    schedule = schedule_of(tmp_path, np.zeros(300))
    order = schedule.samples.score_orders[0, 16]
    size = np.subtract(*bounds(schedule.samples.indices[0], 16)[::-1])
    first = Epochs(int(size), 1, order).samples(0, int(size))
    assert sorted(first.tolist()) == list(range(size)) != first.tolist()


def test_scores_belong_to_what_a_checkpoint_keeps(tmp_path: Path) -> None:
    scores = np.arange(300.0)
    state = json.loads(json.dumps(schedule_of(tmp_path, scores).state_dict(4)))
    assert schedule_of(tmp_path, scores).check_state(state) == []
    assert schedule_of(tmp_path, scores.astype(np.int32)).check_state(state) == []
    scores[5] = 400
    with pytest.raises(ResumeError, match="indices was"):
        schedule_of(tmp_path, scores).check_state(state)
    with pytest.raises(ResumeError, match="indices was"):
        schedule_of(tmp_path, np.arange(300.0), score_order="descending").check_state(state)


def test_a_manifest_names_scores_beside_it(tmp_path: Path) -> None:
    lengths = packed_lengths(120, 32)
    dataset = write_documents(tmp_path / "web", random_documents(lengths))
    pack(lengths, "bucket", buckets=[16, 32]).save(tmp_path / "web.samples", source=dataset)
    np.save(tmp_path / "quality.npy", np.random.default_rng(1).random(120).astype(np.float32))
    source = {"prefix": "web", "index": "web.samples", "scores": "quality.npy"}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"sources": [source]}))
    data = load_blend(tmp_path / "m.yaml").open()
    steps = Schedule(data, tokens_per_step=128)
    plain = Schedule(PackedDataset(dataset, data.samples.indices[0]), tokens_per_step=128)
    assert steps.step(1).sample_ids.tolist() != plain.step(1).sample_ids.tolist()
    copy = pickle.loads(pickle.dumps(data))
    assert Schedule(copy, tokens_per_step=128).identity() == steps.identity()
    with pytest.raises(ConfigError, match="order sequential takes samples as the index has them"):
        Schedule(data, tokens_per_step=128, order="sequential")
    source.pop("scores")
    (tmp_path / "m.yaml").write_text(
        yaml.safe_dump({"sources": [{**source, "score_order": "descending"}]})
    )
    with pytest.raises(ConfigError, match="has score_order descending and no scores"):
        load_blend(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(299), "holds float64 of shape (299,); scores are numbers, one for each of 300"),
        (np.zeros((300, 1)), "of shape (300, 1)"),
        (np.zeros(300, bool), "holds bool"),
        (np.r_[np.zeros(7), np.nan, np.inf, np.zeros(291)], "has nan for document 7 (2 such"),
    ],
)
def test_files_that_are_no_scores_are_refused(
    tmp_path: Path, scores: np.ndarray, message: str
) -> None:
    with pytest.raises(FormatError) as caught:
        schedule_of(tmp_path, scores)
    assert message in str(caught.value) and "scores.npy" in str(caught.value)

"""Orders of the samples of a source: by blocks, by score, or shuffled."""

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

from megapack import _core
from megapack.data import PackedDataset, Schedule, Scores, load_blend, open_blend
from megapack.data.blend import Mixture
from megapack.data.sample_order import BlockOrder, Epochs, ScoreOrder
from megapack.data.sources import SampleSource
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.packing import SampleIndex
from megapack.packing.sharded import Arranged
from tests.data.corpora import packed_documents, packed_index, packed_lengths, random_documents


def order_of(size: int, block: int, window: int) -> Epochs:
    sizes = Arranged(source="", seed=0, block_tokens=block * 16, window_blocks=window)
    return Epochs(size, 7, BlockOrder(size, 16, sizes))


def key_of(epoch: int) -> int:
    return _core.random_bits(7, epoch)


def epoch_of(order: Epochs, epoch: int) -> np.ndarray:
    return order.samples(epoch * order.size, order.size)


def reference(size: int, block: int, window: int, epoch: int) -> list[int]:
    """Return an epoch as defined: blocks in random order, groups of them shuffled."""
    if epoch == 0:
        return list(range(size))
    key, number = key_of(epoch), -(-size // block)
    blocks = _core.permute_range(key, number, 0, number).tolist()
    result: list[int] = []
    for slot in range(0, number, window):
        members = [
            i for b in blocks[slot : slot + window] for i in range(b * block, (b + 1) * block)
        ]
        members = [i for i in members if i < size]
        bits = _core.random_bits(key, len(result) + 1)
        mixed = _core.permute_range(bits, len(members), 0, len(members))
        result += [members[i] for i in mixed.tolist()]
    return result


@given(
    size=st.integers(1, 200),
    block=st.integers(1, 12),
    window=st.integers(1, 6),
    begin=st.integers(0, 700),
    count=st.integers(0, 300),
)
def test_ranges_are_as_defined(size: int, block: int, window: int, begin: int, count: int) -> None:
    order = order_of(size, block, window)
    last = (begin + count) // size + 1
    every = [i for epoch in range(last) for i in reference(size, block, window, epoch)]
    assert order.samples(begin, count).tolist() == every[begin : begin + count]
    for epoch in range(min(3, last)):
        samples = np.array(reference(size, block, window, epoch))
        assert sorted(samples.tolist()) == list(range(size))
        places = order.positions(epoch, samples)
        assert places.tolist() == list(range(size))


BLOCK, WINDOW = 64, 16


def test_later_epochs_are_as_independent_as_shuffles_of_blocks() -> None:
    """The position of a sample is uniform. The rank correlation of two epochs scatters around 0
    like that of n independent items, 1 / sqrt(n): n blocks here, n samples in a shuffle."""
    size, num_epochs = BLOCK * 40 + 17, 200
    order = order_of(size, BLOCK, WINDOW)
    epochs = np.array([epoch_of(order, e) for e in range(1, num_epochs + 1)])
    shuffles = np.array([_core.permute_range(key_of(e), size, 0, size) for e in range(num_epochs)])
    for drawn, independent in ((epochs, size / BLOCK), (shuffles, size)):
        places = np.argsort(drawn, axis=1)
        tenths = places * 10 // size
        counts = np.array([np.bincount(column, minlength=10) for column in tenths[:, ::37].T])
        chi = ((counts - num_epochs / 10) ** 2 / (num_epochs / 10)).sum(axis=1)
        assert 7 < chi.mean() < 11, "9 degrees of freedom"
        centred = places - places.mean()
        rho = (centred[1:] * centred[:-1]).mean(axis=1) / centred.var() * independent**0.5
        assert 0.75 < rho.std() < 1.25 and abs(rho.mean()) < 4 / num_epochs**0.5


def test_samples_share_steps_as_often_as_groups_of_blocks_imply() -> None:
    """Two samples of a step come from one block as often as any two samples of a group of blocks.
    They shared a step of the previous epoch if they were in one group in that epoch, which samples
    of one block always were."""
    num_blocks, step = 48, 32
    order = order_of(BLOCK * num_blocks, BLOCK, WINDOW)
    pairs = again = of_block = 0
    before = np.argsort(epoch_of(order, 1))
    upper = np.triu_indices(step, 1)
    for epoch in range(2, 80):
        drawn = epoch_of(order, epoch)
        for i in range(0, order.size, step * 4):
            of_step = drawn[i : i + step]
            steps, blocks = before[of_step] // step, of_step // BLOCK
            again += int((steps[:, None] == steps)[upper].sum())
            of_block += int((blocks[:, None] == blocks)[upper].sum())
            pairs += len(upper[0])
        before = np.argsort(drawn)
    share = of_block / pairs
    assert share == pytest.approx(1 / WINDOW, rel=0.05)
    in_window = share + (1 - share) * (WINDOW - 1) / (num_blocks - 1)
    assert again / pairs == pytest.approx(in_window * step / (WINDOW * BLOCK), rel=0.1)


@given(
    means=st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0, 7.0]), min_size=1, max_size=60),
    begin=st.integers(0, 300),
    count=st.integers(0, 200),
)
def test_epoch_ascends_and_ties_are_shuffled(means: list[float], begin: int, count: int) -> None:
    scores = np.array(means)
    size = len(means)
    order = Epochs(size, 9, ScoreOrder(scores))
    epochs = [order.samples(e * size, size) for e in range(max(12, (begin + count) // size + 1))]
    expected = np.concatenate(epochs)[begin : begin + count]
    assert order.samples(begin, count).tolist() == expected.tolist()
    for epoch, samples in enumerate(epochs):
        assert sorted(samples.tolist()) == list(range(size))
        assert (np.diff(scores[samples]) >= 0).all()
        assert order.positions(epoch, samples).tolist() == list(range(size))
    for score in set(means):
        tied = {tuple(samples[scores[samples] == score].tolist()) for samples in epochs}
        assert len(tied) > 1 or means.count(score) < 4


def sample_means(index: SampleIndex, scores: np.ndarray) -> np.ndarray:
    """Return the mean scores as defined, weighted by tokens in the sample."""
    samples = [np.array(index.sample(number)[1]).T for number in range(index.num_samples)]
    return np.array([np.average(scores[segments[0]], weights=segments[2]) for segments in samples])


def schedule_of(folder: Path, scores: np.ndarray, **options: Any) -> Schedule:
    """Return a schedule of two sources, the first with scores; no token files."""
    indices = [packed_index(300, (16, 32)), packed_index(200, (16, 32), 1)]
    np.save(folder / "scores.npy", scores)
    how = options.pop("score_order", "ascending")
    scored = [Scores(path=str(folder / "scores.npy"), order=how), None]
    mixture = Mixture(weights=[2, 1], names=["web", "code"], scores=scored)
    return Schedule(SampleSource(indices, mixture), tokens_per_step=128, seed=3, **options)


@pytest.mark.parametrize("score_order", ["ascending", "descending"])
def test_samples_are_sorted_by_mean_score(tmp_path: Path, score_order: str) -> None:
    """Other sources are shuffled; tests/data/test_programs.py covers stages."""
    scores = np.random.default_rng(0).normal(size=300)
    scored = schedule_of(tmp_path, scores, score_order=score_order)
    index = scored.samples.indices[0]
    plain = Schedule(scored.samples.indices, weights=[2, 1], tokens_per_step=128, seed=3)
    means = sample_means(index, scores) * (1 if score_order == "ascending" else -1)
    bounds = index.bucket_sample_offsets.tolist()
    assert scored.capacities == index.bucket_capacity.tolist() == [16, 32]
    for capacity, begin, end in zip((16, 32), bounds[:-1], bounds[1:], strict=True):
        order = scored.stages[0].order_at(0, capacity, 0)[0]
        epoch = begin + order.samples(0, end - begin)
        assert sorted(epoch.tolist()) == list(range(begin, end))
        assert (np.diff(means[epoch]) >= 0).all()
    for step in range(40):
        (draw,), (other,) = scored.step(step).draws, plain.step(step).draws
        second, other_second = (scored.samples.locate(d.sample_ids)[0] == 1 for d in (draw, other))
        assert draw.capacity == other.capacity and (second == other_second).all()
        assert draw.sample_ids[second].tolist() == other.sample_ids[other_second].tolist()


def test_scores_are_part_of_the_resume_identity(tmp_path: Path) -> None:
    scores = np.arange(300.0)
    state = json.loads(json.dumps(schedule_of(tmp_path, scores).state_dict(4)))
    assert schedule_of(tmp_path, scores).check_state(state) == []
    assert schedule_of(tmp_path, scores.astype(np.int32)).check_state(state) == []
    scores[5] = 400
    with pytest.raises(ResumeError, match="indices was"):
        schedule_of(tmp_path, scores).check_state(state)
    with pytest.raises(ResumeError, match="indices was"):
        schedule_of(tmp_path, np.arange(300.0), score_order="descending").check_state(state)


def test_scores_are_relative_to_the_manifest(tmp_path: Path) -> None:
    documents = random_documents(packed_lengths(120, 32))
    dataset = packed_documents(tmp_path / "web", documents, [16, 32])
    np.save(tmp_path / "quality.npy", np.random.default_rng(1).random(120).astype(np.float32))
    source = {"prefix": "web", "index": "web.samples", "scores": "quality.npy"}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"sources": [source]}))
    data = open_blend(load_blend(tmp_path / "m.yaml"))
    steps = Schedule(data, tokens_per_step=128)
    plain = Schedule(PackedDataset(dataset, data.samples.indices[0]), tokens_per_step=128)
    assert steps.step(1).sample_ids.tolist() != plain.step(1).sample_ids.tolist()
    copy = pickle.loads(pickle.dumps(data))
    assert Schedule(copy, tokens_per_step=128).identity() == steps.identity()
    with pytest.raises(
        ConfigError, match="order sequential draws samples in the order of the index"
    ):
        Schedule(data, tokens_per_step=128, order="sequential")
    source["score_order"] = "descending"
    del source["scores"]
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"sources": [source]}))
    with pytest.raises(ConfigError, match="has score_order descending and no scores"):
        load_blend(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(299), "holds float64 of shape (299,); scores are numbers, one for each of 300"),
        (np.zeros((300, 1)), "of shape (300, 1)"),
        (np.zeros(300, bool), "holds bool"),
        (np.r_[np.zeros(7), np.nan, np.inf, np.zeros(291)], "has nan for document 7 (2 such"),
        (b"", "is not a .npy file of numbers"),
        (b"PK\x03\x04", "is not a .npy file of numbers"),  # start of an .npz
    ],
)
def test_files_without_scores_are_refused(tmp_path: Path, scores: Any, message: str) -> None:
    file = tmp_path / "scores.npy"
    file.write_bytes(scores) if isinstance(scores, bytes) else np.save(file, scores)
    with pytest.raises(FormatError) as caught:
        Scores(path=str(file)).read(300)
    assert message in str(caught.value) and "scores.npy" in str(caught.value)

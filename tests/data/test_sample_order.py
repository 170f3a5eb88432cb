"""In which order the samples of a source come: by blocks, by score, or shuffled."""

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
from megapack.data import (
    PackedDataset,
    Schedule,
    Scores,
    Stage,
    build_loader,
    load_blend,
    open_blend,
)
from megapack.data.program import Mixture
from megapack.data.sample_order import BlockOrder, Epochs, ScoreOrder
from megapack.data.sources import SampleSource
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.packing import SampleIndex, pack
from megapack.packing.sharded import Arranged
from tests.data.corpora import packed_index, packed_lengths, random_documents, write_documents


def order_of(size: int, block: int, window: int) -> Epochs:
    sizes = Arranged(source="", seed=0, block_tokens=block * 16, window_blocks=window)
    return Epochs(size, 7, BlockOrder(size, 16, sizes))


def key_of(epoch: int) -> int:
    return _core.random_bits(7, epoch)


def epoch_of(order: Epochs, epoch: int) -> np.ndarray:
    return order.samples(epoch * order.size, order.size)


def reference(size: int, block: int, window: int, epoch: int) -> list[int]:
    """An epoch by its definition: blocks in their order, windows of them mixed."""
    if epoch == 0:
        return list(range(size))
    key, number = key_of(epoch), -(-size // block)
    blocks = _core.permute_range(key, number, 0, number).tolist()
    result: list[int] = []
    for slot in range(0, number, window):
        own = [i for b in blocks[slot : slot + window] for i in range(b * block, (b + 1) * block)]
        own = [i for i in own if i < size]
        bits = _core.random_bits(key, len(result) + 1)
        mixed = _core.permute_range(bits, len(own), 0, len(own))
        result += [own[i] for i in mixed.tolist()]
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
        places = order.places(epoch, samples)
        assert places.tolist() == list(range(size))


BLOCK, WINDOW = 64, 16


@pytest.mark.parametrize("size", [BLOCK * 40, BLOCK * 40 + 17])
def test_later_epochs_are_as_independent_as_shuffles_of_blocks(size: int) -> None:
    """Permutation statistics of 200 epochs beside those of the ordinary shuffle.

    Where a sample stands is uniform. The rank correlation of two epochs scatters around 0 as that
    of n independent things, 1 / sqrt(n): of so many blocks here, of so many samples in a shuffle.
    """
    order, num_epochs = order_of(size, BLOCK, WINDOW), 200
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


def test_who_shares_a_step_with_whom_is_what_windows_make_of_it() -> None:
    """In a step two samples are of one block as often as any two of a window are. They were in one
    step of the epoch before if they lay in one window then, which those of one block always do.
    """
    num_blocks, step = 48, 32
    order = order_of(BLOCK * num_blocks, BLOCK, WINDOW)
    pairs = again = of_block = 0
    before = np.argsort(epoch_of(order, 1))
    upper = np.triu_indices(step, 1)
    for epoch in range(2, 80):
        drawn = epoch_of(order, epoch)
        for i in range(0, order.size, step * 4):
            own = drawn[i : i + step]
            steps, blocks = before[own] // step, own // BLOCK
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
def test_scored_samples_come_by_means_of_documents(tmp_path: Path, score_order: str) -> None:
    """Others come as ever; through stages, tests/data/test_programs.py looks at it."""
    scores = np.random.default_rng(0).normal(size=300)
    ours = schedule_of(tmp_path, scores, score_order=score_order)
    index = ours.samples.indices[0]
    plain = Schedule(
        ours.samples.indices, names=["web", "code"], weights=[2.0, 1.0], tokens_per_step=128, seed=3
    )
    means = sample_means(index, scores) * (1 if score_order == "ascending" else -1)
    for b, capacity in enumerate((16, 32)):
        begin, end = bounds(index, capacity)
        order = ours.stages[0].order_at(0, capacity, 0)[0]
        epoch = begin + order.samples(0, end - begin)
        assert sorted(epoch.tolist()) == list(range(begin, end))
        assert (np.diff(means[epoch]) >= 0).all() and ours.capacities[b] == capacity
    for step in range(40):
        (draw,), (other,) = ours.step(step).draws, plain.step(step).draws
        second, there = (ours.samples.locate(d.sample_ids)[0] == 1 for d in (draw, other))
        assert draw.capacity == other.capacity and (second == there).all()
        assert draw.sample_ids[second].tolist() == other.sample_ids[there].tolist()


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
    data = open_blend(load_blend(tmp_path / "m.yaml"))
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
def test_files_without_scores_are_refused(tmp_path: Path, scores: np.ndarray, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        schedule_of(tmp_path, scores)
    assert message in str(caught.value) and "scores.npy" in str(caught.value)


# ---- Atom sizes (Chen et al., "Packing and shuffling strategies", A.3) through the loader
#
# Documents are cut in atoms of A tokens, atoms are shuffled, and merged or split to the sequence
# length L: ``concat`` cuts the joined stream, ``pad`` every document by itself. The unit of
# shuffling
# is the atom: up to A = L the schedule shuffles samples as always; with A > L it keeps the packer's
# order (``order="sequential"``), in which the samples of an atom follow each other.


LENGTH = 64
ATOMS = [16, 32, 64, 128, 256]  # 1/4, 1/2, 1, 2 and 4 times the length: the paper's five
LENGTHS = packed_lengths(60, 200, seed=8)
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents whose tokens count up through the whole corpus, so that a token is its position."""
    path = tmp_path_factory.mktemp("atoms") / "d"
    spans = zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)
    write_documents(path, [list(range(begin, end)) for begin, end in spans], "int32")
    return path


def one_epoch(prefix: Path, strategy: str, atom: int) -> tuple[list[np.ndarray], int, float]:
    """Tokens of every sample without padding, in the order of training; steps; label tokens."""
    index = pack(LENGTHS, strategy, buckets=[LENGTH], atom_size=atom, seed=42)
    packed = PackedDataset(prefix, index, pad_token=-1)
    order = "proportional" if atom <= LENGTH else "sequential"
    schedule = Schedule(packed, tokens_per_step=4 * LENGTH, order=order)
    samples: list[np.ndarray] = []
    labels = 0.0
    for batch in build_loader(
        packed,
        schedule,
        data_parallel_rank=0,
        data_parallel_size=1,
        micro_batch_tokens=4 * LENGTH,
        layout="rows",
        dealing="in_order",
    ):
        rows = batch["tokens"].numpy()
        fresh = index.num_samples - len(samples)  # the last step reaches into the next epoch
        samples += [row[row >= 0].copy() for row in rows[:fresh]]
        labels += float(batch["loss_mask"][:fresh].sum())
    return samples, schedule.num_steps(), labels


@pytest.mark.parametrize("atom", ATOMS)
@pytest.mark.parametrize("strategy", ["concat", "pad"])
def test_tokens_train_once_and_atoms_stay_whole(prefix: Path, strategy: str, atom: int) -> None:
    samples, _, labels = one_epoch(prefix, strategy, atom)
    stream = np.concatenate(samples)
    assert sorted(stream.tolist()) == list(range(OFFSETS[-1]))
    assert labels == OFFSETS[-1] - len(LENGTHS)  # no label is lost to a cut
    assert all(0 < len(sample) <= LENGTH for sample in samples)
    # Runs of consecutive tokens are atoms: they begin where an atom of the document (or of the
    # joined documents, which may differ from their order on disk) begins, and are whole.
    runs = np.split(stream, np.flatnonzero(np.diff(stream) != 1) + 1)
    if strategy == "pad":
        begins = np.array([run[0] for run in runs])
        document = np.searchsorted(OFFSETS, begins, side="right") - 1
        assert ((begins - OFFSETS[document]) % atom == 0).all()
    assert max(map(len, runs)) >= min(atom, 2 * LENGTH)


@pytest.mark.parametrize("strategy", ["concat", "pad"])
def test_atoms_are_shuffled_and_small_ones_mix_more(prefix: Path, strategy: str) -> None:
    mixed = {}
    for atom in ATOMS:
        samples, _, _ = one_epoch(prefix, strategy, atom)
        documents = [np.searchsorted(OFFSETS, s, side="right") - 1 for s in samples]
        mixed[atom] = np.mean([len(np.unique(d)) for d in documents])
        firsts = np.array([d[0] for d in documents])
        assert np.abs(np.corrcoef(firsts, np.arange(len(firsts)))[0, 1]) < 0.5
    assert mixed[16] > mixed[32] > mixed[64]
    # Atoms of one sequence length and more keep what belongs together in one sample.
    assert mixed[128] == pytest.approx(mixed[64], rel=0.2)


def test_padding_costs_steps_that_concatenation_does_not(prefix: Path) -> None:
    steps = {
        strategy: [one_epoch(prefix, strategy, atom)[1] for atom in ATOMS]
        for strategy in ("concat", "pad")
    }
    assert set(steps["concat"]) == {-(-int(OFFSETS[-1]) // (4 * LENGTH))}
    # A.10 (b): small atoms leave less to pad; from A = L on every document's tail is padded to L.
    assert steps["pad"][0] <= steps["pad"][1] <= steps["pad"][2]
    assert steps["pad"][2] == steps["pad"][3] == steps["pad"][4] > steps["concat"][0]

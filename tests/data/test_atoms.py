"""Atom sizes (Chen et al., "Packing and shuffling strategies", A.3) through the loader.

Documents are cut in atoms of A tokens, atoms are shuffled, and merged or split to the sequence
length L: ``concat`` cuts the joined stream, ``pad`` every document by itself. The unit of shuffling
is the atom: up to A = L the schedule shuffles samples as always; with A > L it keeps the packer's
order (``order="sequential"``), in which the samples of an atom follow each other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing import pack
from tests.data.corpora import packed_lengths, write_documents

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

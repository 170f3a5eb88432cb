"""examples/usual_path.py equals megapack: samples, steps, micro batches and tensors."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing import pack
from tests.data.corpora import of_rank, random_documents, write_documents

FILE = Path(__file__).parents[1] / "examples" / "usual_path.py"
CAPACITIES = [[64], [16, 64], [8, 16, 32], [24, 48, 96]]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    num_documents=st.integers(1, 300),
    spread=st.floats(0.1, 1.5),
    capacities=st.sampled_from(CAPACITIES),
    num_ranks=st.sampled_from([1, 2, 3]),
    micro_batches_per_rank=st.integers(1, 4),
    samples_per_micro_batch=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_usual_path_in_one_file_equals_megapack(
    num_documents: int,
    spread: float,
    capacities: list[int],
    num_ranks: int,
    micro_batches_per_rank: int,
    samples_per_micro_batch: int,
    seed: int,
) -> None:
    lengths = np.random.default_rng(seed).lognormal(3, spread, num_documents).astype(int) + 1
    lengths = lengths.clip(max=4 * capacities[-1]).tolist()
    usual = runpy.run_path(str(FILE))
    documents = random_documents(lengths, seed % 2**32)
    micro_batch_tokens = samples_per_micro_batch * capacities[-1]
    step_tokens = num_ranks * micro_batches_per_rank * micro_batch_tokens

    index = pack(np.array(lengths), "bucket", buckets=capacities)
    buckets = usual["pack_bucket"](lengths, capacities)
    samples = [(c, sample) for c in capacities for sample in buckets[c]]
    assert samples == [
        (capacities[bucket], sample) for bucket, sample in map(index.sample, range(len(index)))
    ]

    with tempfile.TemporaryDirectory() as folder:
        data = PackedDataset(write_documents(Path(folder) / "d", documents), index)
        schedule = Schedule(data, tokens_per_step=step_tokens, seed=seed)
        num_steps = min(4, schedule.num_steps() + 1)  # into the second epoch of a small corpus
        for rank in range(num_ranks):
            options = of_rank(rank, num_ranks, micro_batch_tokens, num_steps=num_steps)
            loader = iter(build_loader(data, schedule, **options))
            for step in range(num_steps):
                capacity, drawn = usual["step_samples"](buckets, step_tokens, seed, step)
                own = usual["micro_batches"](
                    capacity, drawn, rank, num_ranks, tokens=micro_batch_tokens
                )
                for expected in own:
                    batch = next(loader)
                    assert (batch["step"], batch["capacity"]) == (step, capacity)
                    for name, values in usual["tensors"](documents, capacity, expected).items():
                        assert torch.as_tensor(batch[name]).tolist() == values, name
            assert next(loader, None) is None


def test_the_usual_path_runs_and_has_at_most_150_lines() -> None:
    printed = subprocess.run([sys.executable, FILE], check=True, capture_output=True, text=True)
    assert printed.stdout.count("[0, ") == 2
    assert len(FILE.read_text().splitlines()) <= 150

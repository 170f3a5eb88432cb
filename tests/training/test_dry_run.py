"""What a dry run predicts of the ranks' work is what their micro batches hold."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megapack.config import load_config
from megapack.data import BucketBatchSampler
from megapack.training.config import PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.engine.inputs import Inputs, open_inputs
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import build_model

from .conftest import Corpus


@pytest.mark.parametrize(
    ("ranks", "data", "engine"),
    [
        (1, {}, {}),
        (4, {}, {}),
        (2, {}, {}),
        (3, {"uneven": "pad"}, {}),
        (8, {"micro_batch_tokens": 64}, {"sequence_parallel_size": 4}),
    ],
    ids=["one rank", "one micro step", "two micro steps", "uneven ranks", "shared samples"],
)
def test_the_busiest_rank_is_that_of_the_samples_which_ranks_draw(
    corpus: Corpus, tmp_path: Path, ranks: int, data: dict[str, object], engine: dict[str, object]
) -> None:
    path = corpus.config(tmp_path / "run", num_steps=10, data=data, engine=engine)
    config = load_config(PretrainConfig, path)
    inputs = open_inputs(config)
    architecture = model_configuration(config.model, inputs.vocab_size)
    model = build_model(config.model, architecture, backend="sdpa", seed=0)
    flops = ModelFlops.of(model, architecture)
    tokens = config.data.micro_batch_tokens
    work = np.array([_work(inputs, config, rank, ranks) for rank in range(ranks)])
    work = flops.attention(1) * work + flops.per_token * tokens  # (ranks, steps, micro steps)
    mean = work.sum() / ranks
    per_step, per_micro_step = work.sum(2).max(0).sum() / mean, work.max(0).sum() / mean
    found = re.findall(
        r"predicted: (\S+) per step, (\S+) per micro step", dry_run(config, world_size=ranks)
    )
    assert found == [(f"{per_step:.4f}", f"{per_micro_step:.4f}")]
    assert (per_micro_step > 1.0005) == (ranks > 1), "otherwise nothing was to be found"


def _work(inputs: Inputs, config: PretrainConfig, rank: int, ranks: int) -> list[list[float]]:
    """Squared lengths of a rank's segments and paddings, per step and micro step."""
    sampler = BucketBatchSampler(
        inputs.schedule,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        micro_batch_tokens=config.data.micro_batch_tokens,
        uneven=config.data.uneven,
        sequence_parallel_size=config.engine.sequence_parallel_size,
    )
    (index,) = inputs.schedule.samples.indices
    steps = []
    for step in range(10):
        row = []
        for batch in sampler.micro_batches(step):
            total = 0
            for sample in batch:
                begin, end = index.sample_segment_offsets[sample : sample + 2]
                lengths = index.segment_length[begin:end].tolist()
                total += sum(n * n for n in [*lengths, batch.capacity - sum(lengths)])
            row.append(total / batch.sequence_parallel_size)
        steps.append(row)
    return steps

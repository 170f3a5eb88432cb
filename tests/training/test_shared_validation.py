"""Ranks that share long samples score what ranks with whole samples score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus
from .processes import Zygote, run_worker, start_run


@pytest.mark.parametrize(
    ("size", "micro", "stage"), [(2, 64, 3), (4, 32, 1)], ids=["2 x 2, ZeRO 3", "4 x 1"]
)
def test_losses_and_labels_are_those_of_whole_samples(
    zygote: Zygote, corpus: Corpus, tmp_path: Path, size: int, micro: int, stage: int
) -> None:
    """Three sets of documents: some buckets of one are shared, none of another, odd ones of the
    third; once all samples, and once so few that a group has none."""
    config = corpus.config(
        tmp_path / "run",
        data={"micro_batch_tokens": micro, "tokens_per_step": 8 * micro},
        evaluation={"buckets": [32, 64, 128]},
        engine={"sequence_parallel_size": size, "zero_stage": stage},
    )
    found = run_worker(zygote, config, 4, "validation_worker")
    for max_tokens in (None, 128):
        whole, shared = found[False, max_tokens], found[True, max_tokens]
        _check_forwards(whole.pop("forwards"), shared.pop("forwards"), size, micro)
        assert sorted(whole) == ["all", "odd", "short"]
        for name, expected in whole.items():
            assert shared[name]["labels"] == expected["labels"] and any(expected["labels"].values())
            assert shared[name]["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
    losses = found[False, None]["all"]["losses"]
    labels = found[False, None]["all"]["labels"]
    apart = [losses[c] / labels[c] for c in losses]
    assert max(apart) - min(apart) > 1e-3, "buckets of one loss would hide a leak among them"


def _check_forwards(whole: Any, shared: Any, size: int, micro: int) -> None:
    """(tokens, ranks of the micro batch) of every rank's forwards."""
    assert all(one == shared[0] for one in shared), "a rank left out a forward"
    assert max(tokens for tokens, _ in whole[0]) == 133
    assert {ranks for _, ranks in whole[0]} == {1}
    assert {ranks for _, ranks in shared[0]} == {1, size}
    assert max(tokens for tokens, _ in shared[0]) <= max(micro, -(-133 // size))


def test_run_validates_alike_in_groups(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    found = []
    for ranks, group, micro in ((1, 1, 256), (4, 2, 64)):
        run_dir = tmp_path / f"run_{group}"
        config = corpus.config(
            run_dir,
            num_steps=2,
            data={"micro_batch_tokens": micro},
            engine={"sequence_parallel_size": group},
            evaluation={"every": 1},
        )
        start_run(zygote, config, "run", ranks=ranks).succeed()
        found.append(list(read_jsonl(run_dir / "evaluation.jsonl")))
    alone, shared = found
    assert len(alone) == len(shared) == 2
    for one, other in zip(alone, shared, strict=True):
        assert other["label_tokens"] == one["label_tokens"] > 0
        assert other["bucket_loss"] == pytest.approx(one["bucket_loss"], rel=1e-4)
    assert shared[1]["loss"] < shared[0]["loss"]

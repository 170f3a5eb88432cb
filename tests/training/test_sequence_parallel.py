"""Ranks that share long samples train as one process does, and stop and resume as others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus
from .processes import Zygote, read_log, run_worker, start_run


def _run(
    zygote: Zygote, corpus: Corpus, path: Path, ranks: int, **engine: object
) -> dict[str, Any]:
    """Three steps; without ``sequence_parallel_size`` every rank holds whole samples."""
    micro = engine.pop("micro_batch_tokens", 256)
    config = corpus.config(path, num_steps=3, data={"micro_batch_tokens": micro}, engine=engine)
    return run_worker(zygote, config, ranks)


def test_losses_are_equal(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    """Buckets 32, 64, 128; what is longer than a rank's micro batch is shared, the rest is not."""
    alone = _run(zygote, corpus, tmp_path / "alone", 1)
    cases: dict[str, dict[str, Any]] = {
        "2 x 2": {"ranks": 4, "sequence_parallel_size": 2, "micro_batch_tokens": 64},
        "4 x 1": {"ranks": 4, "sequence_parallel_size": 4, "micro_batch_tokens": 32},
        "recomputed, ZeRO 3": {
            "ranks": 2,
            "sequence_parallel_size": 2,
            "micro_batch_tokens": 64,
            "zero_stage": 3,
            "activation_checkpointing": True,
        },
    }
    for name, case in cases.items():
        path = tmp_path / name.replace(" ", "_")
        found = _run(zygote, corpus, path, **case)
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4), name
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-3), name
        for parameter, grad in alone["grads"].items():
            scale = grad.abs().max().clamp(min=1e-6)
            error = (found["grads"][parameter] - grad).abs().max() / scale
            assert error < 1e-3, f"{name}, {parameter}: {error:.1e}"
    assert alone["num_buckets"] > 1 and alone["losses"][2] < alone["losses"][0] - 0.05


def _stretch(
    zygote: Zygote, config: Path, name: str, ranks: int, group: int, micro: int, *more: str
) -> str:
    settings = (f"engine.sequence_parallel_size={group}", f"data.micro_batch_tokens={micro}", *more)
    output: str = start_run(zygote, config, name, *settings, ranks=ranks).succeed()
    return output


def test_run_changes_groups_at_resume(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    """2 groups of 2, then one of 4, then 4 ranks without: the curve of an undisturbed rank."""
    config = corpus.config(tmp_path / "one")
    _stretch(zygote, config, "alone", 1, 1, 256)
    log = read_log(tmp_path / "one")
    config = corpus.config(tmp_path / "run")
    _stretch(zygote, config, "first", 4, 2, 64, "stop_at=3")
    ids = {}
    for rank in range(4):
        for line in read_jsonl(tmp_path / "run" / "batches" / f"rank_{rank:05d}.jsonl"):
            if line["capacity"] == 128:
                ids[rank, line["step"], line["micro_step"]] = line["sample_ids"]
    assert ids, "no step of the longest bucket: nothing was shared"
    for (rank, *place), shared in ids.items():
        assert shared == ids[(rank ^ 1, *place)]
    _stretch(zygote, config, "second", 4, 4, 32, "stop_at=6")
    _stretch(zygote, config, "third", 4, 1, 256)
    found = read_log(tmp_path / "run")
    assert [line["step"] for line in found] == [line["step"] for line in log]
    for name in ("samples", "bucket", "lr", "label_tokens", "tokens", "flops"):
        assert [line.get(name) for line in found] == [line.get(name) for line in log], name
    losses = [line["loss"] for line in log]
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=2e-3)
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    ("group", "model", "message"),
    [
        (3, "llama_tiny", "sequence_parallel_size is 3, and 4 ranks cannot be divided"),
        (4, "gpt2_tiny_alibi", "with sequence_parallel_size 4 fails on a row of documents"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_start(
    zygote: Zygote, corpus: Corpus, tmp_path: Path, group: int, model: str, message: str
) -> None:
    config = corpus.config(tmp_path / "run", model={"preset": model})
    settings = (f"engine.sequence_parallel_size={group}", "data.micro_batch_tokens=64")
    ranks = start_run(zygote, config, "refused", *settings, ranks=4)
    assert set(ranks.wait()) == {2}
    assert message in ranks.output()


# ---- Ranks that share long samples score what ranks with whole samples score


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

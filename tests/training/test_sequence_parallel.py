"""Ranks that share long samples train, stop and resume like one process."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import NewRun


def test_losses_are_equal(new_run: NewRun) -> None:
    """Buckets 32, 64, 128; ranks share samples longer than a micro batch."""

    def run(name: str, ranks: int, micro: int, **engine: object) -> dict[str, Any]:
        data = {"micro_batch_tokens": micro}
        return new_run(name, num_steps=3, data=data, engine=engine).worker(ranks)

    alone = run("alone", 1, 256)
    recomputed = {"zero_stage": 3, "activation_checkpointing": True}
    for ranks, group, micro, engine in ((4, 2, 64, {}), (4, 4, 32, {}), (2, 2, 64, recomputed)):
        case = f"{ranks} by {group}"
        found = run(case, ranks, micro, sequence_parallel_size=group, **engine)
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4), case
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-3), case
        for parameter, grad in alone["grads"].items():
            scale = grad.abs().max().clamp(min=1e-6)
            error = (found["grads"][parameter] - grad).abs().max() / scale
            assert error < 1e-3, f"{case}, {parameter}: {error:.1e}"
    assert alone["num_buckets"] > 1 and alone["losses"][2] < alone["losses"][0] - 0.05


def test_run_changes_groups_at_resume(new_run: NewRun) -> None:
    """2 groups of 2, one of 4, 4 ranks without groups: all continue the curve of one rank."""
    alone, run = new_run("alone"), new_run()
    alone.succeed(ranks=1)

    def stretch(group: int, micro: int, *more: str) -> None:
        sizes = f"engine.sequence_parallel_size={group}", f"data.micro_batch_tokens={micro}"
        run.succeed(*sizes, *more, ranks=4)

    stretch(2, 64, "stop_at=3")
    ids = {
        (rank, line["step"], line["micro_step"]): line["sample_ids"]
        for rank in range(4)
        for line in run.lines(f"batches/rank_{rank:05d}")
        if line["capacity"] == 128
    }
    assert ids, "no step of the longest bucket"
    for (rank, *place), shared in ids.items():
        assert shared == ids[(rank ^ 1, *place)]
    stretch(4, 32, "stop_at=6")
    stretch(1, 256)
    for name in ("step", "samples", "bucket", "lr", "label_tokens", "tokens", "flops"):
        found, expected = ([line.get(name) for line in one.log] for one in (run, alone))
        assert found == expected, name
    losses = [line["loss"] for line in alone.log]
    assert [line["loss"] for line in run.log] == pytest.approx(losses, rel=2e-3)


@pytest.mark.parametrize(
    ("group", "model", "message"),
    [
        (3, "llama_tiny", "sequence_parallel_size is 3, and 4 ranks cannot be divided"),
        (4, "gpt2_tiny_alibi", "with sequence_parallel_size 4 fails on a row of documents"),
    ],
)
def test_invalid_sequence_parallel_configurations_are_refused(
    new_run: NewRun, group: int, model: str, message: str
) -> None:
    sizes = {"data": {"micro_batch_tokens": 64}, "engine": {"sequence_parallel_size": group}}
    new_run(model={"preset": model}, **sizes).start(ranks=4).end_with(2, message)


# ---- Validation of shared samples equals that of whole samples


@pytest.mark.parametrize(
    ("size", "micro", "stage"), [(2, 64, 3), (4, 32, 1)], ids=["2 x 2, ZeRO 3", "4 x 1"]
)
def test_losses_and_labels_equal_those_of_whole_samples(
    new_run: NewRun, size: int, micro: int, stage: int
) -> None:
    """Three sets of documents: some buckets shared, none, odd ones; once all samples, and once so
    few that a group has none."""
    run = new_run(
        data={"micro_batch_tokens": micro, "tokens_per_step": 8 * micro},
        evaluation={"buckets": [32, 64, 128]},
        engine={"sequence_parallel_size": size, "zero_stage": stage},
    )
    found = run.worker(4, "validation_worker")
    for max_tokens in (None, 128):
        whole, shared = found[False, max_tokens], found[True, max_tokens]
        _check_forwards(whole.pop("forwards"), shared.pop("forwards"), size, micro)
        assert sorted(whole) == ["all", "odd", "short"]
        for name, expected in whole.items():
            assert shared[name]["labels"] == expected["labels"] and any(expected["labels"].values())
            assert shared[name]["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
    every = found[False, None]["all"]
    apart = [loss / every["labels"][c] for c, loss in every["losses"].items()]
    assert max(apart) - min(apart) > 1e-3, "equal losses of buckets would hide a leak"


def _check_forwards(whole: Any, shared: Any, size: int, micro: int) -> None:
    """Check (tokens, ranks of the micro batch) of every rank's forward passes."""
    assert all(one == shared[0] for one in shared), "a rank skipped a forward"
    assert max(tokens for tokens, _ in whole[0]) == 133
    assert {ranks for _, ranks in whole[0]} == {1}
    assert {ranks for _, ranks in shared[0]} == {1, size}
    assert max(tokens for tokens, _ in shared[0]) <= max(micro, -(-133 // size))

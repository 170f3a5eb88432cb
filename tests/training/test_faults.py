"""Faults of numbers, disks, processes and people, made to happen in real ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megapack.training.monitoring.heartbeat import LOST_CONTACT

from .conftest import Corpus
from .processes import Zygote, read_log, start_run, wait_for


def _end(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "end.json").read_text())
    return result


def _faulty(**faults: list[Any]) -> dict[int, dict[str, Any]]:
    return {0: {"faults": faults}, 1: {"faults": faults}}


@pytest.mark.parametrize("stage", [0, 1])
def test_bad_update_is_skipped(zygote: Zygote, corpus: Corpus, tmp_path: Path, stage: int) -> None:
    run_dir = tmp_path / "run"
    engine = {"precision": "fp32", "zero_stage": stage}
    config = corpus.config(run_dir, engine=engine, num_steps=5, checkpoint={"every": 2})
    ranks = start_run(zygote, config, "some", of_rank=_faulty(nan_gradients=[[1, 3]]))
    output = ranks.succeed()
    assert output.count("its gradient is not finite") == 2
    log = read_log(run_dir)
    assert [line["skipped"] for line in log] == [False, True, False, True, False]
    assert all(line["loss"] is not None for line in log), "the weights are numbers"
    assert log[1]["grad_norm"] is None


def test_endless_skipping_stops_the_run(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "run", optimizer={"max_skipped": 2}, num_steps=40)
    faults = _faulty(nan_gradients=[[1, *range(3, 40)]])
    ranks = start_run(zygote, config, "all", of_rank=faults)
    assert ranks.wait() == [1, 1], ranks.output()[-3000:]
    assert "3 updates in a row were skipped" in ranks.output()
    assert [line["step"] for line in read_log(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]
    assert _end(tmp_path / "run")["reason"] == "error"


def test_weights_not_finite_are_not_saved(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, num_steps=4, checkpoint={"every": 2, "export": True})
    ranks = start_run(zygote, config, "nan", ranks=1, of_rank=_faulty(nan_weight_after=[3]))
    assert ranks.wait() == [1]
    assert "model.model.embed_tokens.weight" in ranks.output()
    assert [p.name[:13] for p in (run_dir / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert not (run_dir / "model").exists()


def test_step_size_keeps_checkpoints(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    """Steps count anew: eight of 1,024 tokens are two of 4,096."""
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint={"every": 4, "keep": 2})
    start_run(zygote, config, "small", ranks=1).succeed()
    larger = ["data.tokens_per_step=4096", "num_steps=4", "checkpoint.every=1"]
    allow = "checkpoint.allow_change=[tokens_per_step]"
    output = start_run(zygote, config, "large", *larger, allow, ranks=1).succeed()
    assert "continuing at step 2 " in output
    assert output.count("documents of a micro batch are kept apart: probed in") == 1
    assert "tokens_per_step was 1024 and is 4096: the step number is converted" in output
    kept = sorted(p.name for p in (run_dir / "checkpoints").glob("step_*"))
    assert kept == ["step_00000003_tokens_12288", "step_00000004_tokens_16384"]
    assert (run_dir / "checkpoints" / "latest").read_text() == kept[-1]
    log = read_log(run_dir)
    assert [line["step"] for line in log] == [*range(8), 2, 3], "what was done stays in the log"
    assert [line["tokens_seen"] for line in log[-3:]] == [8192, 12288, 16384]


def test_manifest_names_files_of_all_ranks(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, num_steps=1, checkpoint={"every": 1})
    stale = {rank: {"faults": {"stale_listing": [rank]}} for rank in (0, 1)}
    start_run(zygote, config, "stale", of_rank=stale).succeed()
    saved = next((run_dir / "checkpoints").glob("step_*"))
    files = set(json.loads((saved / "manifest.json").read_text())["files"])
    written = {str(p.relative_to(saved)) for p in saved.rglob("*.pt")}
    assert len(written) == 3 and written <= files


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_named_and_what_was_saved_stays(
    zygote: Zygote, corpus: Corpus, tmp_path: Path, asynchronous: bool
) -> None:
    """A real file system with room for one checkpoint and a half."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    run_dir = tmp_path / "run"
    checkpoint = {"every": 1, "asynchronous": asynchronous}
    config = corpus.config(run_dir, num_steps=3, checkpoint=checkpoint)
    disk = {"small_disk": [str(run_dir / "checkpoints"), "1600k"]}
    ranks = start_run(zygote, config, "full", ranks=1, of_rank={0: {"faults": disk}})
    assert ranks.wait() == [1], ranks.output()
    assert "No space left on device" in ranks.output()
    assert str(run_dir / "checkpoints") in ranks.output() and "MB free" in ranks.output()
    assert "unexpected pos" not in ranks.output()
    end = _end(run_dir)
    assert end["reason"] == "error" and "No space left" in end["message"]
    assert end["saved"] == 1 and end["step"] in ((2, 3) if asynchronous else (2,))


def _wait_for_steps(run_dir: Path) -> None:
    batches = run_dir / "batches" / "rank_00000.jsonl"
    wait_for(lambda: batches.exists() and '"step": 1' in batches.read_text(), "two steps")


def test_second_launch_names_the_first(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint={"every": None})
    first = start_run(zygote, config, "first", "num_steps=100000", ranks=1)
    _wait_for_steps(run_dir)
    second = start_run(zygote, config, "second", ranks=1)
    assert second.wait() == [1]
    assert f"{run_dir} is being written by process {first.pids[0]} on " in second.output()
    assert _end(run_dir)["reason"] == "running", "the refused one leaves the record alone"
    first.signal(signal.SIGKILL)
    first.wait()
    end = _end(run_dir)
    assert end["reason"] == "running" and end["pid"] == first.pids[0], "it could say nothing more"
    assert (config.parent / "run.lock").exists(), "a kill leaves the file and no lock"
    start_run(zygote, config, "third", "num_steps=1", ranks=1).succeed()
    assert _end(run_dir)["reason"] == "done" and not (config.parent / "run.lock").exists()
    refused = start_run(zygote, config, "refused", "seed=3", ranks=1)
    assert refused.wait() == [1]
    assert _end(run_dir)["reason"] == "error" and "seed was 0" in _end(run_dir)["message"]


def test_hanging_rank_is_named(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "run")
    faults = {0: {"stall_limit_from_step": [2, 3.0]}, 1: {"hang_before_step": [2]}}
    of_rank = {rank: {"faults": fault} for rank, fault in faults.items()}
    ranks = start_run(zygote, config, "hangs", of_rank=of_rank)
    assert ranks.wait() == [LOST_CONTACT, LOST_CONTACT], ranks.output()
    assert "no progress for 3 seconds: rank 1 on " in ranks.output()
    assert "is behind" in ranks.output() and "at the end of step 1" in ranks.output()
    assert "no progress" in _end(tmp_path / "run")["message"]

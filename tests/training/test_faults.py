"""Faults of numbers, disks, processes and people, made to happen in real ranks."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.cli.main import main as build
from megapack.training.engine.checkpoint import WrittenFiles
from megapack.training.engine.directory import RunDirectory, append_jsonl
from megapack.training.engine.world import RankProgress
from megapack.training.monitoring.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.monitoring.signals import PREEMPTED
from megapack.training.monitoring.slowdowns import Slowdowns

from .conftest import Corpus
from .processes import PRETRAIN, Zygote, read_end, read_log, start_run, wait_for, wait_for_step


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
    assert read_end(tmp_path / "run")["reason"] == "error"


def test_weights_not_finite_are_not_saved(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, num_steps=4, checkpoint={"every": 2, "export": True})
    ranks = start_run(zygote, config, "nan", ranks=1, of_rank=_faulty(nan_weight_after=[3]))
    assert ranks.wait() == [1]
    assert "model.model.embed_tokens.weight" in ranks.output()
    assert [p.name[:13] for p in (run_dir / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert not (run_dir / "model").exists()
    words = ["autopilot.spikes=true", "checkpoint.keep=4", f"run_dir={tmp_path / 'back'}"]
    faults = _faulty(nan_weight_after=[3])
    output = start_run(zygote, config, "back", *words, ranks=1, of_rank=faults).succeed()
    assert "weights are not finite" in output and "back to step 2" in output
    assert read_end(tmp_path / "back")["reason"] == "done"


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
    end = read_end(run_dir)
    assert end["reason"] == "error" and "No space left" in end["message"]
    assert end["saved"] == 1 and end["step"] in ((2, 3) if asynchronous else (2,))


def test_a_log_on_a_full_disk_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device while writing: '/dev/full'"):
        append_jsonl(Path("/dev/full"), {"step": 1})


def test_second_launch_names_the_first(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint={"every": None})
    first = start_run(zygote, config, "first", "num_steps=100000", ranks=1)
    wait_for_step(run_dir, 1)
    second = start_run(zygote, config, "second", ranks=1)
    assert second.wait() == [1]
    assert f"{run_dir} is being written by process {first.pids[0]} on " in second.output()
    assert read_end(run_dir)["reason"] == "running", "the refused one leaves the record alone"
    first.signal(signal.SIGKILL)
    first.wait()
    end = read_end(run_dir)
    assert end["reason"] == "running" and end["pid"] == first.pids[0], "it could say nothing more"
    assert (config.parent / "run.lock").exists(), "a kill leaves the file and no lock"
    start_run(zygote, config, "third", "num_steps=1", ranks=1).succeed()
    assert read_end(run_dir)["reason"] == "done" and not (config.parent / "run.lock").exists()
    refused = start_run(zygote, config, "refused", "seed=3", ranks=1)
    assert refused.wait() == [1]
    assert read_end(run_dir)["reason"] == "error" and "seed was 0" in read_end(run_dir)["message"]


def test_hanging_rank_is_named(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "run")
    soon = {"stall_limit_from_step": [2, 2.0]}
    of_rank = {0: {"faults": soon}, 1: {"faults": {**soon, "hang_before_step": [2]}}}
    ranks = start_run(zygote, config, "hangs", of_rank=of_rank)
    assert ranks.wait() == [LOST_CONTACT, LOST_CONTACT], ranks.output()
    assert "no progress for 2 seconds: rank 1 on " in ranks.output()
    assert "is behind" in ranks.output() and "at the end of step 1" in ranks.output()
    assert "no progress" in read_end(tmp_path / "run")["message"]


def test_stall_is_of_the_rank_that_is_behind_whoever_has_written_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there is none as long as any rank gets on, though the furthest wait for it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    mine, other = RankProgress(), RankProgress()
    world: Any = SimpleNamespace(
        rank=0, size=2, host="here", is_first=True, progress=mine, gather=lambda value: [value] * 2
    )
    heart = Heartbeat(world, stall=0.0, on_loss=lambda _: None)

    def look() -> str | None:
        for world.rank, world.progress in enumerate((mine, other)):
            heart._beat()
        heart._decide(silence=1e9)
        return heart._lost

    mine.at("the end of step 1")
    for place in ("the end of step 1", "micro step 0 of step 2"):
        other.at(place)
    for number in range(2):
        WrittenFiles(tmp_path, mine).save({"x": torch.zeros(9)}, str(tmp_path / f"{number}.pt"))
        assert look() is None, "a part of a checkpoint was written"
    assert look() == (
        "no progress for 0 seconds: rank 0 on here is behind, at writing 1.pt, the furthest at "
        "micro step 0 of step 2"
    )


# ---- What a run says of itself: traces of steps, the slowest rank, limits, one page of figures


def _events(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_steps_are_traced_when_asked(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(
        tmp_path / "run",
        num_steps=100000,
        checkpoint={"every": None},
        data={"tokens_per_step": 256},  # few events
    )
    argv = [str(PRETRAIN), "--config", str(config), "--profile", "2:4"]
    run = zygote.start(argv, 1, tmp_path / "log")
    traces = tmp_path / "run" / "profile"
    wait_for(lambda: "profile: " in run.output(), "the trace that was asked for")
    run.signal(signal.SIGUSR2)
    wait_for(lambda: run.output().count("profile: ") == 2, "the trace of a signal")
    run.signal(signal.SIGTERM)
    assert run.wait() == [PREEMPTED], run.output()[-3000:]
    first, second = sorted(traces.iterdir())
    assert first.name == "step_00000002_rank_00000.json.gz" and second.name > first.name
    for trace in (first, second):
        assert {"aten::mm", "megapack::varlen_attn"} <= _events(trace)
    refused = zygote.start([*argv[:-1], "4:2"], 1, tmp_path / "refused")
    assert refused.wait() == [2] and "as in 100:105" in refused.output()


def test_slowest_rank_is_named_and_drawn(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, num_steps=4, checkpoint={"every": None})
    slow = {1: {"faults": {"slow_forward": [0.1]}}}
    output = start_run(zygote, config, "slow", of_rank=slow).succeed()
    assert "slow rank: rank 1 on " in output and "times as long as the median" in output
    found = [line["rank_forward"] for line in read_log(run_dir) if "rank_forward" in line]
    assert [f["rank"] for f in found] == [1, 1] and found[1]["host"] == os.uname().nodename
    assert build(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert re.search(r"<li class='look'><b>slow rank</b>: rank 1 on \S+ computes", page)
    assert re.search(r"<th>rank 1 on \S+</th><td>slowest forward</td><td>2 of 2</td>", page)


def test_wait_for_the_first_batch_is_no_share_of_a_time_that_does_not_count(
    zygote: Zygote, corpus: Corpus, tmp_path: Path
) -> None:
    """The probe leaves the time before it out: it is no time of which a wait is a share."""
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, num_steps=2, logging={"every": 1}, checkpoint={"every": None})
    late = {0: {"faults": {"slow_first_batch": [2.0]}}}
    start_run(zygote, config, "late", ranks=1, of_rank=late).succeed()
    assert all(line["data_wait_share"] <= 1 for line in read_log(run_dir))


def _line(**more: Any) -> dict[str, Any]:
    even = {"median": 1.0, "most": 1.1, "rank": 3, "host": "node1"}
    idle = {"median": 0.0, "most": 0.1, "rank": 2, "host": "node0"}
    line = {"seconds": 10.0, "imbalance": 1.0, "tokens": 100, "useful_tokens": 99}
    return {**line, "rank_forward": even, "rank_data_wait": idle, **more}


def test_what_slows_a_run_is_said_once_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    limits, fine = Slowdowns(), _line()
    cases = {
        "slow rank: rank 3 on node1 computes 1.50 times": {
            "rank_forward": {**fine["rank_forward"], "most": 1.5}
        },
        "data wait: rank 2 on node0 waits for batches 10% of the time": {
            "rank_data_wait": {**fine["rank_data_wait"], "most": 1.0}
        },
        "imbalance: the busiest rank has 2.00 times": {"imbalance": 2.0},
        "padding: 40% of the tokens are padding": {"useful_tokens": 60},
    }
    with caplog.at_level(logging.INFO, logger="megapack"):
        limits.look([fine])
        assert not caplog.messages
        for said, line in cases.items():
            caplog.clear()
            for _ in range(3):
                limits.look([_line(**line)])
            assert len(caplog.messages) == 1 and caplog.messages[0].startswith(said)
            limits.look([fine])
            assert caplog.messages[-1].endswith("within its limit again")


def test_nccl_writes_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/elsewhere/rank_")
    RunDirectory(tmp_path / "run").record_flight()
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "run" / "flight" / "rank_")
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/elsewhere/rank_"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert (tmp_path / "run" / "flight").is_dir()
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name)

"""Faults of numbers, disks, processes and users, in real ranks."""

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

from .conftest import NewRun
from .processes import wait_for, wait_for_step


def _on_both(**faults: list[Any]) -> dict[int, dict[str, list[Any]]]:
    return {0: faults, 1: faults}


@pytest.mark.parametrize("stage", [0, 1])
def test_bad_update_is_skipped(new_run: NewRun, stage: int) -> None:
    run = new_run(engine={"zero_stage": stage}, num_steps=5, checkpoint={"every": 2})
    output = run.succeed(faults=_on_both(nan_gradients=[[1, 3]]))
    assert output.count("its gradient is not finite") == 2
    assert [line["skipped"] for line in run.log] == [False, True, False, True, False]
    assert all(line["loss"] is not None for line in run.log), "the weights are numbers"
    assert run.log[1]["grad_norm"] is None


def test_endless_skipping_stops_the_run(new_run: NewRun) -> None:
    run = new_run(optimizer={"max_skipped": 2}, num_steps=40)
    ranks = run.start(faults=_on_both(nan_gradients=[[1, *range(3, 40)]]))
    ranks.end_with(1, "3 updates in a row were skipped")
    assert [line["step"] for line in run.log] == [0, 1, 2, 3, 4, 5]
    assert run.end["reason"] == "error"


def test_weights_not_finite_are_not_saved(new_run: NewRun) -> None:
    checkpoint, fault = {"every": 2, "keep": 4, "export": True}, {0: {"nan_weight_after": [3]}}
    run = new_run(num_steps=4, checkpoint=checkpoint)
    run.start(ranks=1, faults=fault).end_with(1, "model.model.embed_tokens.weight")
    assert [tag[:13] for tag in run.tags()] == ["step_00000002"]
    assert not (run.dir / "model").exists()
    back = new_run("back", num_steps=4, checkpoint=checkpoint, autopilot={"spikes": True})
    messages = "weights are not finite", "back to step 2"
    back.start(ranks=1, faults=fault).succeed(*messages)
    assert back.end["reason"] == "done"


def test_step_size_keeps_checkpoints(new_run: NewRun) -> None:
    """Steps count anew: 8 steps of 1,024 tokens are 2 of 4,096."""
    run = new_run(checkpoint={"every": 4, "keep": 2})
    run.succeed(ranks=1)
    larger = ["data.tokens_per_step=4096", "num_steps=4", "checkpoint.every=1"]
    allow = "checkpoint.allow_change=[tokens_per_step]"
    message = "tokens_per_step was 1024 and is 4096: the step number follows"
    output = run.start(*larger, allow, ranks=1).succeed("continuing at step 2 ", message)
    assert output.count("documents of a micro batch are kept apart: probed in") == 1
    assert run.tags() == ["step_00000003_tokens_12288", "step_00000004_tokens_16384"]
    assert run.latest == run.tags()[-1]
    steps = [line["step"] for line in run.log]
    assert steps == [*range(8), 2, 3], "the log keeps earlier steps"
    assert [line["tokens_seen"] for line in run.log[-3:]] == [8192, 12288, 16384]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_is_named_and_checkpoints_stay(new_run: NewRun, asynchronous: bool) -> None:
    """A file system with space for one and a half checkpoints."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    run = new_run(num_steps=3, checkpoint={"every": 1, "asynchronous": asynchronous})
    disk = {"small_disk": [str(run.checkpoints), "1600k"]}
    messages = "No space left on device", str(run.checkpoints), "MB free"
    output = run.start(ranks=1, faults={0: disk}).end_with(1, *messages)
    assert "unexpected pos" not in output
    assert run.end["reason"] == "error" and messages[0] in run.end["message"]
    assert run.end["saved"] == 1 and run.end["step"] in ((2, 3) if asynchronous else (2,))


def test_full_disk_names_the_log() -> None:
    with pytest.raises(OSError, match="No space left on device while writing: '/dev/full'"):
        append_jsonl(Path("/dev/full"), {"step": 1})


def test_second_launch_names_the_first(new_run: NewRun) -> None:
    run = new_run(checkpoint={"every": None})
    first, lock = run.start("num_steps=100000", ranks=1), run.dir.with_name("run.lock")
    wait_for_step(run.dir, 1)
    message = f"{run.dir} is being written by process {first.pids[0]} on "
    run.start(ranks=1).end_with(1, message)
    assert run.end["reason"] == "running", "the refused start does not change the record"
    first.signal(signal.SIGKILL)
    first.wait()
    end = run.end
    assert end["reason"] == "running" and end["pid"] == first.pids[0], (
        "a killed run cannot update it"
    )
    assert lock.exists(), "a kill leaves the file without a lock"
    run.succeed("num_steps=1", ranks=1)
    assert run.end["reason"] == "done" and not lock.exists()
    run.start("seed=3", ranks=1).end_with(1)
    assert run.end["reason"] == "error" and "seed was 0" in run.end["message"]


def test_hanging_rank_is_named(new_run: NewRun) -> None:
    run, soon = new_run(), {"stall_limit_from_step": [2, 2.0]}
    ranks = run.start(faults={0: soon, 1: {**soon, "hang_before_step": [2]}})
    messages = "no progress for 2 seconds: rank 1 on ", "is behind", "at the end of step 1"
    ranks.end_with(LOST_CONTACT, *messages)
    assert "no progress" in run.end["message"]


def test_hang_names_the_rank_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress of one rank is enough, although the others wait for it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    mine, other = RankProgress(), RankProgress()
    world: Any = SimpleNamespace(
        rank=0, size=2, host="here", is_first=True, progress=mine, gather=lambda value: [value] * 2
    )
    heart = Heartbeat(world, hang_timeout=0.0, on_loss=lambda _: None)

    def look() -> str | None:
        for world.rank, world.progress in enumerate((mine, other)):
            heart._beat()
        heart._decide(timeout=1e9)
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


# ---- Traces of steps, the slowest rank, limits, the page of a run


def _events(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_steps_are_traced_on_request(new_run: NewRun) -> None:
    few_events = {"tokens_per_step": 256}
    run = new_run(num_steps=100000, checkpoint={"every": None}, data=few_events)
    ranks = run.start(words=["--profile", "2:4"], ranks=1)
    wait_for(lambda: "profile: " in ranks.output(), "the requested trace")
    ranks.signal(signal.SIGUSR2)
    wait_for(lambda: ranks.output().count("profile: ") == 2, "the trace of a signal")
    ranks.signal(signal.SIGTERM)
    ranks.end_with(PREEMPTED)
    first, second = sorted((run.dir / "profile").iterdir())
    assert first.name == "step_00000002_rank_00000.json.gz" and second.name > first.name
    for trace in (first, second):
        assert {"aten::mm", "megapack::varlen_attn"} <= _events(trace)
    run.start(words=["--profile", "4:2"], ranks=1).end_with(2, "as in 100:105")


def test_slowest_rank_is_named_and_plotted(new_run: NewRun) -> None:
    run = new_run(num_steps=4, checkpoint={"every": None})
    messages = "slow rank: rank 1 on ", "times as long as the median"
    run.start(faults={1: {"slow_forward": [0.1]}}).succeed(*messages)
    found = [line["rank_forward"] for line in run.log if "rank_forward" in line]
    assert [f["rank"] for f in found] == [1, 1] and found[1]["host"] == os.uname().nodename
    assert build(["report", str(run.dir)]) == 0
    page = (run.dir / "report.html").read_text()
    assert re.search(r"<li class='look'><b>slow rank</b>: rank 1 on \S+ computes", page)
    assert re.search(r"<th>rank 1 on \S+</th><td>slowest forward</td><td>2 of 2</td>", page)


def test_wait_for_the_first_batch_does_not_count(
    new_run: NewRun,
) -> None:
    """The probe resets the time of the step, so the wait before it must not count."""
    run = new_run(num_steps=2, logging={"every": 1}, checkpoint={"every": None})
    run.succeed(ranks=1, faults={0: {"slow_first_batch": [2.0]}})
    assert [line["data_wait_share"] <= 1 for line in run.log] == [True, True]


def _line(slowest: float = 1.1, waits: float = 0.1, **more: float) -> dict[str, Any]:
    ranks = {
        "rank_forward": {"median": 1.0, "most": slowest, "rank": 3, "host": "node1"},
        "rank_data_wait": {"median": 0.0, "most": waits, "rank": 2, "host": "node0"},
    }
    line = {"seconds": 10.0, "imbalance": 1.0, "tokens": 100, "useful_tokens": 99}
    return {**ranks, **line, **more}


def test_slowdowns_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    limits = Slowdowns()
    cases = {
        "slow rank: rank 3 on node1 computes 1.50 times": _line(slowest=1.5),
        "data wait: rank 2 on node0 waits for batches 10% of the time": _line(waits=1.0),
        "imbalance: the busiest rank has 2.00 times": _line(imbalance=2.0),
        "padding: 40% of the tokens are padding": _line(useful_tokens=60),
    }
    with caplog.at_level(logging.INFO, logger="megapack"):
        limits.look([_line()])
        assert not caplog.messages
        for message, line in cases.items():
            caplog.clear()
            for _ in range(3):
                limits.look([line])
            assert len(caplog.messages) == 1 and caplog.messages[0].startswith(message)
            limits.look([_line()])
            assert caplog.messages[-1].endswith("within its limit again")


def test_nccl_writes_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/rank_"})
    RunDirectory(tmp_path / "run").record_flight()
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "run" / "flight" / "rank_")
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/elsewhere/rank_"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert (tmp_path / "run" / "flight").is_dir()

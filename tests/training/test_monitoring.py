"""What a run says of itself: traces of steps, the slowest rank, limits, one page of figures."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megapack.training.engine.directory import RunDirectory
from megapack.training.monitoring.monitor import Slowdowns
from megapack.training.monitoring.signals import PREEMPTED

from .conftest import Corpus
from .processes import PRETRAIN, ROOT, Zygote, read_log, start_run, wait_for


def _events(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_steps_are_traced_when_asked(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "run", num_steps=100000, checkpoint={"every": None})
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
    slow = {1: {"faults": {"slow_forward": [0.5]}}}
    output = start_run(zygote, config, "slow", of_rank=slow).succeed()
    assert "slow rank: rank 1 on " in output and "times as long as the median" in output
    found = [line["rank_forward"] for line in read_log(run_dir) if "rank_forward" in line]
    assert [f["rank"] for f in found] == [1, 1] and found[1]["host"] == os.uname().nodename
    argv = [str(ROOT / "launch" / "evaluate.py"), "--report", str(run_dir)]
    zygote.start(argv, 1, tmp_path / "report", {0: {"env": {}}}).succeed()
    page = (run_dir / "report.png").read_bytes()
    assert page[:4] == b"\x89PNG" and len(page) > 50_000


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

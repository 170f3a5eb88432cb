"""torchrun's elastic agent: a lost worker restarts the job, without anybody's help.

torch 2.13 gives restarted workers the store of those before, in which gloo finds the addresses of
the dead; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives them a new one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus
from .processes import ROOT, Zygote, environment, kill_launcher, start_run, wait_for


def ranks_of(pid: int) -> list[int]:
    """Processes that any thread of torchrun started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for at in threads for child in (at / "children").read_text().split()]
    return [one for one in found if b"megapack" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.multiprocess
def test_lost_worker_restarts_the_job(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    engine = {"silence_seconds": 10}
    sections = {"num_steps": 40, "checkpoint": {"every": 5}, "engine": engine}
    whole = corpus.config(tmp_path / "whole", **sections)
    start_run(zygote, whole, "whole").succeed()
    run_dir = tmp_path / "run"
    config = str(corpus.config(run_dir, **sections))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--standalone", "--max-restarts", "1"]
    with (tmp_path / "output").open("w") as output:
        launcher = subprocess.Popen(
            [*torchrun, "-m", "megapack.training.pretrain", "--config", config],
            stdout=output,
            stderr=output,
            text=True,
            env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            wait_for((run_dir / "checkpoints" / "latest").exists, "a checkpoint")
            os.kill(ranks_of(launcher.pid)[-1], signal.SIGKILL)
            code = launcher.wait(timeout=PATIENCE)
        except BaseException:
            for pid in ranks_of(launcher.pid):  # in sessions of their own
                os.kill(pid, signal.SIGKILL)
            kill_launcher(launcher)
            raise
    said = (tmp_path / "output").read_text()
    assert code == 0, said[-4000:]
    first, second = read_jsonl(run_dir / "starts.jsonl")
    assert first["step"] == 0 < second["step"]
    ours, theirs = (list(read_jsonl(path / "log.jsonl")) for path in (run_dir, tmp_path / "whole"))
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
    losses = [line["loss"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx(losses, rel=1e-4)

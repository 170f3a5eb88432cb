"""What happens to a run when something fails, beside what happens to a plain DeepSpeed loop.

    make faults                       # minutes; root for a full disk and a lost node
    ONLY="rank killed,nan gradient" make faults

Real processes, two ranks: megapack-pretrain, and the loop of DeepSpeed's tutorial
(``faults_plain.py``). Both get the same fault at the same step; then what is left of them is ended,
and the same command is given again, as a scheduler does it. "noticed" are the seconds until every
rank that can has left; a rank that has not left after ``PATIENCE`` seconds waits on. "same samples"
and "loss differs" compare the log, steps that were taken again included, with a run that nothing
happened to.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import show, write_results
from faults_run import (
    EVERY,
    FAULT_AT,
    NUM_STEPS,
    PATIENCE,
    SILENCE,
    Run,
    again,
    children,
    compare,
    end,
    leaves,
    make_corpus,
    refused,
    state,
)
from ports import free_port

from tests.training.processes import Zygote, environment

WAITS_ON = f"waits on after {PATIENCE:.0f} s"
TWO_NODES = Path(__file__).parents[1] / "launch" / "two_nodes.sh"
FALLBACK = ["--set", "checkpoint.fallback=true"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def signalled(number: int, ranks: list[int]) -> Callable[[Run], dict[str, Any]]:
    """Some ranks get a signal in the midst of the run."""

    def fault(run: Run) -> dict[str, Any]:
        started = run.start()
        run.reach(FAULT_AT)
        started.signal(number, ranks)
        noticed = leaves(started.pids, time.monotonic(), PATIENCE)
        result = {"noticed_s": noticed, "exit": str(end(started))}
        return result if noticed is not None else {**result, "happened": WAITS_ON}

    return fault


def nan_gradient(run: Run) -> dict[str, Any]:
    if run.side == "megapack":
        started = run.start(faults={"nan_gradients": [[FAULT_AT]]})
    else:
        started = run.start(str(FAULT_AT))
    leaves(started.pids, time.monotonic())
    codes = end(started)
    bad = [line["step"] for line in run.lines() if not math.isfinite(line["loss"] or math.nan)]
    said = f"{len(bad)} steps without a loss" if bad else "one update skipped, all losses finite"
    return {"happened": said, "exit": str(codes), "again": "was not needed"}


def full_disk(run: Run) -> dict[str, Any] | None:
    """Room for one checkpoint and a half; later there is more."""
    run.checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1800k", "none", str(run.checkpoints)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return None
    try:
        started = run.start()
        noticed = leaves(started.pids, time.monotonic())
        result = {"noticed_s": noticed, "exit": str(end(started)), "happened": run.message()}
        subprocess.run(["mount", "-o", "remount,size=64m", str(run.checkpoints)], check=True)
        return {**result, **again(run)}
    finally:
        subprocess.run(["umount", str(run.checkpoints)], check=True)


def damaged(run: Run) -> dict[str, Any]:
    """A bit of the newest checkpoint turns while nobody trains."""
    started = run.start()
    run.reach(FAULT_AT)
    started.signal(signal.SIGKILL)
    started.wait()
    newest = run.checkpoints / (run.checkpoints / "latest").read_text()
    shard = max(newest.glob("*optim_states.pt"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 64
    shard.write_bytes(data)
    result = refused(run)
    return result if "again" in result else {**result, **again(run, *FALLBACK)}


def launched_twice(run: Run) -> dict[str, Any]:
    first = run.start()
    run.reach(FAULT_AT)
    begin = time.monotonic()
    second = run.start()
    noticed = leaves(second.pids, begin)
    codes = end(second)
    result = {"exit": str(codes), "again": "was not needed"}
    if any(codes):
        result |= {"noticed_s": noticed, "happened": run.message()}
    else:
        result["happened"] = "nothing was noticed: both wrote the same log and checkpoints"
    leaves(first.pids, time.monotonic())
    end(first)
    return result


def torchrun_killed(run: Run) -> dict[str, Any]:
    """The agent alone, so that its workers are orphans when the command is given again."""
    log = run.dir.with_name("torchrun.log")
    run.logs.append(log)
    command = [*TORCHRUN, *run.argv]
    with log.open("w") as output:
        agent = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(), start_new_session=True
        )
    run.reach(FAULT_AT)
    workers = children(agent.pid)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    result = refused(run)
    leaves(workers, time.monotonic())
    for pid in workers:
        if state(pid) != "Z":
            os.kill(pid, signal.SIGKILL)
    return result if "again" in result else {**result, **again(run)}


def node_lost(run: Run) -> dict[str, Any] | None:
    """Two nodes made of network namespaces; one falls silent, and all of it is gone."""
    if subprocess.run(["bash", str(TWO_NODES), "--probe"], check=False).returncode:
        return None
    log = run.dir.with_name("nodes.log")
    run.logs.append(log)
    third = EVERY * 3
    tag = (
        f"step_{third:08d}_tokens_{third * 1024}"
        if run.side == "megapack"
        else f"global_step{third}"
    )
    env = environment(
        KILL_NODE="1",
        KILL_WHEN=str(run.checkpoints / tag),
        PORT=str(free_port()),
        PYTHON_BIN=str(Path(sys.executable).parent),
    )
    env["PATH"] = f"{env['PYTHON_BIN']}:{env['PATH']}"
    with log.open("w") as output:
        nodes = subprocess.Popen(
            ["bash", str(TWO_NODES), *run.argv], stdout=output, stderr=output, env=env
        )
    while nodes.poll() is None and not (run.checkpoints / tag).exists():
        time.sleep(0.05)
    begin = time.monotonic()
    try:
        code: int | None = nodes.wait(timeout=PATIENCE)
        noticed: float | None = time.monotonic() - begin
    except subprocess.TimeoutExpired:
        code, noticed = None, None
        nodes.terminate()  # its trap ends what it started
        nodes.wait()
    happened = WAITS_ON if noticed is None else run.message()
    result = {"noticed_s": noticed, "exit": str([code]), "happened": happened}
    return {**result, **again(run)}


FAULTS: dict[str, Callable[[Run], dict[str, Any] | None]] = {
    "rank killed": signalled(signal.SIGKILL, [1]),
    "first rank killed": signalled(signal.SIGKILL, [0]),
    "rank stopped": signalled(signal.SIGSTOP, [1]),
    "preempted": signalled(signal.SIGTERM, [0, 1]),
    "nan gradient": nan_gradient,
    "checkpoint damaged": damaged,
    "disk full while saving": full_disk,
    "launched twice": launched_twice,
    "torchrun killed": torchrun_killed,
    "node lost": node_lost,
}


def main() -> None:
    chosen = [name for name in os.environ.get("ONLY", ",".join(FAULTS)).split(",") if name]
    zygote, rows = Zygote(), []
    with tempfile.TemporaryDirectory() as temporary:
        corpus = make_corpus(Path(temporary) / "corpus")

        def fresh(side: str, name: str) -> Run:
            folder = Path(temporary) / f"{side} {name}".replace(" ", "-")
            folder.mkdir()
            return Run(side, folder, corpus, zygote)

        whole = {}
        for side in ("megapack", "plain"):
            run = fresh(side, "whole")
            codes = run.start().wait()
            assert codes == [0, 0], run.said()[-2000:]
            whole[side] = run.lines()
        for name in chosen:
            for side in ("megapack", "plain"):
                run = fresh(side, name)
                found = FAULTS[name](run)
                if found is None:
                    print(f"{name}: not on this machine (root, iproute2, openssh-server, pdsh)")
                    continue
                row = {"fault": name, "side": side, "happened": run.message(), **found}
                if "again" not in row:
                    row |= again(run)
                rows.append({**row, **compare(run.lines(), whole[side])})
                print(json.dumps(rows[-1]), flush=True)
    zygote.close()
    setup = {
        "ranks": 2,
        "steps": NUM_STEPS,
        "save_every": EVERY,
        "fault_at": FAULT_AT,
        "engine.silence_seconds": SILENCE,
        "given_up_after_s": PATIENCE,
    }
    write_results("faults", {"setup": setup, "faults": rows})
    show("faults", rows)


if __name__ == "__main__":
    main()

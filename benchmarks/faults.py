"""Faults in a run of megapack-pretrain, compared with the same faults in a plain DeepSpeed loop.

    make faults                       # minutes; root for a full disk and a lost node
    ONLY="rank killed,nan gradient" make faults

Real processes, two ranks: megapack-pretrain, and the loop of DeepSpeed's tutorial (``plain_loop``).
Both get the same fault at the same step; then remaining processes are killed and the same command
is started again, as a scheduler does. "noticed" is the time until every rank that can exit has
exited. "same samples" and "loss differs" compare the log, including repeated steps, with an
undisturbed run.

Each side keeps its default timeouts: megapack's ``engine.heartbeat_timeout_seconds`` is 300; in the
plain loop, DeepSpeed's collectives wait for 30 minutes. Both are observed for 420 seconds; a
process that has not exited by then "waits on". That takes three quarters of an hour in all; QUICK=1
sets heartbeat_timeout_seconds to 30 and observes for 120 seconds.

`make faults` then runs ``edits.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # a rank is a fork that runs this file
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from common import compare_logs, only, quick, show, write_results
from ports import free_port

from megapack.training.engine.directory import read_jsonl
from tests.training.conftest import Corpus, make_corpus
from tests.training.processes import PRETRAIN, Ranks, Zygote, environment, wait_for

NUM_STEPS, EVERY, FAULT_AT = 300, 25, 60
PATIENCE = 120.0 if quick() else 420.0  # seconds, after which a remaining rank counts as waiting
AT_MOST = 1200.0  # seconds, limit of a run that should end without a kill
SILENCE = 30.0 if quick() else 300.0  # engine.heartbeat_timeout_seconds, the default unless QUICK
LIMITS = {
    "megapack": f"heartbeat timeout {SILENCE:.0f} s; observed for {PATIENCE:.0f} s",
    "plain": f"none within {PATIENCE:.0f} s; observed for {PATIENCE:.0f} s",
}
WAITS_ON = f"waits on after {PATIENCE:.0f} s"
TWO_NODES = Path(__file__).parents[1] / "tests" / "training" / "two_nodes.sh"
FALLBACK = ["--set", "checkpoint.fallback=true"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

VOCAB, LENGTH, BATCH = 64, 64, 4  # of the plain loop

Found = dict[str, Any]


def plain_loop(words: list[str]) -> None:
    """RUN_DIR [NAN_AT]: a training loop as DeepSpeed's tutorial has it.

    deepspeed.initialize, forward, backward, step, save_checkpoint with the step as client state; at
    the start load_checkpoint, and the data loader is advanced to that step. It does exactly what
    the tutorial does, and writes a log: the first rank writes the samples and the loss of every
    step to log.jsonl. NAN_AT k makes the gradients of step k NaN.
    """
    import deepspeed  # noqa: PLC0415
    import deepspeed.ops  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.utils.data import DataLoader, DistributedSampler  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    run_dir, nan_at = Path(words[0]), int(words[1]) if len(words) > 1 else -1
    # DeepSpeed would compile this operator, which only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes))
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.5}
    config["steps_per_print"] = 10**9
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    what = {"model": model, "optimizer": optimizer, "config": config}
    engine, *_ = deepspeed.initialize(**what, dist_init_required=False)
    random = torch.Generator().manual_seed(0)
    walks = torch.randint(3, (4096, LENGTH), generator=random).cumsum(1)
    data: Any = [(i, (i + walk) % VOCAB) for i, walk in enumerate(walks)]  # something to learn
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=1))
    _, state = engine.load_checkpoint(str(run_dir / "checkpoints"))
    start = 0 if state is None else state["step"]
    run_dir.mkdir(parents=True, exist_ok=True)
    for step, (ids, tokens) in itertools.islice(enumerate(loader), start, NUM_STEPS):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss * float("nan") if step == nan_at else loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            loss = mean.item() / dist.get_world_size()
            with (run_dir / "log.jsonl").open("a") as file:
                line = {"step": step, "samples": ids.tolist(), "loss": loss}
                file.write(json.dumps(line) + "\n")
        if (step + 1) % EVERY == 0:
            state = {"step": step + 1}
            engine.save_checkpoint(str(run_dir / "checkpoints"), client_state=state)


class Run:
    """A run of one side, and its processes."""

    def __init__(self, side: str, folder: Path, corpus: Corpus, zygote: Zygote) -> None:
        self.side, self.dir, self.zygote = side, folder / "run", zygote
        self.logs: list[Path] = []
        self.checkpoints = self.dir / "checkpoints"
        self.argv = [__file__, str(self.dir)]
        if side == "megapack":
            engine = {"precision": "fp32", "zero_stage": 1, "heartbeat_timeout_seconds": SILENCE}
            often = {"checkpoint": {"every": EVERY}, "logging": {"every": 1}}
            config = corpus.config(self.dir, num_steps=NUM_STEPS, engine=engine, **often)
            self.argv = [str(PRETRAIN), "--config", str(config)]

    def start(self, *more: str, **of_all: Any) -> Ranks:
        """Start both ranks; ``of_all`` as in ``Zygote.start``, the same for both."""
        log = self.dir.with_name(f"{len(self.logs)}.log")
        ranks = self.zygote.start([*self.argv, *more], 2, log, {0: of_all, 1: of_all})
        self.logs += ranks.logs
        return ranks

    def lines(self) -> list[Found]:
        log = self.dir / "log.jsonl"
        return list(read_jsonl(log)) if log.exists() else []

    def reach(self, step: int) -> None:
        """Wait until a step is in the log."""
        wait_for(lambda: any(line["step"] >= step for line in self.lines()), "a step", AT_MOST)

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs if log.exists())

    def message(self) -> str:
        """Return the last error line of the logs, without the names of this machine."""
        kinds = r"megapack: .*|\[rank\d\].*Error.*|\w*Error: .*|\[\d\d:\d\d:\d\d\] a signal.*"
        said = (re.sub(r"^node\d+: ", "", line) for line in self.said().splitlines())  # pdsh's
        found = [line for line in said if re.match(kinds, line.strip())]
        text = found[-1].strip() if found else "nothing"
        for name in (str(self.dir.parent), socket.gethostname()):
            text = text.replace(name, "...")
        return text[:240]


def state(pid: int) -> str:
    """Return the state of a process: R, S, T (stopped), Z (ended) ...; Z if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def leaves(pids: list[int], begin: float, limit: float = AT_MOST) -> float | None:
    """Wait until all processes have exited or are stopped. Return the seconds since ``begin``;
    None: some still run at the limit."""
    while any(state(pid) not in "ZT" for pid in pids):
        if time.monotonic() - begin > limit:
            return None
        time.sleep(0.05)
    return time.monotonic() - begin


def kill(pids: list[int]) -> None:
    """Kill the remaining processes, as launchers do."""
    for pid in pids:
        if state(pid) != "Z":
            os.kill(pid, signal.SIGKILL)


def end(ranks: Ranks) -> list[int]:
    """Kill the remaining ranks; return all exit codes."""
    kill(ranks.pids)
    return ranks.wait()


def again(run: Run, *more: str) -> Found:
    """Run the same command again, on the same number of ranks, until it ends."""
    before = len(run.lines())
    started = run.start(*more)
    leaves(started.pids, time.monotonic())
    if end(started) != [0, 0]:
        return {"again": f"did not: {run.message()}"}
    lines = run.lines()
    if run.side == "megapack":
        first = list(read_jsonl(run.dir / "starts.jsonl"))[-1]["step"]
    else:
        first = lines[before]["step"] if len(lines) > before else NUM_STEPS
    return {"again": f"went on at step {first}"}


def refused(run: Run) -> Found:
    """Run the same command, which should refuse to train; return what happened."""
    begin = time.monotonic()
    found = again(run)
    if found["again"].startswith("did not"):
        return {"happened": run.message(), "noticed_s": time.monotonic() - begin}
    return {"happened": "nothing was noticed", **found}


def signalled(number: int, ranks: list[int]) -> Callable[[Run], Found]:
    """Return a fault: some ranks receive a signal in the middle of the run."""

    def fault(run: Run) -> Found:
        started = run.start()
        run.reach(FAULT_AT)
        started.signal(number, ranks)
        noticed = leaves(started.pids, time.monotonic(), PATIENCE)
        result = {"noticed_s": noticed, "exit": str(end(started))}
        return result if noticed is not None else {**result, "happened": WAITS_ON}

    return fault


def nan_gradient(run: Run) -> Found:
    if run.side == "megapack":
        started = run.start(faults={"nan_gradients": [[FAULT_AT]]})
    else:
        started = run.start(str(FAULT_AT))
    leaves(started.pids, time.monotonic())
    codes = end(started)
    bad = [line["step"] for line in run.lines() if not math.isfinite(line["loss"] or math.nan)]
    said = f"{len(bad)} steps without a loss" if bad else "one update skipped, all losses finite"
    return {"happened": said, "exit": str(codes), "again": "was not needed"}


def full_disk(run: Run) -> Found | None:
    """Limit the disk to one and a half checkpoints, then enlarge it and run again."""
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


def damaged(run: Run) -> Found:
    """Flip a bit of the newest checkpoint between two runs."""
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


def launched_twice(run: Run) -> Found:
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


def torchrun_killed(run: Run) -> Found:
    """Kill only torchrun's agent, so that its workers are orphans when the command runs again."""
    log = run.dir.with_name("torchrun.log")
    run.logs.append(log)
    command = [*TORCHRUN, *run.argv]
    with log.open("w") as output:
        streams = {"stdout": output, "stderr": output, "env": environment()}
        agent = subprocess.Popen(command, **streams, start_new_session=True)
    run.reach(FAULT_AT)
    threads = Path(f"/proc/{agent.pid}/task").iterdir()
    workers = [int(pid) for at in threads for pid in (at / "children").read_text().split()]
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    result = refused(run)
    leaves(workers, time.monotonic())
    kill(workers)
    return result if "again" in result else {**result, **again(run)}


def node_lost(run: Run) -> Found | None:
    """Run on two nodes, each a network namespace; one loses its network and all its processes."""
    if subprocess.run(["bash", str(TWO_NODES), "--probe"], check=False).returncode:
        return None
    log = run.dir.with_name("nodes.log")
    run.logs.append(log)
    third, ours = EVERY * 3, run.side == "megapack"
    tag = f"step_{third:08d}_tokens_{third * 1024}" if ours else f"global_step{third}"
    of_nodes = {"KILL_NODE": "1", "KILL_WHEN": str(run.checkpoints / tag)}
    of_nodes |= {"PORT": str(free_port()), "PYTHON_BIN": str(Path(sys.executable).parent)}
    env = environment(**of_nodes)
    env["PATH"] = f"{env['PYTHON_BIN']}:{env['PATH']}"
    command = ["bash", str(TWO_NODES), *run.argv]
    with log.open("w") as output:
        nodes = subprocess.Popen(command, stdout=output, stderr=output, env=env)
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


FAULTS: dict[str, Callable[[Run], Found | None]] = {
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
    chosen = only(FAULTS, others="bench-edits")
    setup = {"ranks": 2, "steps": NUM_STEPS, "save_every": EVERY, "fault_at": FAULT_AT}
    setup |= {"engine.heartbeat_timeout_seconds": SILENCE, "given_up_after_s": PATIENCE}
    zygote, rows = Zygote(), []
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "corpus").mkdir()
        corpus = make_corpus(Path(temporary) / "corpus")

        def fresh(side: str, name: str) -> Run:
            folder = Path(temporary) / f"{side} {name}".replace(" ", "-")
            folder.mkdir()
            return Run(side, folder, corpus, zygote)

        whole = {}
        for side in ("megapack", "plain") if chosen else ():
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
                row = {"fault": name, "side": side, "limits": LIMITS[side]}
                row |= {"happened": run.message(), **found}
                if "again" not in row:
                    row |= again(run)
                rows.append({**row, **compare_logs(run.lines(), whole[side])})
                print(json.dumps(rows[-1]), flush=True)
            own = [row for row in rows if row["fault"] == name]
            if own:
                write_results("faults", {"setup": setup, "faults": own}, parts="fault")
    zygote.close()
    if rows:
        show("faults", rows)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]  # --local_rank
    if words:  # a rank
        plain_loop(words)
    else:
        main()

"""A run of either side of ``faults.py``: its processes, its log, what it said, how it ended."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from megapack.packing import pack
from megapack.training.engine.directory import read_jsonl
from tests.training.conftest import BUCKETS, Corpus, write_documents
from tests.training.processes import PRETRAIN, Ranks, Zygote

__all__ = [
    "EVERY",
    "FAULT_AT",
    "NUM_STEPS",
    "PATIENCE",
    "SILENCE",
    "Run",
    "again",
    "children",
    "compare",
    "end",
    "leaves",
    "make_corpus",
    "refused",
    "state",
]

PLAIN = Path(__file__).with_name("faults_plain.py")
NUM_STEPS, EVERY, FAULT_AT = 300, 25, 60
PATIENCE = 120.0  # seconds after which a rank that has not left waits on
AT_MOST = 1200.0  # seconds that a run may take which ends by itself
SILENCE = 30.0  # engine.silence_seconds, whose default is 300


class Run:
    """A run of one side, and its processes."""

    def __init__(self, side: str, folder: Path, corpus: Corpus, zygote: Zygote) -> None:
        self.side, self.dir, self.zygote = side, folder / "run", zygote
        self.logs: list[Path] = []
        self.checkpoints = self.dir / "checkpoints"
        self.argv = [str(PLAIN), str(self.dir), str(NUM_STEPS), str(EVERY)]
        if side == "megapack":
            engine = {"precision": "fp32", "zero_stage": 1, "silence_seconds": SILENCE}
            config = corpus.config(
                self.dir,
                num_steps=NUM_STEPS,
                checkpoint={"every": EVERY},
                logging={"every": 1},
                engine=engine,
            )
            self.argv = [str(PRETRAIN), "--config", str(config)]

    def start(self, *more: str, **of_all: Any) -> Ranks:
        """Both ranks; ``of_all`` as in ``Zygote.start``."""
        log = self.dir.with_name(f"{len(self.logs)}.log")
        ranks = self.zygote.start([*self.argv, *more], 2, log, {0: of_all, 1: of_all})
        self.logs += ranks.logs
        return ranks

    def lines(self) -> list[dict[str, Any]]:
        log = self.dir / "log.jsonl"
        return list(read_jsonl(log)) if log.exists() else []

    def reach(self, step: int) -> None:
        """Wait until a step is in the log."""
        deadline = time.monotonic() + AT_MOST
        while all(line["step"] < step for line in self.lines()):
            assert time.monotonic() < deadline, self.said()[-2000:]
            time.sleep(0.02)

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs if log.exists())

    def message(self) -> str:
        """The last line that says what went wrong, without the names of this machine."""
        kinds = r"megapack: .*|\[rank\d\].*Error.*|\w*Error: .*|\[\d\d:\d\d:\d\d\] a signal.*"
        said = (re.sub(r"^node\d+: ", "", line) for line in self.said().splitlines())  # pdsh's
        found = [line for line in said if re.match(kinds, line.strip())]
        text = found[-1].strip() if found else "nothing"
        for name in (str(self.dir.parent), socket.gethostname()):
            text = text.replace(name, "...")
        return text[:240]


def state(pid: int) -> str:
    """R, S, T (stopped), Z (ended) ...; of nobody: Z."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def leaves(pids: list[int], begin: float, limit: float = AT_MOST) -> float | None:
    """Seconds from ``begin`` until all have left that are not stopped; None: some wait on."""
    while any(state(pid) not in "ZT" for pid in pids):
        if time.monotonic() - begin > limit:
            return None
        time.sleep(0.05)
    return time.monotonic() - begin


def end(ranks: Ranks) -> list[int]:
    """What is left, as launchers do; exit codes."""
    for pid in ranks.pids:
        if state(pid) != "Z":
            os.kill(pid, signal.SIGKILL)
    return ranks.wait()


def children(pid: int) -> list[int]:
    """Processes that any thread of a process started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for at in threads for child in (at / "children").read_text().split()]


def again(run: Run, *more: str) -> dict[str, Any]:
    """The same command once more, on the same number of ranks, to its end."""
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


def refused(run: Run) -> dict[str, Any]:
    """What the same command says that should not train; it may train all the same."""
    begin = time.monotonic()
    found = again(run)
    if found["again"].startswith("did not"):
        return {"happened": run.message(), "noticed_s": time.monotonic() - begin}
    return {"happened": "nothing was noticed", **found}


def compare(lines: list[dict[str, Any]], whole: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line of every step beside the undisturbed run's."""
    ours, theirs = ({line["step"]: line for line in of} for of in (lines, whole))
    losses = [(ours[i]["loss"], theirs[i]["loss"]) for i in theirs if i in ours]
    differ = max((abs((a or math.nan) / b - 1) for a, b in losses), default=math.nan)
    same = len(ours) == len(theirs) and all(
        ours[i]["samples"] == theirs[i]["samples"] for i in theirs
    )
    twice = len(lines) - len(ours)
    return {"same_samples": same, "loss_differs": differ, "lines_twice": twice}


def make_corpus(folder: Path) -> Corpus:
    folder.mkdir()
    for name, count in (("train", 700), ("valid", 60)):
        dataset = write_documents(folder / name, count, seed=count)
        index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS)
        index.save(f"{folder / name}.samples", source=dataset)
    return Corpus(folder)

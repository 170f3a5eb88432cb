"""Wait until a training log reaches a step; fail if the launch ends before that."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from megapack.training.engine.directory import read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="process of the launch")
    args = parser.parse_args()
    while last_step(args.log) < args.step:
        if not is_running(args.pid):
            raise SystemExit(
                f"the launch ended at step {last_step(args.log)}; see its output above"
            )
        time.sleep(0.2)
    print(f"\nstep {last_step(args.log)}: kill -9 to every process of the launch")


def last_step(path: Path) -> int:
    """Return the newest step of the log; -1: no log yet."""
    return max((line["step"] for line in read_jsonl(path)), default=-1) if path.exists() else -1


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


if __name__ == "__main__":
    main()

"""Helpers of the benchmarks: timers, peak memory, tables, result files (JSON)."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tables import rounded

from megapack.storage.files import atomic_write

S = TypeVar("S")
T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("megapack", "numpy", "scipy", "torch", "deepspeed", "transformers", "trl", "megatron-core"),
    *("tokenizers", "gigatoken", "sentencepiece", "pyarrow", "zstandard", "orjson", "ray"),
    *("numba", "grain", "mosaicml-streaming"),
)


def quick() -> bool:
    """Return whether QUICK=1 is set: a run of less than a minute."""
    return os.environ.get("QUICK") == "1"


class Units(int):
    """Number of units of work that a call did."""


@dataclass(frozen=True)
class Timing:
    """Seconds per unit of work, one value per window; results use the median."""

    windows: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.windows)

    @property
    def rate(self) -> float:
        return 1 / self.seconds

    @property
    def spread(self) -> float:
        """Return the distance between the quartiles divided by the median."""
        if len(self.windows) == 1:
            return 0.0
        low, _, high = quantiles(self.windows, n=4, method="inclusive")
        return (high - low) / self.seconds

    def row(self) -> dict[str, float]:
        """Return the entry of the result file."""
        return {"seconds": self.seconds, "spread_%": 100 * self.spread}


def in_turns(sides: Mapping[S, Callable[[], T]], rounds: int) -> dict[S, list[T]]:
    """Run all sides in turn in every round; return their results.

    Other load on the machine then affects all sides.
    """
    found: dict[S, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        gc.collect()
        for name, side in sides.items():
            found[name].append(side())
    return found


def take_turns(
    sides: Mapping[str, Callable[[], Any]], *, windows: int = 5, seconds: float = 0.0
) -> dict[str, Timing]:
    """Time all sides in this process, in turns.

    Every side is called once untimed, then timed in ``windows`` windows. In a window a side is
    called until ``seconds`` have passed, at least once. A call that returns a ``Units`` counts as
    that many units of work; any other call counts as one.
    """

    def window(side: Callable[[], Any]) -> float:
        units, begin = 0, time.perf_counter()
        while True:
            done = side()
            units += int(done) if isinstance(done, Units) else 1
            elapsed = time.perf_counter() - begin
            if elapsed >= seconds:
                return elapsed / units

    for side in sides.values():
        side()
    found = in_turns({name: partial(window, side) for name, side in sides.items()}, windows)
    return {name: Timing(tuple(values)) for name, values in found.items()}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call ``function`` once; return the seconds and its result."""
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def compare_logs(lines: list[dict[str, Any]], whole: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the samples and the loss of every step's last log line with an undisturbed run.

    If a loss is NaN (null in the log), the difference is NaN.
    """
    ours, theirs = ({line["step"]: line for line in of} for of in (lines, whole))
    losses = [(ours[i]["loss"], theirs[i]["loss"]) for i in theirs if i in ours]
    mine, other = np.array(losses or [(np.nan, np.nan)], float).T
    taken = ({step: line["samples"] for step, line in of.items()} for of in (ours, theirs))
    return {
        "same_samples": next(taken) == next(taken),
        "loss_differs": float(np.abs(mine / other - 1).max()),
        "lines_twice": len(lines) - len(ours),
    }


def _memory(kind: str) -> int:
    """Return a memory size of this process in bytes (Linux); VmHWM: the largest resident size."""
    found = re.search(rf"^{kind}:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def in_child(fn: Callable[[], Any]) -> Any:
    """Run ``fn()`` in a forked process, so that its imports and memory do not stay here.

    Returns:
        Its result, which must be picklable. A dict also gets "peak_bytes", the largest increase of
        the resident size, and "private_bytes", the increase of private memory (0 if it shrank).

    Raises:
        RuntimeError: if the child died; stderr has its message.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        private = _memory("RssAnon")
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        peak = _memory("VmHWM")
        result = fn()
        if isinstance(result, dict):
            result["peak_bytes"] = _memory("VmHWM") - peak
            result["private_bytes"] = max(0, _memory("RssAnon") - private)
        sender.send(result)

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("a measurement died, see above") from None
    finally:
        child.join()


def peer_of(name: str, load: Callable[[], T], variable: str = "", *folders: str) -> T | None:
    """Return the result of ``load`` for a peer; None, with a printed line, if the peer is missing.

    Args:
        name: name of the peer.
        load: imports the peer and returns a function that calls it.
        variable: environment variable with the peer's checkout; "" if the peer is installed.
        folders: folders of the checkout to import from; empty: the checkout itself.
    """
    checkout = os.environ.get(variable, "")
    if variable and not checkout:
        print(f"skipped: {name} (set {variable} to its checkout)")
        return None
    paths = [str(Path(checkout, folder)) for folder in folders or ("",)] if variable else []
    sys.path[:0] = [path for path in paths if path not in sys.path]
    try:
        return load()
    except ImportError as error:
        print(f"skipped: {name} ({error})")
        return None


def checkout_commit(variable: str) -> str | None:
    """Return the ``commit`` of the checkout that a variable names; None if it is not set."""
    checkout = os.environ.get(variable)
    return commit(Path(checkout)) if checkout else None


def only(known: Iterable[str], *, others: str = "") -> list[str]:
    """Return the names of ``known`` that ONLY=a,b selects, in their order; without ONLY all.

    ``others`` names a command that reads the same ONLY and may know different names; "" if none.

    Raises:
        SystemExit: if a name is unknown and ``others`` is "".
    """
    known = list(known)
    asked = [name for name in os.environ.get("ONLY", "").split(",") if name]
    if unknown := ", ".join(sorted(set(asked) - set(known))):
        text = f"ONLY names {unknown}; there are {', '.join(known)}"
        if not others:
            raise SystemExit(text)
        print(f"{text}, and those of {others}")
    return [name for name in known if not asked or name in asked]


def write_results(name: str, results: Any, *, parts: str = "", **tables: Any) -> Path:
    """Write ``results`` (JSON) to results/NAME-HOST-DATE.json (QUICK: NAME-quick-HOST-DATE.json).

    The file also records the environment. Then print ``tables``, title -> rows. ``parts`` is the
    column that names the part (ONLY) of a row; ``results`` is then a dictionary of lists. Rows of
    parts that did not run stay in the file, even if two processes write it at the same time, and
    "measured" records for every part when, where and under which load it was measured.
    """
    RESULTS.mkdir(exist_ok=True)
    file = f"{name}-quick" if quick() else name
    path = RESULTS / f"{file}-{socket.gethostname()}-{date.today()}.json"
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    run = {
        "benchmark": name, "date": str(date.today()), "quick": quick(),
        "machine": platform.machine(), "cpu": cpu[1].strip() if cpu else platform.processor(),
        "num_cpus": os.cpu_count(), "python": platform.python_version(), "commit": commit(),
        "versions": versions(), "results": results,
    }  # fmt: skip
    if parts:
        now = {key: run[key] for key in ("date", "commit", "cpu")}
        now["load_average"] = os.getloadavg()[2]  # mean of 15 minutes
        those = (row[parts] for rows in results.values() if isinstance(rows, list) for row in rows)
        measured = [{parts: part, **now} for part in dict.fromkeys(those)]
        run |= {"parts": parts, "results": {**results, "measured": measured}}
    folder = os.open(RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        with atomic_write(path, "w") as out:
            out.write(json.dumps(merge_run(old, run), indent=1, default=str) + "\n")
    finally:
        os.close(folder)
    print(f"\nwritten: {path}")
    for title, rows in tables.items():
        show(title, rows)
    return path


def merge_run(old: dict[str, Any] | None, run: dict[str, Any]) -> dict[str, Any]:
    """Add the rows that an older run has for other parts to a run of some parts.

    A run without parts is returned unchanged, and so is a run if only one of the two is QUICK.
    """
    part = run.get("parts")
    if not part or old is None or old["quick"] != run["quick"]:
        return run

    def rows(key: str, new: Any) -> Any:
        if not isinstance(new, list):
            return new
        own = {row[part] for row in new}
        kept = old["results"].get(key, [])
        order = list(dict.fromkeys(row[part] for row in [*kept, *new]))
        found = [*(row for row in kept if row[part] not in own), *new]
        return sorted(found, key=lambda row: order.index(row[part]))

    return {**run, "results": {key: rows(key, new) for key, new in run["results"].items()}}


def commit(checkout: Path = Path(__file__).parent) -> str | None:
    """Return the commit of a checkout, "+changes" if tracked files differ; None without git."""
    git = ["git", "-C", str(checkout)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.decode().strip() + ("+changes" if changed else "")


def versions() -> dict[str, str]:
    """Return the versions of all installed packages that the benchmarks use."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def show(title: str, rows: Iterable[Mapping[str, Any]], *columns: str) -> None:
    """Print rows as a table; ``columns`` chooses keys and their order (default: all)."""
    rows = list(rows)
    look = {"title_justify": "left", "box": None, "pad_edge": False, "header_style": "bold"}
    table = Table(title=f"\n[bold]{title}[/]", **look)
    names = columns or tuple(dict.fromkeys(key for row in rows for key in row))
    for name in names:
        text = any(isinstance(row.get(name), str) for row in rows)
        table.add_column(name.replace("_", " "), justify="left" if text else "right")
    for row in rows:
        table.add_row(*(escape(rounded(row.get(name))) for name in names))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)

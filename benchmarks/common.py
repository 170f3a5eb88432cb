"""What every benchmark needs: best times, peak memory, a table at the end, a JSON beside it."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

__all__ = [
    "Table",
    "best_of",
    "commit",
    "in_child",
    "large",
    "peak_rss",
    "quick",
    "versions",
    "write_results",
]

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("megapack", "numpy", "scipy", "torch", "deepspeed", "transformers", "trl", "megatron-core"),
    *("tokenizers", "gigatoken", "sentencepiece", "pyarrow", "zstandard", "orjson", "ray"),
)


def quick() -> bool:
    """QUICK=1: a run of less than a minute."""
    return os.environ.get("QUICK") == "1"


def large() -> bool:
    """LARGE=1: sizes that need many minutes and gigabytes."""
    return os.environ.get("LARGE") == "1"


def best_of(fn: Callable[[], Any], n: int = 3) -> float:
    """Seconds of the fastest of ``n`` calls; the result of a call is freed outside of its time."""
    best = float("inf")
    for _ in range(n):
        gc.collect()
        begin = time.perf_counter()
        result = fn()
        best = min(best, time.perf_counter() - begin)
        del result
    return best


def peak_rss() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_peak_rss() -> int:
    """Begin a new peak (Linux); the resident size now, without what the allocator keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss()


def in_child(fn: Callable[[], Any]) -> Any:
    """``fn()`` in a forked process: what it imports and allocates is gone afterwards.

    Returns:
        Its result, which must be picklable, with "peak_bytes" added if it is a dict: how much the
        child's resident size rose at most.

    Raises:
        RuntimeError: the child died (its message is on stderr).
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        before = _reset_peak_rss()
        result = fn()
        if isinstance(result, dict):
            result["peak_bytes"] = peak_rss() - before
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


def write_results(name: str, results: Any) -> Path:
    """Write ``results`` (anything JSON) to results/NAME-HOST-DATE.json, with what it ran on.

    A QUICK run has a file of its own, NAME-quick-HOST-DATE.json.
    """
    RESULTS.mkdir(exist_ok=True)
    file = f"{name}-quick" if quick() else name
    path = RESULTS / f"{file}-{socket.gethostname()}-{date.today()}.json"
    about = {
        "benchmark": name,
        "date": str(date.today()),
        "quick": quick(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": versions(),
    }
    path.write_text(json.dumps({**about, "results": results}, indent=1, default=str) + "\n")
    print(f"\nwritten: {path}")
    return path


def commit() -> str | None:
    """Of this checkout, with "+changes" where files differ from it; None outside of git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.decode().strip() + ("+changes" if changed else "")


def versions() -> dict[str, str]:
    """Of every package that a benchmark measures or measures with, as far as it is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


class Table:
    """A title, columns and rows; the first column is left-aligned, the others right-aligned."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._table = RichTable(
            title=f"\n[bold]{title}[/]", title_justify="left", box=None, pad_edge=False
        )
        for i, column in enumerate(columns):
            self._table.add_column(column, justify="right" if i else "left", no_wrap=True)

    def add(self, *cells: object) -> None:
        self._table.add_row(*map(str, cells))

    def print(self) -> None:
        width = None if sys.stdout.isatty() else 200
        Console(highlight=False, width=width).print(self._table)

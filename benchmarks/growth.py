"""``make bench-growth``: how the time of each kind of work grows, at 1, 10 and 100 times the work.

Columns: seconds of CPU at each size (all threads; the smallest of up to three runs),
and the exponent: log10 of the time's factor per factor of ten, of both steps and of the last one.
Work that is proportional to its size has exponent 1; ``n log n`` is log10(10 log(10 n) / log(n)) of
the last step. Below 1, a fixed part dominates. ``verdict`` names rows whose last step grew by
more than ``n log n`` with a tolerance of .1 in the exponent, which is the error of such timings.

CPU seconds do not depend much on other load. Preparation (writing datasets, drawing lengths) is not
timed, except where it is the work. QUICK=1 measures a tenth of every size.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import only, quick, write_results
from lengths import BUCKETS, LAWS, Lengths, write_documents

from megapack.cli.main import main
from megapack.data import PackedDataset, Schedule, build_loader, open_blend
from megapack.data.blend import load_blend
from megapack.packing import SampleIndex, pack
from megapack.planning import plan_step

TOLERANCE = 0.1  # of an exponent
Work = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    unit: str
    smallest: int  # number of units, measured also 10 and 100 times as large
    prepare: Callable[[int, Path], Work]  # (units, an empty folder) -> the work to time


def run(*words: object) -> None:
    """Run a command of megapack-build in this process."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main([str(word) for word in words])
    assert not status, words


def lengths_of(count: int) -> Lengths:
    return LAWS["fineweb_edu_like"](count, 1)


# ---- Packing and planning -----------------------------------------------------------------------


def packing(strategy: str, **options: Any) -> Callable[[int, Path], Work]:
    return lambda n, _: partial(pack, lengths_of(n), strategy, threads=1, **options)


def planning(
    ranks: int | None, max_tokens: int, *, shared: bool = False
) -> Callable[[int, Path], Work]:
    """Return a step of n documents on fixed ranks; None: of n ranks, with 65 documents each."""

    def prepare(n: int, _folder: Path) -> Work:
        lengths = np.minimum(lengths_of(n if ranks else 65 * n).astype(np.int64), 65_536)
        options: dict[str, Any] = {"num_ranks": ranks or n, "max_tokens_per_rank": max_tokens}
        if shared:
            options["max_context_parallel_size"] = 1 << min(6, n.bit_length() - 1)
        return partial(plan_step, lengths, **options)

    return prepare


# ---- Schedule and batches -----------------------------------------------------------------------


def packed_index(samples: int) -> SampleIndex:
    return pack(np.tile([256, 512, 1024], -(-samples // 3)), buckets=[256, 512, 1024])


def open_schedule(n: int, _folder: Path) -> Work:
    index = packed_index(n)
    return lambda: Schedule(index, tokens_per_step=1 << 16, seed=1).step(n // 100).draws


def one_step(n: int, _folder: Path) -> Work:
    schedule = Schedule(packed_index(3_000_000), tokens_per_step=1024 * n, seed=1)
    schedule.step(0)
    return lambda: [schedule.step(step).draws for step in (5, 6, 7)]


def steps_of(n: int, _folder: Path) -> Work:
    index = packed_index(n)
    schedule = Schedule(index, tokens_per_step=4096, cost_window=64)
    end = schedule.num_steps(3)
    return lambda: [schedule.steps_of(sample, end) for sample in range(0, n, n // 20)]


def micro_batch(n: int, folder: Path) -> Work:
    lengths = lengths_of(4000)
    write_documents(folder / "d", lengths, vocabulary=1000)
    data = PackedDataset(folder / "d", pack(lengths, buckets=[1024]))
    rank = {"data_parallel_rank": 0, "data_parallel_size": 1, "prefetch": 0, "num_steps": 10**9}
    schedule = Schedule(data, tokens_per_step=1024 * n)
    loader = iter(build_loader(data, schedule, micro_batch_tokens=1024 * n, **rank))
    next(loader)
    return lambda: [next(loader) for _ in range(3)]


# ---- Many sources, files and documents ----------------------------------------------------------


def write_source(prefix: Path, number: int) -> None:
    lengths = np.random.default_rng(number).integers(2, 200, 60)
    source = write_documents(prefix, lengths, vocabulary=1000)
    pack(lengths, buckets=[256]).save(f"{prefix}.samples", source=source)


def write_blend(n: int, folder: Path) -> None:
    """Write n sources, a manifest of them (blend.yaml) and a run on it (run.yaml)."""
    rows = []
    for i in range(n):
        write_source(folder / f"s{i}", i)
        rows.append(f"  - {{prefix: {folder}/s{i}, index: {folder}/s{i}.samples, weight: 1}}")
    (folder / "blend.yaml").write_text("sources:\n" + "\n".join(rows) + "\n")
    (folder / "run.yaml").write_text(
        f"run_dir: {folder}/run\nnum_steps: 64\nmodel: {{preset: llama_tiny}}\n"
        f"data: {{blend: {folder}/blend.yaml, tokens_per_step: {1024 * n}, "
        "micro_batch_tokens: 1024}\n"
    )


def open_sources(n: int, folder: Path) -> Work:
    write_blend(n, folder)
    return lambda: open_blend(load_blend(folder / "blend.yaml"))


def proxy(n: int, folder: Path) -> Work:
    write_blend(n, folder)
    return partial(run, "proxy", folder / "run.yaml", folder / "p", "--scale", "1/2", "--dry-run")


def merge(n: int, folder: Path) -> Work:
    write_blend(n, folder)
    words = ["merge", *(folder / f"s{i}" for i in range(n)), "--output-prefix", folder / "all"]
    return partial(run, *words, "--overwrite")


def small_files(n: int, folder: Path) -> Work:
    for i in range(n):
        (folder / f"{i}.txt").write_text(f"file {i} has a few words\n" * 5)
    return partial(tokenize, folder)


def one_file(n: int, folder: Path) -> Work:
    line = '{"text": "' + "a line of text with some words " * 30 + '"}\n'
    (folder / "all.jsonl").write_text(line * (n * 1_000_000 // len(line)))
    return partial(tokenize, folder / "all.jsonl")


def tokenize(path: Path) -> None:
    with tempfile.TemporaryDirectory() as output:
        words = ("--tokenizer", "bytes", "--workers", 1, "--output-prefix", f"{output}/d")
        run("tokenize", "--input", path, *words)


def inspect(n: int, folder: Path) -> Work:
    write_documents(folder / "d", np.full(n, 2), vocabulary=1000)
    return partial(run, "inspect", folder / "d")


ROWS = {
    "pack: bucket": Row("documents", 100_000, packing("bucket", buckets=BUCKETS)),
    "pack: first fit decreasing": Row(
        "documents", 100_000, packing("first_fit_decreasing", buckets=[4096])
    ),
    "pack: concat": Row("documents", 100_000, packing("concat", buckets=[4096])),
    "plan_step: 16 ranks": Row("documents", 200, planning(16, 65_536)),
    "plan_step: 65 documents per rank": Row("ranks", 5, planning(None, 65_536)),
    "plan_step: shared documents": Row("ranks", 8, planning(None, 16_384, shared=True)),
    "open a schedule and draw a step": Row("samples", 30_000, open_schedule),
    "three steps": Row("samples of 1,024 tokens", 100, one_step),
    "steps_of: 20 samples in a cost window": Row("samples", 3_000, steps_of),
    "three micro batches": Row("rows of 1,024 tokens", 16, micro_batch),
    "open a blend": Row("sources", 50, open_sources),
    "proxy": Row("sources", 4, proxy),
    "merge": Row("datasets", 10, merge),
    "tokenize: small files": Row("files", 200, small_files),
    "tokenize: one file": Row("MB", 1, one_file),
    "inspect": Row("documents", 100_000, inspect),
}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def seconds_of(row: Row, units: int) -> float:
    """Return CPU seconds: the smallest of three runs, or of one or two that take 2 seconds."""
    with tempfile.TemporaryDirectory() as folder:
        work = row.prepare(units, Path(folder))
        found: list[float] = []
        while len(found) < 3 and sum(found) < 2:
            calls, begin, wall = 0, cpu_seconds(), time.perf_counter()
            while not calls or (time.perf_counter() - wall < 0.05):
                work()
                calls += 1
            found.append((cpu_seconds() - begin) / calls)
    return min(found)


def measure(name: str) -> dict[str, Any]:
    row = ROWS[name]
    smallest = max(2, row.smallest // 10) if quick() else row.smallest
    sizes = [smallest, 10 * smallest, 100 * smallest]
    seconds = [seconds_of(row, units) for units in sizes]
    last = math.log10(seconds[2] / seconds[1])
    n_log_n = math.log10(10 * math.log(sizes[2]) / math.log(sizes[1]))
    found = {"work": name, "unit": row.unit, "smallest": smallest}
    found |= {
        f"seconds_x{size // smallest}": value for size, value in zip(sizes, seconds, strict=True)
    }
    return found | {
        "exponent": math.log10(seconds[2] / seconds[0]) / 2,
        "exponent_last": last,
        "exponent_n_log_n": n_log_n,
        "verdict": "ok" if last <= n_log_n + TOLERANCE else "grows faster",
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for work in only(ROWS):
        rows.append(measure(work))
        print(
            f"{work}: {rows[-1]['exponent']:.2f}, last {rows[-1]['exponent_last']:.2f}", flush=True
        )
    write_results("growth", {"rows": rows}, parts="work", rows=rows)

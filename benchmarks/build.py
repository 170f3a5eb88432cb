"""Text to .bin/.idx, from end to end: ours beside Megatron's way, both beside the bare tokenizers.

Corpus: the Python source of this disk, every distinct file a document, as .jsonl; the tokenizer is
a byte-level BPE trained on it. Everything has two processes or two threads. MB/s are of text
(UTF-8), memory is the proportional set size of all processes of a command, at its largest.

- bare: texts lie in memory, ids are thrown away: the limit of what a build can do. tokenizers gets
  its part in one call. gigatoken remembers words, so it first encodes the first half of the corpus
  and is then timed on the second, which it has not seen: in one call, and in batches of 4 MB (its
  memory is then used again, which is faster; this is how our readers feed it).
- Megatron's way is what preprocess_data.py does: a pool of workers that parse and encode, and one
  parent that writes what they send with megatron-core's own IndexedDatasetBuilder.
- ours: the whole command in a fresh process, from .jsonl to a .bin/.idx on disk (fsync included),
  with its start, the tokenizer's load, cold caches, checks and the merge. "beyond the first half"
  is the text of the second half by the seconds that it adds to a command: the rate of a corpus so
  large that a start does not count.
- reading: .jsonl to flat text in one thread, with our parser and with orjson: the whole corpus, and
  the same text cut into documents of 500 characters.

The fast ones are the best of several runs. The slow ones get the first part of the corpus only.

QUICK=1 runs on less text. MEGAPACK_BENCH_MB sets the size of the corpus (800).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import build_sides
from build_sides import PROCESSES, second_half, texts_of
from common import quick, write_results

from megapack.cli.report import print_table

CORPUS_MB = int(os.environ.get("MEGAPACK_BENCH_MB", "200" if quick() else "800"))
SLOW_MB = 16 if quick() else 200
REPEATS = 1 if quick() else 5
READ_MB = 200
SHORT = 500  # characters
MEGATRON = "Megatron's way"


def python_source() -> Iterator[str]:
    """Every distinct Python file of the interpreters on this disk, in the order of their paths."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    roots |= {str(Path(sys.base_prefix).parent), "/usr/lib", "/usr/share", "/usr/local", "/opt"}
    seen: set[bytes] = set()
    for root in sorted(roots):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                data = path.read_bytes()
                text = data.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.blake2b(data, digest_size=16).digest()
            if text and digest not in seen:
                seen.add(digest)
                yield text


def write_corpus(path: Path, megabytes: int) -> tuple[int, int, int]:
    """(documents, bytes of text, how often the disk's files had to be repeated)."""
    documents = size = rounds = 0
    with path.open("w", encoding="utf-8") as out:
        while size < megabytes * 1_000_000:
            rounds += 1
            for text in python_source():
                out.write(json.dumps({"text": text}) + "\n")
                documents += 1
                size += len(text.encode("utf-8"))
                if size >= megabytes * 1_000_000:
                    break
    return documents, size, rounds


def first_part(corpus: Path, part: Path, megabytes: int) -> None:
    left = megabytes * 1_000_000
    with corpus.open("rb") as source, part.open("wb") as out:
        for line in source:
            out.write(line)
            left -= len(line)
            if left <= 0:
                return


# --- measuring ------------------------------------------------------------------------------------


def processes_of(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from processes_of(int(child))


def memory_of(pid: int) -> int:
    """Proportional set size in bytes of a process and all below it; 0 where nobody tells."""
    total = 0
    for process in processes_of(pid):
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * sum(int(ln.split()[1]) for ln in rollup.splitlines() if ln[:4] == "Pss:")
    return total


def run_command(command: list[str]) -> tuple[float, int, str]:
    """(seconds, largest memory in bytes, stdout)."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, memory_of(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, peak, out


def run_side(side: Callable[..., float], *arguments: Path) -> tuple[float, int]:
    _, peak, out = run_command(
        [sys.executable, build_sides.__file__, side.__name__, *map(str, arguments)]
    )
    return float(out.split()[-1]), peak


def run_build(corpus: Path, tokenizer: Path, prefix: Path, backend: str) -> tuple[float, int]:
    command = [sys.executable, "-m", "megapack.cli.main", "tokenize", "--input", str(corpus)]
    command += ["--tokenizer", str(tokenizer), "--append-eod", "--eod-token", "<|endoftext|>"]
    command += ["--output-prefix", str(prefix), "--workers", PROCESSES, "--backend", backend]
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink()  # what is there already is not built again
    return run_command(command)[:2]


def best(run: Callable[[], tuple[float, int]]) -> tuple[float, int]:
    """The fastest of a few runs, and the largest memory of any."""
    results = [run() for _ in range(REPEATS)]
    return min(seconds for seconds, _ in results), max(peak for _, peak in results)


class Corpora:
    """The files of a comparison, and the bytes of text in them."""

    def __init__(self, work: Path) -> None:
        self.all, self.half = work / "corpus.jsonl", work / "half.jsonl"
        self.part, self.short = work / "part.jsonl", work / "short.jsonl"
        self.long, self.tokenizer = work / "long.jsonl", work / "tokenizer.json"
        documents, size, rounds = write_corpus(self.all, CORPUS_MB)
        self.size = {self.all: size}
        first_part(self.all, self.part, SLOW_MB)
        first_part(self.all, self.long, READ_MB)
        texts = texts_of(self.all)
        write_texts(self.half, texts[: len(texts) - len(second_half(texts))])
        long = texts_of(self.long)
        cut = (t[i : i + SHORT] for t in long for i in range(0, len(t), SHORT))
        write_texts(self.short, cut)
        for path in (self.half, self.part, self.long, self.short):
            self.size[path] = sum(len(text.encode("utf-8")) for text in texts_of(path))
        train = [sys.executable, "-m", "megapack.cli.main", "train-tokenizer", "--type", "bpe-json"]
        train += ["--input", str(self.all), "--output", str(self.tokenizer)]
        run_command([*train, "--sample-bytes", "16M"])
        repeated = "" if rounds == 1 else f", the disk's files {rounds} times over"
        print(f"{documents:,} documents, {size / 1e6:,.0f} MB of Python source{repeated}")


def write_texts(path: Path, texts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, backend: str, size: int, measured: tuple[float, int]) -> None:
        seconds, peak = measured
        row = {"what": what, "backend": backend, "text_mb": size / 1e6, "seconds": seconds}
        self.rows.append({**row, "mb_per_s": size / 1e6 / seconds, "peak_mb": peak / 1e6})
        print(f"  {what}: {size / 1e6 / seconds:,.1f} MB/s", flush=True)


def measure(work: Path) -> list[dict[str, Any]]:
    corpora, rows = Corpora(work), Rows()
    measure_slow(corpora, work, rows)
    measure_fast(corpora, work, rows)
    for what, path in (("whole files", corpora.long), (f"{SHORT} characters", corpora.short)):
        for name, side in (
            ("ours", build_sides.reading_ours),
            ("orjson", build_sides.reading_orjson),
        ):
            measured = best(lambda side=side, path=path: run_side(side, path))  # type: ignore[misc]
            rows.add(f"reading, {name}, {what}", "reading", corpora.size[path], measured)
    return rows.rows


def measure_slow(corpora: Corpora, work: Path, rows: Rows) -> None:
    theirs, ours = work / "theirs", work / "ours"
    part, tokenizer = corpora.part, corpora.tokenizer
    size, backend = corpora.size[part], "tokenizers"
    rows.add(
        "bare tokenizers", backend, size, run_side(build_sides.bare_tokenizers, part, tokenizer)
    )
    rows.add(MEGATRON, backend, size, run_side(build_sides.megatron, part, tokenizer, theirs))
    rows.add("ours, tokenizers", backend, size, run_build(part, tokenizer, ours, "tokenizers"))
    for suffix in (".bin", ".idx"):
        same = Path(f"{theirs}{suffix}").read_bytes() == Path(f"{ours}{suffix}").read_bytes()
        assert same, f"the two {suffix} files differ"


def measure_fast(corpora: Corpora, work: Path, rows: Rows) -> None:
    size, half = corpora.size[corpora.all], corpora.size[corpora.half]
    files = (corpora.all, corpora.tokenizer)
    for what, side in (
        ("one call", build_sides.bare_gigatoken),
        ("4 MB batches", build_sides.bare_gigatoken_batches),
    ):
        measured = best(lambda side=side: run_side(side, *files))  # type: ignore[misc]
        rows.add(f"bare gigatoken, {what}", "gigatoken", size - half, measured)
    for backend in ("auto", "gigatoken"):
        prefix = work / backend

        def build(path: Path, prefix: Path = prefix, backend: str = backend) -> tuple[float, int]:
            return best(lambda: run_build(path, corpora.tokenizer, prefix, backend))

        seconds, _ = build(corpora.half)
        whole = build(corpora.all)
        rows.add(f"ours, {backend}", "gigatoken", size, whole)
        beyond = (whole[0] - seconds, whole[1])
        rows.add(f"ours, {backend}, beyond the first half", "gigatoken", size - half, beyond)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="megapack-build-") as directory:
        rows = measure(Path(directory))
    limit = {
        backend: max(
            row["mb_per_s"]
            for row in rows
            if row["backend"] == backend and row["what"].startswith("bare")
        )
        for backend in ("tokenizers", "gigatoken")
    }
    base = next(row["mb_per_s"] for row in rows if row["what"] == MEGATRON)
    shown = []
    for row in rows:
        reading = row["backend"] == "reading"
        if not reading:
            row["of_bare"] = row["mb_per_s"] / limit[row["backend"]]
            row["times_megatron"] = row["mb_per_s"] / base
        shown.append(
            (
                row["what"],
                f"{row['text_mb']:,.0f}",
                f"{row['mb_per_s']:,.1f}",
                "" if reading else f"{row['of_bare']:.2f}",
                "" if reading else f"{row['times_megatron']:,.1f}",
                f"{row['peak_mb']:,.0f}",
            )
        )
    print()
    columns = ("", "MB of text", "MB/s", "of the fastest bare", "x Megatron", "peak MB")
    print_table(columns, shown)
    write_results("build", rows)


if __name__ == "__main__":
    main()

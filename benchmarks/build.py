"""Text to .bin/.idx, from end to end: ours beside Megatron's way, both beside the bare tokenizers.

Corpus: the Python source of this disk, every distinct file a document, as .jsonl; the tokenizer is
a byte-level BPE trained on it. Everything has two processes or two threads. The bare tokenizers
encode texts that lie in memory and throw the ids away: that is the limit of what a build can do.
gigatoken does so also from one flat buffer, which is how our readers feed it, and always in a fresh
process: it remembers words, so a second pass over the same text would be another thing. Megatron's
way is what preprocess_data.py does: a pool of workers that parse and encode, and one parent that
writes what they send with megatron-core's own IndexedDatasetBuilder.

The slow ones get the first part of the corpus only; MB/s are of text (UTF-8). A build is timed as a
command, with its start, its checks and the merge. Memory is the proportional set size of all
processes of the command, at its largest; the bare ones hold the whole corpus.

QUICK=1 runs on less text. MEGAPACK_BENCH_MB sets the size of the corpus (600).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import awkward
import gigatoken
import numpy as np
from common import quick, write_results
from tokenizers import Tokenizer

from megapack.cli.report import print_table

WORKERS = 2
PROCESSES = str(WORKERS)
CORPUS_MB = int(os.environ.get("MEGAPACK_BENCH_MB", "200" if quick() else "600"))
SLOW_MB = 16 if quick() else 48
REPEATS = 1 if quick() else 3
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


def texts_of(corpus: Path) -> list[str]:
    with corpus.open("rb") as lines:
        return [json.loads(line)["text"] for line in lines]


# --- what is measured; each runs in a process of its own and prints its seconds -------------------


def bare_tokenizers(corpus: str, tokenizer: str) -> float:
    os.environ["RAYON_NUM_THREADS"] = PROCESSES
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = Tokenizer.from_file(tokenizer)
    texts = texts_of(Path(corpus))
    begin = time.perf_counter()
    encoder.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - begin


def bare_gigatoken(corpus: str, tokenizer: str) -> float:
    os.environ["RAYON_NUM_THREADS"] = PROCESSES
    encoder = gigatoken.Tokenizer(tokenizer)
    texts = texts_of(Path(corpus))
    begin = time.perf_counter()
    encoder.encode_batch(texts, parallel=True)
    return time.perf_counter() - begin


def bare_gigatoken_flat(corpus: str, tokenizer: str) -> float:
    os.environ["RAYON_NUM_THREADS"] = PROCESSES
    encoder = gigatoken.Tokenizer(tokenizer)
    texts = awkward.Array(texts_of(Path(corpus)))
    begin = time.perf_counter()
    encoder.encode_batch(texts, parallel=True)
    return time.perf_counter() - begin


class MegatronEncoder:
    """The work of a pool process: a line of JSON to a list of ids and a list of lengths."""

    tokenizer: Any

    @staticmethod
    def start(tokenizer: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        MegatronEncoder.tokenizer = Tokenizer.from_file(tokenizer)

    @staticmethod
    def encode(line: str) -> tuple[list[int], list[int], int]:
        text = json.loads(line)["text"]
        ids = MegatronEncoder.tokenizer.encode(text, add_special_tokens=False).ids
        ids.append(0)
        return ids, [len(ids)], len(line)


def megatron(corpus: str, tokenizer: str, prefix: str) -> float:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: PLC0415

    begin = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(
        WORKERS, initializer=MegatronEncoder.start, initargs=(tokenizer,)
    ) as pool:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        with Path(corpus).open(encoding="utf-8") as lines:
            for ids, lengths, _ in pool.imap(MegatronEncoder.encode, lines, 32):
                builder.add_document(ids, lengths)
        builder.finalize(f"{prefix}.idx")
    return time.perf_counter() - begin


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
    _, peak, out = run_command([sys.executable, __file__, side.__name__, *map(str, arguments)])
    return float(out.split()[-1]), peak


def run_build(corpus: Path, tokenizer: Path, prefix: Path, backend: str) -> tuple[float, int]:
    command = [sys.executable, "-m", "megapack.cli.main", "tokenize", "--input", str(corpus)]
    command += ["--tokenizer", str(tokenizer), "--append-eod", "--eod-token", "<|endoftext|>"]
    command += ["--output-prefix", str(prefix), "--workers", PROCESSES, "--backend", backend]
    return run_command([*command, "--overwrite"])[:2]


def best(run: Callable[[], tuple[float, int]]) -> tuple[float, int]:
    """The fastest of a few runs, and the largest memory of any."""
    results = [run() for _ in range(REPEATS)]
    return min(seconds for seconds, _ in results), max(peak for _, peak in results)


def prepare(corpus: Path, part: Path, tokenizer: Path) -> tuple[int, int]:
    """Bytes of text of the corpus and of its first part."""
    documents, size, rounds = write_corpus(corpus, CORPUS_MB)
    first_part(corpus, part, SLOW_MB)
    train = [sys.executable, "-m", "megapack.cli.main", "train-tokenizer", "--type", "bpe-json"]
    train += ["--input", str(corpus), "--output", str(tokenizer), "--sample-bytes", "16M"]
    run_command(train)
    repeated = "" if rounds == 1 else f", the disk's files {rounds} times over"
    print(f"{documents:,} documents, {size / 1e6:,.0f} MB of Python source{repeated}", flush=True)
    return size, sum(len(text.encode("utf-8")) for text in texts_of(part))


def measure(work: Path) -> list[dict[str, Any]]:
    corpus, part, tokenizer = work / "corpus.jsonl", work / "part.jsonl", work / "tokenizer.json"
    size, part_size = prepare(corpus, part, tokenizer)
    theirs, ours = work / "theirs", work / "ours"
    rows: list[dict[str, Any]] = []

    def add(what: str, backend: str, measured: tuple[float, int]) -> None:
        seconds, peak = measured
        megabytes = (size if backend == "gigatoken" else part_size) / 1e6
        speed = megabytes / seconds
        row = {"what": what, "backend": backend, "text_mb": megabytes, "seconds": seconds}
        rows.append({**row, "mb_per_s": speed, "peak_mb": peak / 1e6})
        print(f"  {what}: {speed:,.1f} MB/s", flush=True)

    add("bare tokenizers", "tokenizers", run_side(bare_tokenizers, part, tokenizer))
    add(MEGATRON, "tokenizers", run_side(megatron, part, tokenizer, theirs))
    add("ours, tokenizers", "tokenizers", run_build(part, tokenizer, ours, "tokenizers"))
    for suffix in (".bin", ".idx"):
        same = Path(f"{theirs}{suffix}").read_bytes() == Path(f"{ours}{suffix}").read_bytes()
        assert same, f"the two {suffix} files differ"
    runs: dict[str, Callable[[], tuple[float, int]]] = {
        "bare gigatoken": lambda: run_side(bare_gigatoken, corpus, tokenizer),
        "bare gigatoken, flat buffer": lambda: run_side(bare_gigatoken_flat, corpus, tokenizer),
        "ours, auto": lambda: run_build(corpus, tokenizer, work / "auto", "auto"),
        "ours, gigatoken": lambda: run_build(corpus, tokenizer, work / "giga", "gigatoken"),
    }
    for what, run in runs.items():
        add(what, "gigatoken", best(run))
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="megapack-build-") as directory:
        rows = measure(Path(directory))
    speed = {row["what"]: row["mb_per_s"] for row in rows}
    shown = []
    for row in rows:
        bare = "bare gigatoken" if row["backend"] == "gigatoken" else "bare tokenizers"
        row["of_bare"] = row["mb_per_s"] / speed[bare]
        row["times_megatron"] = row["mb_per_s"] / speed[MEGATRON]
        shown.append(
            (
                row["what"],
                f"{row['text_mb']:,.0f}",
                f"{row['mb_per_s']:,.1f}",
                f"{row['of_bare']:.2f}",
                f"{row['times_megatron']:,.1f}",
                f"{row['peak_mb']:,.0f}",
            )
        )
    print()
    print_table(("", "MB of text", "MB/s", "of bare", "x Megatron", "peak MB"), shown)
    write_results("build", rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sides = (bare_tokenizers, bare_gigatoken, bare_gigatoken_flat, megatron)
        measured = {side.__name__: side for side in sides}
        print(measured[sys.argv[1]](*sys.argv[2:]))
    else:
        main()

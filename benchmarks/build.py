"""``make bench-build``: text to .bin/.idx, compared with preprocess_data.py; and tokenizers alone.

Corpus: all distinct Python files on this disk, one document each, as .jsonl; the tokenizer is a
byte-level BPE trained on it. Every side uses two processes or two threads. All sides run equally
often, in turns; results are medians. MB/s count text (UTF-8). Memory is the largest proportional
set size of all processes of a command.

- bare: the encoder alone, from texts in memory, without keeping ids: the upper limit of a build.
  tokenizers encodes its part in one call. gigatoken caches words, so it encodes the first half of
  the corpus untimed and is timed on the second: in one call, and in batches of 4 MB, like
  megapack's readers (faster, because it reuses its memory).
- pool + megatron-core: preprocess_data.py's loop, rewritten: a pool of workers parses and encodes,
  one parent writes with megatron-core's IndexedDatasetBuilder.
- ours: the whole command in a fresh process, from .jsonl to a .bin/.idx on disk (fsync included);
  this includes process start, loading the tokenizer, cold caches, checks and merge. With
  "tokenizers" it uses the same encoder as megatron-core's side. "beyond the first half" is the text
  of the second half divided by the seconds that it adds to a command: the speed for a very large
  corpus.
- reading: .jsonl to flat text in one thread, with megapack's parser and with orjson: whole files,
  and the same text in documents of 500 characters.

Sides with "tokenizers" encode only the first part of the corpus. QUICK=1 runs on less text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import orjson
from common import Timing, in_turns, quick, timed, write_results
from tokenizers import Tokenizer

from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.readers import line_blocks, read_jsonl_blocks
from megapack.tokenization.corpus.streams import Piece

CORPUS_MB = 200 if quick() else 800
SLOW_MB = 16 if quick() else 200
REPEATS = 1 if quick() else 3
READ_MB = 200
SHORT = 500  # characters
WORKERS = 2
BATCH_BYTES = 4 << 20
MEGATRON, HALF = "pool + megatron-core", ", the first half"

# ---- Corpora -------------------------------------------------------------------------------------


def python_source() -> Iterator[str]:
    """Yield the text of every distinct Python file of the interpreters on this disk, by path."""
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


def write_texts(path: Path, texts: Iterable[str], megabytes: float = float("inf")) -> int:
    """Write texts to a .jsonl, up to about ``megabytes``; return the bytes of text."""
    size = 0
    with path.open("w", encoding="utf-8") as out:
        for text in texts:
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode("utf-8"))
            if size >= megabytes * 1e6:
                break
    return size


def texts_of(corpus: Path) -> list[str]:
    with corpus.open("rb") as lines:
        return [json.loads(line)["text"] for line in lines]


# ---- Sides that run in separate processes and return their seconds -------------------------------


def bare_tokenizers(corpus: str, tokenizer: str) -> float:
    os.environ |= {"RAYON_NUM_THREADS": str(WORKERS), "TOKENIZERS_PARALLELISM": "true"}
    encoder = Tokenizer.from_file(tokenizer)
    texts = texts_of(Path(corpus))
    return timed(lambda: encoder.encode_batch_fast(texts, add_special_tokens=False))[0]


def bare_gigatoken(corpus: str, tokenizer: str, batch_bytes: str) -> float:
    """Encode the first half of the corpus, then return the seconds for the second half."""
    os.environ["RAYON_NUM_THREADS"] = str(WORKERS)
    encoder = gigatoken.Tokenizer(tokenizer)
    texts = texts_of(Path(corpus))
    seen = len(texts) // 2
    for batch in batches(texts[:seen], int(batch_bytes)):
        encoder.encode_batch(batch)
    unseen = list(batches(texts[seen:], int(batch_bytes)))
    begin = time.perf_counter()
    for batch in unseen:
        encoder.encode_batch(batch)
    return time.perf_counter() - begin


def batches(texts: list[str], batch_bytes: int) -> Iterator[list[str]]:
    numbered = zip(texts, itertools.accumulate(map(len, texts)), strict=True)
    for _, group in itertools.groupby(numbered, lambda pair: pair[1] // batch_bytes):
        yield [text for text, _ in group]


def reading_ours(corpus: str) -> float:
    [file] = find_inputs([corpus], format="jsonl")
    blocks = read_jsonl_blocks(Piece(file, 0, file.size), ReadOptions(), Faults())
    return timed(lambda: deque(blocks, maxlen=0))[0]


def reading_orjson(corpus: str) -> float:
    limits = {"block_bytes": BATCH_BYTES, "max_line_bytes": 1 << 30}
    begin = time.perf_counter()
    with Path(corpus).open("rb") as file:
        for _, data in line_blocks(file, **limits, on_long_line=print):
            view, at, texts = memoryview(data), 0, []
            while (end := data.find(b"\n", at)) >= 0:
                texts.append(orjson.loads(view[at:end])["text"].encode())
                at = end + 1
            np.cumsum([len(text) for text in texts])
            np.frombuffer(b"".join(texts), np.uint8)
    return time.perf_counter() - begin


_tokenizer: Any  # one per pool process


def start_megatron(tokenizer: str) -> None:
    global _tokenizer  # noqa: PLW0603
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(tokenizer)


def encode_megatron(line: str) -> tuple[list[int], list[int], int]:
    """Return the ids of a JSON line, a list with their number, and the number of characters."""
    ids = _tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
    ids.append(0)
    return ids, [len(ids)], len(line)


def megatron(corpus: str, tokenizer: str, prefix: str) -> float:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: PLC0415

    begin = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(WORKERS, start_megatron, (tokenizer,)) as pool:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        with Path(corpus).open(encoding="utf-8") as lines:
            for ids, lengths, _ in pool.imap(encode_megatron, lines, 32):
                builder.add_document(ids, lengths)
        builder.finalize(f"{prefix}.idx")
    return time.perf_counter() - begin


# ---- Measuring -----------------------------------------------------------------------------------


def memory_of(pid: int) -> int:
    """Return the proportional set size in bytes of a process and its children; 0 if unknown."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return own + sum(memory_of(int(child)) for child in children)


def run_command(command: list[str]) -> tuple[float, int, str]:
    """Run a command; return (seconds, largest memory in bytes, stdout)."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    begin = time.perf_counter()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process, peak, out = subprocess.Popen(command, env=environment, **streams), 0, None
    while out is None:
        with suppress(subprocess.TimeoutExpired):
            out, _ = process.communicate(timeout=0.1)
        peak = max(peak, memory_of(process.pid))
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    print(f"  {seconds:7.1f} s  {' '.join(command[1:])}"[:100], flush=True)
    return seconds, peak, out


Side = Callable[[], tuple[float, int]]  # seconds and bytes of one run


def side(function: Callable[..., float], *arguments: object) -> Side:
    """Run a function of this file in a separate process."""
    command = [sys.executable, __file__, function.__name__, *map(str, arguments)]

    def run() -> tuple[float, int]:
        _, peak, out = run_command(command)
        return float(out.split()[-1]), peak

    return run


def build(corpus: Path, tokenizer: Path, prefix: Path, backend: str) -> Side:
    """Return a side that runs megapack's ``tokenize`` command."""
    command = [sys.executable, "-m", "megapack.cli.main", "tokenize", "--input", str(corpus)]
    command += ["--tokenizer", str(tokenizer), "--append-eod", "--eod-token", "<|endoftext|>"]
    command += ["--output-prefix", str(prefix), "--workers", str(WORKERS), "--backend", backend]

    def run() -> tuple[float, int]:
        for path in prefix.parent.glob(f"{prefix.name}.*"):
            path.unlink()  # the command skips a build that is complete
        return run_command(command)[:2]

    return run


def measure(work: Path) -> list[dict[str, Any]]:
    """Run all sides ``REPEATS`` times, in turns; return one row per side."""
    corpus, half, part, long, short = (
        work / f"{name}.jsonl" for name in ("corpus", "half", "part", "long", "short")
    )
    rounds = (python_source() for _ in itertools.count())  # repeat files if the disk has too few
    size = {corpus: write_texts(corpus, itertools.chain.from_iterable(rounds), CORPUS_MB)}
    texts = texts_of(corpus)
    cut = (t[i : i + SHORT] for t in texts for i in range(0, len(t), SHORT))
    size[half] = write_texts(half, texts[: len(texts) // 2])
    size[part] = write_texts(part, texts, SLOW_MB)
    size[long] = write_texts(long, texts, READ_MB)
    size[short] = write_texts(short, cut, READ_MB)
    print(f"{len(texts):,} documents, {size[corpus] / 1e6:,.0f} MB of Python source")
    tokenizer = work / "tokenizer.json"
    train = [sys.executable, "-m", "megapack.cli.main", "train-tokenizer", "--type", "bpe-json"]
    train += ["--input", str(corpus), "--output", str(tokenizer), "--sample-bytes", "16M"]
    run_command(train)
    beyond = size[corpus] - size[half]
    # name: (side, encoder or "reading", bytes of text)
    slow = {
        "bare tokenizers": side(bare_tokenizers, part, tokenizer),
        MEGATRON: side(megatron, part, tokenizer, work / "theirs"),
        "ours, tokenizers": build(part, tokenizer, work / "ours", "tokenizers"),
    }
    sides = {name: (run, "tokenizers", size[part]) for name, run in slow.items()}
    for words, batch_bytes in (("one call", sys.maxsize), ("4 MB batches", BATCH_BYTES)):
        run = side(bare_gigatoken, corpus, tokenizer, batch_bytes)
        sides[f"bare gigatoken, {words}"] = run, "gigatoken", beyond
    for backend in ("auto", "gigatoken"):
        for words, path in (("", corpus), (HALF, half)):
            run = build(path, tokenizer, work / backend, backend)
            sides[f"ours, {backend}{words}"] = run, "gigatoken", size[path]
    for words, path in (("whole files", long), (f"{SHORT} characters", short)):
        for who, reader in (("ours", reading_ours), ("orjson", reading_orjson)):
            sides[f"reading, {who}, {words}"] = side(reader, path), "reading", size[path]
    found = in_turns({name: run for name, (run, _, _) in sides.items()}, REPEATS)
    for suffix in (".bin", ".idx"):
        theirs, ours = (work / f"{who}{suffix}" for who in ("theirs", "ours"))
        assert theirs.read_bytes() == ours.read_bytes(), f"the two {suffix} files differ"
    rows = []
    for name, (_, encoder, num_bytes) in sides.items():
        seconds, peaks = zip(*found[name], strict=True)
        if name.endswith(HALF):
            whole = [run[0] for run in found[name.removesuffix(HALF)]]
            seconds = tuple(all_ - half_ for all_, half_ in zip(whole, seconds, strict=True))
            name, num_bytes = name.replace(HALF, ", beyond the first half"), beyond  # noqa: PLW2901
        timing = Timing(seconds)
        about = {"what": name, "backend": encoder, "text_mb": num_bytes / 1e6, **timing.row()}
        rate = num_bytes / 1e6 / timing.seconds
        rows.append(about | {"mb_per_s": rate, "peak_mb": max(peaks) / 1e6})
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory))
    speeds = {row["what"]: row["mb_per_s"] for row in rows}
    for row in rows:
        bare = [v for name, v in speeds.items() if name.startswith(f"bare {row['backend']}")]
        if bare:
            row["of_the_fastest_bare"] = row["mb_per_s"] / max(bare)
            row["times_megatron"] = row["mb_per_s"] / speeds[MEGATRON]
    write_results("build", rows, **{"text to .bin/.idx": rows})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(globals()[sys.argv[1]](*sys.argv[2:]))
    else:
        main()

"""Text to .bin/.idx, from end to end: ours beside what preprocess_data.py does, and the tokenizers.

Corpus: the Python source of this disk, every distinct file a document, as .jsonl; the tokenizer is
a byte-level BPE trained on it. Everything has two processes or two threads, every side runs equally
often, in turns, and counts with its median. MB/s are of text (UTF-8), memory is the proportional
set size of all processes of a command, at its largest.

- bare: texts lie in memory, ids are thrown away: the limit of what a build can do. tokenizers gets
  its part in one call. gigatoken remembers words, so it first encodes the first half of the corpus
  and is then timed on the second, which it has not seen: in one call, and in batches of 4 MB (its
  memory is then used again, which is faster; this is how our readers feed it).
- pool + megatron-core: preprocess_data.py's loop, written again: a pool of workers that parse and
  encode, and one parent that writes with megatron-core's own IndexedDatasetBuilder.
- ours: the whole command in a fresh process, from .jsonl to a .bin/.idx on disk (fsync included),
  with its start, the tokenizer's load, cold caches, checks and the merge. Beside "tokenizers" it
  has the same encoder as megatron-core's side; what "gigatoken" adds is the encoder's. "beyond the
  first half" is the text of the second half by the seconds that it adds to a command: the rate of
  a corpus so large that a start does not count.
- reading: .jsonl to flat text in one thread, with our parser and with orjson: whole files, and the
  same text cut into documents of 500 characters.

The sides with "tokenizers" get the first part of the corpus only.

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
from functools import partial
from pathlib import Path
from typing import Any

import build_sides
from build_sides import PROCESSES, second_half, texts_of
from common import Timing, in_turns, quick, show, write_results

CORPUS_MB = int(os.environ.get("MEGAPACK_BENCH_MB", "200" if quick() else "800"))
SLOW_MB = 16 if quick() else 200
REPEATS = 1 if quick() else 3
READ_MB = 200
SHORT = 500  # characters
MEGATRON, HALF = "pool + megatron-core", ", the first half"


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


Side = Callable[[], tuple[float, int]]  # seconds and bytes of one run


def side(function: Callable[..., float], *arguments: Path) -> Side:
    """A function of ``build_sides``, in a process of its own."""
    command = [sys.executable, build_sides.__file__, function.__name__, *map(str, arguments)]

    def run() -> tuple[float, int]:
        _, peak, out = run_command(command)
        return float(out.split()[-1]), peak

    return run


def build(corpus: Path, tokenizer: Path, prefix: Path, backend: str) -> Side:
    """The command of ours."""
    command = [sys.executable, "-m", "megapack.cli.main", "tokenize", "--input", str(corpus)]
    command += ["--tokenizer", str(tokenizer), "--append-eod", "--eod-token", "<|endoftext|>"]
    command += ["--output-prefix", str(prefix), "--workers", PROCESSES, "--backend", backend]

    def run() -> tuple[float, int]:
        for path in prefix.parent.glob(f"{prefix.name}.*"):
            path.unlink()  # what is there already is not built again
        return run_command(command)[:2]

    return run


def shown(name: str, run: Side) -> tuple[float, int]:
    """The run, with its progress."""
    seconds, peak = run()
    print(f"  {name}: {seconds:.1f} s", flush=True)
    return seconds, peak


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


def measure(work: Path) -> list[dict[str, Any]]:
    """A row per side: every side runs ``REPEATS`` times, in turns."""
    corpora = Corpora(work)
    part, tokenizer = corpora.part, corpora.tokenizer
    beyond = corpora.size[corpora.all] - corpora.size[corpora.half]
    # name: (side, encoder or "reading", bytes of text)
    sides: dict[str, tuple[Side, str, int]] = {}
    slow = {
        "bare tokenizers": side(build_sides.bare_tokenizers, part, tokenizer),
        MEGATRON: side(build_sides.megatron, part, tokenizer, work / "theirs"),
        "ours, tokenizers": build(part, tokenizer, work / "ours", "tokenizers"),
    }
    sides |= {name: (run, "tokenizers", corpora.size[part]) for name, run in slow.items()}
    bare = {
        "bare gigatoken, one call": build_sides.bare_gigatoken,
        "bare gigatoken, 4 MB batches": build_sides.bare_gigatoken_batches,
    }
    for name, function in bare.items():
        sides[name] = side(function, corpora.all, tokenizer), "gigatoken", beyond
    for backend in ("auto", "gigatoken"):
        for words, path in (("", corpora.all), (HALF, corpora.half)):
            run = build(path, tokenizer, work / backend, backend)
            sides[f"ours, {backend}{words}"] = run, "gigatoken", corpora.size[path]
    for words, path in (("whole files", corpora.long), (f"{SHORT} characters", corpora.short)):
        for who in (build_sides.reading_ours, build_sides.reading_orjson):
            name = f"{who.__name__.replace('_', ', ')}, {words}"
            sides[name] = side(who, path), "reading", corpora.size[path]
    found = in_turns(
        {name: partial(shown, name, run) for name, (run, _, _) in sides.items()}, REPEATS
    )
    for suffix in (".bin", ".idx"):
        theirs, ours = (work / f"{who}{suffix}" for who in ("theirs", "ours"))
        same = theirs.read_bytes() == ours.read_bytes()
        assert same, f"the two {suffix} files differ"
    rows = []
    for name, (_, encoder, size) in sides.items():
        seconds, peaks = zip(*found[name], strict=True)
        if not name.endswith(HALF):
            rows.append(row(name, encoder, size, Timing(seconds), max(peaks)))
            continue
        whole = [run[0] for run in found[name.removesuffix(HALF)]]
        further = Timing(tuple(all_ - half for all_, half in zip(whole, seconds, strict=True)))
        words = name.replace(HALF, ", beyond the first half")
        rows.append(row(words, encoder, beyond, further, max(peaks)))
    return rows


def row(name: str, encoder: str, size: int, timing: Timing, peak: int) -> dict[str, Any]:
    """What the result file says of a side."""
    return {
        "what": name,
        "backend": encoder,
        "text_mb": size / 1e6,
        **timing.row(),
        "mb_per_s": size / 1e6 / timing.seconds,
        "peak_mb": peak / 1e6,
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="megapack-build-") as directory:
        rows = measure(Path(directory))
    speeds = {row["what"]: row["mb_per_s"] for row in rows}
    for row in rows:
        bare = [v for name, v in speeds.items() if name.startswith(f"bare {row['backend']}")]
        if bare:
            row["of_the_fastest_bare"] = row["mb_per_s"] / max(bare)
            row["times_megatron"] = row["mb_per_s"] / speeds[MEGATRON]
    write_results("build", rows)
    show("text to .bin/.idx", rows)


if __name__ == "__main__":
    main()

"""The sides of benchmarks/build.py; each runs in a process of its own and prints its seconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import orjson
from tokenizers import Tokenizer

from megapack.tokenization.corpus.documents import Faults
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.pieces import Piece, ReadOptions
from megapack.tokenization.corpus.readers import line_blocks, read_jsonl

WORKERS = 2
PROCESSES = str(WORKERS)
BATCH_BYTES = 4 << 20


def texts_of(corpus: Path) -> list[str]:
    with corpus.open("rb") as lines:
        return [json.loads(line)["text"] for line in lines]


def bare_tokenizers(corpus: str, tokenizer: str) -> float:
    os.environ["RAYON_NUM_THREADS"] = PROCESSES
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = Tokenizer.from_file(tokenizer)
    texts = texts_of(Path(corpus))
    begin = time.perf_counter()
    encoder.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - begin


def bare_gigatoken(corpus: str, tokenizer: str) -> float:
    return _bare_gigatoken(corpus, tokenizer, sys.maxsize)


def bare_gigatoken_batches(corpus: str, tokenizer: str) -> float:
    return _bare_gigatoken(corpus, tokenizer, BATCH_BYTES)


def _bare_gigatoken(corpus: str, tokenizer: str, batch_bytes: int) -> float:
    """Seconds for the second half of the corpus, after the first."""
    os.environ["RAYON_NUM_THREADS"] = PROCESSES
    encoder = gigatoken.Tokenizer(tokenizer)
    texts = texts_of(Path(corpus))
    seen = len(texts) - len(second_half(texts))
    for batch in batches(texts[:seen], batch_bytes):
        encoder.encode_batch(batch)
    unseen = list(batches(texts[seen:], batch_bytes))
    begin = time.perf_counter()
    for batch in unseen:
        encoder.encode_batch(batch)
    return time.perf_counter() - begin


def second_half(texts: list[str]) -> list[str]:
    """What the corpus has beyond the file that ``halve`` writes."""
    return texts[len(texts) // 2 :]


def batches(texts: list[str], batch_bytes: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def reading_ours(corpus: str) -> float:
    [file] = find_inputs([corpus], format="jsonl")
    begin = time.perf_counter()
    for _ in read_jsonl(Piece(file, 0, file.size), ReadOptions(), Faults()):
        pass
    return time.perf_counter() - begin


def reading_orjson(corpus: str) -> float:
    size = Path(corpus).stat().st_size
    begin = time.perf_counter()
    with Path(corpus).open("rb") as file:
        for _, data in line_blocks(
            file, end=size, block_bytes=BATCH_BYTES, max_line_bytes=1 << 30, on_long_line=print
        ):
            view, at, texts = memoryview(data), 0, []
            while (end := data.find(b"\n", at)) >= 0:
                texts.append(orjson.loads(view[at:end])["text"].encode())
                at = end + 1
            np.cumsum([len(text) for text in texts])
            np.frombuffer(b"".join(texts), np.uint8)
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


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*sys.argv[2:]))

"""The first promise: text in, the same documents out, whoever does the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megapack import IndexedDataset

TEXTS = [f"document {i}: " + "def f(x):\n    return x\n" * (i % 40) for i in range(400)]


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megapack.cli.main", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.multiprocess
def test_bytes_come_back_in_order_for_any_number_of_workers(tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    files = []
    for workers in (1, 2, 3):
        prefix = tmp_path / f"out{workers}"
        done = cli("tokenize", "--input", source, "--tokenizer", "bytes", "--append-eod",
                   "--output-prefix", prefix, "--workers", workers, "--shard-size", "20K")  # fmt: skip
        assert done.returncode == 0, done.stderr
        files.append((Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()))
    assert files[0] == files[1] == files[2]
    dataset = IndexedDataset(tmp_path / "out1")
    assert len(dataset) == len(TEXTS)
    for tokens, text in zip(dataset[:], TEXTS, strict=True):
        assert tokens[-1] == 256
        assert bytes(tokens[:-1].astype(np.uint8)).decode() == text

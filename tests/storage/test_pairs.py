"""An .idx and a .bin are opened as one pair, and written by one writer, whatever others do.

MEGAPACK_ROUNDS=200 runs the longer form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from patience import PATIENCE

from megapack.storage import IndexedDataset
from megapack.storage.verify import verify

ROUNDS = int(os.environ.get("MEGAPACK_ROUNDS", "20"))

# Version v of the dataset: v % 7 + 2 documents, document d of (v + d) % 50 + 1 tokens, all equal
# to v, and v in the meta file: any mixture of two versions shows.
COMMON = """
import json, sys, time
from pathlib import Path
import numpy as np
from megapack.errors import LockedError, MegapackError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
prefix = sys.argv[1]

def lengths_of(version):
    return (version + np.arange(version % 7 + 2)) % 50 + 1

def write(version):
    lengths = lengths_of(version)
    with IndexedDatasetBuilder(
        prefix, np.uint16, metadata={"edition": version}, overwrite=True
    ) as builder:
        for length in lengths.tolist():
            builder.add_document(np.full(length, version))

def version_of(dataset):
    version = int(dataset.tokens[0])
    assert np.array_equal(dataset.document_lengths, lengths_of(version)), "mixed lengths"
    assert (dataset.tokens == version).all(), "mixed tokens"
    assert dataset.tokens.size == lengths_of(version).sum(), "mixed sizes"
    return version
"""
WRITER = (
    COMMON
    + """
print("ready", flush=True)
for version in range(1, int(sys.argv[2]) + 1):
    sys.stdin.readline()
    write(version)
    print(version, flush=True)
"""
)
READER = (
    COMMON
    + """
opened, late, seen = 0, 0, set()
print("ready", flush=True)
last = int(sys.argv[2])
while last not in seen:
    dataset = IndexedDataset(prefix)
    version = version_of(dataset)
    opened += 1
    seen.add(version)
    try:
        assert dataset.meta["edition"] == version, "the meta file of another version"
    except MegapackError as error:
        assert "was replaced" in str(error)
        late += 1
print(json.dumps({"opened": opened, "versions": len(seen), "replaced before meta": late}))
"""
)
RIVAL = (
    COMMON
    + """
first, rounds = int(sys.argv[2]), int(sys.argv[3])
outcomes = []
print("ready", flush=True)
for i in range(rounds):
    sys.stdin.readline()
    try:
        write(first + 2 * i)
        print("written", flush=True)
    except LockedError as error:
        assert "is being written by" in str(error)
        print("locked", flush=True)
"""
)


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_readers_of_a_prefix_that_is_rewritten_never_see_a_mixture(tmp_path: Path) -> None:
    writer = start(WRITER, tmp_path / "data", ROUNDS)
    tell(writer)
    assert answer(writer) == "1"
    readers = [start(READER, tmp_path / "data", ROUNDS) for _ in range(2)]
    for version in range(2, ROUNDS + 1):
        tell(writer)
        assert answer(writer) == str(version)
    reports = [json.loads(reader.communicate(timeout=PATIENCE)[0] or "null") for reader in readers]
    assert writer.wait() == 0 and [reader.returncode for reader in readers] == [0, 0], reports
    print(f"{ROUNDS} versions, one writer, two readers: {reports}")
    assert all(report["opened"] > ROUNDS / 2 for report in reports), "hardly read: proves little"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", *META]


def test_of_two_writers_of_a_prefix_one_at_a_time_writes(tmp_path: Path) -> None:
    rivals = [start(RIVAL, tmp_path / "data", first, ROUNDS) for first in (1, 2)]
    outcomes: Counter[tuple[str, ...]] = Counter()
    for i in range(ROUNDS):
        for rival in rivals:
            tell(rival)
        said = [answer(rival) for rival in rivals]
        outcomes[tuple(sorted(said))] += 1
        assert not [f for f in verify(tmp_path / "data") if f.severity == "error"]
        dataset = IndexedDataset(tmp_path / "data")
        version = int(dataset.tokens[0])
        assert (dataset.tokens == version).all() and dataset.meta["edition"] == version
        assert version in [1 + 2 * i + k for k in range(2) if said[k] == "written"]
    assert [rival.wait() for rival in rivals] == [0, 0]
    print(f"{ROUNDS} rounds of two writers: {dict(outcomes)}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", *META]


META = ["data.meta.json"]

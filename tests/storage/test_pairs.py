"""Readers open .idx and .bin of one writer; writers of a prefix exclude each other.

MEGAPACK_ROUNDS=200 runs the longer form.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import build
from patience import PATIENCE
from programs import answer, started, tell

from megapack.errors import ConfigError, FormatError, LockedError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.files import AtomicFile, publish
from megapack.storage.importing import import_dataset
from megapack.storage.locks import WriterLock
from megapack.storage.merge import merge
from megapack.storage.repair import repair
from megapack.storage.tokens import InputDataset
from megapack.storage.verify import find_duplicates
from storage.strategies import SMALL, errors, files, names, write

ROUNDS = int(os.environ.get("MEGAPACK_ROUNDS", "20"))

# Version v of the dataset: v % 7 + 2 documents, document d of (v + d) % 50 + 1 tokens, all equal
# to v, and v in the meta file: so a mixture of two versions is detected.
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
WRITER = """
print("ready", flush=True)
for version in range(1, int(sys.argv[2]) + 1):
    sys.stdin.readline()
    write(version)
    print(version, flush=True)
"""
READER = """
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
RIVAL = """
first, rounds = int(sys.argv[2]), int(sys.argv[3])
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
ALL = ["data.bin", "data.idx", "data.meta.json"]


def test_readers_never_see_files_of_two_writers(tmp_path: Path) -> None:
    writer = started(COMMON + WRITER, tmp_path / "data", ROUNDS)
    tell(writer)
    assert answer(writer) == "1"
    readers = [started(COMMON + READER, tmp_path / "data", ROUNDS) for _ in range(2)]
    for version in range(2, ROUNDS + 1):
        tell(writer)
        assert answer(writer) == str(version)
    reports = [json.loads(reader.communicate(timeout=PATIENCE)[0] or "null") for reader in readers]
    assert writer.wait() == 0 and [reader.returncode for reader in readers] == [0, 0], reports
    print(f"{ROUNDS} versions, one writer, two readers: {reports}")
    assert all(report["opened"] > ROUNDS / 2 for report in reports), "hardly read: proves little"
    assert names(tmp_path) == ALL


def test_writers_of_a_prefix_exclude_each_other(tmp_path: Path) -> None:
    rivals = [started(COMMON + RIVAL, tmp_path / "data", first, ROUNDS) for first in (1, 2)]
    outcomes: Counter[tuple[str, ...]] = Counter()
    for i in range(ROUNDS):
        for rival in rivals:
            tell(rival)
        said = [answer(rival) for rival in rivals]
        outcomes[tuple(sorted(said))] += 1
        assert not errors(tmp_path / "data")
        dataset = IndexedDataset(tmp_path / "data")
        version = int(dataset.tokens[0])
        assert (dataset.tokens == version).all() and dataset.meta["edition"] == version
        assert version in [1 + 2 * i + k for k in range(2) if said[k] == "written"]
    assert [rival.wait() for rival in rivals] == [0, 0]
    print(f"{ROUNDS} rounds of two writers: {dict(outcomes)}")
    assert names(tmp_path) == ALL


def writers(folder: Path) -> list[Callable[[], object]]:
    """All that replaces ``out``, by what they read: tokens, the dataset ``a``, ``flat``."""
    np.array([1, 2, 0], np.uint16).tofile(folder / "flat")
    write(folder / "a", SMALL)
    flat = {"dtype": "uint16", "eod_token": 0, "overwrite": True}
    return [
        lambda: IndexedDatasetBuilder(folder / "out", overwrite=True),
        lambda: merge([folder / "a"], folder / "out", overwrite=True),
        lambda: import_dataset(folder / "a", folder / "out", overwrite=True),
        lambda: import_dataset(folder / "flat", folder / "out", **flat),
    ]


# ---- Existing datasets: an equal one stays, another one is only replaced on request --------------


def stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.glob("out*")}


def test_builder_replaces_a_dataset_only_with_overwrite(tmp_path: Path) -> None:
    write(tmp_path / "out", SMALL)
    before = files(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out\.bin exists already.*overwrite=True"):
        IndexedDatasetBuilder(tmp_path / "out", np.uint16)
    assert files(tmp_path / "out") == before
    with IndexedDatasetBuilder(tmp_path / "out", np.int32, overwrite=True) as builder:
        builder.add_document([1, 2])
        assert files(tmp_path / "out") == before, "replaced before it was complete"
    dataset = IndexedDataset(tmp_path / "out")
    assert (dataset.num_documents, dataset.dtype) == (1, np.int32)
    assert dataset.meta is not None and dataset.meta["num_documents"] == 1
    assert names(tmp_path) == ["out.bin", "out.idx", "out.meta.json"]


def test_bin_without_an_index_is_not_replaced(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "out.bin")
    with pytest.raises(ConfigError, match="exists already"):
        IndexedDatasetBuilder(tmp_path / "out", np.uint16)
    write(tmp_path / "a", SMALL)
    with pytest.raises(ConfigError, match=r"exists already: it is not complete\. Replace it"):
        merge([tmp_path / "a"], tmp_path / "out")


@pytest.mark.parametrize("named", [[".meta.json"], [".meta.json", ".bin"]])
def test_dataset_of_a_killed_process_is_completed(tmp_path: Path, named: list[str]) -> None:
    write(tmp_path / "a", SMALL)
    inputs = [tmp_path / "a"]
    merge(inputs, tmp_path / "out")
    whole = files(tmp_path / "out")
    for end in {".bin", ".idx"} - set(named):
        (tmp_path / f"out{end}").unlink()
    assert merge(inputs, tmp_path / "out") and files(tmp_path / "out") == whole
    (tmp_path / "out.idx").unlink()
    (tmp_path / "out.bin").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match=r"its \.bin does not match its meta file"):
        merge(inputs, tmp_path / "out")


def test_failed_rename_undoes_earlier_renames(tmp_path: Path) -> None:
    first, second = AtomicFile(tmp_path / "first"), AtomicFile(tmp_path / "second")
    (tmp_path / "second").mkdir()
    with pytest.raises(OSError, match="second"):
        publish(first, second)
    second.discard()
    assert names(tmp_path) == ["second"]


def test_second_equal_merge_does_nothing(tmp_path: Path) -> None:
    for name, corpus in (("a", SMALL), ("b", SMALL[:2]), ("c", SMALL[1:])):
        write(tmp_path / name, corpus, metadata={"tokenizer": {"digest": "x"}})
    inputs = [tmp_path / "a", tmp_path / "b"]
    assert merge(inputs, tmp_path / "out")
    before, content = stamps(tmp_path), files(tmp_path / "out")
    assert not merge(inputs, tmp_path / "out")
    assert not merge(inputs, tmp_path / "out", overwrite=True)
    assert stamps(tmp_path) == before
    others = {
        "its num_sequences is 8, not 3": {"prefixes": inputs[1:]},
        "its bin differs": {"prefixes": inputs[::-1]},
        "its note is None, not 'n'": {"prefixes": inputs, "metadata": {"note": "n"}},
        "has no checksums as int32": {"prefixes": inputs, "dtype": np.int32},
    }
    for difference, other in others.items():
        with pytest.raises(ConfigError, match=f"exists already: .*{difference}.*--overwrite"):
            merge(output=tmp_path / "out", **other)
        assert files(tmp_path / "out") == content
    assert merge(inputs[1:], tmp_path / "out", overwrite=True)
    assert IndexedDataset(tmp_path / "out").num_documents == 2
    (tmp_path / "out.idx").write_bytes((tmp_path / "b.idx").read_bytes()[:-1] + b"\1")
    with pytest.raises(ConfigError, match=r"its \.idx does not match its meta file"):
        merge(inputs[1:], tmp_path / "out")
    assert merge(inputs[1:], tmp_path / "out", overwrite=True)
    assert not merge(inputs[1:], tmp_path / "out", remove_inputs=True)
    assert not IndexedDataset.exists(tmp_path / "b"), "a second run did not end what the first left"


def test_second_equal_import_does_nothing(tmp_path: Path) -> None:
    np.array([1, 2, 0, 3, 0], np.uint16).tofile(tmp_path / "flat")
    flat = {"path": tmp_path / "flat", "dtype": "uint16", "output": tmp_path / "out"}
    for link in ("hard", "symbolic", "copy"):
        for path in tmp_path.glob("out*"):
            path.unlink()
        assert "2 documents" in import_dataset(**flat, eod_token=0, link=link)
        before = stamps(tmp_path)
        assert import_dataset(**flat, eod_token=0).startswith("nothing to do: ")
        assert stamps(tmp_path) == before
        with pytest.raises(ConfigError, match="exists already: its idx differs"):
            import_dataset(**flat, eod_token=2, eod_at="start", metadata={"x": 1})
        import_dataset(**flat, eod_token=2, overwrite=True)
        assert len(IndexedDataset(tmp_path / "out")) == 2
    assert (tmp_path / "flat").read_bytes() == np.array([1, 2, 0, 3, 0], np.uint16).tobytes()


def test_writing_through_the_link_of_an_import_is_refused(tmp_path: Path) -> None:
    """The link's target may belong to someone else."""
    attempts, source = writers(tmp_path)[:3], (tmp_path / "flat").read_bytes()
    how = {"dtype": "uint16", "eod_token": 0, "link": "symbolic"}
    import_dataset(tmp_path / "flat", tmp_path / "out", **how)
    for attempt in attempts:
        with pytest.raises(ConfigError, match=r"out\.bin is a link to .*flat, .*remove the link"):
            attempt()
    assert (tmp_path / "flat").read_bytes() == source
    assert IndexedDataset(tmp_path / "out").num_tokens == 3


def test_locked_prefix_is_an_error_for_every_writer(tmp_path: Path) -> None:
    attempts = [*writers(tmp_path), lambda: repair(tmp_path / "out")]
    damaged = bytearray((tmp_path / "a.idx").read_bytes())
    damaged[34 + 4 * len(SMALL) + 12] ^= 1  # a pointer
    write(tmp_path / "out", SMALL)
    (tmp_path / "out.idx").write_bytes(damaged)
    with WriterLock(tmp_path / "out", what="somebody"):
        for attempt in attempts:
            with pytest.raises(LockedError, match=rf"process {os.getpid()} on .* \(somebody\)"):
                attempt()
        assert repair(tmp_path / "out", dry_run=True)
    assert repair(tmp_path / "out")


def test_builder_locks_the_prefix_until_it_is_released(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "out")
    with pytest.raises(LockedError, match="a builder"):
        IndexedDatasetBuilder(tmp_path / "out")
    builder.abort()
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "out"):
        raise RuntimeError
    with pytest.raises(ConfigError), IndexedDatasetBuilder(tmp_path / "no" / "out"):
        pass
    write(tmp_path / "out", SMALL)
    with pytest.raises(ConfigError) as kept:  # its frames live as long as the error
        IndexedDatasetBuilder(tmp_path / "out")
    write(tmp_path / "out", SMALL, overwrite=True)
    assert "exists already" in str(kept.value)


@pytest.mark.parametrize("suffix", [".idx", ".bin", ".meta.json"])
def test_special_files_at_a_prefix_are_refused_at_once(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"out{suffix}").symlink_to("/dev/full")
    device = Path("/dev/full").stat()
    for attempt in writers(tmp_path):
        with pytest.raises(ConfigError, match=r"device|is a link"):
            attempt()
    assert os.path.samestat(device, Path("/dev/full").stat())


def test_prefixes_too_long_for_all_files_are_refused_at_once(tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - len(".meta.json.tmp-01234567")
    write(tmp_path / ("n" * longest), SMALL)
    for extra in range(1, 12):
        with pytest.raises(ConfigError, match=r"the name n+.meta.json has \d+ bytes|n+.lock has"):
            IndexedDatasetBuilder(tmp_path / ("n" * (longest + extra)))
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("make", ["fifo", "directory", "device"])
def test_special_file_is_refused_without_hanging(tmp_path: Path, suffix: str, make: str) -> None:
    prefix = tmp_path / "data"
    write(prefix, SMALL)
    path = tmp_path / f"data{suffix}"
    path.unlink()
    if make == "fifo":
        os.mkfifo(path)
    elif make == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    for read in (
        lambda: IndexedDataset(prefix),
        lambda: InputDataset(prefix),
        lambda: repair(prefix),
        lambda: import_dataset(prefix, tmp_path / "out", kind="mmididx"),
    ):
        with pytest.raises(FormatError, match=rf"data{suffix} is not a regular file"):
            read()
    assert [found.code for found in errors(prefix)] == ["index"]
    assert find_duplicates([prefix, str(prefix)]) == {}
    done = build("verify", prefix)
    assert done.returncode == 1 and "not a regular file" in done.stdout


def test_invalid_metadata_is_refused_before_the_work(tmp_path: Path) -> None:
    """Python decodes a command line that is not UTF-8 with surrogates."""
    bad = {"command": ["tokenize", "caf\udce9.jsonl"]}
    write(tmp_path / "a", SMALL)
    for attempt in (
        lambda: IndexedDatasetBuilder(tmp_path / "out", metadata=bad),
        lambda: merge([tmp_path / "a"], tmp_path / "out", metadata=bad),
        lambda: import_dataset(tmp_path / "a", tmp_path / "out", metadata=bad),
    ):
        with pytest.raises(ValueError, match=r"caf.udce9.*is not valid Unicode"):
            attempt()
    assert not stamps(tmp_path)


def test_meta_file_of_other_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL, vocab_size=11)
    dataset = IndexedDataset(tmp_path / "data")
    write(tmp_path / "data", SMALL[:2], vocab_size=12, overwrite=True)
    with pytest.raises(FormatError, match="data was replaced after it was opened; open it again"):
        _ = dataset.meta
    assert IndexedDataset(tmp_path / "data").vocab_size == 12
    write(tmp_path / "other", SMALL)
    for suffix in (".bin", ".idx"):  # another tool's builder does not touch the meta file
        (tmp_path / f"other{suffix}").replace(tmp_path / f"data{suffix}")
    with pytest.raises(FormatError, match="meta file does not match the dataset: its num_seq"):
        _ = IndexedDataset(tmp_path / "data").meta


def test_worker_refuses_a_replaced_dataset(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    dataset = IndexedDataset(tmp_path / "data")
    state = dataset.__getstate__()
    IndexedDataset.__new__(IndexedDataset).__setstate__(state)
    write(tmp_path / "data", SMALL[:2], overwrite=True)
    with pytest.raises(FormatError, match="was replaced after it was pickled"):
        IndexedDataset.__new__(IndexedDataset).__setstate__(state)


def test_an_input_replaced_while_it_is_merged_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a", SMALL)
    shard = InputDataset(tmp_path / "a")
    write(tmp_path / "a", SMALL[::-1], overwrite=True)
    with pytest.raises(FormatError, match="was replaced while it was read; start again"):
        list(shard.layout.length_blocks())
    with pytest.raises(FormatError, match="was replaced while it was read; start again"):
        shard.open_tokens()

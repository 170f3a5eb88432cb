"""Names from the user become one list of files in one order."""

from __future__ import annotations

import csv
import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from peers import peer

from megapack.errors import ConfigError, DataError
from megapack.tokenization.corpus.inputs import find_inputs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/2.py", "b/1.py", "a/x.jsonl", "a/notes.txt", ".git/config.py", "b/.hidden.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "b" / "big.json.gz").write_bytes(b"x" * 1000)
    return tmp_path


def names(root: Path, *inputs: str, **options: object) -> list[str]:
    files = find_inputs([str(root / name) for name in inputs], **options)  # type: ignore[arg-type]
    return [str(Path(file.path).relative_to(root)) for file in files]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.tar", r"is a tar archive .*tar -xf \S*a.tar -C \S*a"),
        ("b.tar.gz", r"is a tar archive .*-C \S*b"),
        ("mds/shard.00000.mds", r"folder of MosaicML streaming \(MDS\).*StreamingDataset"),
        ("mds/shard.00000.mds.zstd", r"folder of MosaicML streaming \(MDS\)"),
        ("mds/index.json", r"folder of MosaicML streaming \(MDS\)"),
        ("mds", r"folder of MosaicML streaming \(MDS\)"),
    ],
)
def test_unsupported_format_is_refused_with_a_conversion_command(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "mds").mkdir()
    index = {"version": 2, "shards": [{"column_names": ["text"], "format": "mds"}]}
    (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
    for file in ("a.tar", "b.tar.gz", "mds/shard.00000.mds", "mds/shard.00000.mds.zstd"):
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ConfigError, match=message):
        find_inputs([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.npy",
            b"\x93NUMPY\1\0\0\0",
            r"token ids \(kind npy\).*import \S*a.npy .*--eod-token ID$",
        ),
        ("b.ds", bytes(8), r"token ids \(kind datatrove\).*import \S*b.ds --output-prefix PREFIX$"),
        ("b.ds.index", bytes(8), r"token ids \(kind datatrove\).*import \S*b.ds --"),
        ("c.bin", bytes(8), r"token ids \(kind mmididx\).*import \S*c.bin --output-prefix PREFIX$"),
        ("c.idx", b"MMIDIDX\0\0", r"token ids \(kind mmididx\).*import \S*c --"),
        ("d.bin", struct.pack("<2i", 20240520, 1), r"token ids \(kind llm.c\).*import \S*d.bin --"),
        ("e.npy", b"\7\0", r"token ids \(kind dolma\).*import \S*e.npy --output-prefix PREFIX$"),
        ("f.bin", b"\xff\xff", "token ids without a header.*--dtype uint16 --eod-token ID$"),
        (
            "g.npy.gz",
            gzip.compress(b"\x93NUMPY", mtime=0),
            r"unpack it \(gunzip -k\), then .*g.npy --",
        ),
    ],
)
def test_token_ids_are_refused_with_their_import_command(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    sides = {"b.ds": bytes(8), "b.ds.index": bytes(8), "c.idx": b"MMIDIDX\0\0", "e.csv.gz": b""}
    for side, content in sides.items():
        (tmp_path / side).write_bytes(content)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        find_inputs([str(tmp_path / name)])


def test_text_with_the_suffix_of_token_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("text " * 20_000 + "\u00e9")
    assert find_inputs([str(tmp_path / "a.bin")])[0].format == "text"


def test_directory_gives_data_files_sorted_without_hidden_ones(tree: Path) -> None:
    assert names(tree, "") == ["a/notes.txt", "a/x.jsonl", "b/big.json.gz"]
    assert names(tree, "", suffixes=[".py"]) == ["b/1.py", "b/2.py"]
    assert names(tree, "", suffixes=["1.*", "x*"]) == ["a/x.jsonl", "b/1.py"], "patterns"


def test_inputs_keep_their_order_and_count_once(tree: Path) -> None:
    assert names(tree, "b/2.py", "b/*.py", "a/x.jsonl") == ["b/2.py", "b/1.py", "a/x.jsonl"]
    assert names(tree, "**/*.py") == ["b/1.py", "b/2.py"]


def test_format_follows_the_suffix_or_the_option(tree: Path) -> None:
    files = find_inputs([str(tree / "a"), str(tree / "b" / "big.json.gz"), str(tree / "b/1.py")])
    formats = [(file.format, file.compression) for file in files]
    assert formats == [("text", ""), ("jsonl", ""), ("jsonl", "gz"), ("text", "")]
    assert find_inputs([str(tree / "b/1.py")], format="jsonl")[0].format == "jsonl"


def test_the_size_limit_takes_whole_files_in_order(tree: Path) -> None:
    assert names(tree, "", max_bytes=500) == ["a/notes.txt", "a/x.jsonl"]
    assert names(tree, "b/big.json.gz", max_bytes=1) == ["b/big.json.gz"], "never nothing at all"


def test_input_without_files_is_refused_by_name(tree: Path) -> None:
    for inputs, suffixes, error, message in (
        ([tree / "gone.jsonl"], (), FileNotFoundError, r"gone\.jsonl"),
        ([tree / "*.csv"], (), ConfigError, r"no file matches .*\*\.csv"),
        ([tree], [".rs"], ConfigError, r"has no files with \.rs"),
        ([], (), DataError, "--input"),
        ([""], (), ConfigError, "an input is '' .an empty variable"),
    ):
        with pytest.raises(error, match=message):
            find_inputs([str(name) for name in inputs], suffixes=suffixes)


def test_unsupported_compression_is_refused(tree: Path) -> None:
    for name in ("x.jsonl.bz2", "x.parquet.gz", "x.zip"):
        (tree / name).write_bytes(b"")
        messages = rf"{name}: only \.gz and \.zst are supported"
        with pytest.raises(ConfigError, match=messages):
            find_inputs([str(tree / name)])


def notes(*inputs: object, **options: Any) -> tuple[list[str], list[str]]:
    """Return the paths of the inputs, and the notes."""
    messages: list[str] = []
    files = find_inputs([str(name) for name in inputs], note=messages.append, **options)
    return [file.path for file in files], messages


def test_file_of_many_names_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, x.jsonl and ./x.jsonl were two files."""
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("{}\n")
    Path("folder").mkdir()
    Path("folder/y.jsonl").write_text("{}\n")
    Path("linked.jsonl").symlink_to("x.jsonl")
    Path("hard.jsonl").hardlink_to("x.jsonl")
    for again in ("x.jsonl", "./x.jsonl", str(tmp_path / "x.jsonl"), "linked.jsonl", "hard.jsonl"):
        messages = f"named several times, but read once: 1 file (first: {again} is x.jsonl)"
        assert notes("x.jsonl", again) == (["x.jsonl"], [messages])
    paths, messages = notes("folder", ".", "folder")
    assert paths == ["folder/y.jsonl", "hard.jsonl"], "one of the three names of x.jsonl"
    text = "named several times, but read once: 4 files (first: linked.jsonl is hard.jsonl)"
    assert messages == [text]


def test_copies_of_a_file_are_two_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert notes(tmp_path) == ([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], [])


def test_linked_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    """A corpus is often a folder of links to disks; they were skipped silently."""
    disk, corpus = tmp_path / "disk", tmp_path / "corpus"
    (disk / "part").mkdir(parents=True)
    (disk / "part" / "x.jsonl").write_text("{}\n")
    corpus.mkdir()
    (corpus / "a").symlink_to(disk)
    (disk / "part" / "back").symlink_to(corpus)
    (disk / "up").symlink_to(disk)
    paths, messages = notes(corpus)
    assert paths == [str(corpus / "a" / "part" / "x.jsonl")]
    assert messages == [f"links to folders that are read already: 2 folders (first: {corpus}/a/up)"]


def test_other_files_of_a_folder_are_counted_by_suffix(tmp_path: Path) -> None:
    (tmp_path / "only.json").write_text("{}\n" * 9999)  # most of the bytes
    for i in range(751):
        (tmp_path / f"{i}.rst").write_text("text")
    for name in ("a.tar.gz", "LICENSE", ".hidden"):
        (tmp_path / name).write_text("text")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "empty.jsonl").write_text("")
    paths, messages = notes(tmp_path)
    assert [Path(path).name for path in paths] == ["empty.jsonl", "only.json"]
    assert messages == [
        f"broken links or special files, left out: 1 file (first: {tmp_path}/gone.txt)",
        f"hidden, left out: 1 name (first: {tmp_path}/.hidden)",
        f"empty: 1 file (first: {tmp_path}/empty.jsonl)",
        "not taken from folders: 753 files (.rst 751, no suffix 1, .tar.gz 1); "
        "choose with --suffix",
    ]
    _, messages = notes(tmp_path, suffixes=[".rst"])
    assert messages[-1] == "one document each: 751 files (.rst 751)"
    with pytest.raises(ConfigError, match=r"no files with \.rs; it has 756 files \(\.rst 751, "):
        find_inputs([str(tmp_path)], suffixes=[".rs"])


def test_folders_that_match_a_pattern_are_reported(tree: Path) -> None:
    (tree / "x.txt").write_text("text")
    paths, messages = notes(f"{tree}/*")
    assert paths == [str(tree / "x.txt")]
    assert "matched by a pattern without ** and not read: 2 folders" in messages[0]
    with pytest.raises(ConfigError, match=r"\[ab\]', only 2 folders; name them"):
        find_inputs([f"{tree}/[ab]"])


def test_unreadable_folder_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError, match=r"/b"):
        find_inputs([str(tree)])


def test_pipe_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match=r"x\.jsonl is not a regular file"):
        find_inputs([str(tmp_path / "x.jsonl")])


JSON_LINES = b'{"text": "a"}\n{"text": "b"}\n'
LOOKS: list[tuple[str, bytes, str | None]] = [
    ("part-00000", JSON_LINES, "jsonl"),
    ("part-00000", b'{"text": "the only line"}', "jsonl"),
    ("part-00000", b'{"text": "' + b"x" * 100_000 + b'"}\n', "jsonl"),
    ("part-00000.gz", gzip.compress(JSON_LINES), "jsonl"),
    ("part-00000", b"PAR1 and so on", "parquet"),
    ("data.jl", JSON_LINES, "jsonl"),
    ("README", b"{curly} words\n{and} more\n", None),
    ("notebook.ipynb", b'{"cells": []}\n', None),
    ("pretty.map", b'{\n "version": 3\n}\n', None),
    ("messages.txt", JSON_LINES, None),
]


@pytest.mark.parametrize(("name", "data", "looks"), LOOKS, ids=range(len(LOOKS)))
def test_file_without_suffix(tmp_path: Path, name: str, data: bytes, looks: str | None) -> None:
    """Spark writes part-00000; the first of them is often empty."""
    empty = tmp_path / f"a{Path(name).suffix}"
    empty.write_bytes(b"")
    path = tmp_path / name
    path.write_bytes(data)
    inputs = [str(empty), str(path)]
    if looks is None:
        assert [file.format for file in find_inputs(inputs)] == ["text", "text"]
        return
    with pytest.raises(ConfigError, match=rf"{name} would be one document.* --format {looks}"):
        find_inputs(inputs)
    assert find_inputs(inputs, format="text")[1].format == "text"
    assert find_inputs(inputs, format="jsonl")[1].format == "jsonl"


@pytest.mark.parametrize("name", ["rows.csv", "it's rows.tsv", "rows.csv.gz"])
def test_csv_is_refused_with_a_conversion_command(tmp_path: Path, name: str) -> None:
    """They became one document each."""
    rows = [["text", "id"], ["two\nlines, and a comma\tand a tab", "1"], ["second", "2"]]
    path = tmp_path / name
    with (gzip.open if name.endswith("gz") else Path.open)(path, "wt", newline="") as file:
        csv.writer(file, delimiter="\t" if "tsv" in name else ",").writerows(rows)
    messages = r"would be one document .* with all rows"
    with pytest.raises(ConfigError, match=messages) as refused:
        find_inputs([str(path)])
    command = str(refused.value).partition("convert it: ")[2].replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], check=True)
    texts = pq.read_table(f"{path}.parquet").column("text").to_pylist()
    assert texts == [row[0] for row in rows[1:]]
    assert find_inputs([str(path)], format="text")[0].format == "text"
    (tmp_path / "notes.txt").write_text("words")
    assert sorted(names(tmp_path, "")) == sorted(["notes.txt", f"{name}.parquet"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a directory as ``datasets`` saves it."""
    datasets = peer("datasets")
    datasets.disable_progress_bars()
    texts = {"text": [f"text {i}" for i in range(40)]}
    train, test = datasets.Dataset.from_dict(texts), datasets.Dataset.from_dict({"text": ["last"]})
    train.save_to_disk(tmp_path / "saved", num_shards=12)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"train": train}).save_to_disk(tmp_path / "one_split")
    return tmp_path


def test_saved_dataset_keeps_its_order(saved: Path) -> None:
    files = names(saved, "saved")
    assert files == [f"saved/data-{i:05d}-of-00012.arrow" for i in range(12)]
    assert names(saved, "one_split") == ["one_split/train/data-00000-of-00001.arrow"]
    assert names(saved, "splits/test") == ["splits/test/data-00000-of-00001.arrow"]
    with pytest.raises(ConfigError, match=r"splits train, test: .* example .*/splits/train$"):
        names(saved, "splits")
    state = saved / "saved" / "state.json"
    facts = json.loads(state.read_text())
    facts["_data_files"].reverse()
    state.write_text(json.dumps(facts))
    (saved / "saved" / "cache-1234.arrow").write_bytes(b"of a map that was not saved")
    assert names(saved, "saved") == files[::-1]
    state.rename(saved / "state.json")  # without it, the directory looks like a cache
    assert names(saved, "saved") == ["saved/cache-1234.arrow", *files]
    (saved / "state.json").rename(state)
    (saved / files[0]).unlink()
    with pytest.raises(ConfigError, match=r"data-00000-of-00012\.arrow is missing"):
        names(saved, "saved")


def test_name_that_is_not_utf_8_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "a\udcff").mkdir()
    (tmp_path / "a\udcff" / "x.jsonl").write_text("{}\n")
    for name in (tmp_path, tmp_path / "a\udcff" / "x.jsonl", tmp_path / "*" / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"a\\xff/x\.jsonl is not UTF-8, .*: rename it"):
            find_inputs([str(name)])

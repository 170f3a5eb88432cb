"""Files that megapack did not create are never written, truncated or removed under any name."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megapack.cli.main import main
from megapack.errors import ConfigError
from megapack.storage import IndexedDatasetBuilder
from megapack.storage.locks import WriterLock


def plant_file(path: Path) -> None:
    path.write_text("[[package]]\n")


def plant_empty_file(path: Path) -> None:
    path.touch(0o640)


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent / "home" / "thesis.txt")


def plant_broken_link(path: Path) -> None:
    path.symlink_to(path.parent / "home" / "nothing")


def plant_hard_link(path: Path) -> None:
    path.hardlink_to(path.parent / "home" / "thesis.txt")


def plant_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    for name in ("notes.txt", "sub/plan.json", "000000.samples"):
        (path / name).write_text("{}")


def plant_empty_folder(path: Path) -> None:
    path.mkdir()


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    try:
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


KINDS = [plant_file, plant_empty_file, plant_link, plant_broken_link, plant_hard_link]
KINDS += [plant_folder, plant_empty_folder, plant_fifo, plant_socket]
TEMPORARY = [".tmp-01234567", ".tmp-0f3a9c1e", ".tmp-zzzzzzzz", ".tmp"]
ENDS = ["", ".bin", ".idx", ".meta.json", ".manifest.json", ".samples", ".json", ".checksums"]
TEMPORARIES = [end + more for end in ENDS for more in TEMPORARY]
NAMES = [".lock", ".build", ".build.lock", ".samples.lock", ".lock.lock", ".partial", *TEMPORARIES]
STEMS = ("out", "good")
TOKENIZE = "tokenize --input {root}/text.jsonl --tokenizer bytes --output-prefix {root}/out"
COMMANDS = {
    "tokenize": TOKENIZE,
    "tokenize --overwrite": f"{TOKENIZE} --overwrite",
    "pack": "pack {root}/good --buckets 64 --output {root}/out.samples",
    "import": "import {root}/good --output-prefix {root}/out --link copy",
    "merge": "merge {root}/good {root}/good --output-prefix {root}/out",
    "repair": "repair {root}/good",
    "export": "export {root}/good.samples --format bridge --output {root}/out.parquet",
}


def state(root: Path) -> dict[str, object]:
    """Return what may not change: kind and mode, inode, links, time, content or link target."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: object = path.readlink() if path.is_symlink() else None
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        time = None if path == root or path.is_dir() else status.st_mtime_ns
        facts = status.st_mode, status.st_ino, status.st_nlink, time, content
        found[str(path.relative_to(root))] = facts
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    (root / "home").mkdir()
    (root / "home" / "thesis.txt").write_text("years of work")
    (root / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(9))
    )
    with IndexedDatasetBuilder(root / "good", np.uint16) as builder:
        builder.add_documents(np.arange(200), [0, 50, 120, 200])
    assert main(["pack", str(root / "good"), "--buckets", "64"]) == 0
    return root


@pytest.mark.parametrize("rotation", [0, 4])
@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_files_at_derived_names_survive(
    inputs: Path, tmp_path: Path, command: str, rotation: int
) -> None:
    """With foreign temporary files the command works; with a foreign lock it says what to do."""
    for names, statuses in ((TEMPORARIES, {0}), (NAMES, {0, 1, 2})):
        root = tmp_path / str(len(names))
        shutil.copytree(inputs, root)
        for i, path in enumerate(root / f"{stem}{name}" for stem in STEMS for name in names):
            if not os.path.lexists(path):
                KINDS[(i + rotation) % len(KINDS)](path)
        before = state(root)
        assert main(COMMANDS[command].format(root=root).split(" ")) in statuses
        after = state(root)
        assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("plant", KINDS)
def test_a_foreign_lock_is_refused_and_survives(
    inputs: Path, tmp_path: Path, plant: Callable[[Path], None], shared: bool
) -> None:
    root = tmp_path / "root"
    shutil.copytree(inputs, root)
    plant(root / "out.lock")
    before = state(root)
    with pytest.raises(
        ConfigError, match=r"out\.lock is not a lock file of megapack.*: move the file, or"
    ):
        WriterLock(root / "out", what="a test", shared=shared)
    assert state(root) == before


@pytest.mark.parametrize("plant", [plant_file, plant_link, plant_folder, plant_empty_folder])
def test_a_foreign_build_folder_is_refused_and_survives(
    inputs: Path, tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    shutil.copytree(inputs, root)
    plant(root / "out.build")
    before = state(root)
    for command in ("tokenize", "tokenize --overwrite"):
        assert main(COMMANDS[command].format(root=root).split(" ")) == 2
        assert state(root) == before

"""What stands under a name before a file is written: kept, replaced or refused, by one rule."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megapack.errors import ConfigError
from megapack.storage.files import (
    TEMPORARY_BYTES,
    AtomicFile,
    atomic_write,
    check_target,
    target_of,
)


def test_the_same_is_left_alone_another_needs_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert check_target(path, overwrite=False, difference="never asked")
    path.write_text("x")
    assert not check_target(path, overwrite=False, difference=None)
    assert not check_target(path, overwrite=True, difference=None)
    assert not check_target(path, overwrite=False, difference=lambda: None)
    with pytest.raises(ConfigError, match=r"file is there already: its seed is 1, not 2.*--overwr"):
        check_target(path, overwrite=False, difference="its seed is 1, not 2")
    assert check_target(path, overwrite=True, difference=lambda: "its seed is 1, not 2")


def test_a_difference_is_computed_only_when_a_file_is_there(tmp_path: Path) -> None:
    def read() -> str:
        raise AssertionError("there is nothing to read")

    assert check_target(tmp_path / "file", overwrite=False, difference=read)


def test_a_link_stays_and_the_file_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    link.symlink_to("far/real")  # leads nowhere yet
    for text in ("first", "second"):
        with atomic_write(link, "w") as file:
            file.write(text)
        assert link.is_symlink() and real.read_text() == text and not real.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "link"]
    assert [path.name for path in real.parent.iterdir()] == ["real"]


def special_files(directory: Path) -> dict[str, Path]:
    (directory / "directory").mkdir()
    os.mkfifo(directory / "fifo")
    (directory / "circle").symlink_to("circle")
    (directory / "device").symlink_to("/dev/full")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "socket"))
    names = {"circle": "link that leads in a circle", "device": "device", "fifo": "FIFO"}
    names |= {"socket": "socket", "directory": "directory"}
    return {kind: directory / name for name, kind in names.items()}


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    """As root, a rename over /dev/full would replace the device for everybody."""
    for kind, path in special_files(tmp_path).items():
        before = path.lstat()
        for attempt in (
            lambda path=path: check_target(path, overwrite=True, difference="another"),
            lambda path=path: target_of(path),
            lambda path=path: AtomicFile(path),
            lambda path=path: atomic_write(path).__enter__(),
        ):
            with pytest.raises(ConfigError, match=f"{path.name} is a {kind}; only regular files"):
                attempt()
        assert os.path.samestat(before, path.lstat())
    assert len(list(tmp_path.iterdir())) == 5


def test_names_too_long_for_temporary_ones_are_refused(
    tmp_path: Path,
) -> None:
    limit = os.pathconf(tmp_path, "PC_NAME_MAX") - TEMPORARY_BYTES
    fits = tmp_path / ("n" * limit)
    with atomic_write(fits, "w") as file:
        file.write("fits")
    assert fits.read_text() == "fits"
    for name in ("n" * (limit + 1), "\u00e4" * (limit // 2 + 1), "n" * 300):
        with pytest.raises(ConfigError, match=rf"has \d+ bytes; at most {limit} leave room"):
            check_target(tmp_path / name, overwrite=True, difference=None)
        with pytest.raises(ConfigError, match="choose a shorter one"):
            AtomicFile(tmp_path / name)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path}/no; create it"):
        check_target(tmp_path / "no" / "file", overwrite=False, difference=None)

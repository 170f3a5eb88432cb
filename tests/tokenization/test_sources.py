"""What the user names becomes one list of files, in one order."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapack.errors import ConfigError, DataError
from megapack.tokenization.sources import find_inputs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/2.py", "b/1.py", "a/x.jsonl", "a/notes.txt", ".git/config.py", "b/.hidden.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "b" / "big.json.gz").write_bytes(b"x" * 1000)
    return tmp_path


def names(root: Path, *inputs: str, **options: object) -> list[str]:
    found = find_inputs([str(root / name) for name in inputs], **options)  # type: ignore[arg-type]
    return [str(Path(file.path).relative_to(root)) for file in found]


def test_a_directory_gives_known_data_files_sorted_and_nothing_hidden(tree: Path) -> None:
    assert names(tree, "") == ["a/notes.txt", "a/x.jsonl", "b/big.json.gz"]


def test_suffixes_and_patterns_choose_from_directories(tree: Path) -> None:
    assert names(tree, "", suffixes=[".py"]) == ["b/1.py", "b/2.py"]
    assert names(tree, "", suffixes=["1.*", "x*"]) == ["a/x.jsonl", "b/1.py"]


def test_inputs_keep_the_order_in_which_they_are_named_and_count_once(tree: Path) -> None:
    assert names(tree, "b/2.py", "b/*.py", "a/x.jsonl") == ["b/2.py", "b/1.py", "a/x.jsonl"]
    assert names(tree, "**/*.py") == ["b/1.py", "b/2.py"]


def test_the_format_follows_the_suffix_unless_it_is_said(tree: Path) -> None:
    found = find_inputs([str(tree / "a"), str(tree / "b" / "big.json.gz"), str(tree / "b/1.py")])
    assert [file.format for file in found] == ["text", "jsonl", "jsonl.gz", "text"]
    assert find_inputs([str(tree / "b/1.py")], format="jsonl")[0].format == "jsonl"


def test_the_size_limit_takes_whole_files_in_order(tree: Path) -> None:
    assert names(tree, "", max_bytes=500) == ["a/notes.txt", "a/x.jsonl"]
    assert names(tree, "b/big.json.gz", max_bytes=1) == ["b/big.json.gz"], "never nothing at all"


def test_inputs_that_give_nothing_are_errors_that_name_them(tree: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        find_inputs([str(tree / "gone.jsonl")])
    with pytest.raises(ConfigError, match=r"no file matches .*\*\.csv"):
        find_inputs([str(tree / "*.csv")])
    with pytest.raises(ConfigError, match=r"holds no files with \.rs"):
        find_inputs([str(tree)], suffixes=[".rs"])
    with pytest.raises(DataError, match="--input"):
        find_inputs([])


def test_a_compressed_format_that_is_not_read_is_refused(tree: Path) -> None:
    path = tree / "corpus.tar.gz"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"corpus\.tar\.gz: only \.jsonl\.gz"):
        find_inputs([str(path)])

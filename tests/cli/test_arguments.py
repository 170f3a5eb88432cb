"""The shared options, one by one: what is accepted, what it becomes, what is refused."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import pytest

from megapack.cli import arguments


def _parser(*adders: Callable[[argparse.ArgumentParser], object]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megapack-build some")
    for add in adders:
        add(parser)
    return parser


@pytest.fixture
def reader_of_many() -> argparse.ArgumentParser:
    return _parser(
        lambda parser: arguments.add_dataset_argument(parser, many=True),
        lambda parser: arguments.add_shared(parser, "--overwrite"),
    )


@pytest.fixture
def reader_of_one() -> argparse.ArgumentParser:
    return _parser(
        lambda parser: arguments.add_dataset_argument(parser, many=False),
        lambda parser: arguments.add_shared(parser, "--overwrite"),
    )


@pytest.mark.parametrize(
    "words",
    [
        ["a", "b"],
        ["--data-prefix", "a", "b"],
        ["--overwrite", "a", "b"],
        ["a", "b", "--overwrite"],
        ["--data-prefix", "a", "b", "--overwrite"],
        ["--overwrite", "--data-prefix", "a", "b"],
    ],
    ids=" ".join,
)
def test_datasets_need_no_option(reader_of_many: argparse.ArgumentParser, words: list[str]) -> None:
    assert reader_of_many.parse_args(words).prefixes == ["a", "b"]


@pytest.mark.parametrize(
    "words", [["a"], ["--data-prefix", "a"], ["--overwrite", "a"], ["a.idx", "--overwrite"]]
)
def test_one_dataset_needs_no_option(
    reader_of_one: argparse.ArgumentParser, words: list[str]
) -> None:
    assert reader_of_one.parse_args(words).prefix == "a"


@pytest.mark.parametrize("reader", ["reader_of_one", "reader_of_many"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments PREFIX --data-prefix is required"),
        (["a", "--data-prefix", "b"], "not allowed with"),
    ],
)
def test_no_dataset_and_two_ways_at_once_are_refused(
    reader: str,
    words: list[str],
    message: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as leaving:
        request.getfixturevalue(reader).parse_args(words)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_another_way_to_name_the_same_thing_joins_the_group() -> None:
    """As --lengths of compare."""
    parser = argparse.ArgumentParser()
    arguments.add_dataset_argument(parser, many=False).add_argument("--lengths")
    args = parser.parse_args(["--lengths", "l.npy"])
    assert args.lengths == "l.npy"
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "--lengths", "l.npy"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("64M", 64 << 20), ("1.5G", 3 << 29), ("2kib", 2048), (" 1T ", 1 << 40)],
)
def test_sizes_are_read_as_people_write_them(text: str, value: int) -> None:
    assert arguments.byte_count(text) == value


def test_capacities_are_sorted() -> None:
    assert arguments.capacities("4096,1024") == [1024, 4096]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((arguments.byte_count, text) for text in ("", "-1", "M", "1X", "1e6")),
        *((arguments.capacities, text) for text in ("", "0", "1024,", "-5", "1k", "1.5")),
        *((arguments.positive, text) for text in ("0", "-1", "1.5", "")),
    ],
)
def test_wrong_value_is_named_with_right_ones(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        parse(text)


def test_a_token_is_a_name_or_an_id() -> None:
    parser = _parser(lambda parser: arguments.add_shared(parser, "--eod-token"))
    assert parser.parse_args(["--eod-token", "50256"]).eod_token == 50256
    assert parser.parse_args(["--eod-token", "<|endoftext|>"]).eod_token == "<|endoftext|>"
    assert parser.parse_args([]).eod_token is None


def test_threads_and_workers_are_all_cores_that_may_be_used() -> None:
    parser = _parser(lambda parser: arguments.add_shared(parser, "--threads", "--workers"))
    args = parser.parse_args([])
    assert args.threads == args.workers == len(os.sched_getaffinity(0))

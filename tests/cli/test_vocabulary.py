"""One vocabulary for all commands: an option means the same in each of them."""

from __future__ import annotations

import argparse
import importlib
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from peers import peer

from megapack.cli import arguments
from megapack.cli.main import COMMANDS, build_parser

ALL = sorted(COMMANDS)
READ_DATASETS = {"pack", "compare", "merge", "verify", "repair", "inspect", "upload"}
EDIT = {"column"}
READ_RUNS = {"trace", "audit", "report", "simulate", "proxy", "mixtures"}
WRITE = {"tokenize", "train-tokenizer", "pack", "arrange", "compare", "merge", "import", "export"}
# Spellings that another option has replaced.
GIVEN_UP = ("--document-end-token", "--force", "--output-file", "--num-workers", "--num-threads")
SHARED = {
    *("--overwrite", "--dry-run", "--json", "--threads", "--workers", "--seed", "--output-prefix"),
    *("--output", "--tokenizer", "--eod-token", "--vocab-size", "--dtype", "--set"),
    *(
        "--alignment",
        "--fim-room",
        "--groups",
        "--second",
        "--second-capacity",
        "--column",
        "--document",
        "--no-tokens",
    ),
}


def _actions(command: str) -> list[argparse.Action]:
    return build_parser(command)._actions


def _stem(action: argparse.Action) -> str:
    """Return the shared help text, which ends at the first semicolon."""
    return str(action.help).partition(";")[0].partition(" (default")[0]


def _meaning(action: argparse.Action) -> tuple[object, ...]:
    return (type(action), action.type, action.nargs, action.metavar, _stem(action))


def test_every_command_reads_datasets_or_runs_or_writes() -> None:
    assert set(COMMANDS) == READ_DATASETS | WRITE | READ_RUNS | EDIT


def test_no_option_has_two_meanings() -> None:
    meanings: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    shared = argparse.ArgumentParser()
    arguments.add_shared(shared, *SHARED)
    for action in [*shared._actions, *(action for name in ALL for action in _actions(name))]:
        for option in action.option_strings:
            meanings[option].add(_meaning(action))
    differing = {option: found for option, found in meanings.items() if len(found) > 1}
    # --data-prefix takes one dataset or several; --input DIR of merge is Megatron's spelling;
    # --format is the format of the input, and in export that of the output.
    assert set(differing) <= {"--data-prefix", "--input", "--format"}, differing


@pytest.mark.parametrize("command", sorted(READ_DATASETS))
def test_a_dataset_is_read_by_position_or_by_data_prefix(command: str) -> None:
    actions = _actions(command)
    position = next(a for a in actions if not a.option_strings)
    (option,) = (a for a in actions if "--data-prefix" in a.option_strings)
    assert position.dest == option.dest
    assert str(position.metavar).startswith("PREFIX") and option.metavar == "PREFIX"


@pytest.mark.parametrize("command", sorted(WRITE))
def test_a_command_that_writes_can_overwrite(command: str) -> None:
    assert any("--overwrite" in action.option_strings for action in _actions(command))


@pytest.mark.parametrize("command", ALL)
def test_replaced_spellings_are_gone(command: str) -> None:
    options = {option for action in _actions(command) for option in action.option_strings}
    assert not options & set(GIVEN_UP)
    assert set(arguments.SHARED) == SHARED
    assert "--output-prefix" not in options or "--output" not in options


@pytest.mark.parametrize("command", ALL)
def test_every_option_says_what_it_does(command: str) -> None:
    mute = [a.dest for a in _actions(command) if not a.help and a.help is not argparse.SUPPRESS]
    assert not mute


PACKAGES = ("storage", "packing", "planning", "compare", "data", "attention", "probe")


def test_vocabulary_lists_every_public_name_once() -> None:
    peer("torch")  # which megapack.attention needs
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    page = text.partition("## Words")[2].partition("\n## ")[0]
    rows = [row.rpartition(" | ")[2] for row in page.splitlines() if row.startswith("| ")]
    told = Counter(name for row in rows for name in re.findall(r"`(\w+)`", row))
    modules = [importlib.import_module(f"megapack.{package}") for package in PACKAGES]
    public = {name for module in modules for name in module.__all__}
    assert len(public) > 60
    assert set(told) == public, set(told) ^ public
    assert told.most_common(1)[0][1] == 1, told.most_common(3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["proxy", "run.yaml", "s3://b/x", "--scale", "1/4"], "the address of an object store"),
        (["mixtures", "r.yaml", "gs://b/x", "--scale", "1/4"], "the address of an object store"),
        (
            ["mixtures", "r.yaml", "x", "--scale", "1/4", "--launch", "'x"],
            "not a command of a shell",
        ),
        (["mixtures", "r.yaml", "x", "--scale", "1/4", "--launch", ""], "the command is empty"),
        (
            ["mixtures", "r.yaml", "x", "--scale", "1/4", "--part", "5/3"],
            "of 8 parts the first is 0/8",
        ),
        (["pack", "--buckets", "8", "--second-capacity", "4.5"], "write 8, or 4,8,16"),
    ],
)
def test_values_that_an_option_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser(words[0]).parse_args(words[1:])
    assert message in capsys.readouterr().err

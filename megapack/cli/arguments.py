"""The vocabulary of all commands: one option, one meaning, one help text.

A command declares a shared option through ``add_shared`` and nowhere else;
tests/cli/test_vocabulary.py walks all parsers and holds that. Help of a command's own is added
after the shared text, never instead of it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from megapack.errors import ConfigError
from megapack.storage.index_file import prefix_of
from megapack.units import parse_size

T = TypeVar("T")
# A parser or one of its groups.
Arguments = argparse._ActionsContainer


def usable_cores() -> int:
    """Cores that this process may run on; a container or `taskset` can leave fewer than exist."""
    return len(os.sched_getaffinity(0))


# ---- what a value looks like -----------------------------------------------------------------


def _told(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Converts with our own error text; argparse alone would print only the type."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except ConfigError as error:
            _refuse(str(error))

    return converted


byte_count = _told(parse_size)  # 64M -> 67108864
dataset_prefix = _told(prefix_of)  # argparse would print what it refuses, passwords included


def capacities(text: str) -> list[int]:
    """``2048,1024`` -> [1024, 2048], in tokens."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        _refuse(f"{text!r} is not a list of capacities; write 1024,2048,4096 (tokens, 1 or more)")
    return sorted(map(int, numbers))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        _refuse(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """``0.02`` or ``2/100`` -> 0.02; above 0 and at most 1."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number <= 1:
        _refuse(f"{text!r} is not a share above 0 and at most 1; write 0.02 or 2/100")
    return float(number)


def part_of(text: str) -> tuple[int, int]:
    """``0/8`` -> (0, 8)."""
    i, slash, n = text.partition("/")
    if not slash or not i.isdecimal() or not n.isdecimal() or int(n) == 0:
        _refuse(f"{text!r} is not of the form I/N, as in 0/8")
    return int(i), int(n)


def token_argument(text: str) -> str | int:
    """``50256`` -> the id 50256; everything else is a token's name."""
    return int(text) if text.isascii() and text.isdecimal() else text


def _refuse(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)


# ---- options that several commands have --------------------------------------------------------

_ALL_CORES = "the result is the same for any number (default: all usable cores)"

SHARED: dict[str, dict[str, Any]] = {
    "--output-prefix": {
        "required": True,
        "metavar": "PREFIX",
        "help": "dataset to write: PREFIX.bin/.idx and what belongs to it",
    },
    "--output": {"metavar": "FILE", "help": "file to write"},
    "--overwrite": {
        "action": "store_true",
        "help": "replace what is there with other content; without it that is an error",
    },
    "--dry-run": {"action": "store_true", "help": "say what would be done, and write nothing"},
    "--json": {"action": "store_true", "help": "print the result as JSON on stdout"},
    "--threads": {
        "type": positive,
        "default": usable_cores(),
        "metavar": "N",
        "help": f"threads; {_ALL_CORES}",
    },
    "--workers": {
        "type": positive,
        "default": usable_cores(),
        "metavar": "N",
        "help": f"processes; {_ALL_CORES}",
    },
    "--seed": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "of every random choice (default: 0)",
    },
    "--groups": {
        "metavar": "FILE.npy",
        "help": "pack documents of one group as if they were one: a .npy of an id per document "
        "(negative: on its own), or auto, PREFIX.groups of `tokenize --group-key`",
    },
    "--alignment": {
        "type": positive,
        "default": 1,
        "metavar": "M",
        "help": "leave room for segments that begin at multiples of M, which is 2 x context "
        "parallel size (default: 1, no room)",
    },
    "--fim-room": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "leave room for every whole document to grow by N tokens: the sentinels of "
        "fill-in-the-middle, 3 or 4, and what cuts between characters add (default: 0)",
    },
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "override a field of the YAML, as in --set data.order=uniform; may be repeated",
    },
    "--tokenizer": {
        "metavar": "T",
        "help": "a .model, a tokenizer.json, a directory (also of vocab.json, merges.txt), or "
        "bytes",
    },
    "--vocab-size": {"type": positive, "metavar": "N", "help": "number of token ids"},
    "--dtype": {"metavar": "TYPE", "help": "type of the tokens on disk, as int32"},
    "--eod-token": {
        "type": token_argument,
        "metavar": "T",
        "help": "token that ends documents: its name, or its id in decimal",
    },
}


def add_shared(parser: Arguments, *names: str, help: str = "", **changes: Any) -> None:
    """Declare shared options; ``help`` is added to theirs, ``changes`` are argparse's."""
    for name in names:
        option = {**SHARED[name], **changes}
        option["help"] = f"{option['help']}; {help}" if help else option["help"]
        parser.add_argument(name, **option)


def add_dataset_argument(
    parser: Arguments, *, many: bool, help: str = ""
) -> argparse._MutuallyExclusiveGroup:
    """The datasets a command reads: positional, or behind --data-prefix; one of both is required.

    With ``many`` the result is ``args.prefixes``, a list as it was typed, for
    ``megapack.cli.datasets.dataset_prefixes`` (directories, .idx files); otherwise ``args.prefix``,
    one string. The group that is returned takes alternatives, as --lengths of compare.
    """
    group = parser.add_mutually_exclusive_group(required=True)
    more = f"; {help}" if help else ""
    # SUPPRESS: the positional, where it is absent, must not overwrite what the option gave.
    how: dict[str, Any] = {"metavar": "PREFIX", "default": argparse.SUPPRESS}
    if many:
        text = f"datasets PREFIX.bin/.idx; also .idx files, or directories of them{more}"
        group.add_argument("prefixes", nargs="*", help=text, **how)
        group.add_argument(
            "--data-prefix", nargs="+", dest="prefixes", metavar="PREFIX", help="the same"
        )
    else:
        text = f"dataset PREFIX.bin/.idx{more}"
        group.add_argument("prefix", nargs="?", type=dataset_prefix, help=text, **how)
        group.add_argument(
            "--data-prefix", type=dataset_prefix, dest="prefix", metavar="PREFIX", help="the same"
        )
    return group


def token_id(token: str | int | None, tokenizer: str | None) -> int | None:
    """The id that --eod-token means where ids are compared: a name needs --tokenizer.

    Raises:
        ConfigError: no tokenizer knows the name.
    """
    if not isinstance(token, str):
        return token
    if tokenizer is None:
        raise ConfigError(f"--eod-token {token!r} is a name: add --tokenizer, or give its id")
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

    return TokenizerFiles.open(tokenizer).special_token("eod", token).id


def refuse_without(needed: str, **given: object) -> None:
    """Refuse options that say nothing without ``needed``, which is not there.

    Raises:
        ConfigError: names the first one that is given (neither None nor False).
    """
    for name, value in given.items():
        if value is not None and value is not False:
            told = "" if value is True else f" {value}"
            raise ConfigError(f"--{name}{told} is for {needed}: give it, too")

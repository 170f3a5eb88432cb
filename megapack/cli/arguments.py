"""Options that several commands share: one spelling, one meaning, one help text each.

A command declares a shared option with ``add_shared`` and may add to its help, never replace it;
tests/cli/test_vocabulary.py checks the parsers of all commands.

    add_shared(parser, "--output", "--overwrite")
    byte_count("64M")  # -> 67108864; a wrong value ends the command with a message
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megapack.errors import ConfigError
from megapack.storage.address import is_remote
from megapack.storage.index_file import prefix_of
from megapack.units import parse_size

T = TypeVar("T")
# A parser or one of its groups.
Arguments = argparse._ActionsContainer


def usable_cores() -> int:
    """Return how many cores this process may use; containers and `taskset` can allow fewer."""
    return len(os.sched_getaffinity(0))


# ---- Conversion of values ------------------------------------------------------------------------


def _reporting(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a conversion so that argparse prints its message, not only the name of its type."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except ConfigError as error:
            _refuse(str(error))

    return converted


byte_count = _reporting(parse_size)  # 64M -> 67108864
dataset_prefix = _reporting(prefix_of)  # argparse would print a refused address with its password


def capacities(text: str) -> list[int]:
    """Convert ``2048,1024`` to [1024, 2048], in tokens."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        _refuse(f"{text!r} is not a list of capacities; write 1024,2048,4096 (tokens, 1 or more)")
    return sorted(map(int, numbers))


def limits(text: str) -> list[int]:
    """Convert ``4,8`` to [4, 8]."""
    if not all(limit.strip().isdecimal() for limit in text.split(",")):
        _refuse(f"{text!r} is not a limit; write 8, or 4,8,16 for three buckets")
    return [int(limit) for limit in text.split(",")]


def local_folder(text: str) -> Path:
    """Convert the path of a folder of this machine."""
    if is_remote(text):
        _refuse(f"{text!r} is the address of an object store; give a folder of this machine")
    if Path(text).exists() and not Path(text).is_dir():
        _refuse(f"{text!r} is a file; give the name of a folder")
    return Path(text)


def positive(text: str) -> int:
    """Convert a whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        _refuse(f"{text!r} is not a whole number of at least 1")
    return int(text)


def number(text: str) -> int | float:
    """Convert ``-1`` to an int, ``0.5`` to a float."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    _refuse(f"{text!r} is not a number; write -1 or 0.5")


def share(text: str) -> Fraction:
    """Convert ``0.02`` or ``1/50`` to 1/50; above 0 and at most 1."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number <= 1:
        _refuse(f"{text!r} is not a share above 0 and at most 1; write 0.02 or 1/50")
    return number


def part_of(text: str) -> tuple[int, int]:
    """Convert ``0/8`` to (0, 8)."""
    i, slash, n = text.partition("/")
    if not slash or not i.isdecimal() or not n.isdecimal() or int(i) >= int(n):
        _refuse(f"{text!r} is not of the form I/N with I below N; of 8 parts the first is 0/8")
    return int(i), int(n)


def token_argument(text: str) -> str | int:
    """Convert ``50256`` to an id; any other text is the name of a token."""
    return int(text) if text.isascii() and text.isdecimal() else text


def _refuse(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)


# ---- Options that several commands have ----------------------------------------------------------

_ALL_CORES = "the result does not depend on it (default: all usable cores)"

SHARED: dict[str, dict[str, Any]] = {
    "--output-prefix": {
        "required": True,
        "metavar": "PREFIX",
        "help": "dataset to write: PREFIX.bin, PREFIX.idx and the files that belong to them",
    },
    "--output": {"metavar": "FILE", "help": "file to write"},
    "--overwrite": {
        "action": "store_true",
        "help": "replace existing files of other content (default: an error)",
    },
    "--dry-run": {
        "action": "store_true",
        "help": "print what the command would do, and write nothing",
    },
    "--json": {"action": "store_true", "help": "print the result as JSON on stdout"},
    "--document": {
        "metavar": "SOURCE:D",
        "help": "show the steps that draw document D (counted from 0) of a source",
    },
    "--no-tokens": {"action": "store_true", "help": "do not read .bin: faster, with fewer checks"},
    "--threads": {
        "type": positive,
        "default": usable_cores(),
        "metavar": "N",
        "help": f"number of threads; {_ALL_CORES}",
    },
    "--workers": {
        "type": positive,
        "default": usable_cores(),
        "metavar": "N",
        "help": f"number of worker processes; {_ALL_CORES}",
    },
    "--seed": {"type": int, "default": 0, "metavar": "N", "help": "random seed (default: 0)"},
    "--groups": {
        "metavar": "FILE.npy",
        "help": "keep documents of one group together, as if they were one document: a .npy with "
        "an id per document (negative: in no group), or auto for PREFIX.groups of `tokenize "
        "--group-key`",
    },
    "--alignment": {
        "type": positive,
        "default": 1,
        "metavar": "M",
        "help": "leave room so that every segment can begin at a multiple of M tokens; M is twice "
        "the context parallel size (default: 1, no room)",
    },
    "--fim-room": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "leave room for N more tokens per whole document: fill-in-the-middle inserts 3 or "
        "4 sentinels, and more tokens where it cuts between characters (default: 0)",
    },
    "--second": {
        "metavar": "COLUMN",
        "help": "second size of each document (images, frames, bytes), which buckets limit, too: "
        "a column of integers, summed over each document, or a .npy with a number per document",
    },
    "--second-capacity": {
        "type": limits,
        "metavar": "N[,N...]",
        "help": "largest sum of second sizes in a sample: one number, or one per bucket",
    },
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "override a field of the YAML, as in --set data.order=uniform (repeatable)",
    },
    "--tokenizer": {
        "metavar": "T",
        "help": "tokenizer: a .model, a tokenizer.json, a directory with one of them or with "
        "vocab.json and merges.txt, or bytes",
    },
    "--vocab-size": {"type": positive, "metavar": "N", "help": "vocabulary size, in token ids"},
    "--dtype": {"metavar": "TYPE", "help": "type of the numbers on disk, as in int32"},
    "--column": {
        "action": "append",
        "default": [],
        "metavar": "NAME=SOURCE[:TYPE]",
        "help": "write a column PREFIX.NAME.col, a row per token (repeatable); TYPE as in float32, "
        "float16[8] or float16[8],target,fill=-1",
    },
    "--eod-token": {
        "type": token_argument,
        "metavar": "T",
        "help": "token that ends documents (EOD), by name or by decimal id",
    },
}


# Options of every packing strategy.
PACKING = (
    *("--groups", "--seed", "--threads", "--alignment", "--fim-room"),
    *("--second", "--second-capacity"),
)


def check_second_options(args: argparse.Namespace) -> None:
    """Raise ConfigError if only one of both options for second sizes is given."""
    if args.second is not None and args.second_capacity is None:
        raise ConfigError(
            f"--second {args.second} needs --second-capacity: the largest sum of these sizes in a "
            "sample"
        )
    if args.second is None and args.second_capacity is not None:
        limit = ",".join(map(str, args.second_capacity))
        raise ConfigError(
            f"--second-capacity {limit} needs --second: the size of each document, as a column or "
            "a .npy"
        )


def add_shared(parser: Arguments, *names: str, help: str = "", **changes: Any) -> None:
    """Declare shared options; append ``help`` to the help text, pass ``changes`` to argparse."""
    for name in names:
        option = {**SHARED[name], **changes}
        option["help"] = f"{option['help']}; {help}" if help else option["help"]
        parser.add_argument(name, **option)


def add_flags(parser: Arguments, **texts: str) -> None:
    """Declare options without a value: name -> help."""
    for name, text in texts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)


def add_dataset_argument(
    parser: Arguments, *, many: bool, help: str = ""
) -> argparse._MutuallyExclusiveGroup:
    """Declare the datasets that a command reads, positional or as --data-prefix; one is required.

    With ``many`` the values are ``args.prefixes``, as typed, for ``dataset_prefixes``; otherwise
    ``args.prefix``, one string. Returns the group, to which a command can add alternatives
    (--lengths).
    """
    group = parser.add_mutually_exclusive_group(required=True)
    text = "datasets PREFIX.bin/.idx; also .idx files, or directories that hold them"
    settings: dict[str, Any] = {"dest": "prefixes", "metavar": "PREFIX"}
    if not many:
        text = "dataset PREFIX.bin/.idx"
        settings |= {"dest": "prefix", "type": dataset_prefix}
    # SUPPRESS: an absent positional must not overwrite the value of the option.
    settings |= {"default": argparse.SUPPRESS, "help": f"{text}; {help}" if help else text}
    group.add_argument(nargs="*" if many else "?", **settings)
    settings |= {"default": None, "help": "same as PREFIX"}
    group.add_argument("--data-prefix", nargs="+" if many else None, **settings)
    return group


def token_id(token: str | int | None, tokenizer: str | None) -> int | None:
    """Return the id of --eod-token for a command that compares ids. Raises ConfigError if the token
    is a name, and --tokenizer is missing or does not know it."""
    if not isinstance(token, str):
        return token
    if tokenizer is None:
        raise ConfigError(f"--eod-token {token!r} is a name: add --tokenizer, or give its id")
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

    return TokenizerFiles.open(tokenizer).special_token("eod", token).id


def refuse_without(needed: str, **options: object) -> None:
    """Raise ConfigError for the first option that was given (neither None nor False): these options
    have no effect without ``needed``, which the caller found missing."""
    for name, value in options.items():
        if value is not None and value is not False:
            shown = "" if value is True else f" {value}"
            raise ConfigError(
                f"--{name}{shown} works only with {needed}: give that, or leave --{name} out"
            )

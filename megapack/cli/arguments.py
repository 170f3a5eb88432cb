"""The vocabulary of all commands: one option, one meaning, one help text.

A command declares a shared option through its function here and nowhere else;
tests/cli/test_vocabulary.py walks all parsers and holds that. Help of a command's own is added
after the shared text, never instead of it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from megapack.errors import ConfigError
from megapack.storage.mmididx import prefix_of

__all__ = [
    "add_dataset_argument",
    "add_dry_run",
    "add_dtype",
    "add_eod_token",
    "add_json",
    "add_output",
    "add_output_prefix",
    "add_overwrite",
    "add_seed",
    "add_threads",
    "add_tokenizer",
    "add_vocab_size",
    "add_workers",
    "byte_count",
    "capacities",
    "positive",
    "token_argument",
    "token_id",
    "usable_cores",
]

# A parser or one of its groups.
Arguments = argparse._ActionsContainer
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def usable_cores() -> int:
    """Cores that this process may run on; a container or `taskset` can leave fewer than exist."""
    return len(os.sched_getaffinity(0))


# ---- what a value looks like -----------------------------------------------------------------


def byte_count(text: str) -> int:
    """``64M`` -> 67108864; K, M, G and T are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None:
        _refuse(f"{text!r} is not a size; write 4096, 64M or 1.5G")
    return int(float(match[1]) * _UNITS[match[2]])


def capacities(text: str) -> list[int]:
    """``2048,1024`` -> [1024, 2048], in tokens."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        _refuse(f"{text!r} is not a list of capacities; write 1024,2048,4096 (tokens, 1 or more)")
    return sorted(map(int, parts))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        _refuse(f"{text!r} is not a whole number of at least 1")
    return int(text)


def token_argument(text: str) -> str | int:
    """``50256`` -> the id 50256; everything else is a token's name."""
    return int(text) if text.isascii() and text.isdecimal() else text


def _and(shared: str, own: str) -> str:
    return f"{shared}; {own}" if own else shared


def _refuse(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)


# ---- what is read and written ----------------------------------------------------------------


def add_dataset_argument(
    parser: Arguments, *, many: bool, help: str = ""
) -> argparse._MutuallyExclusiveGroup:
    """The datasets a command reads: positional, or behind --data-prefix; one of both is required.

    With ``many`` the result is ``args.prefixes``, a list as it was typed, for
    ``megapack.cli.datasets.dataset_prefixes`` (directories, .idx files); otherwise ``args.prefix``,
    one string. The group that is returned takes alternatives, as --lengths of compare.
    """
    group = parser.add_mutually_exclusive_group(required=True)
    text = "datasets PREFIX.bin/.idx; also .idx files, or directories of them"
    if not many:
        text = "dataset PREFIX.bin/.idx"
    text = _and(text, help)
    # SUPPRESS: the positional, where it is absent, must not overwrite what the option gave.
    if many:
        group.add_argument(
            "prefixes", nargs="*", metavar="PREFIX", default=argparse.SUPPRESS, help=text
        )
        group.add_argument(
            "--data-prefix", nargs="+", dest="prefixes", metavar="PREFIX", help="the same"
        )
    else:
        group.add_argument(
            "prefix",
            nargs="?",
            type=prefix_of,
            metavar="PREFIX",
            default=argparse.SUPPRESS,
            help=text,
        )
        group.add_argument(
            "--data-prefix", type=prefix_of, dest="prefix", metavar="PREFIX", help="the same"
        )
    return group


def add_output_prefix(parser: Arguments, *, required: bool = True) -> None:
    """``args.output_prefix``."""
    parser.add_argument(
        "--output-prefix",
        required=required,
        metavar="PREFIX",
        help="dataset to write: PREFIX.bin/.idx and what belongs to it",
    )


def add_output(parser: Arguments, *, required: bool = False, help: str = "") -> None:
    """``args.output``, a file name or None."""
    text = "file to write"
    parser.add_argument(
        "--output",
        required=required,
        metavar="FILE",
        help=_and(text, help),
    )


def add_overwrite(parser: Arguments) -> None:
    """``args.overwrite``; every command that writes has it."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace what is there with other content; without it that is an error",
    )


def add_dry_run(parser: Arguments) -> None:
    """``args.dry_run``."""
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and write nothing"
    )


def add_json(parser: Arguments) -> None:
    """``args.json``: a switch; stdout is then one JSON value and nothing else."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


# ---- how it is done --------------------------------------------------------------------------


def add_threads(parser: Arguments) -> None:
    """``args.threads``, at least 1."""
    parser.add_argument(
        "--threads",
        type=positive,
        default=usable_cores(),
        metavar="N",
        help="threads; the result is the same for any number (default: all usable cores)",
    )


def add_workers(parser: Arguments) -> None:
    """``args.workers``, at least 1."""
    parser.add_argument(
        "--workers",
        type=positive,
        default=usable_cores(),
        metavar="N",
        help="processes; the result is the same for any number (default: all usable cores)",
    )


def add_seed(parser: Arguments) -> None:
    """``args.seed``."""
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of every random choice (default: 0)"
    )


def add_tokenizer(parser: Arguments, *, required: bool = False, help: str = "") -> None:
    """``args.tokenizer``, as megapack.tokenization.tokenizers.tokenizer opens it."""
    text = "a .model, a tokenizer.json, a directory (also of vocab.json, merges.txt), or bytes"
    parser.add_argument("--tokenizer", required=required, metavar="T", help=_and(text, help))


def add_vocab_size(parser: Arguments, *, default: int | None = None, help: str = "") -> None:
    """``args.vocab_size``, at least 1, or None."""
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=default,
        metavar="N",
        help=_and("number of token ids", help),
    )


def add_dtype(
    parser: Arguments,
    *,
    choices: Sequence[str] | None = None,
    default: str | None = None,
    help: str = "",
) -> None:
    """``args.dtype``, a name or None."""
    parser.add_argument(
        "--dtype",
        choices=choices,
        default=default,
        metavar="TYPE",
        help=_and("type of the tokens on disk, as int32", help),
    )


def add_eod_token(parser: Arguments, *, help: str = "") -> None:
    """``args.eod_token``: a name (str), an id (int) or None."""
    text = "token that ends documents: its name, or its id in decimal"
    parser.add_argument("--eod-token", type=token_argument, metavar="T", help=_and(text, help))


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

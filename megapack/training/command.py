"""What megapack-pretrain, megapack-evaluate and megapack-export have in common as commands."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable

from megapack.errors import MegapackError, exit_code

__all__ = ["add_overrides", "command_parser", "run_command"]


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that also takes what launchers add."""
    parser = argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Declare --set KEY=VALUE."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field, as in --set optimizer.lr=1e-4; may be repeated",
    )


def run_command(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The exit code of ``work(args)``; an error is printed."""
    faulthandler.enable()  # a mapped file that was truncated ends a process with SIGBUS
    try:
        return work(args)
    except (MegapackError, OSError) as error:
        print(f"megapack: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)

"""megapack-build: prepare data for training, and inspect data and runs.

Results go to stdout, progress and notes to stderr. Exit status:

    0    done
    1    an input or another file is wrong (the message names it), or verify found damage
    2    the command line or the configuration is wrong
    130  interrupted
    141  the reader of the output has exited, as in `| head`
"""

from __future__ import annotations

import importlib
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from megapack.calls import explained, nearest
from megapack.command_line import Parser, add_program_options
from megapack.errors import MegapackError, check_name, exit_code, printable_output, redacted

# command -> (module with add_arguments(parser) and run(args) -> exit status or None, help line);
# only the module of the chosen command is imported
COMMANDS = {
    "tokenize": ("megapack.cli.tokenize", "text -> dataset of token ids (.bin/.idx)"),
    "train-tokenizer": (
        "megapack.cli.train_tokenizer",
        "corpus -> BPE tokenizer (sentencepiece or tokenizer.json)",
    ),
    "pack": ("megapack.cli.pack", "document lengths -> samples in buckets (.samples)"),
    "arrange": ("megapack.cli.arrange", "copy a source with its tokens in the order of training"),
    "compare": ("megapack.cli.compare", "compare packing strategies on a dataset"),
    "simulate": ("megapack.cli.simulate", "simulate steps on a cluster: time, bubbles, idle ranks"),
    "proxy": ("megapack.cli.proxy", "scale a run down: the same program on fewer tokens"),
    "mixtures": ("megapack.cli.mixtures", "try mixtures on proxies, and propose weights"),
    "inspect": ("megapack.cli.inspect", "show the content of .idx and .samples files"),
    "trace": ("megapack.cli.trace", "show which documents a run trains on, and when"),
    "audit": ("megapack.cli.audit", "prove what a run was trained on, from its records"),
    "report": ("megapack.cli.report", "write an HTML page about a run: losses, decisions, speed"),
    "merge": ("megapack.cli.merge", "many datasets -> one"),
    "verify": ("megapack.cli.verify", "check datasets and .samples files for damage"),
    "column": ("megapack.cli.column", "add, list, remove, export data that belongs to tokens"),
    "repair": ("megapack.cli.repair", "repair a damaged .idx"),
    "upload": ("megapack.cli.upload", "copy datasets and their .samples to an object store"),
    "export": ("megapack.cli.export", "samples -> files for another trainer"),
    "import": ("megapack.cli.import_", "index token files of other tools"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    with printable_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(arguments: list[str]) -> int:
    """Run a command; turn a closed pipe or an interrupt into an exit status."""
    try:
        try:
            return _dispatch(arguments)
        finally:
            sys.stdout.flush()  # at exit the interpreter would print an error for a closed pipe
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _reader_left(stream)]
        if not closed:
            raise
        for stream in closed:  # discard buffered text
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141
    except KeyboardInterrupt:
        # Nothing remains to be cleaned up: a second interrupt ends the process at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("megapack-build: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name, *options = arguments
    if name in COMMANDS:
        return _run(name, options)
    if name.startswith("-"):
        program_parser(with_commands="--print-completion".startswith(name)).parse_args(arguments)
    print(
        f"megapack-build: error: no command {name!r}{nearest(name, COMMANDS)} (megapack-build "
        "shows the commands)",
        file=sys.stderr,
    )
    return 2


def program_parser(*, with_commands: bool) -> Parser:
    """Return the program's parser. ``with_commands`` adds the parsers of the commands; importing
    their modules takes a second."""
    parser = Parser("megapack-build")
    add_program_options(parser)
    if with_commands:
        commands = parser.add_subparsers()
        for name, (_, help_line) in COMMANDS.items():
            _fill(commands.add_parser(name, help=help_line), name)
    return parser


def build_parser(name: str) -> Parser:
    return _fill(Parser(f"megapack-build {name}"), name)


def _fill(parser: Parser, name: str) -> Parser:
    module = importlib.import_module(COMMANDS[name][0])
    parser.description = module.__doc__
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _run(name: str, arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        for argument in arguments:
            check_name(argument)
        args = build_parser(name).parse_args(arguments)
        return int(importlib.import_module(COMMANDS[name][0]).run(args) or 0)
    except (MegapackError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_left(sys.stdout):
            raise
        if debug:
            print(redacted(traceback.format_exc()), end="", file=sys.stderr)
        print(f"megapack-build {name}: error: {redacted(explained(error))}", file=sys.stderr)
        return exit_code(error)
    except ModuleNotFoundError as error:  # the package is not installed
        if debug or error.name is None or error.name.startswith("megapack"):
            raise
        remedy = f"it needs the package {error.name} ({error}): pip install {error.name}"
        print(f"megapack-build {name}: error: {remedy}", file=sys.stderr)
        return 1


def _reader_left(stream: TextIO) -> bool:
    """Return whether the stream is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: megapack-build COMMAND [options]", ""]
    lines += [f"  {name:{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    lines += ["", "megapack-build COMMAND --help shows the options of one command.", ""]
    lines += [
        "megapack-build --version, megapack-build --print-completion bash|zsh|tcsh (by shtab)"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

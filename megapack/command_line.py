"""Parser of every megapack command: errors take one line and suggest the intended option.

- ``Parser``: argparse's, with these errors. An option whose metavar ends in ",..." takes a list.
- ``PrintAction``: an option that prints a text and ends the program.
- ``add_program_options``: ``--version`` and ``--print-completion``, for every program.
- ``program``: the entry point of an installed program, for machines that lack its packages.

    $ megapack-build pack corpus --bukets 1024
    megapack-build pack: error: unknown option --bukets; did you mean '--buckets'? (--help ...)

If an option is missing, the error quotes the first example of the command's description.

``--help`` prints the description of a parser verbatim, with its line breaks.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NoReturn

from megapack import __version__
from megapack.calls import nearest
from megapack.errors import MegapackError, printable, redacted, require

# Options of other programs -> ours, where a command has it.
_ELSEWHERE = {"--world-size": "--data-parallel"}


class Parser(argparse.ArgumentParser):
    """Parser of a command; a wrong command line ends it with status 2 and one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.formatter_class = argparse.RawDescriptionHelpFormatter

    def parse_args(  # type: ignore[override]  # megapack passes no namespace
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse a command line. Report an unknown option first: a missing one may be misspelled."""
        words = list(sys.argv[1:] if args is None else args)
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            is_option = name.startswith("--") and " " not in name
            if is_option and not any(option.startswith(name) for option in known):
                elsewhere = {old: new for old, new in _ELSEWHERE.items() if new in known}
                self.error(f"unknown option {name}{nearest(name, known, elsewhere)}")
        for option, *values in zip(words, words[1:], words[2:], strict=False):
            action = self._option_string_actions.get(option)
            is_list = action is not None and str(action.metavar).endswith(",...")
            if is_list and all(map(str.isdecimal, values)):
                self.error(
                    f"{option} {' '.join(values)}: separate them by commas, {','.join(values)}"
                )
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        if re.match(r"the following arguments are required|one of .* is required", message):
            lines = re.sub(r"\\\n\s*", "", self.description or "").splitlines()
            examples = (line.partition("  #")[0].strip() for line in lines)
            ours = (line for line in examples if line.startswith(f"{self.prog} "))
            message += "".join(f"; for example: {line}" for line in islice(ours, 1))
        text = printable(redacted(message))
        self.exit(2, f"{self.prog}: error: {text} (--help shows the options)\n")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """Convert a word of the command line; a choice may be written in either case."""
        value = super()._get_value(action, text)
        in_lower_case = {str(choice).lower(): choice for choice in action.choices or ()}
        is_choice = isinstance(value, str) and value not in (action.choices or ())
        return in_lower_case.get(value.lower(), value) if is_choice else value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            problem = f"{value!r} is unknown{nearest(str(value), choices)}"
            raise argparse.ArgumentError(action, f"{problem} (known: {', '.join(choices)})")

    def _print_message(self, message: str, file: Any = None) -> None:
        # Whether argparse's own method ignores a closed pipe depends on the buffering of stdout.
        if message:
            (file or sys.stderr).write(message)


class PrintAction(argparse.Action):
    """Option that prints a text and ends the program; ``text`` maps (parser, value) to it."""

    def __init__(
        self, *names: Any, text: Callable[[argparse.ArgumentParser, str], str], **options: Any
    ) -> None:
        super().__init__(*names, **options)
        self.text = text

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        del namespace, option
        try:
            sys.stdout.write(f"{self.text(parser, values)}\n")
        except MegapackError as error:
            parser.error(str(error))
        parser.exit()


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    return str(require("shtab", "--print-completion").complete(parser, shell))


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every program."""
    parser.add_argument("--version", action="version", version=f"megapack {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintAction,
        text=_completion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes options in this shell, and exit",
    )


def program(module: str) -> Callable[[], int]:
    """Return a function that runs a module's ``main``, or prints in one line which package the
    module needs and this environment lacks."""

    def run() -> int:
        try:
            main = importlib.import_module(module).main
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("megapack"):
                raise
            lacks = f"{error}; it needs torch and megapack's extra train (pip install '.[train]')"
            text = str(error) if error.name is None else lacks
            sys.stderr.write(f"{module}: error: {text}\n")
            return 1
        return int(main())

    return run


pretrain = program("megapack.training.pretrain")
evaluate = program("megapack.training.evaluate")
export = program("megapack.training.export")
teacher = program("megapack.training.teacher")
probe = program("megapack.attention.leak_table")

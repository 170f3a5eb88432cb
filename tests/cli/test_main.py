"""The command line as a whole: help, unknown commands, exit statuses."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import printed
from hypothesis import given
from hypothesis import strategies as st
from programs import PYTHON, ended

import megapack
from megapack.cli import arguments
from megapack.cli.main import COMMANDS, build_parser, main
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage import IndexedDatasetBuilder
from megapack.units import counted, parse_size, percent, short, size


def test_overview_lists_commands_and_unknown_ones_get_a_hint() -> None:
    overview = printed()
    assert all(name in overview for name in COMMANDS)
    assert "did you mean 'tokenize'?" in printed("tokenise", status=2)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_command_has_examples(name: str) -> None:
    assert f"megapack-build {name} " in printed(name, "--help").split("\n\n", 1)[1]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_missing_options_are_shown_in_an_example(name: str) -> None:
    """The example has every option that is missing."""
    text = printed(name, status=2)
    if name == "inspect":  # it names what it can inspect
        return
    missing, _, example = text.partition("; for example: ")
    assert example.startswith(f"megapack-build {name} ")
    if "the following" in missing:
        assert set(re.findall(r"--[\w-]+", missing)) <= set(re.findall(r"--[\w-]+", example))


PROGRAM = (sys.executable, "-m", "megapack")


def test_runs_as_a_program() -> None:
    assert ended(*PROGRAM, "--version").stdout.startswith("megapack ")


# Program -> a command line with an option that does not exist, the option that was meant.
PROGRAMS = {
    "megapack": ("pack x --bukets 512", "--buckets"),
    "megapack.training.pretrain": ("--confg demo_cpu", "--config"),
    "megapack.attention.leak_table": ("llama --atention sdpa", "--attention"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_names_the_option_that_was_meant(program: str) -> None:
    words, meant = PROGRAMS[program]
    done = ended(sys.executable, "-m", program, *words.split(), status=2)
    assert f"did you mean '{meant}'?" in done.stderr and done.stderr.count("\n") == 1
    version = ended(sys.executable, "-m", program, "--version").stdout
    assert version == f"megapack {megapack.__version__}\n"


def test_completion_knows_every_option_of_every_command() -> None:
    if importlib.util.find_spec("shtab") is None:
        said = ended(*PROGRAM, "--print-completion", "bash", status=2).stderr
        assert "needs the package shtab" in said and said.count("\n") == 1
        pytest.skip("needs shtab")
    for shell in ("bash", "zsh", "tcsh"):
        script = ended(*PROGRAM, "--print-completion", shell).stdout
        assert all(name in script for name in COMMANDS)
        assert shell == "tcsh" or "--padding-threshold" in script  # tcsh completes only commands
    assert ended(*PROGRAM, "--print-completion", "fish", status=2).stderr.count("\n") == 1


def test_every_command_prints_json() -> None:
    options = {name: build_parser(name)._option_string_actions for name in COMMANDS}
    assert not [name for name, known in options.items() if "--json" not in known]


@pytest.mark.parametrize("arguments", ["", "pack --help", "inspect DATA", "inspect DATA --json"])
@pytest.mark.parametrize(("both", "unbuffered"), [(False, ""), (True, "1")])
def test_closed_pipe_is_no_error(
    tmp_path: Path, arguments: str, both: bool, unbuffered: str
) -> None:
    """As in ``megapack-build inspect ... | head -3``, for print, argparse and rich."""
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1, 2, 3])
    words = arguments.replace("DATA", str(tmp_path / "data")).split()
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    where = {"stdout": writer, "stderr": writer if both else subprocess.PIPE}
    done = subprocess.run([*PROGRAM, *words], check=False, text=True, env=environment, **where)
    os.close(writer)
    assert (done.returncode, done.stderr or "") == (141, "")


def test_broken_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(args: object) -> int:
        raise BrokenPipeError(32, "Broken pipe", "worker")

    monkeypatch.setattr("megapack.cli.merge.run", broken)
    with Path(os.devnull).open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(["merge", "a", "--output-prefix", "b"]) == 1
    assert "Broken pipe: 'worker'" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored
from megapack.cli.main import main
class Interrupt:
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.exit(main(["pack", "--help"]))
"""


@pytest.mark.parametrize("module", ["megapack.cli.pack", "numpy"])
def test_an_interrupt_while_a_command_is_imported_is_one_line(module: str) -> None:
    done = ended(*PYTHON, f"MODULE = {module!r}\n{INTERRUPTED}", status=130)
    assert done.stderr == "megapack-build: interrupted\n"


def test_a_missing_package_is_named_with_its_remedy() -> None:
    """A command on a machine without a package that it imports."""
    program = "import sys; sys.modules['numpy'] = None; from megapack.cli.main import main; "
    program += "sys.exit(main(['arrange', 'x.shards.json', '--output', 'y.shards.json']))"
    done = ended(*PYTHON, program, status=1)
    assert done.stderr.startswith("megapack-build arrange: error: it needs the package numpy (")
    assert done.stderr.endswith("): pip install numpy\n")


def test_name_not_utf_8_is_refused_first() -> None:
    """Otherwise the error comes when metadata is written, hours later."""
    for words in (["tokenize", "--input", "x\udcff"], ["merge", "a\udcff"], ["pack", "\udcff"]):
        said = printed(*words, status=2)
        assert r"\xff" in said and "is not UTF-8" in said


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "s3://a/\0", "file:///a\0/b"])
def test_every_command_refuses_names_that_no_file_can_have(name: str) -> None:
    for command in COMMANDS:
        said = printed(command, name, "--output", name, status=2)
        assert re.fullmatch(
            rf"megapack-build {command}: error: the name .*(NUL|not UTF-8), .*\n", said
        )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("two options that exclude each other"), 2),
        (DataError("a document that is none"), 1),
        (FormatError("a damaged file"), 1),
        (FileNotFoundError(2, "No such file", "corpus.idx"), 1),
        (ValueError("plain"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("debug", [False, True])
def test_exit_status_and_debug_traceback(
    error: Exception, status: int, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("megapack.cli.inspect.run", fail)
    said = printed("inspect", "corpus", *(["--debug"] if debug else []), status=status)
    text = str(error).removeprefix("[Errno 2] ").replace("'", "")
    assert said.endswith(f"megapack-build inspect: error: {text}\n")
    assert ("Traceback" in said and "in fail" in said) == debug


def test_narrow_terminal_does_not_cut_numbers(tmp_path: Path) -> None:
    """A table in 40 columns must not become: bucket  0..  0  ..  0.."""
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document(range(1000))
    command = [*PROGRAM, "compare", tmp_path / "data", "--strategies", "pad"]
    command += ["--capacity", "1234567"]
    reader, terminal = os.openpty()
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm"}
    subprocess.run(command, check=True, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    said = os.read(reader, 1 << 16).decode()
    assert re.search(r"\n\S*pad@1234567", said), "the row, not the advice below it"


# ---- Conversion of option values


def _parser(*adders: Callable[[argparse.ArgumentParser], object]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megapack-build some")
    for add in adders:
        add(parser)
    return parser


def _reader(*, many: bool) -> argparse.ArgumentParser:
    return _parser(
        lambda parser: arguments.add_dataset_argument(parser, many=many),
        lambda parser: arguments.add_shared(parser, "--overwrite"),
    )


def test_datasets_are_positional_or_options() -> None:
    ways = ("{}", "--data-prefix {}", "--overwrite {}", "{} --overwrite")
    for way in (*ways, "--data-prefix {} --overwrite"):
        assert _reader(many=True).parse_args(way.format("a b").split()).prefixes == ["a", "b"]
        assert _reader(many=False).parse_args(way.format("a.idx").split()).prefix == "a"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments PREFIX --data-prefix is required"),
        (["a", "--data-prefix", "b"], "not allowed with"),
    ],
)
def test_datasets_given_twice_or_missing_are_refused(
    many: bool, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        _reader(many=many).parse_args(words)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_alternatives_join_the_dataset_group() -> None:
    """For example --lengths of compare."""
    parser = argparse.ArgumentParser()
    arguments.add_dataset_argument(parser, many=False).add_argument("--lengths")
    assert parser.parse_args(["--lengths", "l.npy"]).lengths == "l.npy"
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "--lengths", "l.npy"])


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((arguments.byte_count, text) for text in ("", "-1", "M", "1X", "1e6")),
        *((arguments.capacities, text) for text in ("", "0", "1024,", "-5", "1k", "1.5")),
        *((arguments.positive, text) for text in ("0", "-1", "1.5", "")),
        *((arguments.part_of, text) for text in ("0/0", "0", "1/", "-1/2")),
    ],
)
def test_wrong_value_error_names_right_ones(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        parse(text)
    assert arguments.capacities("4096,1024") == [1024, 4096]


def test_threads_and_workers_default_to_usable_cores() -> None:
    parser = _parser(lambda parser: arguments.add_shared(parser, "--threads", "--workers"))
    args = parser.parse_args([])
    assert args.threads == args.workers == len(os.sched_getaffinity(0))


# ---- Format of numbers


def test_counted_uses_plural() -> None:
    numbers = [counted(number, "shard") for number in (0, 1, 106055)]
    assert numbers == ["0 shards", "1 shard", "106,055 shards"]


def test_a_small_size_is_not_zero_megabytes() -> None:
    sizes = (0, 1023, 1024, 41_234, 1_234_567, 1_023_693)
    texts = ["0 B", "1023 B", "1 KiB", "40.3 KiB", "1.18 MiB", "1000 KiB"]
    assert [size(num_bytes) for num_bytes in sizes] == texts


def test_large_numbers_are_shortened() -> None:
    numbers = (7, 999, 1500, 999_400, 999_700, 1_234_567, 2.5e6, 999.9e6, 3.14159e12)
    texts = ["7", "999", "1.5 k", "999 k", "1 M", "1.23 M", "2.5 M", "1 G", "3.14 T"]
    assert [short(number) for number in numbers] == texts
    assert (percent(0.00123), percent(0.00123, None)) == ("0.12 %", "0.123 %")
    assert percent(0.99999, None) == "100 %"


@given(st.integers(0, 1 << 50))
def test_sizes_are_read_as_they_are_printed(num_bytes: int) -> None:
    assert parse_size(str(num_bytes)) == parse_size(num_bytes) == num_bytes
    assert abs(parse_size(size(num_bytes)) - num_bytes) <= 0.005 * num_bytes


@given(st.integers(0, 1023), st.sampled_from("KMGT"))
def test_sizes_of_one_unit_are_read_and_printed_exactly(number: int, unit: str) -> None:
    num_bytes = number << (10 * ("KMGT".index(unit) + 1))
    for spelt in (unit, unit.lower(), f" {unit}iB", f"{unit}B"):
        assert parse_size(f"{number}{spelt}") == num_bytes
    assert size(num_bytes) == (f"{number} {unit}iB" if number else "0 B")


def test_sizes_are_exact_where_a_float_is_not() -> None:
    assert parse_size("9007199254740993") == 9007199254740993
    assert parse_size("0.3K") == 307 and parse_size("1.5G") == 3 << 29


@pytest.mark.parametrize(
    "text", ["", "M", "1.5.5M", "-1", "1e9", "64X", "0x10", "nan", "1,000", True]
)
def test_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size; write 4096, 64M or 1\.5G"):
        parse_size(text)
    command = ("tokenize", "--input", "x", "--output-prefix", "y", f"--block-bytes={text}")
    assert f"{str(text)!r} is not a size" in printed(*command, status=2)

"""The command line as a whole: help, unknown commands, exit statuses."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.cli.main import COMMANDS, main
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage import IndexedDatasetBuilder


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)


def test_an_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenise"]) == 2
    assert "did you mean 'tokenize'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert f"megapack-build {name} " in capsys.readouterr().out.split("\n\n", 1)[1]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_wrong_option_is_the_command_lines_fault(name: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--no-such-option"])
    assert leaving.value.code == 2


def test_every_command_has_the_two_functions() -> None:
    for module_name, _ in COMMANDS.values():
        module = importlib.import_module(module_name)
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_it_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megapack.cli.main", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("megapack ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["pack", "--help"],
        ["inspect", "DATA"],
        ["inspect", "DATA", "--json"],
        ["verify", "DATA"],
    ],
    ids=lambda arguments: " ".join(arguments) or "overview",
)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_early_reader_is_fine(
    tmp_path: Path, arguments: list[str], both: bool, unbuffered: str
) -> None:
    """As in ``megapack-build inspect ... | head -3``."""
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1, 2, 3])
    words = [str(tmp_path / "data") if word == "DATA" else word for word in arguments]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "megapack.cli.main", *words],
        check=False,
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr or "") == (141, "")


def test_other_pipe_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> int:
        raise BrokenPipeError(32, "Broken pipe", "worker")

    monkeypatch.setattr("megapack.cli.merge.run", broken)
    with Path(os.devnull).open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(["merge", "a", "--output-prefix", "b"]) == 1
    assert "Broken pipe: 'worker'" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys
from megapack.cli.main import main
class Interrupt:
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.exit(main(["pack", "--help"]))
"""


@pytest.mark.parametrize("module", ["megapack.cli.pack", "numpy", "megapack.packing.strategies"])
def test_an_interrupt_while_a_command_is_imported_is_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"MODULE = {module!r}\n{INTERRUPTED}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "megapack-build: interrupted\n")


def test_name_not_utf_8_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was met when metadata was written, hours later."""
    for arguments in (
        ["tokenize", "--input", "x\udcff.jsonl"],
        ["merge", "a\udcff"],
        ["pack", "\udcff"],
    ):
        assert main(arguments) == 2
        assert r"\xff" in (said := capsys.readouterr().err)
        assert "is not UTF-8" in said


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
def test_the_exit_status_says_whose_fault_it_is_and_debug_shows_where(
    error: Exception,
    status: int,
    debug: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("megapack.cli.inspect.run", fail)
    assert main(["inspect", "corpus", *(["--debug"] if debug else [])]) == status
    said = capsys.readouterr().err
    assert said.endswith(f"megapack-build inspect: error: {error}\n")
    assert ("Traceback" in said and "in fail" in said) == debug

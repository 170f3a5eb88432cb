"""The command line as a whole: help, unknown commands, exit statuses."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megapack.cli.main import COMMANDS, main


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)


def test_an_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenise"]) == 2
    assert "did you mean 'tokenize'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_command_teaches_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
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

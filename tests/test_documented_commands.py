"""Every megapack-build command that a reader can copy is understood by the real parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megapack.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[1]
PLACES = (
    "README.md",
    "docs/*.md",
    "docs/guides/*.md",
    "launch/*.sh",
    "launch/README.md",
    "configs/*.yaml",
    "examples/*",
    "megapack/cli/*.py",
)
FILES = sorted(path for place in PLACES for path in ROOT.glob(place) if path.is_file())
# A command at the beginning of a line, behind a prompt or the mark of a comment, to the line that
# does not end in a backslash (which stands doubled in a docstring).
COMMAND = re.compile(
    r"^[ \t]*(?:[#$*>][ \t]+)?megapack-build[ \t]+(?=[a-z])((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE
)
INLINE = re.compile(r"`megapack-build\s+([^`]+)`")


ASSIGNED = re.compile(r"^([A-Z_]+)=(?:\$\{\w+:-)?([\w,./-]+)\}?", re.MULTILINE)


def _words(text: str, variables: dict[str, str]) -> list[str]:
    """Up to a comment or the end of the shell's command; variables of the script are put in."""
    joined = re.sub(r"\\+\n[ \t]*#?", " ", text)
    joined = re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), joined)
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word and set(word) <= set("|&;<>()"):
            break
        words.append(word)
    return words


def _commands(path: Path) -> list[list[str]]:
    text = path.read_text(encoding="utf-8")
    variables = dict(ASSIGNED.findall(text))
    return [_words(match[1], variables) for match in COMMAND.finditer(text)]


CASES = [(path, words) for path in FILES for words in _commands(path)]


def test_the_commands_are_found_where_they_are_known_to_stand() -> None:
    """The test below cannot pass because nothing was found."""
    found = {(path.name, words[0]) for path, words in CASES}
    for name in ("tokenize", "compare", "pack", "inspect"):
        assert ("README.md", name) in found
    assert ("tokenization.md", "train-tokenizer") in found
    assert {name for _, name in found} == set(COMMANDS)


@pytest.mark.parametrize(
    ("path", "words"),
    CASES,
    ids=[f"{path.relative_to(ROOT)}-{words[0]}" for path, words in CASES],
)
def test_a_documented_command_is_understood(
    path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = words
    assert name in COMMANDS, f"{path}: megapack-build {name}"
    if rest == ["--help"]:
        return
    if "..." in rest:  # left out on purpose: only the options that are named can be wrong
        _assert_options_exist(path, name, rest)
        return
    try:
        build_parser(name).parse_args(rest)
    except SystemExit:
        pytest.fail(f"{path}: megapack-build {shlex.join(words)}\n{capsys.readouterr().err}")


def test_options_in_running_text_exist() -> None:
    """As in `megapack-build compare --html`, which need not be complete."""
    found = [
        (path, *match[1].split()) for path in FILES for match in INLINE.finditer(path.read_text())
    ]
    for path, name, *rest in found:
        assert name in COMMANDS, f"{path}: megapack-build {name}"
        _assert_options_exist(path, name, rest)
    assert any(word.startswith("--") for _, _, *rest in found for word in rest)


def _assert_options_exist(path: Path, name: str, words: list[str]) -> None:
    named = {word for word in words if word.startswith("--")}
    unknown = named - set(build_parser(name)._option_string_actions)
    assert not unknown, f"{path}: megapack-build {name} has no {unknown}"

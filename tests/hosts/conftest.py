"""Fixtures of all hosts, and a matrix of the runs below pytest's summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.chats import Chats, write_chats
from tests.hosts.corpus import Corpus, write_corpus
from tests.hosts.layouts import Host
from tests.hosts.matrix import MATRIX


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``tree``: every checkout that a module names (``TREES``), where a test does not say which."""
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "tree" in metafunc.fixturenames and "tree" not in chosen:
        trees = getattr(metafunc.module, "TREES", []) or [None]
        metafunc.parametrize("tree", trees, ids=lambda tree: tree and tree.name, scope="module")


@pytest.fixture(scope="module")
def host(tree: Path) -> Iterator[Host]:
    """A checkout of Megatron-LM."""
    found = Host(tree)
    yield found
    found.ranks.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    return write_chats(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module")
def known_rows() -> dict[str, dict[int, tuple[int, ...]]]:
    """Rows by their number, for every kind of data: the same in all runs."""
    return {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``-n`` workers send their results to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["matrix"] = MATRIX


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for host, cells in getattr(node, "workeroutput", {}).get("matrix", {}).items():
        MATRIX.setdefault(host, {}).update(cells)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for host, cells in MATRIX.items():
        releases = list(dict.fromkeys(release for release, _ in cells))
        layouts = list(dict.fromkeys(layout for _, layout in cells))
        terminalreporter.section(f"{host}: checked calls of the model, segments, violations")
        for row in [
            ["layout", *releases],
            ["---"] * (1 + len(releases)),
            *([layout, *(cells.get((r, layout), "-") for r in releases)] for layout in layouts),
        ]:
            terminalreporter.write_line(f"| {' | '.join(row)} |")

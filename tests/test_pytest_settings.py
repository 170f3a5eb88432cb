"""Settings of this test suite have their effect."""

from __future__ import annotations

import fnmatch
import os
import re
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from peers import peer
from programs import ended

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest")


def test_deprecated_calls_in_our_code_are_errors() -> None:
    """Deprecation warnings from our calls of other packages must not be hidden."""
    going = partial(warnings.warn_explicit, "going away", DeprecationWarning, "file.py", 1)
    for module in ("megapack.data.loader", "megapack", "test_loader"):
        with pytest.raises(DeprecationWarning):
            going(module=module)
    going(module="torch.nn")


@pytest.mark.parametrize(("wanted", "status"), [("3", 0), ("4", 1)])
def test_a_run_that_collects_too_few_tests_fails(tmp_path: Path, wanted: str, status: int) -> None:
    """make test-data passes the least number of tests."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_few.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('i', range(3))\ndef test_it(i):\n    pass\n"
    )
    done = ended(*PYTEST, "-q", "--at-least", wanted, tmp_path, cwd=tmp_path, status=status)
    assert ("only 3 tests passed; at least 4 are there" in done.stdout) == bool(status)


def test_every_test_has_a_time_limit(request: pytest.FixtureRequest) -> None:
    limit = float(os.environ.get("PYTEST_TIMEOUT") or request.config.getini("timeout"))
    assert 0 < PATIENCE < limit <= 7200


def test_names_of_the_longest_tests_exist(pytestconfig: pytest.Config) -> None:
    """A test that was renamed would start late, and the other test processes would wait for it."""
    plugin: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert plugin.LONGEST
    missing = [name for name in plugin.LONGEST if not re.search(rf"def test_\w*{name}", text)]
    assert not missing


HANGING = """
import ctypes, pathlib, subprocess

def test_that_waits_for_a_process():
    process = subprocess.Popen(["sleep", "1000"])
    pathlib.Path("pid").write_text(str(process.pid))
    process.wait()

def test_after_it():
    pass

def test_that_never_lets_go_of_the_interpreter():
    lock = ctypes.PyDLL(None).pthread_mutex_lock  # keeps the GIL; no signal ends it
    mutex = ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)
"""


def test_a_time_limit_ends_a_test_and_its_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_hanging.py").write_text(HANGING)
    done = ended(*PYTEST, "-v", "-n", "1", "--timeout", "3", cwd=tmp_path, status=1)
    said = done.stdout + done.stderr
    assert "Failed: Timeout (>3.0s) from pytest-timeout" in said
    assert not Path("/proc", (tmp_path / "pid").read_text(), "exe").exists()
    assert "PASSED test_hanging.py::test_after_it" in said
    assert "in test_that_never_lets_go_of_the_interpreter" in done.stderr


def test_test_processes_share_the_imports_of_ranks(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each process has a fork of the zygote, and a time limit ends only the ranks of that fork."""
    peer("torch")
    from training.processes import SharedZygote  # noqa: PLC0415  # data-only tests have no torch

    zygote = request.getfixturevalue("zygote")
    if not isinstance(zygote, SharedZygote):
        pytest.skip("needs pytest-xdist")
    plugin: Any = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    other = SharedZygote(zygote._address)
    assert not other._started, "it imports nothing again"
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    ranks = other.start([str(tmp_path / "sleep.py")], 1, tmp_path / "log")
    assert set(ranks.pids) <= plugin.descendants()
    ranks.signal(signal.SIGKILL)
    assert ranks.wait() == [-signal.SIGKILL]
    other.close()
    (tmp_path / "end.py").write_text("raise SystemExit(3)")
    assert zygote.start([str(tmp_path / "end.py")], 1, tmp_path / "log").wait() == [3]


def test_every_file_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest ignores folders called build by default."""
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for pattern in pytestconfig.getini("norecursedirs"):
        left_out = [path for path in files if fnmatch.filter(path.parts, pattern)]
        assert not left_out, pattern

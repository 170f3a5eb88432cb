"""Shared by all tests: hypothesis profiles, one thread per process, time limits, ports, ranks."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from training.processes import Zygote

# Two test processes share two cores; oversubscription would only slow both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch starts processes for it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

settings.register_profile(
    "default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--at-least", type=int, default=0, metavar="N", help="fewer passing tests are a failure"
    )


LONGEST = (  # tests, by their names
    *("under_sanitizers", "compiled_layers", "autopilot_passes_noise", "lost_worker_restarts"),
    *("hanging_rank_is_named", "killed_while_a_run_trains", "lm_eval_scores", "cluster_that_loses"),
    *("mixing_decisions_are_replayed", "estimate_equals_memory", "notebook_trains_a_model"),
    *("deepspeed_launcher_trains", "steps_are_traced_on_request", "time_limit_ends"),
    *("run_reports_the_result_of_each_mutant",),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first; give tests outside the gate two hours instead of minutes."""
    items.sort(key=lambda item: not any(name in item.name for name in LONGEST))
    for item in items:
        if item.get_closest_marker("pages") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(7200))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that collected too few tests (--at-least)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    wanted = session.config.getoption("--at-least")
    if wanted == 0 or reporter is None or hasattr(session.config, "workerinput"):
        return
    passed = len(reporter.stats.get("passed", []))
    if passed < wanted and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"only {passed} tests passed; at least {wanted} are there", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def descendants() -> set[int]:
    """Return all descendants of this process, and those of its fork of a shared zygote."""
    parents = {}
    for process in Path("/proc").iterdir():  # glob would ask each whether it still exists
        if not process.name.isdigit():
            continue
        try:
            stat = (process / "stat").read_text()
        except OSError:  # it has ended
            continue
        parents[int(process.name)] = int(stat.rpartition(")")[2].split()[1])
    processes = sys.modules.get("training.processes")
    found, new = set(), {os.getpid(), *getattr(processes, "SERVERS", ())}
    while new := {pid for pid, parent in parents.items() if parent in new}:
        found |= new
    return found


# A time limit (pytest-timeout, `timeout` in pyproject.toml) raises an exception in the test, and
# ends the processes that the test has started (not those of fixtures). In C++ that holds the GIL no
# exception can be raised: the test process prints the stacks of its threads and ends.


STDERR = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    before = descendants()
    try:
        return (yield)
    except pytest.fail.Exception as failure:
        if str(failure).startswith("Timeout"):
            for pid in descendants() - before:
                os.kill(pid, signal.SIGKILL)
        raise


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    stderr = item.config.stash[STDERR]
    later = settings.timeout + min(10, settings.timeout)
    faulthandler.dump_traceback_later(later, exit=True, file=stderr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def free_port() -> int:
    """Return an unused TCP port of the loopback interface."""
    import ports  # noqa: PLC0415  # this file is also used without what lies beside it

    return ports.free_port()


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    """Return a process that forks ranks with torch imported."""
    from training.processes import shared_zygote  # noqa: PLC0415  # the same

    return shared_zygote()

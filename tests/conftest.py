"""Shared by all tests: hypothesis profiles, one thread per process, free ports."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Two test processes share two cores; oversubscription would only slow both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

settings.register_profile(
    "default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--at-least", type=int, default=0, metavar="N", help="fewer passing tests are a failure"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sanitizers take minutes: they begin, so that in the end nobody waits for them alone."""
    items.sort(key=lambda item: "sanitizers" not in item.name)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that collected next to nothing must not look like one that passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    wanted = session.config.getoption("--at-least")
    if wanted == 0 or reporter is None or hasattr(session.config, "workerinput"):
        return
    passed = len(reporter.stats.get("passed", []))
    if passed < wanted and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"only {passed} tests passed; at least {wanted} are there", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    import ports  # noqa: PLC0415  # this file is also used without what lies beside it

    return ports.free_port()

"""Time limit for waits in tests; only a hang takes longer, even on a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Less than the time limit of a test (`timeout` in pyproject.toml, or PYTEST_TIMEOUT), so that the
# wait fails first and names what did not happen.
PATIENCE = 0.8 * float(os.environ.get("PYTEST_TIMEOUT", "300"))  # seconds
PATIENCE_MINUTES = PATIENCE / 60


def wait_until(reached: Callable[[], object], what: object = "it did not happen") -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.01)

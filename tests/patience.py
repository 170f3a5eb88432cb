"""How long a test waits for what always comes: on a busy machine, too, only a hang takes longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Less than the time limit of a test (`timeout` in pyproject.toml, which PYTEST_TIMEOUT overrules):
# what was waited for is then named by whoever waited.
PATIENCE = 0.8 * float(os.environ.get("PYTEST_TIMEOUT", "300"))  # seconds
PATIENCE_MINUTES = PATIENCE / 60


def wait_until(reached: Callable[[], object], what: object = "it never came") -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.01)

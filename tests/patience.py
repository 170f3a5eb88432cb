"""How long a test waits for what always comes: on a busy machine, too, only a hang takes longer."""

from __future__ import annotations

import os

# Less than the time limit of a test (`timeout` in pyproject.toml, which PYTEST_TIMEOUT overrules):
# what was waited for is then named by whoever waited.
PATIENCE = 0.8 * float(os.environ.get("PYTEST_TIMEOUT", "300"))  # seconds
PATIENCE_MINUTES = PATIENCE / 60

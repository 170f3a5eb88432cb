"""How long a test waits for what always comes: on a busy machine, too, only a hang takes longer."""

from __future__ import annotations

PATIENCE = 1200.0  # seconds
PATIENCE_MINUTES = 20

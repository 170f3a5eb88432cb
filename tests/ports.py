"""TCP ports for tests that start processes, which bind them only later."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

# Below 32,768: the system gives those above to whoever asks for any port, and tests run side by
# side with processes that do.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """Return a random unused port of the loopback interface."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"a hundred ports of {_PORTS} are in use")

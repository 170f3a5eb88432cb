"""TCP ports for tests that start processes, which bind them only later."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

# Below 32,768, since the system assigns higher ports to processes that ask for any port.
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

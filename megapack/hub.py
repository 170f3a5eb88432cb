"""Connection to the model hub: ``hub_answers()`` takes a second; the client's retries a minute."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_answers() -> bool:
    """Return whether the hub, or the proxy before it, accepts a connection within a second."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    url = urlsplit(getproxies().get("https", hub))
    answered = threading.Event()

    def connect() -> None:  # in a thread: the look-up of a name has no timeout
        with suppress(OSError), socket.create_connection((url.hostname, url.port or 443), 1):
            answered.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(1)
    return answered.is_set()

"""Connection to the model hub: ``hub_answers()`` takes a second; retries of the client take a
minute.

HF_ENDPOINT=http://mirror:8080 HTTP_PROXY=proxy:3128    # -> connects to proxy, port 3128
HF_ENDPOINT=http://mirror NO_PROXY=mirror               # -> connects to mirror, port 80
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080}  # other schemes: 80


def hub_answers() -> bool:
    """Return whether the hub, or the proxy in front of it, accepts a connection within a second, or
    within three if its first addresses do not answer."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.netloc):
        url = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    answered = threading.Event()

    def connect() -> None:  # in a thread: the look-up of a name has no timeout
        with suppress(OSError, ValueError):  # ValueError: a port that is not a number
            address = url.hostname, url.port or _PORTS.get(url.scheme, 80)
            with socket.create_connection(address, 1):
                answered.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(3)
    return answered.is_set()

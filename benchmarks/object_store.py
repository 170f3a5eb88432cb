"""Local object stores, and a proxy that makes the connection to them slow, narrow or faulty.

``serve_objects`` is moto's S3 server, for tests. It copies the whole object for every range, so
measurements read from ``serve_files``: aiohttp's file server, which answers GET and HEAD with
ranges and ETags like S3, and accepts any signature. ``Line`` is a proxy in front of a server: it
adds latency, shares a bandwidth among all connections, counts requests and bytes, and injects the
faults of networks and stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

BUCKET = "bucket"
_CHUNK = 1 << 18
_UNTIL_CLOSED = 1 << 62  # as the length of a body: read until the connection closes


@contextlib.contextmanager
def serve_objects(port: int) -> Iterator[str]:
    """Run moto's server with one empty bucket; yield its URL."""
    moto = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with running(port, *moto) as url:
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        yield url


@contextlib.contextmanager
def serve_files(port: int, folder: Path) -> Iterator[str]:
    """Serve the subfolders of ``folder`` as read-only buckets; yield the URL."""
    with running(port, sys.executable, __file__, str(port), str(folder)) as url:
        yield url


@contextlib.contextmanager
def running(port: int, *command: str) -> Iterator[str]:
    """Run a command that serves a port; yield its URL."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, **quiet)
    try:
        while True:
            assert server.poll() is None, "the server ended"
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def environment_of(url: str) -> dict[str, str]:
    """Return the environment variables that point clients to the store at a URL."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def use_store(url: str) -> None:
    """Point clients of this process and of its children to the store at a URL."""
    os.environ.update(environment_of(url))


@dataclass
class Faults:
    """Share of requests with each fault."""

    slow_down: float = 0.0  # answered 503 SlowDown
    cut: float = 0.0  # connection closed in the middle of the body
    short: float = 0.0  # answered with half of the bytes, as if they were all
    flip: float = 0.0  # answered with one bit changed
    expired: float = 0.0  # answered 400 ExpiredToken

    def choose(self, rng: random.Random) -> str | None:
        """Return the fault of the next request, mostly None."""
        shares = vars(self)
        return rng.choices([*shares, None], [*shares.values(), 1 - sum(shares.values())])[0]


@dataclass(eq=False)
class Line:
    """Proxy for HTTP/1.1; runs in a thread of this process inside ``with line.open()``.

    Args:
        port: port that the proxy listens on.
        server: URL of the server behind the proxy.
        latency: seconds before an answer starts.
        bandwidth: bytes per second of all bodies together; None: no limit.
        faults: shares of faults among requests of the method ``faulty``.
    """

    port: int
    server: str
    latency: float = 0.0
    bandwidth: float | None = None
    faults: Faults = field(default_factory=Faults)
    faulty: str = "GET"
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self._rng = random.Random(1)
        self._free_at = 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator[Line]:
        loop = asyncio.new_event_loop()
        ready, stop = threading.Event(), asyncio.Event()

        async def serve() -> None:
            how = {"limit": _CHUNK, "backlog": 256}
            server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, **how)
            ready.set()
            await stop.wait()
            server.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await asyncio.sleep(0)  # let their connections close

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        left = (OSError, EOFError, asyncio.CancelledError)  # a side hung up, or the proxy stops
        with contextlib.closing(back), contextlib.suppress(*left):
            alive = True
            while alive:
                head = await client.readuntil(b"\r\n\r\n")
                host, _, port = self.server.removeprefix("http://").partition(":")
                # One server connection per answer; clients keep their connections.
                server, ahead = await asyncio.open_connection(host, int(port), limit=_CHUNK)
                with contextlib.closing(ahead):
                    alive = await self._pass_on(head, client, back, server, ahead)

    async def _pass_on(
        self,
        head: bytes,
        client: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        ahead: asyncio.StreamWriter,
    ) -> bool:
        """Forward a request and its answer; return whether the client's connection stays open."""
        method = head.partition(b" ")[0].decode()
        head, expects = re.subn(rb"(?i)\r\nexpect: *100-continue", b"", head)
        if expects:  # the client sends its body only after this answer
            back.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        ahead.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        async for data in _body(client, _length(head)):
            await self._spend(len(data))
            ahead.write(data)
            await ahead.drain()
        answer = await server.readuntil(b"\r\n\r\n")
        answer = answer.replace(b"HTTP/1.0", b"HTTP/1.1", 1).replace(b"Connection: close\r\n", b"")
        num_bytes = 0 if method == "HEAD" else _length(answer)
        self.counts["requests"] += 1
        self.counts[method] += 1
        await asyncio.sleep(self.latency)
        fault = self.faults.choose(self._rng) if method == self.faulty else None
        if fault:
            self.counts[fault] += 1
        if fault in ("slow_down", "expired"):
            back.write(_ERRORS[fault])
            return True
        if fault == "short":
            half = f"Content-Length: {num_bytes // 2}".encode()
            answer = re.sub(rb"(?i)content-length: \d+", half, answer)
        back.write(answer)
        flip = fault == "flip"
        async for data in _body(server, num_bytes // 2 if fault in ("short", "cut") else num_bytes):
            await self._spend(len(data))
            self.counts["bytes"] += len(data)
            back.write(bytes([data[0] ^ 1]) + data[1:] if flip else data)
            await back.drain()
            flip = False
        return fault != "cut"

    async def _spend(self, num_bytes: int) -> None:
        """Wait until the bandwidth allows this many more bytes."""
        if self.bandwidth is None:
            return
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + num_bytes / self.bandwidth
        await asyncio.sleep(self._free_at - now)


async def _body(reader: asyncio.StreamReader, num_bytes: int) -> AsyncIterator[bytes]:
    """Yield a body in chunks. Raises EOFError if the sender disconnects."""
    while num_bytes:
        data = await reader.read(min(num_bytes, _CHUNK))
        if not data and num_bytes > _UNTIL_CLOSED // 2:
            return
        if not data:
            raise EOFError
        num_bytes -= len(data)
        yield data


def _length(head: bytes) -> int:
    """Return the length of the body; ``_UNTIL_CLOSED`` for a chunked body."""
    if re.search(rb"(?i)\r\ntransfer-encoding:", head):
        return _UNTIL_CLOSED
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else 0


def _error(status: str, code: str) -> bytes:
    error = f"<Error><Code>{code}</Code><Message>of the line</Message></Error>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode()  # format of Amazon S3
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_ERRORS = {
    "slow_down": _error("503 Slow Down", "SlowDown"),
    "expired": _error("400 Bad Request", "ExpiredToken"),
}


if __name__ == "__main__":
    from aiohttp import web

    app = web.Application()
    app.router.add_static("/", sys.argv[2])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]))

"""Servers on the loopback interface, and a line to them that is slow, narrow or broken.

``serve_objects`` is moto's S3 server, for tests. It copies the whole object for every range of it,
so what is measured is read from ``serve_files``: aiohttp's file server, which answers GET and HEAD
with ranges and ETags as S3 does, and takes any signature. ``Line`` is a proxy before any server: it
adds latency, shares a bandwidth among all connections, counts, and fails as networks and stores do.
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
_UNTIL_CLOSED = 1 << 62  # bytes of a body, or as many as come


@contextlib.contextmanager
def serve_objects(port: int) -> Iterator[str]:
    """Run moto's server with one empty bucket; its URL."""
    with running(
        port, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)
    ) as url:
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        yield url


@contextlib.contextmanager
def serve_files(port: int, folder: Path) -> Iterator[str]:
    """Serve the folders in a folder as buckets, read-only; its URL."""
    with running(port, sys.executable, __file__, str(port), str(folder)) as url:
        yield url


@contextlib.contextmanager
def running(port: int, *command: str) -> Iterator[str]:
    """Run a command that serves a port; its URL."""
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
    """Variables by which clients talk to the store at a URL."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def use_store(url: str) -> None:
    """Have clients of this process and its children talk to the store at a URL."""
    os.environ.update(environment_of(url))


@dataclass
class Faults:
    """Shares of requests that go wrong, each in its way.

    Attributes:
        slow_down: answered 503 SlowDown.
        cut: closed in the middle of the body.
        short: answered with half of the bytes, as if they were all.
        flip: answered with one bit changed.
        expired: answered 400 ExpiredToken.
    """

    slow_down: float = 0.0
    cut: float = 0.0
    short: float = 0.0
    flip: float = 0.0
    expired: float = 0.0

    def choose(self, rng: random.Random) -> str | None:
        """The name of what goes wrong with the next request, mostly None."""
        shares = vars(self)
        return rng.choices([*shares, None], [*shares.values(), 1 - sum(shares.values())])[0]


@dataclass(eq=False)
class Line:
    """A proxy for HTTP/1.1, in a thread of this process, while ``open()`` lasts.

    Args:
        port: where it listens.
        server: URL of what it leads to.
        latency: seconds before an answer begins.
        bandwidth: bytes per second of all bodies together; None: no limit.
        faults: of requests of the method ``faulty``.
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
            with socket.create_server(("127.0.0.1", self.port), backlog=256) as server:
                server.setblocking(False)
                accepting = loop.create_task(self._accept(server))
                ready.set()
                await stop.wait()
                for task in (accepting, *self._open):
                    task.cancel()
                await asyncio.gather(accepting, *self._open, return_exceptions=True)

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._open: set[asyncio.Task[None]] = set()
        while True:
            client, _ = await loop.sock_accept(server)
            task = loop.create_task(self._serve(_End(client)))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _serve(self, client: _End) -> None:
        with client.socket, contextlib.suppress(OSError, EOFError):  # either side left
            while True:
                head = await client.head()
                host, _, port = self.server.removeprefix("http://").partition(":")
                # The server closes after every answer; the line keeps its clients' connections.
                with socket.socket() as connection:
                    connection.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
                    if not await self._pass_on(head, client, _End(connection)):
                        return

    async def _pass_on(self, head: bytes, client: _End, server: _End) -> bool:
        """One request and its answer; whether the connection lives on."""
        method = head.partition(b" ")[0].decode()
        await server.send(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        async for data in client.read(_length(head)):
            await self._spend(len(data))
            await server.send(data)
        answer = await server.head()
        answer = answer.replace(b"HTTP/1.0", b"HTTP/1.1", 1).replace(b"Connection: close\r\n", b"")
        num_bytes = 0 if method == "HEAD" else _length(answer)
        self.counts["requests"] += 1
        self.counts[method] += 1
        await asyncio.sleep(self.latency)
        fault = self.faults.choose(self._rng) if method == self.faulty else None
        if fault:
            self.counts[fault] += 1
        if fault in ("slow_down", "expired"):
            await client.send(_ERRORS[fault])
            return True
        if fault == "short":
            half = f"Content-Length: {num_bytes // 2}".encode()
            answer = re.sub(rb"(?i)content-length: \d+", half, answer)
        await client.send(answer)
        flip = fault == "flip"
        async for data in server.read(num_bytes // 2 if fault in ("short", "cut") else num_bytes):
            if flip:
                data[0] ^= 1
                flip = False
            await self._spend(len(data))
            self.counts["bytes"] += len(data)
            await client.send(data)
        return fault != "cut"

    async def _spend(self, num_bytes: int) -> None:
        """Wait until so many bytes have passed the line."""
        if self.bandwidth is None:
            return
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + num_bytes / self.bandwidth
        await asyncio.sleep(self._free_at - now)


class _End:
    """A connection. Bytes pass through one buffer of its own: the line shall cost little."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._loop = connection, asyncio.get_running_loop()
        self._buffer, self._early = bytearray(), b""

    async def head(self) -> bytes:
        """What stands before a body. Raises EOFError: the other side left."""
        received = bytearray(self._early)
        while b"\r\n\r\n" not in received:
            data = await self._loop.sock_recv(self.socket, 1 << 14)
            if not data:
                raise EOFError
            received += data
        head, end, self._early = bytes(received).partition(b"\r\n\r\n")
        return head + end

    async def read(self, num_bytes: int) -> AsyncIterator[memoryview]:
        """The body, some at a time; each is overwritten by the next."""
        while num_bytes:
            if self._early:
                data = memoryview(bytearray(self._early[:num_bytes]))
                self._early = self._early[num_bytes:]
            else:
                self._buffer = self._buffer or bytearray(_CHUNK)
                room = memoryview(self._buffer)[: min(num_bytes, _CHUNK)]
                data = room[: await self._loop.sock_recv_into(self.socket, room)]
                if not data and num_bytes > _UNTIL_CLOSED // 2:
                    return
                if not data:
                    raise EOFError
            num_bytes -= len(data)
            yield data

    async def send(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self.socket, data)


def _length(head: bytes) -> int:
    """Of the body; one in chunks, which are passed on as they are, ends with its connection."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding":
            return _UNTIL_CLOSED
    return 0


def _error(status: str, code: str) -> bytes:
    error = f"<Error><Code>{code}</Code><Message>of the line</Message></Error>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode()  # as Amazon writes it
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

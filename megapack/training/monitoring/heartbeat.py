"""Heartbeat: if a rank or node is lost or hangs, end the job with an error that names the rank.

A collective that waits for a dead process reports a closed connection at best; with NCCL it waits
for the whole timeout. So a thread of every rank regularly writes the rank's progress to a small
store, which the first rank reads:

    lost contact with rank 5 on node7              # no beat for engine.heartbeat_timeout_seconds
    no progress for 1800 seconds: rank 3 on node4 is behind, at micro step 7 of step 12, the
    furthest at the end of step 12                 # no progress for engine.hang_timeout_seconds
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megapack.training.engine.world import World

LOST_CONTACT = 76
"""Exit code of a rank that ends because another rank is lost."""


class Heartbeat:
    """Thread that reports this rank and watches the others: ``with Heartbeat(world):``. A rank that
    hangs still sends beats, so a beat contains its progress (``World.progress``).

    Args:
        interval: seconds between beats.
        heartbeat_timeout, hang_timeout: as in ``EngineConfig``, in seconds; longer than any pause
            of a healthy process, such as slow storage.
        on_loss: called with the reason before this process ends.
    """

    def __init__(
        self,
        world: World,
        *,
        interval: float = 2.0,
        heartbeat_timeout: float = 300.0,
        hang_timeout: float = 1800.0,
        on_loss: Callable[[str], None],
    ) -> None:
        self.world, self.interval = world, interval
        self.heartbeat_timeout, self.hang_timeout = heartbeat_timeout, hang_timeout
        self._on_loss = on_loss
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[bytes, float]] = {}
        # Progress of all ranks, and its time.
        self._reached: tuple[list[tuple[int, int]], float] = ([], 0.0)
        self._lost: str | None = None
        # A separate store: waiting in that of torch.distributed would block its other users.
        first_store = self._open_store(0) if world.is_first else None  # at any free port
        port = world.gather(0 if first_store is None else first_store.port)[0]
        self._store = self._open_store(port) if first_store is None else first_store
        self._hosts = world.gather(world.host)
        self._beat()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self.interval)

    def _open_store(self, port: int) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]  # public, but not exported
            os.environ["MASTER_ADDR"],
            port,
            self.world.size,
            is_master=self.world.is_first,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    def explain(self) -> str | None:
        """Return a sentence that names the ranks lost in a failed collective; None: no rank is.
        Waits for a few heartbeat intervals before it returns None."""
        timeout = 3 * self.interval
        deadline = time.monotonic() + timeout + 3 * self.interval
        while self._lost is None and time.monotonic() < deadline:
            self._look(timeout)
            time.sleep(self.interval / 4)
        return self._lost

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._attempt(self._beat)
            self._look(self.heartbeat_timeout)
            # The first rank may have finished before this one: let the main thread exit first.
            patience = min(30.0, self.heartbeat_timeout, self.hang_timeout)
            if self._lost is not None and not self._stop.wait(patience):
                sys.stderr.write(f"megapack: {self._lost}; this job ends\n")
                sys.stderr.flush()
                self._on_loss(self._lost)
                os._exit(LOST_CONTACT)

    def _beat(self) -> None:
        at = self.world.progress
        beat = {"time": time.time(), "count": at.count, "signs": at.signs, "place": at.place}
        self._store.set(f"beat/{self.world.rank}", json.dumps(beat))

    def _look(self, timeout: float) -> None:
        # The first rank decides, by its own clock; the others read its decision.
        self._attempt(lambda: self._decide(timeout) if self.world.is_first else self._read())

    def _decide(self, timeout: float) -> None:
        with self._lock:
            beats = [self._store.get(f"beat/{rank}") for rank in range(self.world.size)]
            now = time.monotonic()
            for rank, beat in enumerate(beats):
                if rank not in self._seen or self._seen[rank][0] != beat:
                    self._seen[rank] = (beat, now)
            silent = [r for r in range(1, len(beats)) if now - self._seen[r][1] > timeout]
            stalled = self._stalled([json.loads(beat) for beat in beats], now)
        if silent:
            self._lost = f"lost contact with {', '.join(map(self._name, silent))}"
        elif stalled:
            self._lost = stalled
        if self._lost is not None:
            self._store.set("lost", self._lost)

    def _stalled(self, beats: list[dict[str, Any]], now: float) -> str | None:
        reached = [(beat["count"], beat["signs"]) for beat in beats]
        if reached != self._reached[0]:
            self._reached = reached, now
        if now - self._reached[1] <= self.hang_timeout:
            return None
        counts = [beat["count"] for beat in beats]
        furthest = max(counts)
        behind = [
            f"{self._name(rank)} is behind, at {beat['place']}"
            for rank, beat in enumerate(beats)
            if beat["count"] < furthest
        ]
        others = f"the furthest at {beats[counts.index(furthest)]['place']}"
        return f"no progress for {self.hang_timeout:g} seconds: {', '.join([*behind[:8], others])}"

    def _read(self) -> None:
        if self._store.check(["lost"]):
            self._lost = self._store.get("lost").decode()

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError:  # raised by torch's stores and networks
            store = f"{self._name(0)}, which stores the heartbeats of all ranks"
            self._lost = f"lost contact with {store}"

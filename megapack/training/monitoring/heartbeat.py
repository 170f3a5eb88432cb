"""Who is still there: when a node is lost, the others end the job and name it.

A collective that waits for a dead process says at best that a connection was closed, and with NCCL
nothing for the whole timeout. Here every rank writes to a small store once in a while how far it
is, in a thread of its own; the first rank reads them.

    lost contact to rank 5 on node7                # no beat for engine.heartbeat_timeout_seconds
    no progress for 1800 seconds: rank 3 on node4 is behind, at micro step 7 of step 12, the
    furthest at the end of step 12                 # nobody got on for engine.hang_timeout_seconds
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
"""Exit code of a rank that ended because another one was lost."""


class Heartbeat:
    """One thread per rank; ``with Heartbeat(world):`` around the whole run.

    A beat says how far the rank is (``World.progress``), since a rank that hangs beats on.

    Args:
        interval: seconds between beats.
        heartbeat_timeout, hang_timeout: of ``EngineConfig``, in seconds. Longer than any pause of
            a healthy process, such as slow storage.
        on_loss: called with the reason before this process is ended.
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
        self._reached: tuple[list[tuple[int, int]], float] = [], 0.0  # by all ranks, and when
        self._lost: str | None = None
        # A store of our own: waiting in the one of torch.distributed would block its users.
        own = self._open_store(0) if world.is_first else None  # at any free port
        port = world.gather(0 if own is None else own.port)[0]
        self._store = self._open_store(port) if own is None else own
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
        """After a collective failed: which ranks are gone, waiting a few beats to be sure.

        Returns:
            A sentence that names them; None when all ranks still beat.
        """
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
            # The first rank may simply be done before us: give the main thread time to leave.
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
        """The first rank decides, by its own clock alone; the others read what it says."""
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
            self._lost = f"lost contact to {', '.join(map(self._name, silent))}"
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
        except RuntimeError:  # torch's errors of stores and networks are RuntimeErrors
            self._lost = f"lost contact to {self._name(0)}, which keeps the beats of all ranks"

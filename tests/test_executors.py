"""Work of several processes when one of them is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megapack import executors
from megapack.errors import MegapackError
from megapack.executors import Report, run_shards


class KilledWhileItCounts:
    """Worker that is killed while it holds the lock of the counters."""

    threads = 1

    def build(self, index: int, report: Report) -> int:
        executors._counters.get_lock().acquire()
        time.sleep(0.5)  # meanwhile the build asks for it
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_worker_killed_while_it_counts_is_an_error_and_nobody_waits_for_it() -> None:
    with pytest.raises(MegapackError, match="a worker process was killed"):
        run_shards(KilledWhileItCounts(), range(3), lambda _: None, num_processes=2)

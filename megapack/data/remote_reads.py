"""What a gather reads of datasets in object stores: fetched before, looked at again after."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.storage import IndexedDataset
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.tokens import RemoteTokens, blocks_of, read_consistently

__all__ = ["RemoteReads"]

T = TypeVar("T")

AHEAD_BYTES = 1 << 26
_CACHE_PART = 16  # of a cache, which all processes of a node share


class RemoteReads:
    """Of the shards of a gatherer that are remote.

    Args:
        gatherer: which knows where the tokens of a sample lie.
    """

    def __init__(self, gatherer: _core.Gatherer) -> None:
        self._gatherer = gatherer
        self._tokens: dict[int, list[RemoteTokens]] = {}

    def add(self, shard: int, *datasets: IndexedDataset | None) -> None:
        """A shard was opened; ``datasets``: what of it is read, tokens or labels or both."""
        found = [d.tokens for d in datasets if d and isinstance(d.tokens, RemoteTokens)]
        if found:
            self._tokens[shard] = found

    @property
    def ahead_bytes(self) -> int:
        """Of the blocks that hold what coming micro batches need: so much is asked for ahead."""
        limit = open_cache().limit
        return AHEAD_BYTES if limit is None else min(AHEAD_BYTES, limit // _CACHE_PART)

    def want(self, sample_ids: NDArray[np.int64]) -> int:
        """Have fetched what a gather of samples will read; bytes of the blocks that hold it.

        Returns at once. Raises as the gather does.
        """
        num_bytes = 0
        for tokens, blocks in self._blocks(sample_ids):
            tokens.want(blocks)
            num_bytes += blocks.size * BLOCK_BYTES
        return num_bytes

    def read(self, sample_ids: NDArray[np.int64], gather: Callable[[], T]) -> T:
        """``gather()``, when everything that it reads of samples is there.

        Raises:
            FormatError, ConfigError, OSError: it cannot be fetched (see ``RemoteObject.read``).
        """
        return read_consistently(self._blocks(sample_ids), gather) if self._tokens else gather()

    def _blocks(
        self, sample_ids: NDArray[np.int64]
    ) -> list[tuple[RemoteTokens, NDArray[np.int64]]]:
        shards, begins, ends = self._gatherer.token_ranges(sample_ids)
        present, lows = np.unique(shards, return_index=True)
        highs = [*lows[1:], len(shards)]
        return [
            (tokens, blocks_of(np.stack([begins[low:high], ends[low:high]]), tokens.dtype.itemsize))
            for shard, low, high in zip(present.tolist(), lows, highs, strict=True)
            for tokens in self._tokens.get(shard, ())
        ]

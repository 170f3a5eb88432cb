"""What a gather reads of datasets in object stores: fetched before, looked at again after."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
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
        open_for: opens the shards of samples; called before they are wanted.
        expected: whether shards that are not open yet are remote.
    """

    def __init__(
        self,
        gatherer: _core.Gatherer,
        open_for: Callable[[NDArray[np.int64]], None],
        *,
        expected: bool,
    ) -> None:
        self._gatherer, self._open_for, self._expected = gatherer, open_for, expected
        self._tokens: dict[int, list[RemoteTokens]] = {}

    def add(self, shard: int, *datasets: IndexedDataset | None) -> None:
        """A shard that was opened: what is read of it, tokens or labels or both."""
        arrays = [dataset.tokens for dataset in datasets if dataset is not None]
        remote = [array for array in arrays if isinstance(array, RemoteTokens)]
        if remote:
            self._tokens[shard] = remote

    @property
    def any(self) -> bool:
        """Whether one of the shards, open or not, is remote."""
        return self._expected or bool(self._tokens)

    @property
    def num_open(self) -> int:
        """Remote shards that are open."""
        return len(self._tokens)

    @property
    def ahead_bytes(self) -> int:
        """Of the blocks that hold what coming micro batches need: so much is asked for ahead."""
        limit = open_cache().limit
        return AHEAD_BYTES if limit is None else min(AHEAD_BYTES, limit // _CACHE_PART)

    def want(self, sample_ids: NDArray[np.int64]) -> int:
        """Have fetched what a gather of samples will read; bytes of the blocks that hold it.

        Returns at once. Raises as the gather does.
        """
        self._open_for(sample_ids)
        num_bytes = 0
        for tokens, blocks in self._blocks(sample_ids):
            tokens.want(blocks)
            num_bytes += blocks.size * BLOCK_BYTES
        return num_bytes

    def are_here(self, sample_ids: NDArray[np.int64]) -> bool:
        """Whether a gather of samples would wait for nothing just now."""
        return all(tokens.are_here(blocks) for tokens, blocks in self._blocks(sample_ids))

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
        bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        return [
            (tokens, blocks_of(begins[low:high], ends[low:high], tokens.dtype.itemsize))
            for low, high in pairwise(bounds)
            if low < high
            for tokens in self._tokens.get(int(shards[low]), ())
        ]

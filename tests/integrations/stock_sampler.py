"""Megatron-LM's ``single`` sampler, restated from its contract for the tests.

megatron-core's package has no ``megatron.training``; this is the rule of its
MegatronPretrainingSampler (micro step t of all ranks takes the next mbs * dp numbers, rank r the
r-th run of mbs, what is left at the end is dropped), written anew.
"""

from __future__ import annotations

from collections.abc import Iterator


class SingleSampler:
    """Batches of numbers for one data-parallel rank."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        assert 0 <= consumed_samples < total_samples
        assert 0 <= data_parallel_rank < data_parallel_size
        self.first = consumed_samples + data_parallel_rank * micro_batch_size
        self.stride = micro_batch_size * data_parallel_size
        self.micro_batch_size = micro_batch_size
        self.num_batches = (total_samples - consumed_samples) // self.stride

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.num_batches):
            begin = self.first + batch * self.stride
            yield list(range(begin, begin + self.micro_batch_size))

"""Micro batches of one rank, for hosts that take an iterable with a state and have no sampler.

torchtitan, OLMo-core and nanotron iterate over whatever yields their batches and save what it says
of itself. ``RankRows`` is that for all of them: consecutive rows of a ``RowDataset``, told in the
dialect of the host, from a count of consumed rows on. Two ranks with micro batches of 3 rows, then
three with micro batches of 2, in blocks of 12 rows (one step, all of one bucket):

    micro step   0        1        saved: consumed_rows 12     0       1
    rank 0       0 1 2    6 7 8                                12 13   18 19
    rank 1       3 4 5    9 10 11                              14 15   20 21
    rank 2                                                     16 17   22 23

The rows of a step depend on neither, so that count and the program of the schedule are all that a
checkpoint keeps. ``RankRows.probe`` tries the host's own forward on its first micro batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megapack.attention.probe import probe
from megapack.errors import ConfigError, ResumeError
from megapack.integrations.dialects import Dialect, emit, loss_terms
from megapack.integrations.rows.dataset import RowDataset

logger = logging.getLogger(__name__)

PROBED_BLOCKS = 32


class RankRows:
    """Iterates over what one rank takes, as its host's dialect has it.

    Args:
        rows: the rows of all ranks.
        dialect: a value of ``megapack.integrations.dialects.DIALECTS``.
        data_parallel_rank, data_parallel_size: ranks that share documents count once.
        micro_batch_rows: rows of a micro batch.
        num_workers: processes that read ahead; 0: rows are gathered when they are asked for.

    Attributes:
        consumed_rows: by all ranks together, up to the batch that was yielded last.

    Raises:
        ConfigError: micro steps that do not divide a block, or attention windows that the dialect
            cannot tell.
    """

    def __init__(
        self,
        rows: RowDataset,
        dialect: Dialect,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batch_rows: int,
        num_workers: int = 0,
    ) -> None:
        self.rows, self.dialect = rows, dialect
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_rows = micro_batch_rows
        self.num_workers = num_workers
        self.consumed_rows = 0
        block = rows.options.rows_per_block
        if micro_batch_rows < 1 or block % self.rows_per_micro_step:
            raise ConfigError(
                f"a step of {block} rows is not divided by {data_parallel_size} ranks with micro "
                f"batches of {micro_batch_rows} rows of {rows.options.sequence_length} tokens: "
                "choose sizes whose product divides it"
            )
        if dialect.restart and rows.packed.samples.windows:
            raise ConfigError(
                f"the manifest has attention windows {rows.packed.samples.windows}, and "
                f"{dialect.name} is told of documents by positions that restart, which do not show "
                "them: leave attention_window out"
            )

    @property
    def rows_per_micro_step(self) -> int:
        """Of all ranks."""
        return self.micro_batch_rows * self.data_parallel_size

    def micro_batch(self, consumed_rows: int) -> dict[str, Tensor]:
        """What this rank takes after that many rows, as megapack has it."""
        return self.rows.micro_batch(self._numbers(consumed_rows))

    def _numbers(self, consumed_rows: int) -> range:
        begin = consumed_rows + self.data_parallel_rank * self.micro_batch_rows
        return range(begin, begin + self.micro_batch_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches in the dialect, from ``consumed_rows`` to the last row."""
        begins = range(
            self.consumed_rows,
            len(self.rows) - self.rows_per_micro_step + 1,
            self.rows_per_micro_step,
        )
        gathered = DataLoader(
            self.rows,
            batch_sampler=(list(self._numbers(begin)) for begin in begins),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in gathered:
            # Counted before the host has it: its checkpoint is written behind the batch.
            self.consumed_rows += self.rows_per_micro_step
            yield emit(batch, self.dialect)

    def state_dict(self) -> dict[str, Any]:
        """Alike on all ranks: consumed_rows, and program, JSON that says what decides the rows."""
        begun = -(-self.consumed_rows // self.rows.options.rows_per_block)
        program = json.dumps(self.rows.schedule.state_dict(begun))
        return {"consumed_rows": self.consumed_rows, "program": program}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the rows of a state, with any number of ranks, workers, micro batches.

        Raises:
            ResumeError: the rows up to there were others (``megapack.data.resume``), or end in the
                midst of what is a micro step now.
        """
        consumed_rows = int(state["consumed_rows"])
        for change in self.rows.schedule.check_state(json.loads(state["program"])):
            logger.warning("%s", change)
        block = self.rows.options.rows_per_block
        if consumed_rows % block % self.rows_per_micro_step:
            raise ResumeError(
                f"{consumed_rows} rows are consumed, {consumed_rows % block} of a block of {block},"
                f" and a micro step takes {self.rows_per_micro_step} now: save between steps to "
                "change ranks or micro batches"
            )
        self.consumed_rows = consumed_rows

    # ---- The host's own forward, tried on its first micro batch

    def probe(
        self,
        forward: Callable[[dict[str, Any]], Tensor],
        arrived: Mapping[str, Any],
        *,
        module: nn.Module,
        consumed_rows: int | None = None,
    ) -> None:
        """Refuse a host in which documents of a micro batch see each other, or masks are shifted.

        What is tried is a micro batch of the smallest bucket that comes soon. Every rank calls it
        alike. Dropout is off meanwhile, and buffers of the module (what experts count of tokens)
        are put back.

        Args:
            forward: from a batch in the dialect to the loss of every token, as
                ``megapack.integrations.probe`` takes it.
            arrived: the micro batch as it has come through the host; keys that differ from what
                this loader told are named.
            module: the model.
            consumed_rows: before it; None: it is the one that was yielded last.

        Raises:
            ConfigError: what is wrong.
        """
        if consumed_rows is None:
            consumed_rows = self.consumed_rows - self.rows_per_micro_step
        told = emit(self.micro_batch(consumed_rows), self.dialect)
        for key, value in arrived.items():
            if isinstance(value, Tensor) and not torch.equal(value.cpu(), told[key]):
                raise ConfigError(
                    f"{key!r} of the first micro batch is not what megapack told "
                    f"{self.dialect.name} of rows {list(self._numbers(consumed_rows))}: something "
                    "between the loader and the model changes it"
                )
        with _as_it_was(module):
            seconds = probe(
                lambda asked: forward(emit(asked, self.dialect)),
                self.micro_batch(self._with_most_documents(consumed_rows)),
                outputs="losses",
                counted=lambda asked: loss_terms(asked, self.dialect).weights != 0,
                host=type(module).__name__,
                longest=self.micro_batch(consumed_rows),
            )
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)

    def _with_most_documents(self, consumed_rows: int) -> int:
        """Where to look for boundaries: the first step has the longest documents, one to a row."""
        block = self.rows.options.rows_per_block
        begins = range(consumed_rows // block * block, len(self.rows) - block + 1, block)
        return min(begins[:PROBED_BLOCKS], key=self.rows.bucket_of)


def seen_losses(losses: Tensor, counts: Tensor) -> Tensor:
    """As the probe takes them: one that counts is not 0, however sure of its token a model is."""
    return torch.where(counts, losses.clamp(min=1e-30), losses)


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """A module that evaluates meanwhile, and has its mode and buffers again afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)

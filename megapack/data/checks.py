"""RankChecker: ranks that no longer agree on what a step contains are stopped, not averaged.

A rank with another seed, file or step would train on, silently, on batches of other shapes and
counts. Every ``every`` steps the ranks exchange a few integers that say what they are about to do.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megapack import _core
from megapack.data.dataset import PackedDataset
from megapack.data.documents import ShardedDocuments, SourceDocuments
from megapack.data.sampler import BucketBatchSampler
from megapack.errors import ConfigError, RankMismatchError

# ---- Whether a model has a row for every token id of its documents, before it meets the first ---

logger = logging.getLogger("megapack")

_BLOCKS, _BLOCK_TOKENS = 64, 1 << 16


def check_token_ids(data: PackedDataset, vocab_size: int) -> None:
    """Refuse documents, or labels chosen for them, with ids that the model does not have.

    Args:
        data: what the model is trained on.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: naming the dataset and its largest id.
    """
    chosen = [labels for labels in data.label_datasets if labels is not None]
    for dataset in [*data.datasets, *chosen]:
        if np.iinfo(dataset.dtype).max < vocab_size:
            continue
        largest = _largest_token_id(dataset)
        if largest >= vocab_size:
            raise ConfigError(
                f"{dataset.prefix} holds token id {largest}, and the model has ids below "
                f"{vocab_size}; tokenize with the model's own tokenizer, or give the model a "
                "larger vocabulary"
            )


def _largest_token_id(dataset: SourceDocuments) -> int:
    """-1 without tokens. The meta file knows; without one, blocks all over the .bin are read."""
    if dataset.meta is not None:
        known = dataset.meta["max_token_id"]
        return -1 if known is None else int(known)
    if isinstance(dataset, ShardedDocuments):
        logger.warning("%s: some shards had no .meta.json: token ids are unknown", dataset.prefix)
        return -1
    begins = range(0, dataset.num_tokens, _BLOCK_TOKENS)
    if len(begins) > _BLOCKS:
        begins = begins[:: len(begins) // _BLOCKS]
        logger.warning(
            "%s has no .meta.json (`megapack-build import` writes one): token ids were looked at "
            "in %.1f %% of it",
            dataset.prefix,
            100 * len(begins) * _BLOCK_TOKENS / dataset.num_tokens,
        )
    blocks = (dataset.tokens[begin : begin + _BLOCK_TOKENS] for begin in begins)
    return max((_core.token_range(block)[1] for block in blocks), default=-1)


class RankChecker:
    """Compares the ranks of a torch.distributed group.

    Args:
        sampler: of this rank.
        every: steps between comparisons; the first step is always compared.
        group: process group; None: the default one.

    ``check`` counts its own calls, so that ranks that stand at different steps still meet.
    """

    def __init__(
        self,
        sampler: BucketBatchSampler,
        *,
        every: int = 100,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._sampler = sampler
        self._every = every
        self._group = group
        self._calls = 0
        self._fixed: dict[str, Any] = {
            "check_ranks_every": every,
            **sampler.launch,
            "last_step": sampler.start_step + sampler.num_steps,
            "stages": [],  # the same fields on all ranks, whatever each was given
            **sampler.schedule.identity(),
        }

    def check(self, step: int) -> None:
        """Before ``step`` is taken; all ranks of the group call it equally often.

        Raises:
            RankMismatchError: on every rank, naming the ranks and the fields that differ.
        """
        due = self._calls % self._every == 0
        self._calls += 1
        if not due:
            return
        content = self._sampler.schedule.step(step)
        fields = {
            "step": step,
            **self._fixed,
            "num_micro_steps": self._sampler.num_micro_steps(step),
            "bucket": content.bucket,
            "sample_ids": xxhash.xxh3_64_intdigest(content.sample_ids.tobytes()),
        }
        table = _gather([_code(value) for value in fields.values()], self._group)
        problems = [
            _describe(name, [row[i] for row in table])
            for i, name in enumerate(fields)
            if len({row[i] for row in table}) > 1
        ]
        if problems:
            raise RankMismatchError(
                f"ranks disagree at step {step}: "
                + "; ".join(problems)
                + ". Start all ranks with the same files and configuration"
            )


def _code(value: Any) -> int:
    """Small numbers as they are, everything else by a 62-bit hash."""
    if isinstance(value, int) and 0 <= value < 1 << 40:
        return value
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 2 | 1 << 61


def _gather(codes: list[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    on_gpu = dist.get_backend(group) == "nccl"
    mine = torch.tensor(codes, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    return [row.tolist() for row in table]


def _describe(name: str, codes: list[int]) -> str:
    """``seed is 8 on rank 2 and 7 on the other 3``."""
    common, _ = Counter(codes).most_common(1)[0]
    odd = [f"{_shown(code)} on rank {rank}" for rank, code in enumerate(codes) if code != common]
    others = sum(code == common for code in codes)
    return f"{name} is {', '.join(odd[:8])} and {_shown(common)} on the other {others}"


def _shown(code: int) -> str:
    return str(code) if code < 1 << 40 else f"#{code & 0xFFFFFFFF:08x}"

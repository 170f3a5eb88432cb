"""Whether a model has a row for every token id of its documents, before it meets the first."""

from __future__ import annotations

import logging

import numpy as np

from megapack import _core
from megapack.data.dataset import PackedDataset
from megapack.data.documents import ShardedDocuments, SourceDocuments
from megapack.errors import ConfigError

__all__ = ["check_token_ids"]

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

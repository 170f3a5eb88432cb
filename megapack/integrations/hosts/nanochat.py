"""nanochat: packed rows in place of its training loader; its model, evaluation and loop unchanged.

    write_documents("climbmix")    # once: nanochat's training shards by nanochat's tokenizer
    install("climbmix")            # then scripts.base_train trains on packed rows

nanochat attends over whole rows, and trains the last token of a document to predict the BOS of the
next one. So do these batches. What differs is which tokens a row holds; four documents in rows of 8
tokens (b: BOS), of which nanochat sees one more token than it trains on:

    documents    b 1 2 3 4 5 6 7 8 9 | b 1 2 | b 1 2 3 | b 1 2 3 4
    nanochat     b 1 2 3 4 b 1 2 | b 1 2 3 b 1 2 3      tokens 4 to 9 of the first are dropped
    megapack     b 1 2 3 4 5 6 7 | b 1 2 3 4 b 1 2 | b 1 2 3 8 9      nothing is dropped

A document is cut only if it is longer than a row. Validation keeps nanochat's own loader, so bits
per byte remain comparable. docs/guides/nanochat.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
from nanochat import dataloader
from nanochat.common import get_dist_info
from nanochat.dataset import list_parquet_files
from nanochat.tokenizer import get_tokenizer
from pyarrow import parquet
from torch import Tensor

from megapack.data import PackedDataset, Schedule, build_loader, check_token_ids
from megapack.integrations.host import Rebinding
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

LOADER = "tokenizing_distributed_data_loader_with_state_bos_bestfit"
NO_LABEL = -1  # ignore_index of nanochat's loss


def write_documents(prefix: str, *, num_threads: int = 4) -> IndexedDataset:
    """Tokenize all parquet files of nanochat but the last one, which is for validation, with
    nanochat's tokenizer, a BOS before every document. Return the documents ``<prefix>.bin``."""
    tokenizer = get_tokenizer()
    bos, vocab_size = tokenizer.get_bos_token_id(), tokenizer.get_vocab_size()
    with IndexedDatasetBuilder(
        prefix, np.uint16 if vocab_size <= 1 << 16 else np.int32, vocab_size=vocab_size
    ) as builder:
        for path in list_parquet_files()[:-1]:
            shard = parquet.ParquetFile(path)
            for group in range(shard.num_row_groups):
                texts = shard.read_row_group(group, columns=["text"]).column("text").to_pylist()
                for tokens in tokenizer.encode(texts, prepend=bos, num_threads=num_threads):
                    builder.add_document(tokens)
    return IndexedDataset(prefix)


def packed_batches(
    prefix: str,
    tokenizer: Any,
    rows: int,
    row_tokens: int,
    *,
    seed: int = 0,
    device: Any = "cuda",
    state: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Yield inputs and targets, int64 (rows, row_tokens), of this rank, and the state before them.

    nanochat fetches the next batch before it saves a checkpoint, and loses that batch on resume.
    With the state before it, the resumed run begins with it. The number of ranks must not change.
    Raises ResumeError for another order of samples, and ConfigError if the documents have token ids
    that the tokenizer does not have, or if the run repeats them more often than ``max_epochs`` of a
    blend allows.
    """
    _, rank, _, num_ranks = get_dist_info()
    dataset = IndexedDataset(prefix)
    index = pack(dataset.document_lengths, buckets=[row_tokens])
    packed = PackedDataset(dataset, index, attention="sample", label_boundary="sample")
    check_token_ids(packed, tokenizer.get_vocab_size())
    schedule = Schedule(packed, tokens_per_step=rows * row_tokens * num_ranks, seed=seed)
    step = 0 if state is None else schedule.resume_step(state["megapack"])
    for epoch in count(1):
        loader = build_loader(
            packed,
            schedule,
            layout="rows",
            micro_batch_tokens=rows * row_tokens,
            data_parallel_rank=rank,
            data_parallel_size=num_ranks,
            start_step=step,
            num_steps=max(0, schedule.num_steps(epoch) - step),
            device=device,
            pin_memory=True,
        )
        for batch in loader:
            targets = batch["labels"].masked_fill(batch["labels"] < 0, NO_LABEL)
            position = {"pq_idx": 0, "rg_idx": batch["step"], "epoch": epoch}  # base_train logs it
            yield (
                batch["tokens"],
                targets,
                {**position, "megapack": schedule.state_dict(batch["step"])},
            )
        step = max(step, schedule.num_steps(epoch))


def install(prefix: str, *, seed: int = 0) -> Rebinding:
    """Replace the training loader of nanochat until ``undo()``; call it before scripts.base_train
    is imported. Raises ConfigError if this nanochat has no such loader.

    Args:
        prefix: documents of ``write_documents``.
        seed: seed of the order of rows.
    """
    rebinding = Rebinding("nanochat")
    stock = getattr(dataloader, LOADER, None)

    def loader(
        tokenizer: Any,
        B: int,  # noqa: N803 (nanochat's names)
        T: int,  # noqa: N803
        split: str,
        *args: Any,
        device: Any = "cuda",
        resume_state_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        if split == "train":
            return packed_batches(
                prefix, tokenizer, B, T, seed=seed, device=device, state=resume_state_dict
            )
        assert stock is not None  # replace() would have raised
        options = {"device": device, "resume_state_dict": resume_state_dict, **kwargs}
        validation: Iterator[Any] = stock(tokenizer, B, T, split, *args, **options)
        return validation

    rebinding.replace(dataloader, LOADER, loader)
    return rebinding

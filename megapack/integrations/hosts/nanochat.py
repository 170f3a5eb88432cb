"""nanochat: packed rows replace its training loader; model, evaluation and loop remain.

    install("climbmix")            # then scripts.base_train trains on packed rows

``climbmix.bin`` holds documents of nanochat's tokenizer, a BOS before each
(examples/nanochat_packed.py writes it). nanochat attends over whole rows, and trains the last token
of a document to predict the BOS of the next one. These batches do the same; only the
tokens of a row differ. Four documents, rows of 8 tokens (b: BOS; nanochat adds one label per row):

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

from nanochat import dataloader
from nanochat.common import get_dist_info
from torch import Tensor

from megapack.data import PackedDataset, Schedule, build_loader, check_token_ids
from megapack.data.loader import LoaderState
from megapack.integrations.host import Rebinding
from megapack.packing import pack
from megapack.storage import IndexedDataset

LOADER = "tokenizing_distributed_data_loader_with_state_bos_bestfit"
NO_LABEL = -1  # ignore_index of nanochat's loss


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
    A resume from the state before the batch draws that batch again. The number of ranks must not
    change. Raises ResumeError if the order of samples or the bytes of the documents differ, and
    ConfigError if the documents have token ids that the tokenizer lacks, or if a run repeats them
    too often (``max_epochs``).
    """
    _, rank, _, num_ranks = get_dist_info()
    dataset = IndexedDataset(prefix)
    index = pack(dataset.document_lengths, buckets=[row_tokens])
    packed = PackedDataset(dataset, index, attention="sample", label_boundary="sample")
    check_token_ids(packed, tokenizer.get_vocab_size())
    tokens = rows * row_tokens
    schedule = Schedule(packed, tokens_per_step=tokens * num_ranks, seed=seed)
    saved = LoaderState(schedule, packed)
    step = 0 if state is None else saved.resume_step(state.get("megapack", {}))
    for epoch in count(1):
        loader = build_loader(
            packed,
            schedule,
            layout="rows",
            micro_batch_tokens=tokens,
            data_parallel_rank=rank,
            data_parallel_size=num_ranks,
            start_step=step,
            num_steps=max(0, schedule.num_steps(epoch) - step),
            device=device,
            pin_memory=True,
        )
        for batch in loader:
            step = batch["step"]
            targets = batch["labels"].masked_fill(batch["labels"] < 0, NO_LABEL)
            logged = {"epoch": epoch, "pq_idx": 0, "rg_idx": step}  # base_train prints these
            yield batch["tokens"], targets, {**logged, "megapack": saved.save(step)}
        step = max(step, schedule.num_steps(epoch))


def install(prefix: str, *, seed: int = 0) -> Rebinding:
    """Replace nanochat's training loader by packed rows of the dataset ``prefix``, shuffled with
    ``seed``, until ``undo()``. Call it before scripts.base_train is imported. Raises ConfigError if
    this nanochat has no such loader."""
    rebinding = Rebinding("nanochat")
    stock = getattr(dataloader, LOADER, None)

    def loader(
        tokenizer: Any, rows: int, row_tokens: int, split: str, *args: Any, **options: Any
    ) -> Any:
        if split != "train" and stock is not None:
            return stock(tokenizer, rows, row_tokens, split, *args, **options)
        device, state = options.get("device", "cuda"), options.get("resume_state_dict")
        of_rank = {"seed": seed, "device": device, "state": state}
        return packed_batches(prefix, tokenizer, rows, row_tokens, **of_rank)

    rebinding.replace(dataloader, LOADER, loader)
    return rebinding

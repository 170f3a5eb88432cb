"""What the benchmarks of data read: corpora, and megatron-core's dataset over them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lengths import LAWS
from numpy.typing import NDArray

from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

__all__ = ["BUCKETS", "ROW", "megatron_train", "write_corpus", "write_index", "write_large_corpus"]

warnings.filterwarnings("ignore", module="megatron")

ROW = 4096
BUCKETS = [1024, 2048, 4096, 8192, 16384]
VOCABULARY, EOD = 50_000, 0


class Tokenizer:
    """What megatron-core's datasets read of one."""

    vocab_size, eod, pad = VOCABULARY, EOD, -1
    unique_identifiers = ("Tokenizer",)


def write_corpus(prefix: Path, num_tokens: int) -> IndexedDataset:
    """Documents of calibrated lengths, each ending with EOD."""
    lengths = LAWS["fineweb_edu_like"](num_tokens // 900, 1)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, offsets[-1]).astype(np.uint16)
    tokens[offsets[1:] - 1] = EOD
    with IndexedDatasetBuilder(prefix, np.uint16, vocab_size=VOCABULARY) as builder:
        builder.add_documents(tokens, offsets)
    return IndexedDataset(prefix)


def write_large_corpus(prefix: Path, num_documents: int) -> None:
    """A whole .idx, packed, and a .bin of holes."""
    lengths = LAWS["fineweb_edu_like"](num_documents, 1)
    write_index(prefix, lengths)
    index = pack(lengths, "bucket", buckets=BUCKETS)
    index.save(f"{prefix}.samples", source=IndexedDataset(prefix), overwrite=True)


def write_index(prefix: Path, lengths: NDArray[np.int32]) -> None:
    """The .idx of documents, and a .bin of holes: of the right size, without taking the space."""
    num_documents = len(lengths)
    pointers = np.zeros(num_documents + 1, np.int64)
    np.cumsum(2 * lengths.astype(np.int64), out=pointers[1:])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]))
        file.write(np.array([num_documents, num_documents + 1], np.int64).tobytes())
        for array in (lengths, pointers[:-1], np.arange(num_documents + 1, dtype=np.int64)):
            array.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(pointers[-1]))


def megatron_train(
    dataset: type | None,
    blend: Path | Sequence[Path],
    cache: Path,
    *,
    positions: bool,
    num_samples: int,
) -> Any:
    """The train split of ``dataset`` (None: GPTDataset), through megatron-core's own builder.

    Args:
        dataset: what the builder makes.
        blend: prefix of an indexed dataset, or what ``dataset`` takes for one; or several, of
            equal weights.
        cache: folder of its indices.
        positions: reset positions and mask the loss at every end of document.
        num_samples: how many to ask for.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: PLC0415
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: PLC0415

    paths = [blend] if isinstance(blend, Path) else blend
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=ROW,
        blend=([str(path) for path in paths], [1.0] * len(paths) if len(paths) > 1 else None),
        split="100,0,0",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        reset_position_ids=positions,
        reset_attention_mask=False,
        eod_mask_loss=positions,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(
        dataset or GPTDataset, [num_samples, 0, 0], lambda: True, config
    ).build()
    return train

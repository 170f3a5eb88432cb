"""Finished shards -> the datasets that were asked for, in the order of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megapack.errors import DataError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.merge import merge
from megapack.storage.meta import OWN_KEYS
from megapack.storage.mmididx import path_of, read_header
from megapack.tokenization.config import BuildConfig
from megapack.tokenization.job import Job
from megapack.tokenization.shard import LABELS, shard_prefix
from megapack.tokenization.split import SPLIT_NAMES, ordered_split

__all__ = ["assemble", "output_prefixes"]


def output_prefixes(config: BuildConfig) -> dict[str, str]:
    """The datasets a build makes: stream (``""``, ``"_valid"``, ``"_valid.labels"``) -> prefix.

    GPT-NeoX names the tokens ``<prefix>_<key>_document`` and the labels
    ``<prefix>_<key>_label_document``.
    """
    splits = [""]
    if config.split_weights is not None:
        chosen = zip(SPLIT_NAMES, config.split_weights, strict=True)
        splits = [f"_{name}" for name, weight in chosen if weight > 0]
    prefixes = {}
    for split in splits:
        base = config.output_prefix + split
        if config.label_names == "neox":
            prefixes[split] = f"{base}_{config.messages_key}_document"
            prefixes[split + LABELS] = f"{base}_{config.messages_key}_label_document"
            continue
        prefixes[split] = base
        if config.messages_key is not None:
            prefixes[split + LABELS] = base + LABELS
    return prefixes


def assemble(job: Job, config: BuildConfig, documents_of_shard: Sequence[int]) -> None:
    """Join all shards.

    Raises:
        DataError: a split would be empty.
        OSError: a file cannot be written; the shards are kept.
    """
    shards = [shard_prefix(job.work_dir, i) for i in range(len(documents_of_shard))]
    outputs = output_prefixes(config)
    if config.split_weights is None or job.hash_weights is not None:
        sources = {stream: [shard + stream for shard in shards] for stream in outputs}
        for stream, output in outputs.items():
            _require_documents(sum(map(_num_documents, sources[stream])), output)
        for stream, output in outputs.items():
            merge(sources[stream], output, overwrite=True)
        return
    ranges = ordered_split(config.split_weights, sum(documents_of_shard))
    documents = {f"_{name}": chosen for name, chosen in zip(SPLIT_NAMES, ranges, strict=True)}
    for stream, output in outputs.items():
        _require_documents(len(documents[stream.removesuffix(LABELS)]), output)
    for stream, output in outputs.items():
        end = LABELS if stream.endswith(LABELS) else ""
        parts = [shard + end for shard in shards]
        _cut(parts, documents_of_shard, documents[stream.removesuffix(LABELS)], output)


def _num_documents(prefix: str) -> int:
    return read_header(path_of(prefix, ".idx")).num_documents


def _require_documents(num_documents: int, output: str) -> None:
    if not num_documents:
        raise DataError(f"{Path(output).name} would have no documents; give it a larger --split")


def _cut(
    sources: Sequence[str], documents_of: Sequence[int], documents: range, output: str
) -> None:
    """Write documents ``[start, stop)`` of the concatenated ``sources``."""
    first = IndexedDataset(sources[0])
    is_labels = first.vocab_size is None
    metadata = {k: v for k, v in (first.meta or {}).items() if k not in OWN_KEYS}
    with IndexedDatasetBuilder(
        output,
        first.dtype,
        vocab_size=first.vocab_size,
        allow_negative=is_labels,
        metadata=metadata,
        overwrite=True,
    ) as builder:
        begin = 0
        for source, count in zip(sources, documents_of, strict=True):
            low = max(documents.start - begin, 0)
            high = min(documents.stop - begin, count)
            begin += count
            if low == 0 and high == count:
                builder.add_index(source)
            elif low < high:
                dataset = IndexedDataset(source)
                bounds = dataset.document_offsets[low : high + 1]
                builder.add_documents(dataset.tokens[bounds[0] : bounds[-1]], bounds - bounds[0])

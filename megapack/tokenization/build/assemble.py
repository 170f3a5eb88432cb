"""Finished shards -> the datasets that were asked for, in the order of the corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megapack.errors import DataError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.merge import merge
from megapack.storage.mmididx import path_of, read_header
from megapack.tokenization.build.config import BuildConfig
from megapack.tokenization.build.plan import Plan
from megapack.tokenization.build.record import LABELS, shard_prefix
from megapack.tokenization.build.space import directory_bytes, free_bytes
from megapack.tokenization.build.workspace import Workspace
from megapack.tokenization.corpus.split import SPLIT_NAMES, ordered_split

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


def assemble(
    plan: Plan,
    workspace: Workspace,
    outputs: Mapping[str, str],
    documents_of_shard: Sequence[int],
    *,
    metadata: Mapping[str, Any],
    progress: Callable[[int, int], None],
) -> None:
    """Join all shards. Where the disk has no room for two copies, a shard's tokens are removed as
    soon as they are copied; a run that is stopped then has to build those again.

    Args:
        outputs: from ``output_prefixes``.
        documents_of_shard: of every shard of the plan.
        metadata: for the meta files, besides the plan's.
        progress: called with (parts copied, parts in all).

    Raises:
        DataError: a split would be empty.
        OSError: a file cannot be written.
    """
    directory = workspace.directory
    shards = [shard_prefix(str(directory), i) for i in range(len(documents_of_shard))]
    remove = directory_bytes(directory) > free_bytes(directory)
    done = 0

    def copied(source: str, *, used_up: bool = True) -> None:
        nonlocal done
        done += 1
        progress(done, len(shards) * len(outputs))
        if remove and used_up:
            path_of(source, ".bin").unlink()

    ranges = _ranges(plan, sum(documents_of_shard))
    for stream, output in outputs.items():  # all of them, or none
        if ranges is None:
            num_documents = sum(_num_documents(shard + stream) for shard in shards)
        else:
            num_documents = len(ranges[stream.removesuffix(LABELS)])
        if not num_documents:
            name = Path(output).name
            raise DataError(f"{name} would have no documents; give it a larger --split")
    workspace.join()
    for stream, output in outputs.items():
        is_labels = stream.endswith(LABELS)
        facts = {**(plan.label_metadata if is_labels else plan.metadata), **metadata}
        if ranges is None:
            sources = [shard + stream for shard in shards]
            following = iter(sources)
            merge(
                sources,
                output,
                metadata=facts,
                overwrite=True,
                progress=lambda *_: copied(next(following)),  # noqa: B023
            )
            continue
        builder = IndexedDatasetBuilder(
            output,
            np.int32 if is_labels else plan.dtype,
            vocab_size=None if is_labels else plan.tokenizer.vocab_size,
            allow_negative=is_labels,
            metadata=facts,
            overwrite=True,
        )
        with builder:
            begin = 0
            wanted = ranges[stream.removesuffix(LABELS)]
            for shard, count in zip(shards, documents_of_shard, strict=True):
                source = shard + (LABELS if is_labels else "")
                low, high = max(wanted.start - begin, 0), min(wanted.stop - begin, count)
                _append(builder, source, low, high, count)
                copied(source, used_up=low < high == count)
                begin += count


def _ranges(plan: Plan, num_documents: int) -> dict[str, range] | None:
    """The documents of every split where shards are cut; None where they are joined whole."""
    if plan.split is None or plan.split_while_writing:
        return None
    cut = ordered_split(plan.split, num_documents)
    return {f"_{name}": documents for name, documents in zip(SPLIT_NAMES, cut, strict=True)}


def _num_documents(prefix: str) -> int:
    return read_header(path_of(prefix, ".idx")).num_documents


def _append(builder: IndexedDatasetBuilder, source: str, low: int, high: int, count: int) -> None:
    """Documents ``[low, high)`` of the ``count`` of ``source``."""
    if low == 0 and high == count:
        builder.add_index(source)
    elif low < high:
        dataset = IndexedDataset(source)
        bounds = dataset.document_offsets[low : high + 1]
        builder.add_documents(dataset.tokens[bounds[0] : bounds[-1]], bounds - bounds[0])

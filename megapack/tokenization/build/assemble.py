"""Finished shards -> the datasets that were asked for, in the order of the corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megapack.errors import DataError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.merge import merge
from megapack.storage.mmididx import path_of, read_header
from megapack.tokenization.build.config import LABELS, BuildConfig
from megapack.tokenization.build.plan import Plan
from megapack.tokenization.build.record import shard_prefix
from megapack.tokenization.build.space import directory_bytes, free_bytes
from megapack.tokenization.build.workspace import Workspace
from megapack.tokenization.corpus.split import SPLIT_NAMES, ordered_split

__all__ = ["assemble"]


def assemble(
    plan: Plan,
    config: BuildConfig,
    workspace: Workspace,
    documents_of_shard: Sequence[int],
    progress: Callable[[int, int], None],
    *,
    command: str,
) -> None:
    """Join all shards. Where the disk has no room for two copies, a shard's tokens are removed as
    soon as they are copied; a run that is stopped then has to build those again.

    Args:
        documents_of_shard: of every shard of the plan.
        progress: called with (shards copied, shards to copy), counted for every output.
        command: that builds the same datasets, for their meta files.

    Raises:
        DataError: a split would be empty.
        OSError: a file cannot be written.
    """
    directory, outputs = workspace.directory, config.outputs
    shards = [shard_prefix(directory, i) for i in range(len(documents_of_shard))]
    remove = directory_bytes(directory) > free_bytes(directory)
    done = 0

    def copied(dataset: str, *, used_up: bool = True) -> None:
        nonlocal done
        done += 1
        progress(done, len(shards) * len(outputs))
        if remove and used_up:
            path_of(dataset, ".bin").unlink()

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
        stored = plan.stored(labels=is_labels)
        stored["metadata"]["command"] = command
        if ranges is None:
            datasets = [shard + stream for shard in shards]
            following = iter(datasets)
            merge(
                datasets,
                output,
                metadata=stored["metadata"],
                overwrite=True,
                progress=lambda *_: copied(next(following)),  # noqa: B023
            )
            continue
        with IndexedDatasetBuilder(output, **stored, overwrite=True) as builder:
            begin = 0
            wanted = ranges[stream.removesuffix(LABELS)]
            for shard, count in zip(shards, documents_of_shard, strict=True):
                dataset = shard + (LABELS if is_labels else "")
                low, high = max(wanted.start - begin, 0), min(wanted.stop - begin, count)
                _append(builder, dataset, low, high, count)
                copied(dataset, used_up=low < high == count)
                begin += count


def _ranges(plan: Plan, num_documents: int) -> dict[str, range] | None:
    """The documents of every split where shards are cut; None where they are joined whole."""
    if plan.split is None or plan.split_while_writing:
        return None
    cut = ordered_split(plan.split, num_documents)
    return {f"_{name}": documents for name, documents in zip(SPLIT_NAMES, cut, strict=True)}


def _num_documents(prefix: str) -> int:
    return read_header(path_of(prefix, ".idx")).num_documents


def _append(builder: IndexedDatasetBuilder, prefix: str, low: int, high: int, count: int) -> None:
    """Documents ``[low, high)`` of the ``count`` of a dataset."""
    if low == 0 and high == count:
        builder.add_index(prefix)
    elif low < high:
        dataset = IndexedDataset(prefix)
        bounds = dataset.document_offsets[low : high + 1]
        builder.add_documents(dataset.tokens[bounds[0] : bounds[-1]], bounds - bounds[0])

"""A manifest and what a host asks for -> rows: sources mapped, packed or found packed, blended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megapack.data.blend import open_blend
from megapack.data.documents import ShardedDocuments, SourceDocuments
from megapack.data.report import check_epochs, plan_run
from megapack.errors import ConfigError
from megapack.integrations.index_cache import Recipe, cached_index, is_first_rank
from megapack.integrations.manifest import Manifest, Source, default_buckets
from megapack.integrations.rows import RowDataset, RowOptions
from megapack.packing.shards import ShardedIndex, SourceIndex
from megapack.storage import IndexedDataset
from megapack.storage.remote import is_remote

__all__ = ["open_rows", "open_sources"]

logger = logging.getLogger(__name__)


def open_sources(manifest: Manifest) -> list[SourceDocuments]:
    """The documents of a manifest, memory-mapped; those of shards when a sample needs them.

    Raises OSError or FormatError naming the file.
    """
    return [
        ShardedDocuments(index, with_labels=source.labels != "none")
        if source.prefix is None and isinstance(index := source.open_index(), ShardedIndex)
        else IndexedDataset(str(source.prefix))
        for source in manifest.sources
    ]


def open_rows(
    manifest: Manifest,
    datasets: Sequence[SourceDocuments],
    options: RowOptions,
    *,
    split: tuple[float, float] = (0.0, 1.0),
    num_rows: int | None = None,
    cache_directory: str | Path | None = None,
) -> RowDataset:
    """Pack the sources of a manifest (or find them packed) and lay them out in rows.

    Args:
        manifest: sources and packing options; its seed, rows_per_block, align and cache_directory
            go before those of the host.
        datasets: ``open_sources(manifest)``.
        options: what the host asks for.
        split: part of every source's documents, as fractions; (0.99, 1.0) is the last percent.
            Stages are of the part that begins with the first document; what is behind it (for
            validation and test) has the sources and weights of the manifest from end to end.
        num_rows: see ``RowDataset``.
        cache_directory: of the host; None: ``megapack-cache`` beside the first source, if that is
            no address.

    Raises:
        ConfigError: options that exclude each other, or a split without documents.
        MegapackError, OSError: sources that cannot be read or packed.
    """
    stages = manifest.stages if split[0] == 0 else ()
    options = _overruled(options, manifest)
    where = manifest.cache_directory or cache_directory
    if where is None and not is_remote(datasets[0].prefix):
        where = Path(datasets[0].prefix).parent / "megapack-cache"
    used = [
        (source, dataset, index)
        for source, dataset in zip(manifest.sources, datasets, strict=True)
        if (stages or source.weight != 0)
        and (index := _index_of(source, dataset, manifest, options, split, where)) is not None
    ]
    if not used:
        raise ConfigError(
            f"documents {split[0]:.4g} to {split[1]:.4g} of "
            f"{', '.join(source.title for source in manifest.sources)} hold no tokens; change "
            "--split"
        )
    sources, documents, indices = zip(*used, strict=True)
    packed = open_blend(
        sources,
        documents,
        indices,
        max_epochs=manifest.max_epochs,
        stages=stages,
        attention_window=manifest.attention_window if split[0] == 0 else None,  # not in evaluation
        alignment=options.align,
    )
    rows = RowDataset(packed, options, order=manifest.order, num_rows=num_rows)
    num_blocks = -(-len(rows) // options.rows_per_block)
    check_epochs(rows.schedule, num_blocks)
    if is_first_rank():
        logger.info(
            "blocks of %d rows:\n%s", options.rows_per_block, plan_run(rows.schedule, num_blocks)
        )
    return rows


def _index_of(
    source: Source,
    dataset: SourceDocuments,
    manifest: Manifest,
    options: RowOptions,
    split: tuple[float, float],
    where: str | Path | None,
) -> SourceIndex | None:
    """The samples of one source's split, None where it has no tokens."""
    begin, end = (round(part * dataset.num_documents) for part in split)
    if begin == end:
        return None
    if source.index is not None or isinstance(dataset, ShardedDocuments):
        whole = (begin, end) == (0, dataset.num_documents)
        return _index_given(source, dataset, options, whole=whole)
    buckets = manifest.buckets or default_buckets(options.sequence_length, options.align)
    if max(buckets) > options.sequence_length:
        raise ConfigError(
            f"bucket {max(buckets)} is longer than the host's sequence length "
            f"{options.sequence_length}; raise --seq-length or drop the bucket"
        )
    if where is None:
        raise ConfigError(
            f"the samples of {source.title!r} are packed into a directory that all nodes see, and "
            f"{dataset.prefix} is an address: give cache_directory (the host's cache path), or the "
            "index that `megapack-build pack` made"
        )
    recipe = Recipe(
        begin=begin,
        end=end,
        strategy=manifest.strategy,
        parameters=manifest.parameters,
        buckets=tuple(buckets),
        seed=options.seed,
        align=options.align,
    )
    index = cached_index(dataset, recipe, Path(where), node_local=manifest.node_local)
    return index if index.num_samples else None


def _index_given(
    source: Source, dataset: SourceDocuments, options: RowOptions, *, whole: bool
) -> SourceIndex:
    """The .samples, or the shard manifest, that a source names."""
    if not whole:
        raise ConfigError(
            f"source {source.title!r} names index {source.index}, which has all its documents, "
            "and the host asks for a part: give one split all of them (--split 100,0,0), or leave "
            "out index"
        )
    index = dataset.index if isinstance(dataset, ShardedDocuments) else source.open_index()
    if index.alignment % options.align:
        raise ConfigError(
            f"index {source.index} has no room for segments at multiples of {options.align}: pack "
            f"it with --alignment {options.align}, or leave out index"
        )
    return index


def _overruled(options: RowOptions, manifest: Manifest) -> RowOptions:
    """What the manifest says, where it says something."""
    given = {name: getattr(manifest, name) for name in ("seed", "rows_per_block", "align")}
    return replace(options, **{name: v for name, v in given.items() if v is not None})

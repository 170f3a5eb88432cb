"""A manifest and what a host asks for -> rows: sources mapped, packed or found packed, blended."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash

from megapack.data.dataset import open_blend
from megapack.data.documents import SourceDocuments, open_source
from megapack.data.fim import open_fim
from megapack.data.report import check_epochs, check_labels, plan_run
from megapack.errors import ConfigError
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.manifest import Manifest, Source, default_buckets
from megapack.packing import SampleIndex, find_strategy, pack
from megapack.packing.sample_index import describe_source
from megapack.packing.sharded import SourceIndex
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote

# ---- The sample index of a source, built once and found again by content ------------------------
# The name of a cached file holds a digest of everything that decides what is in it: the layout of
# the documents (not their path or date), the range of documents, strategy, parameters, capacities,
# seed and alignment. A changed dataset or option is another file; a stale one is never opened.

logger = logging.getLogger(__name__)

# Part of every digest: raise it when the same recipe gives other samples.
VERSION = 2
BUILD_TIMEOUT = 3600.0  # seconds that ranks wait for the one that builds
MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything beside the documents that decides an index."""

    begin: int
    """First document."""
    end: int
    """Behind the last document."""
    strategy: str
    parameters: dict[str, Any]
    buckets: tuple[int, ...]
    seed: int
    align: int = 1
    """Segments are given room in multiples of this many tokens."""
    fim_room: int = 0
    """Tokens by which a document may grow (``megapack.data.fim``)."""

    def digest(self, fingerprint: str) -> str:
        """Identity of the index of a dataset with this fingerprint: 32 hexadecimal digits."""
        strategy = find_strategy(self.strategy)
        content = asdict(self) | {"parameters": strategy.resolve(self.parameters)}
        content |= {"version": VERSION, "documents": fingerprint}
        if not self.fim_room:  # as before there was any
            del content["fim_room"]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def cached_index(
    dataset: IndexedDataset, recipe: Recipe, directory: Path, *, node_local: bool = False
) -> SampleIndex:
    """The index of a recipe, memory-mapped from ``directory``; built there if it is missing.

    Global rank 0 builds and the others wait for the file; with ``node_local`` the first process of
    a node to come builds, under a lock, and the others of that node wait. Files appear under their
    name only when they are complete.

    Args:
        dataset: the documents.
        recipe: how they are packed.
        directory: where index files lie; created if missing.
        node_local: the directory is a disk of each node and not shared between nodes.

    Raises:
        ConfigError: the file did not appear in an hour; the message says what to try.
        OSError: the directory cannot be written.
    """
    name = f"{Path(dataset.prefix).name}-{recipe.strategy}-{recipe.digest(dataset.fingerprint)}"
    path = directory / f"{name}.samples"
    if not path.exists():
        if node_local or is_first_rank():
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory) if node_local else nullcontext():
                if not path.exists():
                    _build_and_save(dataset, recipe, path)
        else:
            _wait_for(path)
    return SampleIndex.load(path)


def is_first_rank() -> bool:
    """Whether this is global rank 0. Without a process group every process is its own first."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Alone among the processes of this node; the lock ends with the process, whatever happens."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build_and_save(dataset: IndexedDataset, recipe: Recipe, path: Path) -> None:
    started = time.perf_counter()
    index = build_index(dataset, recipe)
    # Given as a mapping: the index knows the lengths of its range, not those of all documents.
    index.save(path, source=describe_source(dataset, dataset.prefix))
    metrics = index.metrics()
    logger.info(
        "packed %s documents [%d, %d) in %.1f s: %d samples, padding %.3f %%, cut documents "
        "%.3f %% -> %s",
        dataset.prefix,
        recipe.begin,
        recipe.end,
        time.perf_counter() - started,
        metrics["num_samples"],
        100 * metrics["padding_ratio"],
        100 * metrics["num_truncated_documents"] / max(1, recipe.end - recipe.begin),
        path,
    )


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + BUILD_TIMEOUT
    pause = 0.05
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} did not appear in {BUILD_TIMEOUT:.0f} s; rank 0 builds it. If the "
                'directory is not shared between nodes set "node_local" in the manifest; to build '
                "before the job starts run `python -m megapack.integrations.rows.index`"
            )
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def build_index(dataset: IndexedDataset, recipe: Recipe) -> SampleIndex:
    """Pack the documents of a recipe; ids and positions are those of the whole dataset.

    Raises:
        ConfigError: capacities that are no multiples of ``align``.
        ValueError: what else ``pack`` refuses.
    """
    unaligned = [capacity for capacity in recipe.buckets if capacity % recipe.align]
    if unaligned:
        raise ConfigError(
            f"bucket {unaligned[0]} is no multiple of align {recipe.align}; choose capacities that "
            "are (2 x context_parallel_size x tensor_parallel_size always works)"
        )
    lengths = np.array(dataset.document_lengths)  # a copy: the others are hidden below
    lengths[: recipe.begin] = 0
    lengths[recipe.end :] = 0
    return pack(
        lengths,
        recipe.strategy,
        buckets=recipe.buckets,
        seed=recipe.seed,
        threads=min(MAX_THREADS, os.cpu_count() or 1),
        alignment=recipe.align,
        fim_room=recipe.fim_room,
        **recipe.parameters,
    )


def open_documents(manifest: Manifest) -> list[SourceDocuments]:
    """Return the documents of a manifest, memory-mapped; shards are opened when they are needed.

    Raises OSError or FormatError naming the file.
    """
    return [
        open_source(
            source.prefix,
            source.open_index() if source.prefix is None else None,
            labels=None if source.labels == "none" else source.labels,
            weights=None if source.token_weights == "none" else source.token_weights,
        )
        for source in manifest.sources
    ]


def open_rows(
    manifest: Manifest,
    datasets: Sequence[SourceDocuments],
    options: RowOptions,
    *,
    split: tuple[float, float] = (0.0, 1.0),
    num_rows: int | None = None,
    finite: bool = False,
    cache_directory: str | Path | None = None,
) -> RowDataset:
    """Pack the sources of a manifest (or find them packed) and lay them out in rows.

    Args:
        manifest: sources and packing options; its seed, rows_per_block, align and cache_directory
            go before those of the host.
        datasets: ``open_documents(manifest)``.
        options: what the host asks for.
        split: part of every source's documents, as fractions; (0.99, 1.0) is the last percent.
            Stages are of the part that begins with the first document; what is behind it (for
            validation and test) has the sources and weights of the manifest from end to end.
        num_rows, finite: see ``RowDataset``. A finite set has the host's rows_per_block, no stages
            and no attention window.
        cache_directory: of the host; None: ``megapack-cache`` beside the first source, if that is
            no address.

    Documents are turned round (``fim``) where they are trained on, that is, where stages are.

    Raises:
        ConfigError: options that exclude each other, or a split without documents.
        MegapackError, OSError: sources that cannot be read or packed.
    """
    trains = split[0] == 0 and not finite
    stages = manifest.stages if trains else ()
    names = ("seed", "align") if finite else ("seed", "align", "rows_per_block")
    given = {name: getattr(manifest, name) for name in names}
    options = replace(options, **{name: v for name, v in given.items() if v is not None})
    where = manifest.cache_directory or cache_directory
    if where is None and not is_remote(datasets[0].prefix):
        where = Path(datasets[0].prefix).parent / "megapack-cache"
    if not trains:
        held_out = tuple(replace(source, fim_rate=None) for source in manifest.sources)
        manifest = replace(manifest, sources=held_out, fim=None)
    rooms = _fim_rooms(manifest, datasets)
    used = [
        (source, dataset, index)
        for source, dataset, room in zip(manifest.sources, datasets, rooms, strict=True)
        if (stages or source.weight != 0)
        and (index := _index_of(source, dataset, manifest, options, split, where, room)) is not None
    ]
    if not used:
        raise ConfigError(
            f"documents {split[0]:.4g} to {split[1]:.4g} of "
            f"{', '.join(source.title for source in manifest.sources)} hold no tokens; change "
            "--split"
        )
    sources, documents, indices = zip(*used, strict=True)
    window, run_tokens = (manifest.attention_window, manifest.run_tokens) if trains else (None,) * 2
    blend = replace(
        manifest, sources=sources, stages=stages, attention_window=window, run_tokens=run_tokens
    )
    attention = manifest.attention if trains else "document"
    packed = open_blend(blend, documents, indices, alignment=options.align, attention=attention)
    rows = RowDataset(packed, options, order=manifest.order, num_rows=num_rows, finite=finite)
    num_blocks = -(-len(rows) // options.rows_per_block)
    check_epochs(rows.schedule, num_blocks)
    if trains:
        check_labels(rows.schedule, num_blocks)
    if is_first_rank():
        plan = plan_run(rows.schedule, num_blocks)
        # Without a line break of its own: nanotron's handler cuts messages there, unformatted.
        logger.info("blocks of %d rows:%s", options.rows_per_block, f"\n{plan}")
    return rows


def open_data_path(data_path: str | Manifest, options: RowOptions, **more: Any) -> RowDataset:
    """The rows of a host's data path.

    Args:
        data_path: a prefix, a manifest file, JSON text (``Manifest.read``), or a Manifest.
        options: what the host asks for.
        more: split, num_rows, finite, cache_directory of ``open_rows``.
    """
    manifest = Manifest.read(data_path) if isinstance(data_path, str) else data_path
    return open_rows(manifest, open_documents(manifest), options, **more)


def _fim_rooms(manifest: Manifest, datasets: Sequence[SourceDocuments]) -> list[int]:
    """Of every source the tokens by which its documents may grow."""
    if manifest.fim is None:
        return [0] * len(datasets)
    room = open_fim(manifest.fim, datasets).room
    mixture = manifest.mixture
    return [room if rate else 0 for rate in mixture.of(mixture.names or ()).largest_fim_rates]


def _index_of(
    source: Source,
    dataset: SourceDocuments,
    manifest: Manifest,
    options: RowOptions,
    split: tuple[float, float],
    where: str | Path | None,
    fim_room: int,
) -> SourceIndex | None:
    """The samples of one source's split, None where it has no tokens."""
    begin, end = (round(part * dataset.num_documents) for part in split)
    if begin == end:
        return None
    if source.index is not None:
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
        fim_room=fim_room,
    )
    index = cached_index(dataset.open(0)[0], recipe, Path(where), node_local=manifest.node_local)
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
    index = dataset.shard_index or source.open_index()
    if index.alignment % options.align:
        raise ConfigError(
            f"index {source.index} has no room for segments at multiples of {options.align}: pack "
            f"it with --alignment {options.align}, or leave out index"
        )
    return index

"""A host's data path -> rows: read its manifest, pack its sources once, blend them.

A host's --data-path may be a plain prefix (all options at their defaults), a shard manifest (many
datasets, packed by `megapack-build pack`), a manifest file, or the JSON text of a manifest (which
megapack makes of a weighted list of prefixes):

    {"sources": [{"prefix": "web_text_document", "weight": 0.7},
                 {"prefix": "code_text_document", "weight": 0.3}],
     "strategy": "bucket", "buckets": [1024, 2048, 4096, 8192], "cache_directory": "/scratch/idx"}

A source with an index is not packed again (``megapack.data.blend``). The steps of stages are blocks
of ``rows_per_block`` rows, which are the host's steps if a block is its global batch.

- ``Manifest``, ``is_manifest``, ``default_buckets``: the manifest.
- ``Recipe``, ``cached_index``: the packed samples of a source, built once and found by content.
- ``open_data_path``, ``open_rows``: the rows.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash

from megapack.config import from_dict, load_config, to_dict
from megapack.data.blend import HostOptions, Source
from megapack.data.dataset import open_blend
from megapack.data.documents import SourceDocuments
from megapack.data.report import check_epochs, check_labels, plan_run
from megapack.errors import ConfigError, LockedError
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.packing import SampleIndex, find_strategy, pack
from megapack.packing.sample_index import describe_source
from megapack.packing.sharded import SourceIndex, is_shard_manifest
from megapack.records import parse_json
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.locks import WriterLock

logger = logging.getLogger(__name__)

# ---- The manifest of a data path

MANIFEST_SUFFIXES = (".json", ".yaml", ".yml")
SMALLEST_DEFAULT_BUCKET = 256
MOST_DEFAULT_BUCKETS = 5
# Options that a stage of a host's rows may have; the host sets the sizes of rows and steps.
STAGE_FIELDS = frozenset(
    {"from_step", "from_tokens", "weights", "order", "num_cycles", "skip_steps", "exclude", "ramp"}
    | {"attention_window", "window_steps", "fim_rates"}
)


@dataclass(frozen=True, kw_only=True)
class Manifest(HostOptions):
    """Sources and options of a host's data path; every field but ``sources`` has a default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in self.sources:
            if source.loss_weight != 1:
                raise ConfigError(
                    f"source {source.title!r} has loss_weight {source.loss_weight} "
                    "and a host takes the plain mean of its labels, counted in whole numbers: "
                    "leave loss_weight out, or train with megapack-pretrain"
                )
        for name in ("rows_per_block", "align"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        for stage in self.stages:
            names = [field.name for field in fields(stage) if getattr(stage, field.name)]
            refused = [name for name in names if name not in STAGE_FIELDS]
            if refused:
                raise ConfigError(
                    f"{stage} has {', '.join(refused)}, which the host decides: a stage of a "
                    f"host's rows may have {', '.join(sorted(STAGE_FIELDS))}; leave out the other "
                    "options, or train with launch/pretrain.py"
                )

    @classmethod
    def read(cls, data_path: str) -> Manifest:
        """Read a host's data path: JSON text, a manifest file, or one source. Raises ConfigError,
        which names the key, for an invalid manifest, and OSError for a file that cannot be read."""
        if data_path.lstrip().startswith("{"):
            remedy = 'give one object, as in {"sources": [...]}, or the path of a manifest'
            tree = parse_json(data_path, "data path", remedy=remedy, error=ConfigError)
            return from_dict(cls, tree, where="data path")
        if data_path.endswith(MANIFEST_SUFFIXES) and not is_shard_manifest(data_path):
            path = Path(data_path)
            return load_config(cls, path).relative_to(path.parent)
        return cls(sources=(_source(data_path),))

    @classmethod
    def of_blend(cls, prefixes: Sequence[str], weights: Sequence[float] | None) -> Manifest:
        """Return a manifest of weighted prefixes; all other options have their defaults. Raises
        ConfigError if a prefix is itself a manifest."""
        for prefix in prefixes:
            if is_manifest(prefix):
                raise ConfigError(
                    f"{prefix!r} is a manifest inside a blend; put all sources and their weights "
                    "into one manifest and give that as the only data path"
                )
        # A weight of 0 is valid in Megatron: the source is unused.
        given = [None] * len(prefixes) if weights is None else weights
        pairs = zip(prefixes, given, strict=True)
        return cls(sources=tuple(_source(prefix, w) for prefix, w in pairs if w != 0))

    def to_json(self) -> str:
        """Return one line of JSON that ``read`` turns into an equal manifest."""
        return json.dumps(to_dict(self))

    def relative_to(self, folder: Path) -> Manifest:
        """Return the manifest with paths resolved against its folder."""
        cache = None if self.cache_directory is None else str(folder / self.cache_directory)
        moved = super().relative_to(folder)
        return replace(self, sources=moved.sources, stages=moved.stages, cache_directory=cache)


def is_manifest(data_path: str) -> bool:
    """Return whether a data path is a manifest (file or JSON text), not a single source."""
    if is_shard_manifest(data_path):
        return False
    return data_path.endswith(MANIFEST_SUFFIXES) or data_path.lstrip().startswith("{")


def _source(data_path: str, weight: float | None = None) -> Source:
    if is_shard_manifest(data_path):
        return Source(index=data_path, weight=weight)
    return Source(prefix=data_path, weight=weight)


def default_buckets(sequence_length: int, align: int = 1) -> tuple[int, ...]:
    """Return the sequence length and its halves, down to a sixteenth or 256 tokens, ascending."""
    buckets = [sequence_length]
    while len(buckets) < MOST_DEFAULT_BUCKETS:
        half, remainder = divmod(buckets[-1], 2)
        if remainder or half < SMALLEST_DEFAULT_BUCKET or half % align:
            break
        buckets.append(half)
    return tuple(reversed(buckets))


# ---- The sample index of a source: built once, found by content
# The name of a cached file contains a digest of everything that determines its content: the layout
# of the documents (not their path or date), the range of documents, strategy, parameters,
# capacities, seed and alignment. A changed dataset or option changes the name: no file is stale.

VERSION = 2  # part of every digest: increment it when the same recipe yields different samples
BUILD_TIMEOUT = 3600.0  # seconds that ranks wait for the rank that builds
MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All options that, together with the documents, determine an index."""

    begin: int  # first document
    end: int  # one past the last document
    strategy: str
    parameters: dict[str, Any]
    buckets: tuple[int, ...]
    seed: int
    align: int = 1  # each segment takes a multiple of this many tokens
    fim_room: int = 0  # tokens by which fill-in-the-middle may lengthen a document

    def digest(self, fingerprint: str) -> str:
        """Return the identity of the index of a dataset: 32 hexadecimal digits."""
        strategy = find_strategy(self.strategy)
        content = asdict(self) | {"parameters": strategy.resolve(self.parameters)}
        content |= {"version": VERSION, "documents": fingerprint}
        if not self.fim_room:  # keep the digests of releases without this field
            del content["fim_room"]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def cached_index(
    dataset: IndexedDataset, recipe: Recipe, directory: Path, *, node_local: bool = False
) -> SampleIndex:
    """Return the index of a recipe, memory-mapped from ``directory``; build it if it is missing.

    Global rank 0 builds; all other ranks wait for the file and raise ConfigError after an hour.
    With ``node_local`` (each node has its own copy of the directory), one process per node builds
    under a lock. A file gets its name only when it is complete.
    """
    name = f"{Path(dataset.prefix).name}-{recipe.strategy}-{recipe.digest(dataset.fingerprint)}"
    path = directory / f"{name}.samples"
    deadline, pause = time.monotonic() + BUILD_TIMEOUT, 0.05
    while not path.exists():
        if node_local or is_first_rank():
            directory.mkdir(parents=True, exist_ok=True)
            with suppress(LockedError):  # a process of this node builds it: wait for it
                with WriterLock(path, what="packing") if node_local else nullcontext():
                    if not path.exists():
                        _build_and_save(dataset, recipe, path)
                continue
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} did not appear in {BUILD_TIMEOUT:.0f} s; rank 0 builds it. If the "
                'directory is not shared between nodes set "node_local" in the manifest; to build '
                "before the job starts run `python -m megapack.integrations.rows.index`"
            )
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
    return SampleIndex.load(path)


def is_first_rank() -> bool:
    """Return whether this is global rank 0, or a process without a process group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _build_and_save(dataset: IndexedDataset, recipe: Recipe, path: Path) -> None:
    started = time.perf_counter()
    index = build_index(dataset, recipe)
    # Save a description, because the index has only the lengths of its range.
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


def build_index(dataset: IndexedDataset, recipe: Recipe) -> SampleIndex:
    """Pack the documents of a recipe; ids and positions refer to the whole dataset. Raises
    ConfigError if a capacity is not a multiple of ``align``; ``pack`` may raise ValueError."""
    unaligned = [capacity for capacity in recipe.buckets if capacity % recipe.align]
    if unaligned:
        raise ConfigError(
            f"bucket {unaligned[0]} is not a multiple of align {recipe.align}; choose capacities "
            "that are (multiples of 2 x context_parallel_size x tensor_parallel_size always work)"
        )
    lengths = np.array(dataset.document_lengths)  # a copy, to hide documents outside the range
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
    return [source.open_documents() for source in manifest.sources]


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
    """Pack the sources of a manifest, or reuse packed ones, and arrange them in rows.

    Raises ConfigError for options that exclude each other or a split without documents, and
    MegapackError or OSError for sources that cannot be read or packed.

    Args:
        manifest: its seed, rows_per_block, align and cache_directory override those of the host.
        datasets: ``open_documents(manifest)``.
        split: part of every source's documents, as fractions; (0.99, 1.0) is the last percent.
            Stages and fill-in-the-middle apply only to a part that begins with the first document
            (training); others (validation, test) always use the manifest's sources and weights.
        num_rows, finite: see ``RowDataset``. A finite set ignores the manifest's rows_per_block,
            stages and attention window.
        cache_directory: that of the host; None: ``megapack-cache`` in the folder of the first
            source, if that is a local path.
    """
    trains = split[0] == 0 and not finite
    stages = manifest.stages if trains else ()
    overriding = ("seed", "align") if finite else ("seed", "align", "rows_per_block")
    overrides = {name: getattr(manifest, name) for name in overriding}
    options = replace(options, **{n: value for n, value in overrides.items() if value is not None})
    where = manifest.cache_directory or cache_directory
    if where is None and not is_remote(datasets[0].prefix):
        where = Path(datasets[0].prefix).parent / "megapack-cache"
    if not trains:
        manifest = manifest.without_fim()
    rooms = manifest.fim_rooms(datasets)
    used = [
        (source, dataset, index)
        for source, dataset, room in zip(manifest.sources, datasets, rooms, strict=True)
        if (stages or source.weight != 0)
        and (index := _index_of(source, dataset, manifest, options, split, where, room)) is not None
    ]
    if not used:
        raise ConfigError(
            f"documents {split[0]:.4g} to {split[1]:.4g} of "
            f"{', '.join(s.title for s in manifest.sources)} hold no tokens; change --split"
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
        # No line break in the format string: nanotron's handler splits it before formatting.
        logger.info("blocks of %d rows:%s", options.rows_per_block, f"\n{plan}")
    return rows


def open_data_path(data_path: str | Manifest, options: RowOptions, **arguments: Any) -> RowDataset:
    """Open the rows of a data path: a prefix, a manifest file, JSON text, or a Manifest;
    ``arguments`` are split, num_rows, finite, cache_directory of ``open_rows``."""
    manifest = Manifest.read(data_path) if isinstance(data_path, str) else data_path
    return open_rows(manifest, open_documents(manifest), options, **arguments)


def _index_of(
    source: Source,
    dataset: SourceDocuments,
    manifest: Manifest,
    options: RowOptions,
    split: tuple[float, float],
    where: str | Path | None,
    fim_room: int,
) -> SourceIndex | None:
    """Return the samples of one source's split; None: it has no tokens."""
    begin, end = (round(part * dataset.num_documents) for part in split)
    if begin == end:
        return None
    if source.index is not None:
        whole = (begin, end) == (0, dataset.num_documents)
        return _given_index(source, dataset, options, whole=whole)
    buckets = manifest.buckets or default_buckets(options.sequence_length, options.align)
    if max(buckets) > options.sequence_length:
        raise ConfigError(
            f"bucket {max(buckets)} is longer than the host's sequence length "
            f"{options.sequence_length}; raise --seq-length or drop the bucket"
        )
    if where is None:
        raise ConfigError(
            f"{source.title!r} needs a directory for its packed samples that all nodes see, and "
            f"{dataset.prefix} is an address: set cache_directory (the host's cache path), or the "
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
    index = cached_index(dataset.open(0), recipe, Path(where), node_local=manifest.node_local)
    return index if index.num_samples else None


def _given_index(
    source: Source, dataset: SourceDocuments, options: RowOptions, *, whole: bool
) -> SourceIndex:
    if not whole:
        raise ConfigError(
            f"source {source.title!r} has index {source.index}, which contains all documents, and "
            "the host's split takes a part: use one split (--split 100,0,0), or leave out index"
        )
    index = dataset.shard_index or source.open_index()
    if index.alignment % options.align:
        raise ConfigError(
            f"index {source.index} has no room for segments at multiples of {options.align}: pack "
            f"it with --alignment {options.align}, or leave out index"
        )
    return index

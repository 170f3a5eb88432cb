"""``pack_shards``: pack many datasets, with any number of processes and machines.

Each dataset gets its .samples file, which is complete or absent and records its dataset and packing
options. So finished shards are reused after a crash, and machines need not wait for each other: the
process that finds all shards packed writes the manifest. More datasets can be added later.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megapack.errors import ConfigError, IndexMismatchError
from megapack.executors import Counted, Report, run_shards
from megapack.packing.groups import groups_checksum, read_groups
from megapack.packing.pack import pack
from megapack.packing.sample_index import SampleIndex, describe_source, how_it_differs
from megapack.packing.second import read_second, second_checksum
from megapack.packing.sharded import (
    PLAN,
    SUFFIX,
    PackedColumn,
    PackedShard,
    is_shard_manifest,
    load_shards,
    manifest_path,
    place,
    plain,
    related,
    save_shards,
)
from megapack.packing.trees import tokens_checksum, tokens_of
from megapack.storage import IndexedDataset
from megapack.storage.address import is_below, split_address
from megapack.storage.columns import LABELS, column_entries
from megapack.storage.dataset import check_converted, open_index
from megapack.storage.files import check_target
from megapack.storage.remote.copies import local_output_file


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Datasets to pack and packing options; the same on all machines."""

    manifest: Path | str  # to write; an address is a str
    prefixes: tuple[str, ...]  # of all shards: those of an existing manifest, then new ones
    known: Mapping[str, PackedShard]  # rows of the existing manifest, by ``place``
    options: Mapping[str, Any]  # arguments of ``pack``
    resolved: Mapping[str, Any]  # the options as the manifest records them (PLAN)

    def samples_of(self, prefix: str) -> str:
        """Return the path of a shard's .samples file, distinct for equal names in two folders."""
        digest = xxhash.xxh3_64_hexdigest(related(self.manifest, prefix).encode())
        folder = str(self.manifest).removesuffix(".json")
        return f"{folder}/{Path(prefix).name}-{digest[:8]}.samples"


def plan_packing(
    manifest: str, prefixes: Sequence[str], options: Mapping[str, Any], *, overwrite: bool = False
) -> PackingPlan:
    """Decide what to pack for a shard manifest, which may exist: datasets that are already in it
    keep their place. ``options`` are arguments of ``pack``; ``groups`` is a bool: use the groups
    of PREFIX.groups; ``second`` the name of a column. ``overwrite`` ignores an existing manifest.
    Raises ConfigError (a bad option or name, no datasets, a duplicate, an existing manifest with
    other options), FormatError, OSError."""
    path = manifest_path(manifest)
    if not is_shard_manifest(path):
        raise ConfigError(f"--output is {path}; for several datasets it must be NAME{SUFFIX}")
    empty = np.zeros(0, np.int32)
    # Packing no documents checks the options and resolves defaults.
    nothing = {"groups": empty if options.get("groups") else None, "tokens": (empty, [0])}
    nothing["second"] = empty if options.get("second") else None
    packed = pack(empty, **{**options, **nothing})
    resolved = {name: plain(getattr(packed, name)) for name in PLAN}
    known: dict[str, PackedShard] = {}
    with local_output_file(path) as local:
        difference = "it is replaced" if overwrite else None
        is_new = check_target(local, overwrite=overwrite, difference=difference)
    if not is_new:
        existing = load_shards(path)
        if existing.arranged is not None:
            raise ConfigError(
                f"{path} is an arranged source: add datasets to the source it was arranged from"
            )
        changed = [name for name in PLAN if plain(getattr(existing, name)) != resolved[name]]
        if changed:
            raise ConfigError(
                f"{path} was packed with other values of {' and '.join(changed)}: give the same "
                "options to add datasets to it, another --output, or --overwrite to pack all again"
            )
        known = {place(shard.prefix): shard for shard in existing.shards}
    duplicates = [where for where, times in Counter(map(place, prefixes)).items() if times > 1]
    if duplicates:
        raise ConfigError(
            f"{duplicates[0]} is given more than once; a source has each dataset once: to draw its "
            "documents more often, pack it as a separate source with a larger weight in the blend"
        )
    new = {place(prefix): prefix for prefix in prefixes if place(prefix) not in known}
    wanted = (*(shard.prefix for shard in known.values()), *new.values())
    if not wanted:
        raise ConfigError(f"no datasets for {path}; give their prefixes")
    if isinstance(path, str):
        folder, _ = split_address(path)
        elsewhere = [prefix for prefix in wanted if not is_below(folder, prefix)]
        if elsewhere:
            raise ConfigError(
                f"{elsewhere[0]} is not below {folder}, the folder of {path}; a manifest at an "
                "address may only list datasets below its folder: `megapack-build upload` the "
                "dataset there and pack its address, or pack to a local --output"
            )
    return PackingPlan(
        manifest=path, prefixes=wanted, known=known, options=options, resolved=resolved
    )


@dataclass(frozen=True, kw_only=True)
class ShardPacker:
    plan: PackingPlan
    threads: int
    overwrite: bool = False
    """Replace .samples files of other documents or options."""

    def build(self, index: int, report: Report) -> PackedShard:
        """Pack a shard, unless it is packed already. Raises IndexMismatchError if the shard has
        changed since the manifest was written, ConfigError if its .samples has other documents or
        options (without ``overwrite``), FormatError, OSError."""
        prefix = self.plan.prefixes[index]
        shard = self.plan.known.get(place(prefix))
        if shard is None:
            shard = self._pack(prefix)
        else:
            self._check_unchanged(shard)
            # Samples do not depend on columns, which may be added or replaced after packing.
            shard = replace(shard, columns=packed_columns(IndexedDataset(prefix)))
        report(Counted(documents=shard.num_documents, tokens=shard.num_tokens))
        return shard

    def _check_unchanged(self, shard: PackedShard) -> None:
        """Compare fingerprints; tokens and samples are not read."""
        samples = SampleIndex.load(shard.samples)
        second, packed_by = self.plan.options.get("second"), (samples.source or {}).get("second")
        if second != packed_by:
            raise ConfigError(
                f"--second is {second}, and the samples of {shard.prefix} were packed with "
                f"{packed_by or 'no second size'}: give the same, or --overwrite to pack all again"
            )
        for name, actual, recorded in (
            (f"{shard.prefix}.idx", open_index(shard.prefix).fingerprint, shard.fingerprint),
            (shard.samples, samples.fingerprint, shard.samples_fingerprint),
        ):
            if actual != recorded:
                raise IndexMismatchError(
                    f"{name} has changed since {self.plan.manifest} was written: restore it, or "
                    "pack all datasets again with --overwrite"
                )

    def _pack(self, prefix: str) -> PackedShard:
        dataset = IndexedDataset(prefix)
        samples = self.plan.samples_of(prefix)
        with local_output_file(samples) as path:
            path.parent.mkdir(exist_ok=True)
            expected = {name: self.plan.resolved[name] for name in PLAN[:4]}
            groups = None
            tokens = tokens_of(dataset, expected["strategy"])
            expected["tokens"] = tokens_checksum(tokens)
            if self.plan.options.get("groups"):
                groups = read_groups("auto", prefix, dataset.num_documents)
                expected["groups"] = groups_checksum(groups)
            second = self.plan.options.get("second")
            sizes = None if second is None else read_second(second, prefix)
            if sizes is not None:
                expected["second"] = second_checksum(sizes)
            difference = partial(how_it_differs, path, **expected, dataset=dataset.fingerprint)
            if check_target(path, overwrite=self.overwrite, difference=difference, name=samples):
                options = {**self.plan.options, **tokens, "groups": groups, "second": sizes}
                index = pack(dataset.document_lengths, threads=self.threads, **options)
                source = describe_source(dataset, prefix)
                if expected["tokens"] is not None:
                    source["tokens"] = expected["tokens"]
                if second is not None:
                    source["second"] = second
                index.save(path, source=source, overwrite=True)
            else:
                index = SampleIndex.load(path)
        return describe_shard(dataset, samples, index)


def describe_shard(
    dataset: IndexedDataset, path: str | os.PathLike[str], index: SampleIndex
) -> PackedShard:
    """Return the manifest's row of a dataset and its samples, which are in the file ``path``.
    Raises ConfigError if labels or weights are not converted to columns (``check_converted``)."""
    columns = packed_columns(dataset)
    check_converted(dataset.prefix, columns)
    meta, max_token_id = dataset.meta or {}, None
    if dataset.meta is not None:
        max_token_id = -1 if meta["max_token_id"] is None else meta["max_token_id"]
        if LABELS in columns:
            max_token_id = max(max_token_id, dataset.columns[LABELS].largest)
    return PackedShard(
        prefix=dataset.prefix,
        samples=os.fspath(path),
        dtype=dataset.dtype.name,
        num_documents=dataset.num_documents,
        num_tokens=dataset.num_tokens,
        fingerprint=dataset.fingerprint,
        samples_fingerprint=index.fingerprint,
        samples_per_bucket=tuple(np.diff(index.bucket_sample_offsets).tolist()),
        most_segments=tuple(index.most_segments),
        longest_segment=index.longest_segment,
        longest_reach=index.longest_reach,
        max_token_id=max_token_id,
        vocab_size=meta.get("vocab_size"),
        document_end_token=meta.get("document_end_token"),
        document_begin_token=meta.get("document_begin_token"),
        columns=columns,
    )


def packed_columns(dataset: IndexedDataset) -> dict[str, PackedColumn]:
    """Return the columns of a dataset as a manifest records them; their files are not opened.
    Raises FormatError if the meta file is damaged."""
    entries = column_entries(dataset.meta, f"{dataset.prefix}.meta.json")
    return {
        name: PackedColumn(spec=entry.spec, identity=entry.identity)
        for name, entry in entries.items()
    }


def pack_shards(
    plan: PackingPlan,
    report: Report,
    *,
    workers: int = 1,
    threads: int = 1,
    part: tuple[int, int] | None = None,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    overwrite: bool = False,
) -> list[PackedShard]:
    """Pack the shards that are not packed yet, then write the manifest.

    ``workers`` and ``threads`` are the numbers of processes, and of threads of all processes
    together. ``part`` (i, n) packs only the i-th of n parts of the shards and does not write the
    manifest. ``executor`` runs processes of this machine, or one task per shard of a Ray cluster.
    ``overwrite`` replaces .samples files of other documents or options. Raises the errors of
    ``ShardPacker.build`` (finished shards remain), and MegapackError if a worker was killed or ray
    is not installed.
    """
    i, n = part or (0, 1)
    if not 0 <= i < n:
        raise ConfigError(f"part is {i}/{n}; parts of {n} are counted from 0 to {n - 1}")
    indices = range(i, len(plan.prefixes), n)
    num_processes = max(1, min(workers, len(indices)))
    packer = ShardPacker(plan=plan, threads=max(1, threads // num_processes), overwrite=overwrite)
    shards = run_shards(
        packer,
        indices,
        report,
        executor=executor,
        num_processes=num_processes,
        ray_address=ray_address,
    )
    if part is None:
        save_shards(plan.manifest, plan.resolved, shards)
    return shards

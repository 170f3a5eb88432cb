"""Many datasets packed, each by itself, by any number of processes and machines.

A shard's .samples is complete or absent, and says what it was packed from and with. So work that
was done is found again, whoever did it, and machines need not wait for each other: the manifest is
written by whoever finds all of it done. A later packing of more datasets goes on behind those that
the manifest has.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megapack.errors import ConfigError, IndexMismatchError
from megapack.executors import Counted, Report, run_shards
from megapack.packing.groups import groups_checksum, read_groups
from megapack.packing.pack import pack
from megapack.packing.sample_index import SampleIndex, how_it_differs
from megapack.packing.sharded import (
    PLAN,
    SUFFIX,
    PackedShard,
    ShardedIndex,
    is_shard_manifest,
    load_shards,
    manifest_path,
    place,
    plain,
    related,
    save_shards,
)
from megapack.storage import IndexedDataset
from megapack.storage.address import is_below, split_address
from megapack.storage.dataset import open_index, open_labels, open_weights, weights_identity
from megapack.storage.files import check_target
from megapack.storage.index_file import LABELS, WEIGHTS
from megapack.storage.remote.copies import local_output_file


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """The datasets to pack and how, decided before the first shard; the same on all machines.

    Attributes:
        manifest: path of the result; its address, a str, where that is remote.
        prefixes: of all shards in their order: those of the manifest that is there, then new ones.
        known: what that manifest says of its shards, by ``place``.
        options: of ``pack``, seed and strategy among them.
        how: the same in full, as the manifest has it (``PLAN``).
    """

    manifest: Path | str
    prefixes: tuple[str, ...]
    known: Mapping[str, PackedShard]
    options: Mapping[str, Any]
    how: Mapping[str, Any]

    def samples_of(self, prefix: str) -> str:
        """The .samples of a shard; a digest tells datasets of one name in two folders apart."""
        digest = xxhash.xxh3_64_hexdigest(related(self.manifest, prefix).encode())
        folder = str(self.manifest).removesuffix(".json")
        return f"{folder}/{Path(prefix).name}-{digest[:8]}.samples"


def plan_packing(
    manifest: str, prefixes: Sequence[str], options: Mapping[str, Any], *, overwrite: bool = False
) -> PackingPlan:
    """Plan the work for a shard manifest, whether it exists or not.

    Args:
        manifest: where it stands, or shall stand; at an address only of those beside or below it.
        prefixes: datasets; those that it has already keep their places.
        options: of ``pack``; ``groups`` whether shards are packed with those of PREFIX.groups.
        overwrite: what the manifest says counts for nothing.

    Raises:
        ConfigError: a bad option or name, no datasets, one named twice, or the manifest that is
            there was packed with other options.
        FormatError, OSError: it is damaged or cannot be read.
    """
    path = manifest_path(manifest)
    if not is_shard_manifest(path):
        raise ConfigError(f"{path}: several datasets become one source by a file NAME{SUFFIX}")
    none = np.zeros(0, np.int32)
    packed = pack(none, **{**options, "groups": none if options.get("groups") else None})
    how = {name: plain(getattr(packed, name)) for name in PLAN}
    there: ShardedIndex | None = None
    with local_output_file(path) as local:
        difference = "it is replaced" if overwrite else None
        is_new = check_target(local, overwrite=overwrite, difference=difference)
    if not is_new:
        there = load_shards(path)
        if there.arranged is not None:
            raise ConfigError(
                f"{path} is an arranged source: add datasets to the one it is made of"
            )
        changed = [name for name in PLAN if plain(getattr(there, name)) != how[name]]
        if changed:
            raise ConfigError(
                f"{path} was packed with another {' and '.join(changed)}: give the same options to "
                "add datasets to it, another --output, or --overwrite to pack all of them again"
            )
    again = [where for where, times in Counter(map(place, prefixes)).items() if times > 1]
    if again:
        raise ConfigError(
            f"{again[0]} is named more than once, and a source has each dataset once: to draw its "
            "documents more often, pack it as a source of its own, with a larger weight in the "
            "blend"
        )
    known = {} if there is None else {place(shard.prefix): shard for shard in there.shards}
    new = {place(prefix): prefix for prefix in prefixes if place(prefix) not in known}
    wanted = (*(shard.prefix for shard in known.values()), *new.values())
    if not wanted:
        raise ConfigError(f"there are no datasets to make {path} of; give their prefixes")
    if isinstance(path, str):
        folder, _ = split_address(path)
        elsewhere = [prefix for prefix in wanted if not is_below(folder, prefix)]
        if elsewhere:
            raise ConfigError(
                f"{path} would name {elsewhere[0]}, which is not below {folder}: a manifest at an "
                "address names what lies beside or below it. `megapack-build upload` that dataset "
                "to there and pack its address, or pack to a local --output"
            )
    return PackingPlan(manifest=path, prefixes=wanted, known=known, options=options, how=how)


@dataclass(frozen=True, kw_only=True)
class ShardPacker:
    """Packs the shards of a plan."""

    plan: PackingPlan
    threads: int
    overwrite: bool = False
    """Replace .samples that were packed of or with something else."""

    def build(self, index: int, report: Report) -> PackedShard:
        """Pack a shard, or find it packed.

        Raises:
            IndexMismatchError: it is one that the manifest speaks of, and has changed.
            ConfigError: its .samples is of or with something else, and may not be replaced.
            FormatError, OSError: the dataset is damaged or missing, or cannot be written.
        """
        prefix = self.plan.prefixes[index]
        shard = self.plan.known.get(place(prefix)) or self._packed(prefix)
        if place(prefix) in self.plan.known:
            self._check_unchanged(shard)
        report(Counted(documents=shard.num_documents, tokens=shard.num_tokens))
        return shard

    def _check_unchanged(self, shard: PackedShard) -> None:
        """By fingerprints: what was packed is not read again."""
        samples = SampleIndex.load(shard.samples)
        labels, weights = (shard.prefix + end for end in (LABELS, WEIGHTS))
        own = IndexedDataset(weights) if IndexedDataset.exists(weights) else None
        for name, found, said in (
            (f"{shard.prefix}.idx", open_index(shard.prefix).fingerprint, shard.fingerprint),
            (shard.samples, samples.fingerprint, shard.samples_fingerprint),
            (labels, IndexedDataset.exists(labels), shard.labels),
            (weights, None if own is None else weights_identity(own), shard.weights),
        ):
            if found != said:
                raise IndexMismatchError(
                    f"{name} has changed since {self.plan.manifest} was written: restore it, or "
                    "pack all datasets again with --overwrite"
                )

    def _packed(self, prefix: str) -> PackedShard:
        dataset = IndexedDataset(prefix)
        samples = self.plan.samples_of(prefix)
        with local_output_file(samples) as path:
            path.parent.mkdir(exist_ok=True)
            how = {name: self.plan.how[name] for name in PLAN[:4]}
            groups = None
            if self.plan.options.get("groups"):
                groups = read_groups("auto", prefix, dataset.num_documents)
                how["groups"] = groups_checksum(groups)
            difference = partial(how_it_differs, path, **how, dataset=dataset.fingerprint)
            if check_target(path, overwrite=self.overwrite, difference=difference, name=samples):
                options = {**self.plan.options, "groups": groups}
                index = pack(dataset.document_lengths, threads=self.threads, **options)
                index.save(path, source=dataset, overwrite=True)
            else:
                index = SampleIndex.load(path)
        return describe_shard(dataset, samples, index)


def describe_shard(
    dataset: IndexedDataset, path: str | os.PathLike[str], index: SampleIndex
) -> PackedShard:
    """The row of a manifest for a dataset and its samples, which stand at ``path``.

    Raises:
        IndexMismatchError: the labels or weights beside it are of other documents.
    """
    labels, weights = open_labels(dataset), open_weights(dataset)
    streams = [dataset] if labels is None else [dataset, labels]
    known = [stream.meta["max_token_id"] for stream in streams if stream.meta is not None]
    meta = dataset.meta or {}
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
        max_token_id=max((i for i in known if i is not None), default=-1)
        if len(known) == len(streams)
        else None,
        vocab_size=meta.get("vocab_size"),
        document_end_token=meta.get("document_end_token"),
        labels=labels is not None,
        weights=None if weights is None else weights_identity(weights),
    )


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
    """Pack what is not packed yet, and write the manifest; nothing in it depends on who did what.

    Args:
        plan: of ``plan_packing``.
        report: is told what is done, as work goes on.
        workers, threads: processes, and threads for all of them together.
        part: (i, n): only the i-th of n parts of the shards, and no manifest.
        executor, ray_address: processes of this machine, or one task per shard of a Ray cluster.
        overwrite: replace .samples that were packed of or with something else.

    Raises:
        ConfigError, IndexMismatchError, FormatError, OSError: as of ``ShardPacker.build``; shards
            that are packed stay.
        MegapackError: a worker was killed, or ray is not installed.
    """
    i, n = part or (0, 1)
    if not 0 <= i < n:
        raise ConfigError(f"part {i}/{n}: parts are counted from 0 to {n - 1}")
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
        save_shards(plan.manifest, plan.how, shards)
    return shards

"""Copy finished datasets to an object store, from which runs read them.

  megapack-build upload corpus s3://bucket/folder
  megapack-build upload shards/*.idx gs://bucket/folder
  megapack-build upload web.shards.json s3://bucket/folder

Each takes its name along, and with it its .samples, labels, loss weights and groups where they lie
beside it. Beside every dataset come checksums of its blocks, by which readers know that what
arrives is right. The .idx comes last: a dataset is there in whole or not at all. A shard manifest
comes behind all its shards, which keep their places beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megapack.cli.arguments import add_dataset_argument
from megapack.cli.datasets import named_files
from megapack.errors import ConfigError
from megapack.packing.sharded import load_shards, related
from megapack.storage import IndexedDataset
from megapack.storage.index_file import BESIDE
from megapack.storage.remote.address import is_below, is_remote
from megapack.storage.remote.client import put_object, remove_object
from megapack.storage.remote.copies import upload_dataset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="or shard manifests")
    parser.add_argument("address", metavar="ADDRESS", help="folder, like s3://bucket/folder")


def run(args: argparse.Namespace) -> int:
    folder = args.address.rstrip("/")
    if not is_remote(folder):
        raise ConfigError(f"{args.address} is no address; give one like s3://bucket/folder")
    prefixes, _, manifests = named_files(args.prefixes)
    for prefix in prefixes:
        target = f"{folder}/{Path(prefix).name}"
        beside = (end for end in BESIDE if IndexedDataset.exists(prefix + end))
        _upload(prefix, target, ("", *beside))
        if Path(f"{prefix}.samples").exists():
            _put(f"{prefix}.samples", f"{target}.samples")
    for manifest in manifests:
        _upload_source(manifest, folder)
    return 0


def _upload_source(manifest: str, folder: str) -> None:
    """All shards of a manifest that are not at an address already, then the manifest."""
    shards, target = load_shards(manifest).shards, f"{folder}/{Path(manifest).name}"
    places = {
        path: path if is_remote(path) else related(Path(manifest), path)
        for shard in shards
        for path in (shard.prefix, shard.samples)
    }
    for place in places.values():
        if not is_below(folder, place if is_remote(place) else f"{folder}/{place}"):
            raise ConfigError(
                f"{manifest} names {place}, which would not be below {folder}: what a manifest "
                "names keeps its place beside it. Upload that dataset by itself, and pack its "
                "address there"
            )
    remove_object(target)  # it speaks of shards that are replaced now
    for shard in shards:
        if not is_remote(shard.prefix):
            _upload(shard.prefix, f"{folder}/{places[shard.prefix]}", shard.ends)
        if not is_remote(shard.samples):
            _put(shard.samples, f"{folder}/{places[shard.samples]}")
    _put(manifest, target)


def _upload(prefix: str, target: str, ends: tuple[str, ...]) -> None:
    for end in ends:
        upload_dataset(f"{prefix}{end}", f"{target}{end}")
        print(f"{prefix}{end} -> {target}{end}")


def _put(path: str, target: str) -> None:
    put_object(target, path)
    print(f"{path} -> {target}")

"""Copy finished datasets to an object store, from which runs read them.

  megapack-build upload corpus s3://bucket/folder
  megapack-build upload shards/*.idx gs://bucket/folder
  megapack-build upload web.shards.json s3://bucket/folder

Files keep their names. A dataset is copied with its columns, .samples and groups, if they exist; a
.samples file of another name must be named itself. A file of block checksums is added, so that
readers can check the bytes that they receive. The .idx is copied last, so a reader finds either the
whole dataset or none. A shard manifest is copied after all its shards, and its folder keeps its
layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from megapack.cli.arguments import add_dataset_argument, add_shared
from megapack.cli.datasets import documents_of, named_files
from megapack.cli.output import print_result
from megapack.errors import ConfigError
from megapack.packing.sharded import load_shards, related
from megapack.storage import IndexedDataset
from megapack.storage.address import is_below, is_remote
from megapack.storage.dataset import check_converted
from megapack.storage.index_file import GROUPS
from megapack.storage.remote.client import put_object, remove_object
from megapack.storage.remote.copies import upload_dataset

Copy = tuple[Callable[[str, str], None], str, str]  # function, source, target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="or .samples files, or shard manifests")
    parser.add_argument("address", metavar="ADDRESS", help="folder, as in s3://bucket/folder")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> None:
    folder = args.address.rstrip("/")
    if not is_remote(folder):
        raise ConfigError(f"{args.address} is not an address; give one like s3://bucket/folder")
    prefixes, samples, manifests = named_files(args.prefixes)
    copies: dict[str, Copy] = {}
    for copy in _copies(documents_of(prefixes), samples, manifests, folder):
        _, source, target = copy
        other = copies.setdefault(target, copy)[1]
        if Path(other).resolve() != Path(source).resolve():
            raise ConfigError(
                f"{other} and {source} would both be {target}: upload them to two folders"
            )
    for manifest in manifests:  # an old manifest lists shards that are about to change
        remove_object(f"{folder}/{Path(manifest).name}")
    for copy_file, source, target in copies.values():
        copy_file(source, target)
        if not args.json:
            print(f"{source} -> {target}")
    print_result(args, {source: target for _, source, target in copies.values()}, lambda: None)


def _copies(
    prefixes: list[str], samples: list[str], manifests: list[str], folder: str
) -> Iterator[Copy]:
    for prefix in prefixes:
        target = f"{folder}/{Path(prefix).name}"
        check_converted(prefix, IndexedDataset(prefix).columns)
        for end in ("", GROUPS) if IndexedDataset.exists(prefix + GROUPS) else ("",):
            yield upload_dataset, f"{prefix}{end}", f"{target}{end}"
        if Path(f"{prefix}.samples").exists():
            yield _put, f"{prefix}.samples", f"{target}.samples"
    for name in samples:
        yield _put, name, f"{folder}/{Path(name).name}"
    for manifest in manifests:
        yield from _copies_of_source(manifest, folder)


def _copies_of_source(manifest: str, folder: str) -> Iterator[Copy]:
    """Yield the local shards of a manifest, then the manifest."""
    shards = load_shards(manifest).shards
    # A shard is either at an address already, or keeps its path relative to the manifest.
    places = {
        path: path if is_remote(path) else related(Path(manifest), path)
        for shard in shards
        for path in (shard.prefix, shard.samples)
    }
    for place in places.values():
        if not is_below(folder, place if is_remote(place) else f"{folder}/{place}"):
            raise ConfigError(
                f"{manifest} names {place}, which would not be below {folder}; the files of a "
                "manifest must be in its folder or below. Upload that dataset separately, and "
                "pack it from its address"
            )
    for shard in shards:
        if not is_remote(shard.prefix):
            yield upload_dataset, shard.prefix, f"{folder}/{places[shard.prefix]}"
        if not is_remote(shard.samples):
            yield _put, shard.samples, f"{folder}/{places[shard.samples]}"
    yield _put, manifest, f"{folder}/{Path(manifest).name}"


def _put(path: str, target: str) -> None:
    put_object(target, path)

"""Copy finished datasets to an object store, from which runs read them.

  megapack-build upload corpus s3://bucket/folder
  megapack-build upload shards/*.idx gs://bucket/folder

Each takes its name along, and with it its .samples and its labels where they lie beside it. Beside
every dataset come checksums of its blocks, by which readers know that what arrives is right. The
.idx comes last: a dataset is there in whole or not at all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megapack.cli.arguments import add_dataset_argument
from megapack.cli.datasets import dataset_prefixes
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.remote import is_remote
from megapack.storage.remote.client import put_object
from megapack.storage.remote.upload import upload_dataset

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True)
    parser.add_argument("address", metavar="ADDRESS", help="folder, like s3://bucket/folder")


def run(args: argparse.Namespace) -> int:
    folder = args.address.rstrip("/")
    if not is_remote(folder):
        raise ConfigError(f"{args.address} is no address; give one like s3://bucket/folder")
    for prefix in dataset_prefixes(args.prefixes):
        target = f"{folder}/{Path(prefix).name}"
        upload_dataset(prefix, target)
        print(f"{prefix} -> {target}")
        if IndexedDataset.exists(f"{prefix}.labels"):
            upload_dataset(f"{prefix}.labels", f"{target}.labels")
            print(f"{prefix}.labels -> {target}.labels")
        samples = Path(f"{prefix}.samples")
        if samples.exists():
            put_object(f"{target}.samples", samples)
            print(f"{samples} -> {target}.samples")
    return 0

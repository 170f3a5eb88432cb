"""Write a source anew, so that its tokens lie in the order in which they are drawn.

SOURCE is a shard manifest (`megapack-build pack --output NAME.shards.json`, of one dataset or of
many), OUTPUT another one. A run that draws from OUTPUT reads every bucket straight through in the
first epoch, and by megabytes in shuffled blocks in later ones, instead of a few kilobytes here and
there: for disks and object stores that are slow at that. Its samples are those of the source, token
by token, in one random order (--seed).

The same command goes on where it was stopped, and always writes the same bytes. Several machines:
each runs it with its own --part I/N, then one of them without.

examples:
  megapack-build arrange web.shards.json --output web-arranged.shards.json --seed 1
"""

from __future__ import annotations

import argparse

from megapack.cli.arguments import add_shared, byte_count
from megapack.cli.datasets import local_file
from megapack.cli.output import Work, is_part, printed_as_json
from megapack.cli.pack import add_sharing
from megapack.errors import ConfigError
from megapack.packing.sharded import is_shard_manifest
from megapack.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="shard manifest to read")
    add_shared(parser, "--output", required=True, help="a shard manifest NAME.shards.json")
    add_shared(parser, "--overwrite", "--seed")
    parser.add_argument(
        "--bytes-per-shard",
        type=byte_count,
        default=1 << 30,
        metavar="SIZE",
        help="tokens of a shard on disk, about (default: 1G)",
    )
    add_shared(parser, "--json")
    add_sharing(parser)


def run(args: argparse.Namespace) -> int:
    from megapack.data.arrange import arrange, plan_arrangement  # noqa: PLC0415 (needs torch)

    if not is_shard_manifest(args.source):
        raise ConfigError(f"{args.source} is not a shard manifest (pack --output NAME.shards.json)")
    arranger = plan_arrangement(
        args.source,
        str(local_file(args.output, "--output")),
        seed=args.seed,
        shard_bytes=args.bytes_per_shard,
        overwrite=args.overwrite,
    )
    i, n = args.part or (0, 1)
    mine = len(range(i, arranger.num_shards, n))
    with Work(f"arranging {counted(arranger.source.num_samples, 'sample')}") as work:
        tokens = arranger.source.num_tokens * mine // arranger.num_shards
        shards = arrange(
            arranger,
            work.counting(tokens, lambda more: more.tokens),
            part=args.part,
            executor=args.executor or "local",
            num_processes=max(1, min(args.workers, mine)),
            ray_address=args.ray_address,
        )
    if is_part(args, f"{counted(len(shards), 'shard')} written", args.output):
        return 0
    facts = {
        "manifest": args.output,
        "num_shards": len(shards),
        "num_samples": arranger.source.num_samples,
        "num_tokens": sum(shard.num_tokens for shard in shards),
    }
    if not printed_as_json(args, facts):
        print(
            f"{args.output}: {counted(len(shards), 'shard')}, "
            f"{counted(facts['num_samples'], 'sample')}, {counted(facts['num_tokens'], 'token')}"
        )
    return 0

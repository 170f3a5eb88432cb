"""Copy a source so that its tokens lie on disk in the order in which training draws them.

SOURCE is a shard manifest (`megapack-build pack --output NAME.shards.json`, of one dataset or of
many), OUTPUT another one with the same samples, token by token, in one random order (--seed). A run
that draws from OUTPUT reads every bucket sequentially in the first epoch and in blocks of megabytes
in later ones, instead of a few kilobytes at random places. This helps on disks and object stores
with slow random reads.

The command writes the same bytes every time, and resumes if it was stopped. To use several
machines, run it on each with its own --part I/N, then on one without --part.

examples:
  megapack-build arrange web.shards.json --output web-arranged.shards.json --seed 1
"""

from __future__ import annotations

import argparse

from megapack.cli.arguments import add_shared, byte_count
from megapack.cli.datasets import local_file
from megapack.cli.output import Work, is_part, print_result
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
        help="approximate size of the tokens and columns of one shard on disk (default: 1G)",
    )
    add_shared(parser, "--json")
    add_sharing(parser)


def run(args: argparse.Namespace) -> None:
    from megapack.data.arrange import arrange, plan_arrangement  # noqa: PLC0415 (needs torch)

    if not is_shard_manifest(args.source):
        raise ConfigError(
            f"{args.source} is not a shard manifest; write one with `megapack-build pack --output "
            "NAME.shards.json`"
        )
    arranger = plan_arrangement(
        args.source,
        str(local_file(args.output, "--output")),
        seed=args.seed,
        shard_bytes=args.bytes_per_shard,
        overwrite=args.overwrite,
    )
    i, n = args.part or (0, 1)
    shards_of_part = len(range(i, arranger.num_shards, n))
    num_samples = arranger.source.num_samples
    with Work(f"arranging {counted(num_samples, 'sample')}") as work:
        tokens = arranger.source.num_tokens * shards_of_part // arranger.num_shards
        shards = arrange(
            arranger,
            work.counting(tokens, lambda piece: piece.tokens),
            part=args.part,
            executor=args.executor or "local",
            num_processes=max(1, min(args.workers, shards_of_part)),
            ray_address=args.ray_address,
        )
    if is_part(args, f"{counted(len(shards), 'shard')} written", args.output):
        return
    num_tokens = sum(shard.num_tokens for shard in shards)
    facts = {
        "manifest": args.output,
        "num_shards": len(shards),
        "num_samples": num_samples,
        "num_tokens": num_tokens,
    }
    counts = (len(shards), "shard"), (num_samples, "sample"), (num_tokens, "token")
    print_result(args, facts, f"{args.output}: {', '.join(counted(*pair) for pair in counts)}")

"""`pack` of many datasets as one source: --output NAME.shards.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from megapack.cli.arguments import Arguments, add_shared, part_of
from megapack.cli.datasets import dataset_prefixes
from megapack.cli.report import Work, note
from megapack.cli.shard_report import describe_shards, print_shards
from megapack.errors import ConfigError
from megapack.execution.work import Counted
from megapack.packing.shard_manifest import load_shards
from megapack.packing.shard_packing import PackingPlan, pack_shards, plan_packing
from megapack.storage.lengths import open_index
from megapack.units import count, counted

__all__ = ["add_sharing", "run_shards"]


def add_sharing(group: Arguments) -> None:
    """Options that share the work out."""
    add_shared(group, "--workers")
    group.add_argument("--part", type=part_of, metavar="I/N", help="build the I-th of N parts only")
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        help="processes of this machine, or one Ray task per shard (local)",
    )
    group.add_argument("--ray-address", metavar="A", help="of a running cluster (Ray's own rule)")


def run_shards(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Pack, and say what the source then has. ``options`` are those of ``pack`` but its seed."""
    if args.documents is not None:
        raise ConfigError("--documents is for one dataset; pack its rest by itself")
    found = dataset_prefixes(args.prefixes)
    # Labels stand beside their dataset and are no dataset of their own.
    prefixes = [p for p in found if p.removesuffix(".labels") not in {*found} - {p}]
    plan = plan_packing(
        args.output, prefixes, {**options, "seed": args.seed}, overwrite=args.overwrite
    )
    shown = _Progress(plan, args.part or (0, 1))
    with shown.work:
        shards = pack_shards(
            plan,
            shown,
            workers=args.workers,
            threads=args.threads,
            part=args.part,
            executor=args.executor or "local",
            ray_address=args.ray_address,
            overwrite=args.overwrite,
        )
    if args.part is not None:
        i, n = args.part
        note(
            f"part {i}/{n}: {counted(len(shards), 'dataset')} packed; when all parts are, run the "
            f"command without --part, which writes {plan.manifest}"
        )
        return 0
    _tell(args, plan)
    return 0


class _Progress:
    """Counts documents that are done."""

    def __init__(self, plan: PackingPlan, part: tuple[int, int]) -> None:
        mine = plan.prefixes[part[0] :: part[1]]
        self.total = sum(open_index(p).num_documents for p in mine)
        self.done = 0
        self.work = Work(f"packing {counted(len(mine), 'dataset')}")

    def __call__(self, more: Counted) -> None:
        self.done += more.documents
        self.work(self.done, self.total)


def _tell(args: argparse.Namespace, plan: PackingPlan) -> None:
    index = load_shards(plan.manifest)
    new = len(index.shards) - len(plan.known)
    if args.json:
        print(json.dumps({**describe_shards(index), "num_new_shards": new}, indent=2))
    else:
        print_shards(index, f", {count(new)} of them new" if plan.known else "")

"""Which documents did a step see? One answer of ``megapack-build trace``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.cli.decoding import decoder
from megapack.cli.inspect_sample import print_sample, view_sample
from megapack.cli.report import Screen, print_table
from megapack.errors import ConfigError

if TYPE_CHECKING:  # torch, which no other command needs
    from megapack.data import PackedDataset
    from megapack.data.run import OpenRun

__all__ = ["answer_step"]


def answer_step(args: argparse.Namespace, run: OpenRun) -> None:
    """Print what step ``args.step`` holds; with ``args.ranks``, who has it."""
    data, schedule = run.data, run.schedule
    if args.step < 0:
        raise ConfigError(f"--step {args.step}: steps are counted from 0")
    content = schedule.step(args.step)
    facts: dict[str, Any] = {
        "step": args.step,
        "tokens_before": schedule.tokens_before(args.step),
        "stage_from_step": schedule.stage_at(args.step).begin,
        "num_label_tokens": content.num_label_tokens,
        "samples": [
            {
                **place,
                "source": data.samples.names[source],
                "sample": int(data.samples.locate(np.array([sample]))[1][0]),
                "capacity": data.samples.capacity_of(sample),
                "segments": segments,
            }
            for place, sample in _dealt(args, run)
            for source, segments in [data.samples.segments(sample, content.num_lists)]
        ],
    }
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    console = Screen()
    stage = f"; of the stage from step {facts['stage_from_step']:,}" * (len(schedule.stages) > 1)
    console.write_line(
        f"step {args.step:,}: {len(content.sample_ids):,} samples of "
        f"{' and '.join(f'{draw.capacity:,}' for draw in content.draws)} tokens, "
        f"{content.num_label_tokens:,} labels; {facts['tokens_before']:,} tokens before it{stage}",
        style="bold",
    )
    if args.tokenizer is None:
        _print_segments(facts["samples"])
        return
    _print_text(console, args, data, facts["samples"])


def _print_text(
    console: Screen, args: argparse.Namespace, data: PackedDataset, items: list[dict[str, Any]]
) -> None:
    samples, shards = data.samples, data.samples.shards
    places = []
    for shown in items:
        source = samples.names.index(shown["source"])
        shard, sample = samples.shard_of(int(samples.bases[source]) + shown["sample"])
        first = int(shards.first_documents[shard])
        segments = [(document - first, begin, n) for document, begin, n in shown["segments"]]
        views = view_sample(data.documents(shard), shards.index(shard), sample, segments)
        places.append((source, shard, sample, views))
    decoders = {}
    for source, shard, _, _ in places:
        if source not in decoders:
            own = [view for s, _, _, views in places if s == source for view in views]
            ids = [i for view in own for i in view.token_ids]
            decoders[source] = decoder(args.tokenizer, data.documents(shard), ids)
    for shown, (source, shard, sample, views) in zip(items, places, strict=True):
        had = f"rank {shown['rank']}, micro step {shown['micro_step']}, " if "rank" in shown else ""
        console.write_line(f"=== {had}{shown['source']}")
        if len(shards.of_source(source)) > 1:
            console.write_line(f"in {data.documents(shard).prefix}, its documents counted there")
        print_sample(console, shards.index(shard), sample, views, decoders[source], full=args.full)


def _dealt(args: argparse.Namespace, run: OpenRun) -> list[tuple[dict[str, int], int]]:
    """(where, global sample id) of a step; ``where`` is empty when no ranks are asked for."""
    if args.ranks is None:
        if args.rank is not None:
            raise ConfigError(f"--rank {args.rank} of how many? Give --ranks, too")
        return [({}, sample) for sample in run.schedule.step(args.step).sample_ids.tolist()]
    found = []
    for rank in range(args.ranks) if args.rank is None else (args.rank,):
        for batch in run.sampler(rank, args.ranks).micro_batches(args.step):
            where = {"rank": rank, "micro_step": batch.micro_step}
            found += [(where, sample) for sample in batch]
    return found


def _print_segments(samples: list[dict[str, Any]]) -> None:
    places = [name for name in ("rank", "micro_step") if samples and name in samples[0]]
    print_table(
        ("source", *(name.replace("_", " ") for name in places), "sample", "document", "tokens"),
        [
            (shown["source"], *(shown[name] for name in places), shown["sample"], document)
            + (f"[{begin:,}, {begin + length:,})",)
            for shown in samples
            for document, begin, length in shown["segments"]
        ],
    )

"""Ask a run what it saw or will see, and when; answered without going through it.

FILE is a configuration of megapack-pretrain, or the config.yaml of a run directory. What a step
holds is a function of it and of the .samples files, so any step is as near as the first.

--step N shows the documents of a step, with --tokenizer their text, with --ranks who had them.
--document SOURCE:D shows in which steps document D of a source was or will be drawn.
Neither of them: what the run takes of every source until a step, in tokens and epochs.

examples:
  megapack-build trace run/config.yaml --step 1200 --tokenizer tokenizer.json
  megapack-build trace run/config.yaml --step 1200 --ranks 64 --rank 3
  megapack-build trace run/config.yaml --document code:81723 --until 20000
  megapack-build trace run/config.yaml --until 20000
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megapack.cli.arguments import add_shared, positive
from megapack.cli.decoding import decoder
from megapack.cli.inspect_sample import print_sample, view_sample
from megapack.cli.report import Screen, print_table
from megapack.config import apply_overrides, from_dict
from megapack.errors import ConfigError

if TYPE_CHECKING:  # megapack.data imports torch, which no other command needs
    from megapack.data import PackedDataset, Schedule

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML of the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of it, as in --set data.order=uniform; may be repeated",
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--step", type=int, metavar="N", help="show the documents of step N")
    question.add_argument(
        "--document",
        metavar="SOURCE:D",
        help="show the steps that draw document D (counted from 0) of a source",
    )
    parser.add_argument(
        "--until",
        type=positive,
        metavar="N",
        help="look at the first N steps (default: num_steps of the run, or one epoch)",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="deal the step to N ranks")
    parser.add_argument("--rank", type=int, metavar="R", help="show what rank R of them has")
    add_shared(parser, "--tokenizer", help="shows the text of the step")
    parser.add_argument("--full", action="store_true", help="do not shorten the text of segments")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    tree = _read(args.config, args.set)
    data, schedule = _open(tree, args.config)
    until = args.until or tree.get("num_steps") or schedule.num_steps(tree.get("num_epochs") or 1)
    if args.step is not None:
        _answer_step(args, tree, data, schedule)
    elif args.document is not None:
        _answer_document(args, schedule, until)
    else:
        _answer_until(args, schedule, until)
    return 0


def _read(path: str, overrides: list[str]) -> dict[str, Any]:
    tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(tree, dict) or not isinstance(tree.get("data"), dict):
        raise ConfigError(f"{path} has no section data; give a configuration of megapack-pretrain")
    return apply_overrides(tree, overrides)


def _open(tree: dict[str, Any], path: str) -> tuple[PackedDataset, Schedule]:
    """The data and the schedule that the run has."""
    from megapack.data import (  # noqa: PLC0415
        PackedDataset,
        Schedule,
        ScheduleConfig,
        load_blend,
    )

    section = tree["data"]
    if section.get("blend"):
        data = load_blend(section["blend"]).open()
    elif section.get("prefix") and section.get("index"):
        data = PackedDataset(section["prefix"], section["index"])
    else:
        raise ConfigError(f"{path}: data has neither prefix and index nor blend")
    names = {field.name for field in dataclasses.fields(ScheduleConfig)}
    chosen = {name: value for name, value in section.items() if name in names}
    config = from_dict(ScheduleConfig, {"seed": tree.get("seed", 0), **chosen}, where=path)
    return data, Schedule.from_config(data, config)


# --- which documents did a step see? ------------------------------------------------------------


def _answer_step(
    args: argparse.Namespace, tree: dict[str, Any], data: PackedDataset, schedule: Schedule
) -> None:
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
                "sample": sample - int(data.samples.bases[source]),
                "capacity": data.samples.capacity_of(sample),
                "segments": segments,
            }
            for place, sample in _dealt(args, tree, schedule)
            for source, segments in [data.samples.segments(sample)]
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
    console: Screen, args: argparse.Namespace, data: PackedDataset, samples: list[dict[str, Any]]
) -> None:
    sources = [data.samples.names.index(shown["source"]) for shown in samples]
    views = [
        view_sample(data.datasets[source], data.samples.indices[source], shown["sample"])
        for source, shown in zip(sources, samples, strict=True)
    ]
    decoders = {}
    for source in set(sources):
        own = [view for s, view in zip(sources, views, strict=True) if s == source]
        ids = [i for segments in own for segment in segments for i in segment.token_ids]
        decoders[source] = decoder(args.tokenizer, data.datasets[source], ids)
    for source, shown, segments in zip(sources, samples, views, strict=True):
        had = f"rank {shown['rank']}, micro step {shown['micro_step']}, " if "rank" in shown else ""
        console.write_line(f"=== {had}{shown['source']}")
        index = data.samples.indices[source]
        print_sample(console, index, shown["sample"], segments, decoders[source], full=args.full)


def _dealt(
    args: argparse.Namespace, tree: dict[str, Any], schedule: Schedule
) -> list[tuple[dict[str, int], int]]:
    """(where, global sample id) of a step; ``where`` is empty when no ranks are asked for."""
    from megapack.data import BucketBatchSampler  # noqa: PLC0415

    if args.ranks is None:
        if args.rank is not None:
            raise ConfigError(f"--rank {args.rank} of how many? Give --ranks, too")
        return [({}, sample) for sample in schedule.step(args.step).sample_ids.tolist()]
    found = []
    for rank in range(args.ranks) if args.rank is None else (args.rank,):
        sampler = BucketBatchSampler(
            schedule,
            data_parallel_rank=rank,
            data_parallel_size=args.ranks,
            micro_batch_tokens=tree["data"]["micro_batch_tokens"],
            num_steps=0,
            uneven=tree["data"].get("uneven", "error"),
        )
        for batch in sampler.micro_batches(args.step):
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


# --- in which steps does a document appear? ------------------------------------------------------


def _answer_document(args: argparse.Namespace, schedule: Schedule, until: int) -> None:
    samples = schedule.samples
    source, document = _document(args.document, samples.names)
    facts: dict[str, Any] = {
        "source": samples.names[source],
        "document": document,
        "until": until,
        "samples": [
            {
                "sample": sample - int(samples.bases[source]),
                "segments": [
                    piece for piece in samples.segments(sample)[1] if piece[0] == document
                ],
                "steps": schedule.steps_of(sample, until),
            }
            for sample in samples.samples_of(source, document)
        ],
    }
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    Screen().write_line(
        f"document {document:,} of {facts['source']} in the first {until:,} steps", style="bold"
    )
    if not facts["samples"]:
        Screen().write_line("no sample holds it: it is empty, was dropped, or does not exist")
        return
    print_table(
        ("sample", "tokens", "steps"),
        [
            (
                f"{shown['sample']:,}",
                " ".join(f"[{begin:,}, {begin + n:,})" for _, begin, n in shown["segments"]),
                " ".join(f"{step:,}" for step in shown["steps"]) or "none",
            )
            for shown in facts["samples"]
        ],
    )


def _document(text: str, names: list[str]) -> tuple[int, int]:
    """``code:17`` -> (number of source code, 17); with one source its name may be left out."""
    name, colon, number = text.rpartition(":")
    if not colon and len(names) == 1:
        name = names[0]
    if not number.isdecimal() or names.count(name) != 1:
        raise ConfigError(
            f"--document {text!r} is not SOURCE:D with a number D and one of the sources "
            f"{', '.join(names[:20])}"
        )
    return names.index(name), int(number)


# --- what will be seen? ---------------------------------------------------------------------------


def _answer_until(args: argparse.Namespace, schedule: Schedule, until: int) -> None:
    from megapack.data import plan_run  # noqa: PLC0415

    plan = plan_run(schedule, until)
    print(json.dumps(dataclasses.asdict(plan), indent=2) if args.json else plan)

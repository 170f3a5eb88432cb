"""Ask a run what it saw or will see, and when; answered without going through it.

FILE is a configuration of megapack-pretrain, or the config.yaml of a run directory. What a step
holds is a function of it and of the .samples files, so any step is as near as the first.

--step N shows the documents of a step, with --tokenizer their text, with --ranks who had them;
of fill-in-the-middle which were told with their middle last, how (PSM, SPM), and where cut.
--document SOURCE:D shows in which steps document D of a source was or will be drawn.
--excluded shows what each list of excluded documents masks: how often its documents were seen
before, how often their samples are drawn since, and how often one of them is still shown (never).
--skipped shows the documents that stages skip, and what the run decided itself (autopilot, mixing);
with --tokenizer their text.
--unseen SOURCE writes the documents of a source that are not seen yet in the present pass over it,
as .npy, for `megapack-build pack --documents`: so a source goes on in another packing.
None of them: what the run takes of every source until a step, in tokens and epochs.

examples:
  megapack-build trace run/config.yaml --step 1200 --tokenizer tokenizer.json
  megapack-build trace run/config.yaml --step 1200 --ranks 64 --rank 3
  megapack-build trace run/config.yaml --document code:81723 --max-step 20000
  megapack-build trace run/config.yaml --excluded --max-step 20000
  megapack-build trace run/config.yaml --skipped --tokenizer tokenizer.json
  megapack-build trace run/config.yaml --unseen web --max-step 12000 --output rest.npy
  megapack-build trace run/config.yaml --max-step 20000
"""

from __future__ import annotations

import argparse
import dataclasses
import io
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.cli.arguments import add_shared, positive, refuse_without
from megapack.cli.inspect import decoder, print_sample, turned_round, view_sample
from megapack.cli.output import Screen, print_table, printed_as_json
from megapack.config import load_config
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.storage.files import atomic_write, check_target

if TYPE_CHECKING:
    from megapack.data import PackedDataset, Schedule
    from megapack.data.run import OpenRun
    from megapack.training.config import PretrainConfig


# ---- Which documents did a step see? One answer of ``megapack-build trace`` ---------------------


def answer_step(args: argparse.Namespace, run: OpenRun) -> None:
    """Print what step ``args.step`` holds; with ``args.ranks``, who has it."""
    if args.step < 0:
        raise ConfigError(f"--step {args.step}: steps are counted from 0")
    facts = step_facts(args, run, args.step)
    if not printed_as_json(args, facts):
        _print_step(args, run, facts)


def step_facts(args: argparse.Namespace, run: OpenRun, step: int) -> dict[str, Any]:
    """A step and its samples, as JSON."""
    data, schedule = run.data, run.schedule
    content = schedule.step(step)
    return {
        "step": step,
        "tokens_before": schedule.tokens_before(step),
        "stage_from_step": schedule.stage_at(step).begin,
        "num_label_tokens": content.num_label_tokens,
        **_weights(run, step),
        "samples": [
            {**place, **_sample_facts(data, sample, view)}
            for place, sample, view in _assigned(args, run, step)
        ],
    }


def _sample_facts(data: PackedDataset, sample: int, view: StepView) -> dict[str, Any]:
    """Return source, number, segments and groups of a sample, as JSON."""
    samples = data.samples
    source, segments = samples.segments(sample, view)
    facts: dict[str, Any] = {
        "source": samples.names[source],
        "sample": int(samples.locate(np.array([sample]))[1][0]),
        "capacity": samples.capacity_of(sample),
        "segments": segments,
    }
    if samples.attention == "group":
        facts["groups"] = samples.groups_of(sample, view)
    return facts if view.epochs is None else facts | _fim(data, sample, view)


def _fim(data: PackedDataset, sample: int, view: StepView) -> dict[str, Any]:
    """Return how fill-in-the-middle transforms documents of a sample, with epoch and rate."""
    assert view.epochs is not None and view.fim_rates is not None
    found = [
        {"segment": draw.segment, "how": "SPM" if draw.spm else "PSM"}
        | {"cuts": [draw.first, draw.second]}
        for draw in data.fim_draws([sample], view)
    ]
    epoch, rate = int(view.epochs[0]), float(view.fim_rates[0])
    return {"epoch": epoch, "fim_rate": rate, "fim": found}


def _weights(run: OpenRun, step: int) -> dict[str, Any]:
    """How losses of a step count, where not all alike."""
    from megapack.data.sampler import weigh_step  # noqa: PLC0415 (torch)

    samples = run.data.samples
    weight = weigh_step(run.schedule, run.schedule.step(step), samples).label_weight
    return {} if weight is None else {"loss": samples.mixture.loss, "step_label_weight": weight}


def _print_step(args: argparse.Namespace, run: OpenRun, facts: dict[str, Any]) -> None:
    schedule, content = run.schedule, run.schedule.step(facts["step"])
    console = Screen()
    weight = ""
    if "step_label_weight" in facts:
        weight = f" of weight {facts['step_label_weight']:,.6g} ({facts['loss']})"
    stage = f"; of the stage from step {facts['stage_from_step']:,}" * (len(schedule.stages) > 1)
    console.write_line(
        f"step {content.index:,}: {len(content.sample_ids):,} samples of "
        f"{' and '.join(f'{draw.capacity:,}' for draw in content.draws)} tokens, "
        f"{content.num_label_tokens:,} labels{weight}; {facts['tokens_before']:,} tokens before it"
        f"{stage}",
        style="bold",
    )
    if args.tokenizer is None:
        _print_segments(facts["samples"])
    else:
        _print_text(console, args, run, facts["samples"], content.view)


def _print_text(
    console: Screen,
    args: argparse.Namespace,
    run: OpenRun,
    items: list[dict[str, Any]],
    view: StepView,
) -> None:
    data, samples, shards = run.data, run.data.samples, run.data.samples.shards
    places, told = [], _as_told(data) if any("fim" in shown for shown in items) else None
    for shown in items:
        source = samples.names.index(shown["source"])
        number = int(samples.bases[source]) + shown["sample"]
        shard, sample = samples.shard_of(number)
        first = int(shards.first_documents[shard])
        segments = [(document - first, begin, n) for document, begin, n in shown["segments"]]
        views = view_sample(data.documents(shard), shards.index(shard), sample, segments)
        if told is not None:
            epoch, rate = (np.array([shown[name]]) for name in ("epoch", "fim_rate"))
            of_sample = dataclasses.replace(view, epochs=epoch, fim_rates=rate, window=None)
            views = turned_round(views, told, number, of_sample)
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


def _as_told(data: PackedDataset) -> PackedDataset:
    """The data with every document a segment of its own, and no other weights than its tokens'."""
    from megapack.data import PackedDataset as Packed  # noqa: PLC0415 (torch)

    mixture = data.samples.mixture
    names = ("names", "stages", "fim", "fim_rates")
    return Packed(
        data.datasets,
        data.samples.indices,
        **{name: getattr(mixture, name) for name in names},
    )


Assigned = tuple[dict[str, int], int, StepView]


def _assigned(args: argparse.Namespace, run: OpenRun, step: int) -> list[Assigned]:
    """Return (place, global sample id, view of this sample) for every sample of a step.

    The place names rank and micro step; it is empty without ``--ranks``.
    """
    if args.ranks is None:
        refuse_without("--ranks N", rank=args.rank)
        content = run.schedule.step(step)
        views = content.view.each(len(content.sample_ids))
        return [({}, *row) for row in zip(content.sample_ids.tolist(), views, strict=True)]
    found: list[Assigned] = []
    for rank in range(args.ranks) if args.rank is None else (args.rank,):
        for batch in run.sampler(rank, args.ranks).micro_batches(step):
            where = {"rank": rank, "micro_step": batch.micro_step}
            found += [(where, *row) for row in zip(batch, batch.view.each(len(batch)), strict=True)]
    return found


def _print_segments(samples: list[dict[str, Any]]) -> None:
    places = [name for name in ("rank", "micro_step") if samples and name in samples[0]]
    in_groups, has_fim = (bool(samples) and name in samples[0] for name in ("groups", "fim"))
    heads = ("source", *(name.replace("_", " ") for name in places), "sample", "document", "tokens")
    told = [
        {of["segment"]: f"{of['how']} {of['cuts'][0]:,} {of['cuts'][1]:,}" for of in shown["fim"]}
        if has_fim
        else {}
        for shown in samples
    ]
    print_table(
        (*heads, *(["group"] if in_groups else []), *(["middle last"] if has_fim else [])),
        [
            (shown["source"], *(shown[name] for name in places), shown["sample"], document)
            + (f"[{begin:,}, {begin + length:,})",)
            + ((shown["groups"][i],) if in_groups else ())
            + ((of.get(i, ""),) if has_fim else ())
            for shown, of in zip(samples, told, strict=True)
            for i, (document, begin, length) in enumerate(shown["segments"])
        ],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML of the run")
    add_shared(parser, "--set")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--step", type=int, metavar="N", help="show the documents of step N")
    question.add_argument(
        "--document",
        metavar="SOURCE:D",
        help="show the steps that draw document D (counted from 0) of a source",
    )
    question.add_argument(
        "--excluded", action="store_true", help="show what lists of excluded documents mask"
    )
    question.add_argument(
        "--unseen", metavar="SOURCE", help="write which documents of a source are not seen yet"
    )
    question.add_argument(
        "--skipped",
        action="store_true",
        help="show what stages skip, and decisions of the run itself",
    )
    parser.add_argument(
        "--max-step",
        type=positive,
        metavar="N",
        help="look at the first N steps (default: those of the run)",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="deal the step to N ranks")
    parser.add_argument("--rank", type=int, metavar="R", help="show what rank R of them has")
    add_shared(parser, "--tokenizer", help="shows the text of the step")
    add_shared(parser, "--output", help="of --unseen; ids of documents as .npy")
    add_shared(parser, "--overwrite")
    parser.add_argument("--full", action="store_true", help="do not shorten the text of segments")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    from megapack.data.program import check_reach  # noqa: PLC0415
    from megapack.data.run import DECISIONS, open_run  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    if args.step is None and not args.skipped:
        given = {"ranks": args.ranks, "rank": args.rank, "tokenizer": args.tokenizer}
        refuse_without("--step N (or --skipped)", **given)
    elif args.max_step is not None:
        raise ConfigError(f"--max-step {args.max_step} covers many steps: leave it out")
    if args.tokenizer is None:
        refuse_without("--tokenizer T", full=args.full)
    if args.unseen is None:
        refuse_without("--unseen SOURCE", output=args.output, overwrite=args.overwrite)
    config = load_config(PretrainConfig, args.config, args.set)
    if (Path(args.config).parent / DECISIONS).exists():  # of a run directory, wherever it is now
        config = dataclasses.replace(config, run_dir=str(Path(args.config).parent))
    opened = open_run(config)
    schedule = opened.schedule
    max_step = args.max_step or opened.num_steps
    check_reach(
        schedule.program, "the question", max(args.step or 0, max_step), "ask of earlier ones"
    )
    if args.step is not None:
        answer_step(args, opened)
    elif args.document is not None:
        _answer_document(args, schedule, max_step)
    elif args.unseen is not None:
        _answer_unseen(args, schedule, max_step)
    elif args.excluded:
        _answer_excluded(args, schedule, max_step)
    elif args.skipped:
        _answer_skipped(args, config, opened)
    else:
        _answer_steps(args, schedule, max_step)
    return 0


# --- what did the run decide, and what did it pass over? ------------------------------------------


def _answer_skipped(args: argparse.Namespace, config: PretrainConfig, opened: OpenRun) -> None:
    from megapack.data.run import open_run  # noqa: PLC0415

    decisions = opened.decisions
    made = decisions.decisions if decisions is not None else ()
    facts, before = [], []
    for number, decision in enumerate(made):
        assert decisions is not None
        then = open_run(config, dataclasses.replace(decisions, decisions=made[:number]))
        end = decision.begin + decision.stage.skip_steps
        steps = [step_facts(args, then, step) for step in range(decision.begin, end)]
        facts.append({**decision.tree, "skipped": steps})
        before.append(then)
    written = _written_skips(opened, {decision.begin for decision in made})
    if printed_as_json(args, {"decisions": facts, "written": written}):
        return
    console = Screen()
    for skip in written:
        console.write_line(
            f"the stage from step {skip['from_step']:,} skips {len(skip['skipped']):,} steps",
            style="bold",
        )
        for number, samples in enumerate(skip["skipped"], skip["from_step"]):
            console.write_line(f"step {number:,} of the run without this skip")
            _print_segments(samples)
    if not facts:
        console.write_line("the run has decided nothing itself")
    for fact, then in zip(facts, before, strict=True):
        taken_back = " (taken back by a later one)" if fact["void"] else ""
        console.write_line(
            f"{fact['by']}, after {fact['step']:,} steps{taken_back}: {fact['reason']}",
            style="bold",
        )
        said = (f"{name} {value}" for name, value in fact["stage"].items())
        console.write_line(f"the stage: {', '.join(said)}")
        for step in fact["skipped"]:
            _print_step(args, then, step)


def _written_skips(run: OpenRun, decided: Collection[int]) -> list[dict[str, Any]]:
    """Return the skips of written stages: for every skipped step, its samples."""
    return [
        {
            "from_step": stage.begin,
            "skipped": [
                [
                    _sample_facts(run.data, sample, view)
                    for draw in draws
                    for sample, view in zip(
                        draw.sample_ids.tolist(),
                        draw.view.each(len(draw.sample_ids)),
                        strict=True,
                    )
                ]
                for draws in stage.skipped_steps()
            ],
        }
        for stage in run.schedule.stages
        if stage.settings.skip_steps and stage.begin not in decided
    ]


# --- in which steps does a document appear? ------------------------------------------------------


MOST_DRAWS = 100_000  # of a document that are listed: seconds, and megabytes of numbers


def _answer_document(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data.report import times_drawn  # noqa: PLC0415

    samples = schedule.samples
    source, document = _document(args.document, samples.names)
    masked_from = schedule.masked_from(source, document)
    end = max_step if masked_from is None else min(max_step, masked_from)
    holding = samples.samples_of(source, document)
    times = times_drawn(schedule.stage_at(end), source, np.array(holding, np.int64), end).sum()
    if times > MOST_DRAWS:
        raise ConfigError(
            f"--document {args.document}: its samples are drawn {times:,} times in {end:,} steps, "
            f"and at most {MOST_DRAWS:,} are listed: look at fewer steps by --max-step"
        )
    facts: dict[str, Any] = {
        "source": samples.names[source],
        "document": document,
        "max_step": max_step,
        "masked_from": masked_from,
        "samples": [
            {
                "sample": sample - int(samples.bases[source]),
                "segments": [
                    piece for piece in samples.segments(sample)[1] if piece[0] == document
                ],
                "steps": schedule.steps_of(sample, end),
            }
            for sample in holding
        ],
    }
    if printed_as_json(args, facts):
        return
    masked = "" if masked_from is None else f"; masked from step {masked_from:,} on"
    Screen().write_line(
        f"document {document:,} of {facts['source']} in the first {max_step:,} steps{masked}",
        style="bold",
    )
    if not facts["samples"]:
        Screen().write_line("no sample holds it: it is empty, or packing left it out")
    for shown in facts["samples"]:  # no table, which would cut long lines
        tokens = " ".join(f"[{begin:,}, {begin + n:,})" for _, begin, n in shown["segments"])
        steps = " ".join(f"{step:,}" for step in shown["steps"]) or "none"
        Screen().write_line(f"sample {shown['sample']:,}, tokens {tokens}: steps {steps}")


def _document(text: str, names: list[str]) -> tuple[int, int]:
    """``code:17`` -> (number of source code, 17); with one source its name may be left out."""
    name, colon, number = text.rpartition(":")
    if not colon and len(names) == 1:
        name = names[0]
    if not number.isdecimal() or len(number) > 18 or names.count(name) != 1:
        raise ConfigError(
            f"--document {text!r} is not SOURCE:D with a number D and one of the sources "
            f"{', '.join(names[:20])}"
        )
    return names.index(name), int(number)


# --- what do the lists of excluded documents mask? ----------------------------------------------


def _answer_excluded(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data import plan_exclusions  # noqa: PLC0415

    found = plan_exclusions(schedule, max_step)
    if printed_as_json(args, [dataclasses.asdict(item) for item in found]):
        return
    Screen().write_line(f"excluded documents in the first {max_step:,} steps", style="bold")
    if not found:
        Screen().write_line("no stage excludes any")
        return
    print_table(
        ("source", "from step", "documents", "samples", "seen before", "last", "drawn since")
        + ("shown since",),
        [
            (item.source, f"{item.from_step:,}", f"{item.num_documents:,}")
            + (f"{item.num_samples:,}", f"{item.draws_before:,}")
            + ("never" if item.last_seen is None else f"step {item.last_seen:,}",)
            + (f"{item.draws_since:,}", f"{item.shown_since:,}")
            for item in found
        ],
    )


# --- what is not seen yet? -----------------------------------------------------------------------


def _answer_unseen(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data import unseen_documents  # noqa: PLC0415

    names = schedule.samples.names
    if args.output is None:
        raise ConfigError(f"--unseen {args.unseen} writes the documents to a file: give --output")
    if names.count(args.unseen) != 1:
        there = ", ".join(names[:20])
        raise ConfigError(f"--unseen {args.unseen!r} is none of the sources {there}")
    documents, passes = unseen_documents(schedule, names.index(args.unseen), max_step)
    content = io.BytesIO()
    np.save(content, documents)

    def difference() -> str | None:
        same = Path(args.output).read_bytes() == content.getvalue()
        return None if same else "it holds something else"

    if check_target(args.output, overwrite=args.overwrite, difference=difference):
        with atomic_write(args.output) as file:
            file.write(content.getvalue())
    facts = {
        "source": args.unseen,
        "steps": max_step,
        "passes": passes,
        "documents": len(documents),
    }
    if printed_as_json(args, facts):
        return
    Screen().write_line(
        f"after {max_step:,} steps {len(documents):,} documents of {args.unseen} are not seen "
        f"yet in pass {passes + 1:,} over it: {args.output}"
    )


# --- what will be seen? ---------------------------------------------------------------------------


def _answer_steps(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data import plan_run  # noqa: PLC0415

    plan = plan_run(schedule, max_step)
    facts = {
        "num_steps": plan.num_steps,
        "stages": [dataclasses.asdict(stage) for stage in plan.stages],
        "datasets": [dataset._asdict() for dataset in plan.datasets],
    }
    if not printed_as_json(args, facts):
        print(plan)

"""Show which documents a run trains on, and when, without replaying the steps before.

FILE is a configuration of megapack-pretrain, or the config.yaml of a run directory. The content of
a step follows from it and from the .samples files, so every step is computed directly.

--step N shows the documents of a step; with --tokenizer their text, with --ranks which rank has
them. For fill-in-the-middle it shows which documents are reordered, how (PSM, SPM) and where they
are cut.
--document SOURCE:D shows the steps that draw document D of a source.
--exclusions shows for each list of excluded documents how often its documents were drawn before the
list took effect, and how often their samples are drawn after it (the documents are masked there).
--skipped shows the documents that stages skip, and the decisions of the run itself (autopilot,
mixing); with --tokenizer their text.
--unseen SOURCE writes the documents of a source that its current epoch has not drawn yet, as .npy
for `megapack-build pack --documents`: so a source can continue in another packing.
Without any of these: the tokens and epochs that the run takes of every source.

examples:
  megapack-build trace run/config.yaml --step 1200 --tokenizer tokenizer.json
  megapack-build trace run/config.yaml --step 1200 --ranks 64 --rank 3
  megapack-build trace run/config.yaml --document code:81723 --max-step 20000
  megapack-build trace run/config.yaml --exclusions --max-step 20000
  megapack-build trace run/config.yaml --skipped --tokenizer tokenizer.json
  megapack-build trace run/config.yaml --unseen web --max-step 12000 --output rest.npy
  megapack-build trace run/config.yaml --max-step 20000
"""

from __future__ import annotations

import argparse
import dataclasses
import io
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.cli.arguments import add_flags, add_shared, positive, refuse_without
from megapack.cli.inspect import apply_fim, decoder, print_sample, view_sample
from megapack.cli.output import Screen, print_result, print_table
from megapack.config import load_config
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.storage.files import atomic_write, check_target

if TYPE_CHECKING:
    from megapack.data import PackedDataset, Schedule
    from megapack.data.run import OpenRun
    from megapack.training.config import PretrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML of the run")
    add_shared(parser, "--set")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--step", type=int, metavar="N", help="show the documents of step N")
    add_shared(question, "--document")
    add_flags(question, exclusions="show the effect of lists of excluded documents")
    question.add_argument(
        "--unseen",
        metavar="SOURCE",
        help="write the documents of a source that its current epoch has not drawn to --output",
    )
    add_flags(
        question, skipped="show the documents that stages skip, and the decisions of the run itself"
    )
    parser.add_argument(
        "--max-step",
        type=positive,
        metavar="N",
        help="consider the first N steps (default: all steps of the run)",
    )
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="assign --step to N data-parallel ranks"
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="show only rank R, from 0 (default: all --ranks)"
    )
    add_shared(parser, "--tokenizer", help="shows the text of --step and --skipped")
    add_shared(parser, "--output", help="of --unseen, a .npy of document numbers")
    add_shared(parser, "--overwrite")
    add_flags(parser, full="show the whole text of segments, without ellipses")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> None:
    from megapack.data.program import check_reach  # noqa: PLC0415
    from megapack.data.run import DECISIONS, OpenRun  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    if args.step is None and not args.skipped:
        options = {"ranks": args.ranks, "rank": args.rank, "tokenizer": args.tokenizer}
        refuse_without("--step N (or --skipped)", **options)
    elif args.max_step is not None:
        raise ConfigError(
            f"--max-step {args.max_step} has no effect with --step and --skipped: leave it out"
        )
    if args.tokenizer is None:
        refuse_without("--tokenizer T", full=args.full)
    if args.unseen is None:
        refuse_without("--unseen SOURCE", output=args.output, overwrite=args.overwrite)
    config = load_config(PretrainConfig, args.config, args.set)
    if (Path(args.config).parent / DECISIONS).exists():  # a run directory, possibly moved
        config = dataclasses.replace(config, run_dir=str(Path(args.config).parent))
    opened = OpenRun(config)
    max_step = args.max_step or opened.num_steps
    farthest = max(max_step, args.step or 0)
    check_reach(opened.schedule.program, "the question", farthest, "ask about earlier steps")
    if args.step is not None:
        _answer_step(args, opened)
    elif args.skipped:
        _answer_skipped(args, config, opened)
    elif args.document is not None:
        facts = document_facts(args.document, opened.schedule, max_step)
        print_result(args, facts, lambda: print_document(facts))
    elif args.unseen is not None:
        _answer_unseen(args, opened.schedule, max_step)
    elif args.exclusions:
        _answer_excluded(args, opened.schedule, max_step)
    else:
        _answer_steps(args, opened.schedule, max_step)


# ---- --step: which documents did a step see? -----------------------------------------------------


def _answer_step(args: argparse.Namespace, run: OpenRun) -> None:
    if args.step < 0:
        raise ConfigError(f"--step is {args.step}; steps are counted from 0")
    facts = step_facts(args, run, args.step)
    print_result(args, facts, lambda: _print_step(args, run, facts))


def step_facts(args: argparse.Namespace, run: OpenRun, step: int) -> dict[str, Any]:
    from megapack.data.sampler import weigh_step  # noqa: PLC0415 (torch)

    samples, schedule = run.data.samples, run.schedule
    content = schedule.step(step)
    facts: dict[str, Any] = {
        "step": step,
        "tokens_before": schedule.tokens_before(step),
        "stage_from_step": schedule.stage_at(step).begin,
        "num_label_tokens": content.num_label_tokens,
    }
    weight = weigh_step(schedule, content, samples).label_weight
    if weight is not None:  # not all losses count alike
        facts |= {"loss": samples.mixture.loss, "step_label_weight": weight}
    facts["samples"] = [
        {**place, **_sample_facts(run.data, sample, view)}
        for place, sample, view in _assigned(args, run, step)
    ]
    return facts


def _sample_facts(data: PackedDataset, sample: int, view: StepView) -> dict[str, Any]:
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
    if view.epochs is not None:
        assert view.fim_rates is not None
        facts |= {"epoch": int(view.epochs[0]), "fim_rate": float(view.fim_rates[0])}
        facts["fim"] = [
            {"segment": draw.segment, "how": "SPM" if draw.spm else "PSM"}
            | {"cuts": [draw.first, draw.second]}
            for draw in data.fim_draws([sample], view)
        ]
    return facts


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
    assigned: list[Assigned] = []
    for rank in range(args.ranks) if args.rank is None else (args.rank,):
        for batch in run.sampler(rank, args.ranks).micro_batches(step):
            place = {"rank": rank, "micro_step": batch.micro_step}
            rows = zip(batch, batch.view.each(len(batch)), strict=True)
            assigned += [(place, *row) for row in rows]
    return assigned


def _print_step(args: argparse.Namespace, run: OpenRun, facts: dict[str, Any]) -> None:
    schedule, content = run.schedule, run.schedule.step(facts["step"])
    console = Screen()
    weight = ""
    if "step_label_weight" in facts:
        weight = f" of weight {facts['step_label_weight']:,.6g} ({facts['loss']})"
    stage = f"; of the stage from step {facts['stage_from_step']:,}" * (len(schedule.stages) > 1)
    console.write_line(
        f"step {content.index:,}: {len(content.sample_ids):,} samples of "
        f"{' and '.join(dict.fromkeys(f'{draw.capacity:,}' for draw in content.draws))} tokens, "
        f"{content.num_label_tokens:,} labels{weight}; {facts['tokens_before']:,} tokens before it"
        f"{stage}",
        style="bold",
    )
    if args.tokenizer is None:
        _print_segments(facts["samples"])
    else:
        _print_text(console, args, run, facts["samples"], content.view)


def _print_segments(samples: list[dict[str, Any]]) -> None:
    """Print a row per segment; columns without content are left out."""
    first = samples[0] if samples else {}
    columns: dict[str, Callable[[tuple[dict[str, Any], int]], Any]] = {
        "source": lambda row: row[0]["source"]
    }
    if "rank" in first:
        columns["rank"] = lambda row: row[0]["rank"]
        columns["micro step"] = lambda row: row[0]["micro_step"]
    columns["sample"] = lambda row: row[0]["sample"]
    columns["document"] = lambda row: row[0]["segments"][row[1]][0]
    columns["tokens"] = lambda row: _range(*row[0]["segments"][row[1]])
    if "groups" in first:
        columns["group"] = lambda row: row[0]["groups"][row[1]]
    if "fim" in first:
        columns["middle last"] = lambda row: _cuts(row[0]["fim"], row[1])
    print_table(columns, [(facts, i) for facts in samples for i in range(len(facts["segments"]))])


def _range(_: int, begin: int, length: int) -> str:
    return f"[{begin:,}, {begin + length:,})"


def _cuts(fim: list[dict[str, Any]], segment: int) -> str:
    draws = (draw for draw in fim if draw["segment"] == segment)
    return "".join(f"{draw['how']} {draw['cuts'][0]:,} {draw['cuts'][1]:,}" for draw in draws)


def _print_text(
    console: Screen,
    args: argparse.Namespace,
    run: OpenRun,
    items: list[dict[str, Any]],
    view: StepView,
) -> None:
    data, samples, shards = run.data, run.data.samples, run.data.samples.shards
    fim_data = _fim_data(data) if any("fim" in facts for facts in items) else None
    places = []
    for facts in items:
        source = samples.names.index(facts["source"])
        number = int(samples.bases[source]) + facts["sample"]
        shard, sample = samples.shard_of(number)
        # Documents are numbered within the source; view_sample expects the number in the shard.
        first = int(shards.first_documents[shard])
        segments = [(document - first, begin, n) for document, begin, n in facts["segments"]]
        views = view_sample(data.documents(shard), shards.index(shard), sample, segments)
        if fim_data is not None:
            epoch, rate = (np.array([facts[name]]) for name in ("epoch", "fim_rate"))
            step_view = dataclasses.replace(view, epochs=epoch, fim_rates=rate, window=None)
            views = apply_fim(views, fim_data, number, step_view)
        places.append((source, shard, sample, views))
    # One decoder per source: shards of a source have the same tokenizer.
    decoders = {}
    for source, shard, _, _ in places:
        if source not in decoders:
            views = [view for s, _, _, views in places if s == source for view in views]
            ids = [i for view in views for i in view.token_ids]
            decoders[source] = decoder(args.tokenizer, data.documents(shard), ids)
    for facts, (source, shard, sample, views) in zip(items, places, strict=True):
        place = ""
        if "rank" in facts:
            place = f"rank {facts['rank']}, micro step {facts['micro_step']}, "
        console.write_line(f"=== {place}{facts['source']}")
        if len(shards.of_source(source)) > 1:
            console.write_line(f"in {data.documents(shard).prefix}, its documents counted there")
        print_sample(console, shards.index(shard), sample, views, decoders[source], full=args.full)


def _fim_data(data: PackedDataset) -> PackedDataset:
    """Return the data with one segment per document and the loss weights of its tokens alone."""
    from megapack.data import PackedDataset as Packed  # noqa: PLC0415 (torch)

    mixture = data.samples.mixture
    settings = {name: getattr(mixture, name) for name in ("names", "stages", "fim", "fim_rates")}
    return Packed(data.datasets, data.samples.indices, **settings)


# ---- --skipped: what did the run decide, and what did it skip? -----------------------------------


def _answer_skipped(args: argparse.Namespace, config: PretrainConfig, opened: OpenRun) -> None:
    from megapack.data.run import OpenRun  # noqa: PLC0415

    decisions = opened.decisions
    decided = decisions.decisions if decisions is not None else ()
    facts, runs_before = [], []
    for number, decision in enumerate(decided):
        assert decisions is not None
        run_before = OpenRun(config, dataclasses.replace(decisions, decisions=decided[:number]))
        end = decision.begin + decision.stage.skip_steps
        steps = [step_facts(args, run_before, step) for step in range(decision.begin, end)]
        facts.append({**decision.tree, "skipped": steps})
        runs_before.append(run_before)
    written = _written_skips(opened, {decision.begin for decision in decided})

    def show() -> None:
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
            console.write_line("the run made no decisions")
        for fact, run_before in zip(facts, runs_before, strict=True):
            rolled_back = " (rolled back by a later one)" if fact["void"] else ""
            console.write_line(
                f"{fact['by']}, after {fact['step']:,} steps{rolled_back}: {fact['reason']}",
                style="bold",
            )
            settings = (f"{name} {value}" for name, value in fact["stage"].items())
            console.write_line(f"the stage: {', '.join(settings)}")
            for step in fact["skipped"]:
                _print_step(args, run_before, step)

    print_result(args, {"decisions": facts, "written": written}, show)


def _written_skips(run: OpenRun, decided: Collection[int]) -> list[dict[str, Any]]:
    """Return the skips of written stages: for every skipped step, its samples."""

    def samples_of(draws: Any) -> list[dict[str, Any]]:
        return [
            _sample_facts(run.data, sample, view)
            for draw in draws
            for sample, view in zip(
                draw.sample_ids.tolist(), draw.view.each(len(draw.sample_ids)), strict=True
            )
        ]

    return [
        {"from_step": stage.begin, "skipped": list(map(samples_of, stage.skipped_steps()))}
        for stage in run.schedule.stages
        if stage.settings.skip_steps and stage.begin not in decided
    ]


# ---- --document: in which steps does a document appear? ------------------------------------------

MOST_DRAWS = 100_000  # draws of a document that are listed: seconds, and megabytes of numbers


def document_facts(name: str, schedule: Schedule, max_step: int) -> dict[str, Any]:
    """Return the samples with a piece of document ``SOURCE:D``, and the steps that draw them."""
    from megapack.data.report import times_drawn  # noqa: PLC0415

    samples = schedule.samples
    source, document = _parse_document(name, samples.names)
    masked_from = schedule.masked_from(source, document)
    end = max_step if masked_from is None else min(max_step, masked_from)
    holding = samples.samples_of(source, document)
    times = times_drawn(schedule.stage_at(end), source, np.array(holding, np.int64), end).sum()
    if times > MOST_DRAWS:
        raise ConfigError(
            f"--document {name}: its samples are drawn {times:,} times in {end:,} steps, "
            f"and at most {MOST_DRAWS:,} are listed: consider fewer steps with --max-step"
        )
    return {
        "source": samples.names[source],
        "document": document,
        "max_step": max_step,
        "masked_from": masked_from,
        "samples": [
            {
                "sample": sample - int(samples.bases[source]),
                "segments": [s for s in samples.segments(sample)[1] if s[0] == document],
                "steps": schedule.steps_of(sample, end),
            }
            for sample in holding
        ],
    }


def print_document(facts: dict[str, Any]) -> None:
    console, masked_from = Screen(), facts["masked_from"]
    masked = "" if masked_from is None else f"; masked from step {masked_from:,} on"
    console.write_line(
        f"document {facts['document']:,} of {facts['source']} in the first "
        f"{facts['max_step']:,} steps{masked}",
        style="bold",
    )
    if not facts["samples"]:
        console.write_line("no sample holds it: it is empty, or packing left it out")
    for sample in facts["samples"]:  # not a table: it would cut long lines
        tokens = " ".join(_range(*segment) for segment in sample["segments"])
        steps = " ".join(f"{step:,}" for step in sample["steps"]) or "none"
        console.write_line(f"sample {sample['sample']:,}, tokens {tokens}: steps {steps}")


def _parse_document(text: str, names: list[str]) -> tuple[int, int]:
    """Convert ``code:17`` to (number of source code, 17); a single source needs no name."""
    name, colon, number = text.rpartition(":")
    if not colon and len(names) == 1:
        name = names[0]
    if not number.isdecimal() or len(number) > 18 or names.count(name) != 1:
        raise ConfigError(
            f"--document {text!r} is not SOURCE:D with a number D and one of the sources "
            f"{', '.join(names[:20])}"
        )
    return names.index(name), int(number)


# ---- --exclusions: what do the lists of excluded documents mask? ---------------------------------

_EXCLUSION_COLUMNS: dict[str, Any] = {
    "source": lambda row: row.source,
    "from step": lambda row: f"{row.from_step:,}",
    "documents": lambda row: f"{row.num_documents:,}",
    "samples": lambda row: f"{row.num_samples:,}",
    "seen before": lambda row: f"{row.draws_before:,}",
    "last": lambda row: "never" if row.last_seen is None else f"step {row.last_seen:,}",
    "drawn since": lambda row: f"{row.draws_since:,}",
    "shown since": lambda row: f"{row.shown_since:,}",
}


def _answer_excluded(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data import plan_exclusions  # noqa: PLC0415

    exclusions = plan_exclusions(schedule, max_step)

    def show() -> None:
        Screen().write_line(f"excluded documents in the first {max_step:,} steps", style="bold")
        if exclusions:
            print_table(_EXCLUSION_COLUMNS, exclusions)
        else:
            Screen().write_line("no stage excludes any")

    print_result(args, [dataclasses.asdict(item) for item in exclusions], show)


# ---- --unseen: which documents were not drawn yet? -----------------------------------------------


def _answer_unseen(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data import unseen_documents  # noqa: PLC0415

    names = schedule.samples.names
    if args.output is None:
        raise ConfigError(f"--unseen {args.unseen} writes the documents to a file: give --output")
    if names.count(args.unseen) != 1:
        sources = ", ".join(names[:20])
        raise ConfigError(f"--unseen {args.unseen!r} is none of the sources {sources}")
    documents, passes = unseen_documents(schedule, names.index(args.unseen), max_step)
    content = io.BytesIO()
    np.save(content, documents)

    def difference() -> str | None:
        same = Path(args.output).read_bytes() == content.getvalue()
        return None if same else "it holds something else"

    if check_target(args.output, overwrite=args.overwrite, difference=difference):
        with atomic_write(args.output) as file:
            file.write(content.getvalue())
    num_documents = len(documents)
    facts = {"source": args.unseen, "steps": max_step, "passes": passes, "documents": num_documents}
    text = (
        f"after {max_step:,} steps {num_documents:,} documents of {args.unseen} are not seen yet "
        f"in pass {passes + 1:,} over it: {args.output}"
    )
    print_result(args, facts, lambda: Screen().write_line(text))


# ---- Default: what does the run take of every source? --------------------------------------------


def _answer_steps(args: argparse.Namespace, schedule: Schedule, max_step: int) -> None:
    from megapack.data import plan_run  # noqa: PLC0415

    plan = plan_run(schedule, max_step)
    facts = {
        "num_steps": plan.num_steps,
        "stages": [dataclasses.asdict(stage) for stage in plan.stages],
        "datasets": [dataset._asdict() for dataset in plan.datasets],
    }
    print_result(args, facts, lambda: print(plan))

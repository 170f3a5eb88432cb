"""Replay steps on a cluster that you do not have: time over the ideal, bubbles, waiting ranks.

SOURCE is a configuration of megapack-pretrain (.yaml), whose steps are dealt as training deals
them, or lengths of documents: a dataset PREFIX, a .samples file, .npy, or .txt (one a line). The
same documents are then assigned by plan_step and in the usual ways, to the same ranks under the
same cap, and each assignment is replayed: every forward and backward of every stage and rank.

  time        of the step over the ideal, in which all GPUs do equal parts of the useful work
  extra       share of the GPUs' time for padding, attention between documents, and exchanges
  bubbles     share in which a GPU waits for another stage of its pipeline
  waiting     share in which it waits for other ranks, at a barrier or at the end of the step
  empty       pairs of rank and micro batch that hold nothing; over: that hold more than the cap

It is a model, not a measurement. Work is predicted from lengths; a backward counts as two forwards,
stages of a pipeline are equal. Left out: every communication but the exchange of context
parallelism, optimizer, input, memory, embedding and head, kernels that are slow on short documents.

examples:
  megapack-build simulate lengths.npy --data-parallel 16 --max-tokens 33792 \\
      --documents-per-step 2048
  megapack-build simulate run.yaml --data-parallel 64 --barrier step
  megapack-build simulate corpus_text_document --data-parallel 8 --context 4 --pipeline 4 \\
      --virtual-stages 2 --max-tokens 8192 --model 8b --exchange-cost-tokens 400
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.cli.arguments import add_shared, positive, refuse_without
from megapack.cli.output import Screen, note, print_table
from megapack.compare import MODELS
from megapack.config import load_config
from megapack.errors import ConfigError, DataError
from megapack.packing import SampleIndex
from megapack.planning import ASSIGNMENTS, AssignedStep, Cluster, StepTime, simulate_step
from megapack.planning.assignments import cut_documents
from megapack.storage import read_document_lengths
from megapack.storage.dataset import MAX_DOCUMENT_TOKENS, read_lengths_file
from megapack.units import counted

MICRO_BATCHES = 8  # that a step fills where nobody says how many documents it has
A_MODEL = (
    "a model, not a measurement: predicted work alone; left out: gradients, parameters and stages "
    "on the wire, optimizer, input, memory, embedding and head, kernels slow on short documents"
)

Lengths = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Documents of a step; of a run also how its schedule deals them."""

    documents: Lengths
    scheduled: AssignedStep | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="YAML of a run; or lengths: PREFIX, .samples, .npy, .txt"
    )
    add_shared(parser, "--set")
    cluster = parser.add_argument_group("cluster")
    for option, text in (
        ("--data-parallel", "groups of ranks that hold different documents"),
        ("--context", "ranks that may share a document: a power of two"),
        ("--pipeline", "stages of a pipeline, one forward one backward"),
        ("--virtual-stages", "parts of the model that each stage has, interleaved"),
    ):
        cluster.add_argument(
            option, type=positive, default=1, metavar="N", help=f"{text} (default: %(default)s)"
        )
    cluster.add_argument(
        "--barrier",
        choices=("micro_batch", "step"),
        default="micro_batch",
        help="where data-parallel ranks meet: at each forward and backward (FSDP, ZeRO-3), or once "
        "(default: %(default)s)",
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="that a rank holds in a micro batch; a run says it itself",
    )
    steps.add_argument(
        "--documents-per-step",
        type=positive,
        metavar="N",
        help=f"of all ranks (default: what {MICRO_BATCHES} full micro batches hold)",
    )
    steps.add_argument(
        "--steps",
        type=positive,
        default=4,
        metavar="N",
        help="steps looked at, evenly spread (default: %(default)s)",
    )
    work = parser.add_argument_group("work")
    work.add_argument("--model", choices=MODELS, default="1b", help="size (default: %(default)s)")
    work.add_argument(
        "--linear-cost-tokens",
        type=float,
        metavar="N",
        help="tokens of the document whose attention costs as much as all else, instead of --model",
    )
    work.add_argument(
        "--exchange-cost-tokens",
        type=float,
        default=0.0,
        metavar="N",
        help="to exchange the keys and values of a token costs as much as attention over N tokens: "
        "about 400 within a node, 3,400 between nodes of H100s (default: none)",
    )
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    linear = (
        MODELS[args.model].linear_cost_tokens
        if args.linear_cost_tokens is None
        else args.linear_cost_tokens
    )
    if not (0 <= linear < math.inf and 0 <= args.exchange_cost_tokens < math.inf):
        raise ConfigError(
            f"--linear-cost-tokens is {linear:g} and --exchange-cost-tokens "
            f"{args.exchange_cost_tokens:g}; both must be finite and at least 0"
        )
    cluster = Cluster(
        data_parallel=args.data_parallel,
        context_parallel=args.context,
        pipeline_parallel=args.pipeline,
        virtual_stages=args.virtual_stages,
        barrier=args.barrier,
    )
    if args.source.endswith((".yaml", ".yml")):
        steps, max_tokens = _steps_of_run(args, cluster)
    elif args.max_tokens is None:
        raise ConfigError(f"{args.source} holds lengths alone: give --max-tokens, of a micro batch")
    else:
        max_tokens = args.max_tokens
        steps = list(_steps_of_lengths(args, cluster))
    rows = [
        _row(name, times, over)
        for name, times, over in _replayed(
            steps, cluster, max_tokens, linear, args.exchange_cost_tokens
        )
    ]
    documents = sum(len(step.documents) for step in steps)
    if args.json:
        facts = {"model": A_MODEL, "cluster": asdict(cluster), "max_tokens": max_tokens}
        facts |= {"linear_cost_tokens": linear, "exchange_cost_tokens": args.exchange_cost_tokens}
        facts |= {"steps": len(steps), "documents": documents, "assignments": rows}
        print(json.dumps(facts, indent=2))
        return 0
    stages = f" in {counted(args.virtual_stages, 'part')}" if args.virtual_stages > 1 else ""
    meet = "once a step" if args.barrier == "step" else "at every micro batch"
    Screen().write_line(
        f"{counted(documents, 'document')} in {counted(len(steps), 'step')}; a rank holds at most "
        f"{max_tokens:,} tokens in a micro batch\n{args.data_parallel} data x {args.context} "
        f"context x {args.pipeline} pipeline{stages}; ranks meet {meet}",
        style="bold",
    )
    shown = ("micro_batches", "time", "extra_%", "bubbles_%", "waiting_%", "empty", "over")
    cells = [[row["assignment"], *(_cell(row[name], name) for name in shown)] for row in rows]
    print_table(("assignment", *(name.replace("_", " ") for name in shown)), cells)
    print(A_MODEL)
    return 0


def _cell(value: float, name: str) -> str:
    places = {"time": 3, "micro_batches": 1, "empty": 0, "over": 0}.get(name, 2)
    return f"{value:,.{places}f}"


def _row(name: str, times: list[StepTime], over: int) -> dict[str, Any]:
    """All steps one after the other."""
    total = sum(t.time for t in times) or 1.0

    def share(field: str) -> float:
        return 100 * sum(float(getattr(t, field)) * t.time for t in times) / total

    return {
        "assignment": name,
        "micro_batches": fmean(t.num_micro_batches for t in times),
        "time": total / (sum(t.ideal for t in times) or 1.0),
        "extra_%": share("extra"),
        "bubbles_%": share("bubble"),
        "waiting_%": share("waiting"),
        "empty": sum(t.empty for t in times),
        "over": over,
    }


def _replayed(
    steps: list[_Step], cluster: Cluster, max_tokens: int, linear: float, exchange: float
) -> Iterator[tuple[str, list[StepTime], int]]:
    """For every assignment: its name, the times of the steps, micro batches over the cap."""
    lengths = {"linear_cost_tokens": linear, "exchange_cost_tokens": exchange}
    if steps[0].scheduled is not None:
        scheduled = [step.scheduled for step in steps if step.scheduled is not None]
        yield "the run's schedule", [simulate_step(s, cluster, **lengths) for s in scheduled], 0
    for name, assign in ASSIGNMENTS.items():
        times, over = [], 0
        for step in steps:
            plan = assign(step.documents, cluster, max_tokens, linear)
            assigned = AssignedStep.of_plan(plan, step.documents)
            times.append(simulate_step(assigned, cluster, **lengths))
            over += int((assigned.tokens > max_tokens).sum())
        yield name, times, over


# ---- Steps of a list of lengths ------------------------------------------------------------------


def _steps_of_lengths(args: argparse.Namespace, cluster: Cluster) -> Iterator[_Step]:
    refuse_without("a run (.yaml)", set=" ".join(args.set) or None)
    given = _read_lengths(args.source)
    if (given < 0).any():
        raise DataError(f"{args.source}: a document has {given.min()} tokens; give 0 or more")
    longest = args.max_tokens * args.context
    lengths = cut_documents(given[given > 0].astype(np.int64), longest)
    if not len(lengths):
        raise DataError(f"{args.source}: no document has a token; there is no step to replay")
    if cut := int((given > longest).sum()):
        note(f"{counted(cut, 'document')} of more than {longest:,} tokens cut there")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = MICRO_BATCHES * args.max_tokens * cluster.num_ranks
    if args.documents_per_step is None:
        count = min(args.steps, max(1, int(ends[-1]) // tokens))
    else:
        count = min(args.steps, max(1, len(lengths) // args.documents_per_step))
    for i in range(count):
        begin = i * len(lengths) // count
        end = int(np.searchsorted(ends, ends[begin] + tokens, side="right")) - 1
        if args.documents_per_step is not None:
            end = begin + args.documents_per_step
        yield _Step(documents=lengths[begin:end])


def _read_lengths(source: str) -> NDArray[Any]:
    """Tokens per document; of a .samples file per segment."""
    if source.endswith(".npy"):
        return read_lengths_file(source)
    if source.endswith(".samples"):
        return np.asarray(SampleIndex.load(source).segment_length)
    if source.endswith(".txt"):
        words = Path(source).read_text(encoding="utf-8").split()
        wrong = next((w for w in words if not w.isdecimal() or int(w) > MAX_DOCUMENT_TOKENS), None)
        if wrong is not None:
            raise DataError(f"{source}: {wrong!r} is no number of tokens up to 2^40, one a line")
        return np.array(words, np.int64)
    return read_document_lengths(source)


# ---- Steps of a run ------------------------------------------------------------------------------


def _steps_of_run(args: argparse.Namespace, cluster: Cluster) -> tuple[list[_Step], int]:
    """Steps as training would take them, and the tokens of its micro batches."""
    from megapack.data.batch import cut_lengths  # noqa: PLC0415
    from megapack.data.run import open_run  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    if args.max_tokens is not None or args.documents_per_step is not None:
        raise ConfigError(
            f"{args.source} says itself what a step holds: leave --max-tokens and "
            "--documents-per-step out, or change it by --set data.micro_batch_tokens=N"
        )
    config = load_config(PretrainConfig, args.source, args.set)
    if args.context != config.engine.sequence_parallel_size:
        raise ConfigError(
            f"--context is {args.context}, and the run's engine.sequence_parallel_size "
            f"{config.engine.sequence_parallel_size}: give the same"
        )
    opened = open_run(config)
    schedule, tokens = opened.schedule, config.data.micro_batch_tokens
    sampler = opened.sampler(0, cluster.num_ranks)
    steps = []
    for i in np.unique(np.linspace(0, opened.num_steps - 1, args.steps).astype(int)).tolist():
        content = schedule.step(i)
        documents = cut_lengths(
            schedule.samples.segment_lengths(content.sample_ids, content.view), content.view.window
        )
        attention = sampler.attention_of_ranks(i)
        degree = [sampler.ranks_per_micro_batch(draw.capacity) for draw in content.draws]
        scheduled = AssignedStep.of_attention(
            attention,
            tokens=tokens,
            degree=np.repeat(degree, len(attention) // len(degree)),
            documents=documents,
        )
        steps.append(_Step(documents=documents, scheduled=scheduled))
    return steps, tokens

"""Simulate steps on a cluster that you do not have: time over the ideal, bubbles, idle ranks.

SOURCE is a configuration of megapack-pretrain (.yaml), whose steps are assigned to ranks as in
training, or lengths of documents: a dataset PREFIX, a .samples file, .npy, or .txt (one per line).
plan_step and the usual methods then assign the same documents to the same ranks under the same
limit of tokens, and every forward and backward of every stage and rank is simulated. --trees also
simulates prefix trees (plan_trees), in which documents of a step share their common prefixes.

  tokens      forwarded by all ranks, with padding
  time        duration of the step divided by the ideal, in which all GPUs do equal parts of the
              useful work; less than 1 if trees save more work than ranks waste
  extra       share of the GPUs' time for padding, attention between documents, and exchanges
  bubbles     share in which a GPU waits for another stage of its pipeline
  waiting     share in which it waits for other ranks, at a barrier or at the end of the step
  empty       pairs of rank and micro batch without documents; over: pairs that exceed the limit

This is a model, not a measurement. It predicts work from lengths; a backward counts as two
forwards, and the stages of a pipeline are equal. It leaves out all communication except the
exchange of context parallelism, the optimizer, input, memory, embedding and head, and kernels that
are slow on short documents.

examples:
  megapack-build simulate lengths.npy --data-parallel 16 --max-tokens 33792 \\
      --documents-per-step 2048
  megapack-build simulate run.yaml --data-parallel 64 --barrier step
  megapack-build simulate rollouts --data-parallel 16 --max-tokens 32768 --trees
  megapack-build simulate corpus_text_document --data-parallel 8 --context 4 --pipeline 4 \\
      --virtual-stages 2 --max-tokens 8192 --model 8b --exchange-cost-tokens 400
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack.cli.arguments import add_shared, positive, refuse_without
from megapack.cli.output import Screen, note, print_result, print_table
from megapack.compare import MODELS
from megapack.config import check_range, load_config
from megapack.errors import ConfigError, DataError
from megapack.packing import SampleIndex
from megapack.planning import (
    ASSIGNMENTS,
    AssignedStep,
    Cluster,
    StepTime,
    TreePlan,
    plan_trees,
    simulate_step,
)
from megapack.planning.assignments import cut_documents
from megapack.storage import IndexedDataset, read_document_lengths
from megapack.storage.address import is_remote
from megapack.storage.dataset import MAX_DOCUMENT_TOKENS, read_lengths_file
from megapack.units import counted

MICRO_BATCHES = 8  # default per step
CAVEAT = (
    "a model, not a measurement: it predicts work, and ignores communication of gradients, "
    "parameters and activations, optimizer, input, memory, embedding and head, and kernels that "
    "are slow on short documents"
)

Lengths = NDArray[np.int64]

_COLUMNS: dict[str, Any] = {
    "assignment": lambda row: row["assignment"],
    "micro batches": lambda row: f"{row['micro_batches']:,.1f}",
    "tokens": lambda row: f"{row['tokens']:,}",
    "time": lambda row: f"{row['time']:,.3f}",
    "extra %": lambda row: f"{row['extra_%']:,.2f}",
    "bubbles %": lambda row: f"{row['bubbles_%']:,.2f}",
    "waiting %": lambda row: f"{row['waiting_%']:,.2f}",
    "empty": lambda row: f"{row['empty']:,}",
    "over": lambda row: f"{row['over']:,}",
}


@dataclass(frozen=True, kw_only=True)
class _Step:
    documents: Lengths
    scheduled: AssignedStep | None = None
    tokens: NDArray[Any] | None = None  # tokens of all documents; only for trees


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="YAML of a run; or lengths: PREFIX, .samples, .npy, .txt"
    )
    add_shared(parser, "--set")
    cluster = parser.add_argument_group("cluster")
    for option, text in (
        ("--data-parallel", "groups of ranks that hold different documents (default: 1)"),
        ("--context", "ranks that may share a document, a power of two (default: 1)"),
        ("--pipeline", "pipeline stages, with the schedule 1F1B (default: 1)"),
        ("--virtual-stages", "interleaved parts of the model per pipeline stage (default: 1)"),
    ):
        cluster.add_argument(option, type=positive, default=1, metavar="N", help=text)
    cluster.add_argument(
        "--barrier",
        choices=("micro_batch", "step"),
        default="micro_batch",
        help="where data-parallel ranks wait for each other: at every forward and backward (FSDP, "
        "ZeRO-3), or once per step (default: %(default)s)",
    )
    steps = parser.add_argument_group("steps")
    for option, default, text in (
        ("--max-tokens", None, "tokens per rank and micro batch (default: those of the run)"),
        (
            "--documents-per-step",
            None,
            f"documents of all ranks in a step (default: fill {MICRO_BATCHES} micro batches)",
        ),
        ("--steps", 4, "number of steps to simulate, evenly spread (default: %(default)s)"),
    ):
        steps.add_argument(option, type=positive, default=default, metavar="N", help=text)
    steps.add_argument(
        "--trees", action="store_true", help="also simulate prefix trees; reads tokens of PREFIX"
    )
    work = parser.add_argument_group("work")
    work.add_argument(
        "--model",
        choices=MODELS,
        default="1b",
        help="size of the model, in parameters (default: %(default)s)",
    )
    work.add_argument(
        "--linear-cost-tokens",
        type=float,
        metavar="N",
        help="length in tokens of a document whose attention costs as much as all its other work; "
        "replaces --model",
    )
    work.add_argument(
        "--exchange-cost-tokens",
        type=float,
        default=0.0,
        metavar="N",
        help="exchanging the keys and values of a token costs as much as attention over N tokens: "
        "about 400 within a node, 3,400 between nodes of H100s (default: 0)",
    )
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> None:
    linear = args.linear_cost_tokens
    if linear is None:
        linear = MODELS[args.model].linear_cost_tokens
    costs = {"linear_cost_tokens": linear, "exchange_cost_tokens": args.exchange_cost_tokens}
    for name, value in costs.items():
        check_range("simulate", at_least=0, **{f"--{name.replace('_', '-')}": value})
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
        raise ConfigError(
            "--max-tokens is missing: give the tokens per rank and micro batch (only a run's "
            f".yaml sets them, and {args.source} is not one)"
        )
    else:
        steps, max_tokens = list(_steps_of_lengths(args, cluster)), args.max_tokens
    rows = list(_simulate(steps, cluster, max_tokens, costs))
    documents = sum(len(step.documents) for step in steps)
    facts = {"model": CAVEAT, "cluster": asdict(cluster), "max_tokens": max_tokens, **costs}
    facts |= {"steps": len(steps), "documents": documents, "assignments": rows}

    def show() -> None:
        stages = f" in {counted(args.virtual_stages, 'part')}" if args.virtual_stages > 1 else ""
        barrier = "once per step" if args.barrier == "step" else "at every micro batch"
        Screen().write_line(
            f"{counted(documents, 'document')} in {counted(len(steps), 'step')}; a rank holds at "
            f"most {max_tokens:,} tokens in a micro batch\n{args.data_parallel} data x "
            f"{args.context} context x {args.pipeline} pipeline{stages}; ranks synchronize "
            f"{barrier}",
            style="bold",
        )
        print_table(_COLUMNS, rows)
        print(CAVEAT)

    print_result(args, facts, show)


def _simulate(
    steps: list[_Step], cluster: Cluster, max_tokens: int, costs: dict[str, float]
) -> Iterator[dict[str, Any]]:
    linear = costs["linear_cost_tokens"]
    assigned = {"the run's schedule": [s.scheduled for s in steps if s.scheduled is not None]}
    assigned["prefix trees"] = [
        AssignedStep.of_plan(_plan_trees(s.tokens, s.documents, cluster, max_tokens, linear))
        for s in steps
        if s.tokens is not None
    ]
    for name, assign in ASSIGNMENTS.items():
        assigned[name] = [
            AssignedStep.of_plan(assign(s.documents, cluster, max_tokens, linear), s.documents)
            for s in steps
        ]
    for name, of_steps in assigned.items():
        if of_steps:
            times = [simulate_step(step, cluster, **costs) for step in of_steps]
            over = sum(int((step.tokens > max_tokens).sum()) for step in of_steps)
            tokens = round(sum(float(step.tokens.sum()) for step in of_steps))
            yield {**_row(name, times), "tokens": tokens, "over": over}


def _plan_trees(
    tokens: NDArray[Any], documents: Lengths, cluster: Cluster, max_tokens: int, linear: float
) -> TreePlan:
    balance: Literal["micro_batches", "step", "pipeline"] = "micro_batches"
    if cluster.pipeline_parallel > 1:
        balance = "pipeline"
    elif cluster.barrier == "step":
        balance = "step"
    return plan_trees(
        tokens,
        offsets=np.append(0, np.cumsum(documents)),
        num_ranks=cluster.num_ranks,
        max_tokens_per_rank=max_tokens,
        linear_cost_tokens=linear,
        balance=balance,
        micro_batch_multiple=cluster.micro_batch_multiple,
    )


def _row(name: str, times: list[StepTime]) -> dict[str, Any]:
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
    }


# ---- Steps of a list of lengths ------------------------------------------------------------------


def _steps_of_lengths(args: argparse.Namespace, cluster: Cluster) -> Iterator[_Step]:
    refuse_without("a run (.yaml)", set=" ".join(args.set) or None)
    uncut, flat = _read_lengths(args.source), _read_tokens(args)
    if (uncut < 0).any():
        raise DataError(f"{args.source}: a document has {uncut.min()} tokens; give 0 or more")
    longest = args.max_tokens * args.context
    lengths = cut_documents(uncut[uncut > 0].astype(np.int64), longest)
    if not len(lengths):
        raise DataError(f"{args.source}: no document has a token; give a corpus that has tokens")
    if cut := int((uncut > longest).sum()):
        if flat is not None:
            raise ConfigError(
                f"{args.source} has a document of {uncut.max():,} tokens, and a micro batch has "
                f"{longest:,}: trees hold whole documents, so raise --max-tokens"
            )
        note(f"{counted(cut, 'document')} of more than {longest:,} tokens cut there")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = MICRO_BATCHES * args.max_tokens * cluster.num_ranks
    if args.documents_per_step is None:
        num_steps = min(args.steps, max(1, int(ends[-1]) // tokens))
    else:
        num_steps = min(args.steps, max(1, len(lengths) // args.documents_per_step))
    # Spread the steps evenly over the file; each takes the documents that follow its first one.
    for i in range(num_steps):
        begin = i * len(lengths) // num_steps
        end = int(np.searchsorted(ends, ends[begin] + tokens, side="right")) - 1
        if args.documents_per_step is not None:
            end = min(begin + args.documents_per_step, len(lengths))
        part = None if flat is None else flat[ends[begin] : ends[end]]
        yield _Step(documents=lengths[begin:end], tokens=part)


def _read_tokens(args: argparse.Namespace) -> NDArray[Any] | None:
    """Return the tokens of all documents, for trees; None without --trees."""
    if not args.trees:
        return None
    if args.context > 1:
        raise ConfigError(
            f"--context is {args.context}, and ranks cannot share trees: leave it out"
        )
    if is_remote(args.source) or not IndexedDataset.exists(args.source):
        raise ConfigError(
            f"--trees compares tokens, and {args.source} is not a local dataset PREFIX: give one"
        )
    return np.asarray(IndexedDataset(args.source).tokens)


def _read_lengths(source: str) -> NDArray[Any]:
    """Return tokens per document, or per segment of a .samples file."""
    if source.endswith(".npy"):
        return read_lengths_file(source)
    if source.endswith(".samples"):
        index = SampleIndex.load(source)
        if index.has_trees:
            raise ConfigError(f"{source} has nodes of prefix trees: give its dataset and --trees")
        return np.asarray(index.segment_length)
    if source.endswith(".txt"):
        words = Path(source).read_text(encoding="utf-8").split()
        wrong = next((w for w in words if not w.isdecimal() or int(w) > MAX_DOCUMENT_TOKENS), None)
        if wrong is not None:
            raise DataError(
                f"{source}: {wrong!r} is not a number of tokens up to 2^40; write one per line"
            )
        return np.array(words, np.int64)
    return read_document_lengths(source)


# ---- Steps of a run ------------------------------------------------------------------------------


def _steps_of_run(args: argparse.Namespace, cluster: Cluster) -> tuple[list[_Step], int]:
    """Return steps as training would take them, and the tokens of its micro batches."""
    from megapack.data.batch import cut_lengths  # noqa: PLC0415
    from megapack.data.run import OpenRun  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    if args.trees:
        raise ConfigError(
            f"--trees does not apply to a run ({args.source}), whose data.attention decides: leave "
            "--trees out"
        )
    if args.max_tokens is not None or args.documents_per_step is not None:
        raise ConfigError(
            f"{args.source} defines the size of a step: leave out --max-tokens and "
            "--documents-per-step, or change it by --set data.micro_batch_tokens=N"
        )
    config = load_config(PretrainConfig, args.source, args.set)
    if args.context != config.engine.sequence_parallel_size:
        raise ConfigError(
            f"--context is {args.context}, and the run's engine.sequence_parallel_size "
            f"{config.engine.sequence_parallel_size}: give the same"
        )
    opened = OpenRun(config)
    schedule, tokens = opened.schedule, config.data.micro_batch_tokens
    sampler = opened.sampler(0, cluster.num_ranks)
    steps = []
    for i in np.unique(np.linspace(0, opened.num_steps - 1, args.steps).astype(int)).tolist():
        content = schedule.step(i)
        if schedule.samples.attention == "tree":
            documents = schedule.samples.sequence_lengths(content.sample_ids)
        else:
            lengths = schedule.samples.segment_lengths(content.sample_ids, content.view)
            documents = cut_lengths(lengths, content.view.window)
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

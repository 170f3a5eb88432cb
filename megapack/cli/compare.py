"""What each packing strategy would make of a dataset, before a GPU is asked.

Packs the same documents with every strategy (or those you name), counts padding, truncation,
concatenation, dropped and repeated tokens and attention work, estimates the imbalance over the
ranks, training time and cost, and recommends one with its reasons. Only lengths are read.

examples:
  megapack-build compare corpus_text_document --html report.html
  megapack-build compare --lengths lengths.npy --model 8b --gpu h100 --num-gpus 512 \\
      --train-tokens 1e12 --json > report.json
  megapack-build compare --lengths lengths.npy --buckets 2048,4096,8192 --strategies bucket \\
      bucket_llm:preset=paper concat@4096 seamless@2048:r_max=0.3,extra_capacity=50

A strategy is written NAME[@CAPACITY[+CAPACITY...]][:KEY=VALUE[,KEY=VALUE...]].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from megapack.cli.arguments import add_dataset_argument, add_shared, capacities, positive
from megapack.cli.output import Work, note, print_table
from megapack.compare import (
    GPUS,
    MODELS,
    Comparison,
    Gpu,
    Model,
    TrainingRun,
    compare,
    default_cases,
    parse_case,
)
from megapack.compare.charts import check_matplotlib
from megapack.compare.evaluation import COLUMNS
from megapack.compare.page import comparison_page, to_json
from megapack.errors import ConfigError, printable
from megapack.packing.groups import read_groups
from megapack.storage import read_document_lengths
from megapack.storage.dataset import read_lengths_file
from megapack.storage.files import atomic_write, check_target
from megapack.units import count, counted, percent, short

# ---- What ``megapack-build compare`` prints -----------------------------------------------------


def print_comparison(comparison: Comparison, prefix: str) -> None:
    """A line per strategy and the recommendation, for a terminal; prefix: of its command."""
    corpus, training = comparison.corpus, comparison.run
    print(
        f"{corpus.name}: {count(corpus.num_documents)} documents, {count(corpus.num_tokens)} "
        f"tokens (mean {corpus.mean:,.0f}, median {corpus.median:,.0f}, "
        f"longest {count(corpus.longest)})"
    )
    if corpus.sampled_from is not None:
        print(
            f"a random sample of {count(corpus.num_documents)} of {count(corpus.sampled_from)} "
            "documents; every figure is of the sample"
        )
    rows = []
    for position, evaluation in enumerate(comparison.evaluations):
        style = "dim" if comparison.recommendation.out[position] else ""
        if position == comparison.recommendation.best:
            style = "bold green"
        rows.append([Text(cell(evaluation), style) for head, _, _, cell in COLUMNS if head])
    print_table([head for head, *_ in COLUMNS if head], rows)
    for label, reason in comparison.left_out.items():
        print(f"left out: {label}: {reason}")
    print(
        "pad: of the positions; split: of the documents; docs: per sample; dropped, repeated: of\n"
        f"the tokens; imbal: attention work of the busiest of {comparison.num_ranks} ranks over\n"
        f"the mean; GPU hours and cost: {short(training.model.parameters)} parameters, "
        f"{training.gpu.name.upper()} at {training.utilization:.0%} of its peak"
    )
    if comparison.planned:
        _print_planned(comparison)
    _print_recommendation(comparison, prefix)


def _print_planned(comparison: Comparison) -> None:
    rows = [
        [
            "one rank"
            if planned.max_context_parallel_size == 1
            else f"up to {planned.max_context_parallel_size} ranks",
            percent(planned.split_ratio, 3).removesuffix(" %"),
            percent(planned.shared_ratio, 1).removesuffix(" %"),
            f"{planned.micro_batches:.2f}",
            f"{planned.extra_micro_batches:.2f}",
            f"{planned.attention.per_step:.3f}",
            f"{planned.model.per_step:.3f}",
            f"{planned.model.per_micro_batch:.3f}",
        ]
        for planned in comparison.planned
    ]
    print("\nplanned steps: documents dealt one by one (megapack.plan_step) instead of samples")
    heads = ("held by", "split %", "shared %", "micro", "extra", "imbal", "step", "micro step")
    print_table(heads, rows)
    first = comparison.planned[0]
    best = comparison.evaluations[comparison.recommendation.best]
    print(
        f"micro: micro batches of {count(first.micro_batch_tokens)} tokens a rank; extra: of them, "
        "beyond what the tokens need;\nshared: of the tokens; step, micro step: all work of the "
        "busiest rank over the mean, ranks\nmeeting at every optimizer step or micro step "
        f"(step of {best.label}: {best.breakdown.critical_path:.3f});\n"
        f"means of {counted(first.num_steps, 'drawn step')}"
    )


def _print_recommendation(comparison: Comparison, prefix: str) -> None:
    recommendation = comparison.recommendation
    best = comparison.evaluations[recommendation.best]
    print(f"\nrecommended: {best.label}")
    for reason in recommendation.reasons:
        print(f"  {reason}")
    for name, decision in best.decisions.items():
        print(f"  {name}: {decision}")
    fixed = recommendation.best_fixed
    if fixed is not None and fixed != recommendation.best:
        print(f"  With one sample shape only: {comparison.evaluations[fixed].label}.")
    print(f"\n  {best.case.command(prefix, comparison.seed, comparison.grouped_by)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, grouped by what they are about."""
    data = parser.add_argument_group("data")
    source = add_dataset_argument(data, many=False, help="only the .idx is read")
    source.add_argument(
        "--lengths", metavar="FILE.npy", type=Path, help="tokens per document, a 1-D integer array"
    )
    data.add_argument(
        "--max-documents",
        metavar="N",
        type=positive,
        help="use a random sample of N documents (said in every output)",
    )
    packing = parser.add_argument_group("packing")
    packing.add_argument(
        "--strategies", metavar="STRATEGY", nargs="+", help="default: all, see above for the form"
    )
    packing.add_argument(
        "--buckets",
        metavar="L,L,...",
        type=capacities,
        default="1024,2048,4096,8192,16384",
        help="capacities in tokens; of the bucket strategies (default: %(default)s)",
    )
    packing.add_argument(
        "--capacity",
        metavar="L,L,...",
        type=capacities,
        help="capacities of the fixed-length strategies (default: the largest bucket)",
    )
    add_shared(packing, "--alignment", "--fim-room", "--groups", "--seed", "--threads")
    _add_training(parser.add_argument_group("training, for the estimate of time and cost"))
    output = parser.add_argument_group("output")
    add_shared(output, "--json")
    output.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with plots (needs matplotlib)"
    )
    add_shared(output, "--overwrite")


def _add_training(group: argparse._ArgumentGroup) -> None:
    """Option, default, type or choices, what its value is called, help."""
    options: tuple[tuple[str, Any, Any, str | None, str], ...] = (
        ("--model", "1b", list(MODELS), None, "size"),
        ("--model-shape", None, str, "PARAMETERS,LAYERS,WIDTH", "a model, as in 2.6e9,26,2304"),
        ("--gpu", "h100", list(GPUS), None, "type"),
        ("--gpu-tflops", None, float, "X", "dense 16-bit peak of a type not listed"),
        ("--num-gpus", 64, int, "N", "how many"),
        ("--gpu-price", 2.0, float, "X", "per GPU hour"),
        ("--utilization", 0.4, float, "X", "share of the peak that training reaches"),
        ("--train-tokens", None, float, "N", "document tokens (default: all, once)"),
        ("--attention", "document", ["document", "sample"], None, "inside those, or over these"),
        ("--dealing", "balanced", ["balanced", "random"], None, _DEALING),
        ("--num-ranks", None, int, "N", "data-parallel ranks (default: --num-gpus)"),
        ("--tokens-per-rank", 49_152, int, "N", "per step"),
        ("--micro-batch-tokens", None, positive, "N", _MICRO_BATCHES),
    )
    for name, default, kind, metavar, text in options:
        values = {"choices": kind} if isinstance(kind, list) else {"type": kind}
        shown = f"{text} (default: %(default)s)" if default is not None else text
        group.add_argument(name, default=default, metavar=metavar, help=shown, **values)


_DEALING = "a step's samples to ranks: longest first to the least loaded, or at random"
_MICRO_BATCHES = (
    "of a rank: says what planning each step by its documents (megapack.plan_step; plain data "
    "parallelism, dynamic context parallelism) would give"
)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write what was asked for."""
    training = _training_run(args)
    named: dict[str, Any] = {
        "buckets": args.buckets,
        "capacities": args.capacity or [max(args.buckets)],
        "alignment": args.alignment,
        "fim_room": args.fim_room,
    }
    if args.strategies:
        cases = [case for text in args.strategies for case in parse_case(text, **named)]
        left_out: dict[str, str] = {}
    else:
        cases, left_out = default_cases(**named)
    if args.html is not None:
        check_matplotlib()
        check_target(args.html, overwrite=args.overwrite, difference="it is of another run")
    lengths, name = _read_lengths(args)
    ids = None
    if args.groups is not None:
        if args.prefix is None and args.groups == "auto":
            raise ConfigError("--groups auto needs a dataset; with --lengths give a .npy of ids")
        ids = read_groups(args.groups, args.prefix or "", len(lengths))
    sampled_from = None
    if args.max_documents is not None and args.max_documents < len(lengths):
        sampled_from = len(lengths)
        chosen = _sample(len(lengths), args.max_documents, args.seed)
        lengths, ids = lengths[chosen], None if ids is None else ids[chosen]
    with Work(f"{len(cases)} strategies on {counted(len(lengths), 'document')}") as work:
        comparison = compare(
            lengths,
            cases,
            run=training,
            name=name,
            sampled_from=sampled_from,
            num_ranks=args.num_ranks,
            tokens_per_rank=args.tokens_per_rank,
            micro_batch_tokens=args.micro_batch_tokens,
            seed=args.seed,
            threads=args.threads,
            left_out=left_out,
            groups=ids,
            grouped_by=args.groups,
            progress=work,
        )
    prefix = "PREFIX" if args.prefix is None else args.prefix
    if args.json:
        print(json.dumps(to_json(comparison, prefix), indent=1))
    else:
        print_comparison(comparison, prefix)
    if args.html is not None:
        with atomic_write(args.html) as file:
            file.write(printable(comparison_page(comparison)).encode())
        note(f"wrote {args.html}")
    return 0


def _training_run(args: argparse.Namespace) -> TrainingRun:
    model, gpu = MODELS[args.model], GPUS[args.gpu]
    if args.model_shape is not None:
        try:
            parameters, layers, width = args.model_shape.split(",")
            model = Model(
                name=args.model_shape,
                parameters=float(parameters),
                num_layers=int(layers),
                attention_width=int(width),
            )
        except ValueError as error:
            raise ConfigError(
                f"--model-shape {args.model_shape} is not PARAMETERS,LAYERS,WIDTH "
                f"(as in 2.6e9,26,2304): {error}"
            ) from None
    if args.gpu_tflops is not None:
        gpu = Gpu(name=f"{args.gpu_tflops:g} TFLOP/s GPU", peak_flops=args.gpu_tflops * 1e12)
    return TrainingRun(
        model=model,
        gpu=gpu,
        num_gpus=args.num_gpus,
        price_per_gpu_hour=args.gpu_price,
        utilization=args.utilization,
        attention=args.attention,
        dealing=args.dealing,
        train_tokens=args.train_tokens,
    )


def _read_lengths(args: argparse.Namespace) -> tuple[NDArray[Any], str]:
    """Document lengths and a name for the report."""
    if args.lengths is None:
        return read_document_lengths(args.prefix), Path(args.prefix).name
    return read_lengths_file(args.lengths), args.lengths.name


def _sample(num_documents: int, count: int, seed: int) -> NDArray[Any]:
    """``count`` documents without replacement, in file order."""
    chosen = np.random.default_rng(seed).choice(num_documents, count, replace=False, shuffle=False)
    return np.asarray(np.sort(chosen))

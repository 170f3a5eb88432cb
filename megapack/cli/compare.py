"""Compare packing strategies on a dataset, before any GPU is used.

Packs the same documents with every strategy (or those you name), counts padding, truncation,
concatenation, dropped and repeated tokens and attention work, estimates the imbalance over the
ranks, training time and cost, and recommends one strategy with its reasons. It reads only lengths.

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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.cli.arguments import (
    PACKING,
    add_dataset_argument,
    add_shared,
    capacities,
    check_second_options,
    positive,
)
from megapack.cli.output import Work, note, print_result, print_table
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
from megapack.compare.evaluation import columns_of
from megapack.compare.page import comparison_page, to_json
from megapack.errors import ConfigError, DataError, printable
from megapack.packing.groups import read_groups
from megapack.packing.second import read_second
from megapack.storage import read_document_lengths
from megapack.storage.dataset import read_lengths_file
from megapack.storage.files import atomic_write, check_target
from megapack.units import count, counted, percent, short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    source = add_dataset_argument(data, many=False, help="only the .idx is read")
    source.add_argument(
        "--lengths", metavar="FILE.npy", type=Path, help="tokens per document, a 1-D integer array"
    )
    data.add_argument(
        "--max-documents",
        metavar="N",
        type=positive,
        help="compare on a random sample of N documents; every output says so (default: all)",
    )
    packing = parser.add_argument_group("packing")
    packing.add_argument(
        "--strategies",
        metavar="STRATEGY",
        nargs="+",
        help="strategies to compare, in the form above (default: all)",
    )
    packing.add_argument(
        "--buckets",
        metavar="L,L,...",
        type=capacities,
        default="1024,2048,4096,8192,16384",
        help="bucket capacities in tokens; for the bucket strategies (default: %(default)s)",
    )
    packing.add_argument(
        "--capacity",
        metavar="L,L,...",
        type=capacities,
        help="capacities of the fixed-length strategies, in tokens (default: the largest bucket)",
    )
    add_shared(packing, *PACKING)
    _add_training(parser.add_argument_group("training, for the estimate of time and cost"))
    output = parser.add_argument_group("output")
    add_shared(output, "--json")
    output.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with plots (needs matplotlib)"
    )
    add_shared(output, "--overwrite")


def _add_training(group: argparse._ArgumentGroup) -> None:
    options: tuple[tuple[str, Any, Any, str], ...] = (
        # option and metavar, default, type or choices, help
        ("--model", "1b", list(MODELS), "size of the model, in parameters"),
        ("--model-shape PARAMETERS,LAYERS,WIDTH", None, str, "instead of --model: 2.6e9,26,2304"),
        ("--gpu", "h100", list(GPUS), "type of the GPUs"),
        ("--gpu-tflops X", None, float, "instead of --gpu: dense 16-bit peak, in TFLOP/s"),
        ("--num-gpus N", 64, int, "number of GPUs"),
        ("--gpu-price X", 2.0, float, "dollars per GPU hour"),
        ("--utilization X", 0.4, float, "share of the peak that training reaches, 0 to 1"),
        ("--train-tokens N", None, float, "document tokens to train on (default: all, once)"),
        ("--attention", "document", ["document", "sample"], "inside documents, or over samples"),
        ("--dealing", "balanced", ["balanced", "random"], _DEALING),
        ("--num-ranks N", None, int, "data-parallel ranks (default: --num-gpus)"),
        ("--tokens-per-rank N", 49_152, int, "tokens of one rank in one step"),
        ("--micro-batch-tokens N", None, positive, _MICRO_BATCH_TOKENS),
    )
    for option, default, kind, text in options:
        name, _, metavar = option.partition(" ")
        values = {"choices": kind} if isinstance(kind, list) else {"type": kind}
        shown = f"{text} (default: %(default)s)" if default is not None else text
        group.add_argument(name, default=default, metavar=metavar or None, help=shown, **values)


_DEALING = "assign the samples of a step to ranks longest first, to the least loaded, or at random"
_MICRO_BATCH_TOKENS = (
    "tokens of one rank in a micro batch; also plan each step by its documents "
    "(megapack.plan_step), with plain and with dynamic context parallelism (default: do not)"
)


def run(args: argparse.Namespace) -> None:
    training = _training_run(args)
    check_second_options(args)
    settings: dict[str, Any] = {
        "buckets": args.buckets,
        "capacities": args.capacity or [max(args.buckets)],
        "alignment": args.alignment,
        "fim_room": args.fim_room,
        "second_capacity": args.second_capacity and tuple(args.second_capacity),
    }
    if args.strategies:
        cases = [case for text in args.strategies for case in parse_case(text, **settings)]
        left_out: dict[str, str] = {}
    else:
        cases, left_out = default_cases(**settings)
    if args.html is not None:
        check_matplotlib()
        check_target(args.html, overwrite=args.overwrite, difference="another command wrote it")
    if args.lengths is None:
        lengths, name = read_document_lengths(args.prefix), Path(args.prefix).name
    else:
        lengths, name = read_lengths_file(args.lengths), args.lengths.name
    group_ids = None
    if args.groups is not None:
        if args.prefix is None and args.groups == "auto":
            raise ConfigError("--groups auto needs a dataset; with --lengths give a .npy of ids")
        group_ids = read_groups(args.groups, args.prefix or "", len(lengths))
    second = None
    if args.second is not None:
        if args.prefix is None and not args.second.endswith(".npy"):
            raise ConfigError(
                f"--second {args.second} needs a dataset with this column; with --lengths give a "
                ".npy of sizes"
            )
        second = read_second(args.second, args.prefix or "")
        if len(second) != len(lengths):
            raise DataError(
                f"--second {args.second} has {count(len(second))} numbers, and there are "
                f"{counted(len(lengths), 'document')}: give one for each"
            )
    sampled_from = None
    if args.max_documents is not None and args.max_documents < len(lengths):
        sampled_from = len(lengths)
        chosen = _sample_documents(len(lengths), args.max_documents, args.seed)
        lengths, group_ids = lengths[chosen], None if group_ids is None else group_ids[chosen]
        second = None if second is None else second[chosen]
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
            groups=group_ids,
            grouped_by=args.groups,
            second=second,
            second_by=args.second,
            progress=work,
        )
    prefix = "PREFIX" if args.prefix is None else args.prefix
    facts = to_json(comparison, prefix)
    print_result(args, facts, lambda: print_comparison(comparison, prefix), indent=1)
    if args.html is not None:
        with atomic_write(args.html) as file:
            file.write(printable(comparison_page(comparison)).encode())
        note(f"wrote {args.html}")


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


def _sample_documents(num_documents: int, number: int, seed: int) -> NDArray[Any]:
    chosen = np.random.default_rng(seed).choice(num_documents, number, replace=False, shuffle=False)
    return np.asarray(np.sort(chosen))


# ---- Printing ------------------------------------------------------------------------------------

_PLANNED_COLUMNS: dict[str, Any] = {
    "held by": lambda plan: (
        "one rank"
        if plan.max_context_parallel_size == 1
        else f"up to {plan.max_context_parallel_size} ranks"
    ),
    "split %": lambda plan: percent(plan.split_ratio, 3).removesuffix(" %"),
    "shared %": lambda plan: percent(plan.shared_ratio, 1).removesuffix(" %"),
    "micro": lambda plan: f"{plan.micro_batches:.2f}",
    "extra": lambda plan: f"{plan.extra_micro_batches:.2f}",
    "imbal": lambda plan: f"{plan.attention.per_step:.3f}",
    "step": lambda plan: f"{plan.model.per_step:.3f}",
    "micro step": lambda plan: f"{plan.model.per_micro_batch:.3f}",
}


def print_comparison(comparison: Comparison, prefix: str) -> None:
    """Print a row per strategy and the recommendation; ``prefix`` is the dataset to pack."""
    corpus, training = comparison.corpus, comparison.run
    recommendation = comparison.recommendation
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
    styles = ["dim" if reason else "" for reason in recommendation.out]
    styles[recommendation.best] = "bold green"
    columns = columns_of(comparison.evaluations)
    second = "" if comparison.second_by is None else "2nd pad: % of the second capacities;\n"
    cells = {column.head: column.cell for column in columns if column.head}
    print_table(cells, comparison.evaluations, styles)
    for label, reason in comparison.left_out.items():
        print(f"left out: {label}: {reason}")
    print(
        f"{second}pad: % of positions; split: % of documents; docs: per sample; "
        "dropped, repeated: % of\n"
        f"tokens; imbal: attention work of the busiest of {comparison.num_ranks} ranks over\n"
        f"the mean; GPU hours and cost: {short(training.model.parameters)} parameters, "
        f"{training.gpu.name.upper()} at {training.utilization:.0%} of its peak"
    )
    best = comparison.evaluations[recommendation.best]
    if comparison.planned:
        first = comparison.planned[0]
        print("\nplanned steps: documents assigned one by one (megapack.plan_step), not samples")
        print_table(_PLANNED_COLUMNS, comparison.planned)
        print(
            f"micro: micro batches of {count(first.micro_batch_tokens)} tokens a rank; "
            "extra: those beyond the minimum;\nshared: % of tokens; step, micro step: all work of "
            "the busiest rank over the mean, if ranks\nwait for each other at every optimizer step "
            "or micro "
            f"step (step of {best.label}: {best.breakdown.critical_path:.3f});\n"
            f"means of {counted(first.num_steps, 'drawn step')}"
        )
    print(f"\nrecommended: {best.label}")
    for reason in recommendation.reasons:
        print(f"  {reason}")
    for name, decision in best.decisions.items():
        print(f"  {name}: {decision}")
    fixed = recommendation.best_fixed
    if fixed is not None and fixed != recommendation.best:
        print(f"  With one sample shape only: {comparison.evaluations[fixed].label}.")
    given = (comparison.grouped_by, comparison.second_by)
    print(f"\n  {best.case.command(prefix, comparison.seed, *given)}")

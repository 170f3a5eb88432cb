"""Check of a Megatron-LM run without GPUs: print the micro batches that every rank would read.

    python -m megapack.integrations.hosts.megatron check --ranks 4x2x1x1 --ranks 8x2x1x1 \\
        pretrain_gpt.py <the script's own flags>

The script runs with its own argument parser, dataset provider and sampler, without a GPU and
without torchrun, once for every rank that reads data: all data-parallel ranks, and the pipeline
stages and context-parallel ranks of the first one. Instead of training it draws the micro batches
of the first steps and prints for each: capacity of its bucket, rows, documents and parts of
documents (segments), max_seqlen, tokens with a label, share of padding, and whether all ranks are
in one bucket. It also reports flags that megapack would refuse in the run.

Exit status: 0 all ranks agree; 1 invalid data, or ranks disagree; 2 invalid flags or manifest.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megapack.errors import ConfigError, MegapackError, exit_code, printable
from megapack.integrations.hosts.megatron.dataset import PackedGPTDataset
from megapack.integrations.hosts.megatron.host import HOST
from megapack.integrations.hosts.megatron.swap import OwnGetBatch, install

# ---- One rank: the script's own flags, datasets and loaders, without a GPU
# The script runs in this process with a process group that only knows its size (torch's "fake"
# backend) and with a ``pretrain()`` that draws micro batches instead of training.

SHOWN_DOCUMENTS = 3
SHOWN_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Number of ranks along each axis."""

    data: int
    tensor: int
    pipeline: int
    context: int

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        return f"DP {self.data} x TP {self.tensor} x PP {self.pipeline} x CP {self.context}"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank that reads data: the first of its tensor-parallel group."""

    data: int
    pipeline: int = 0
    context: int = 0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Micro batch of one rank. Counts of segments and tokens exclude padding."""

    step: int  # iteration, from 0
    rows: tuple[int, ...]
    capacity: int
    segments: int
    longest: int  # max_seqlen
    labels: int
    padding: int


@dataclass(kw_only=True)
class RankReport:
    """Data that one rank would read."""

    row: int = 0
    block: int = 0
    num_rows: dict[str, int] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    # The first documents, as text if the run's tokenizer decodes them, else as ids.
    documents: list[str] = field(default_factory=list)


def draw_rank(
    world: RankLayout,
    place: RankPlace,
    script: str,
    arguments: list[str],
    *,
    steps: int,
    own_get_batch: OwnGetBatch = "auto",
) -> RankReport:
    """Run the script as this rank until it would train, and draw the first steps. A process can
    call it once: Megatron never releases its arguments and groups.

    Raises ConfigError for flags, a manifest or sizes that contradict each other, the errors of the
    data, and SystemExit if the script's parser refuses a flag.
    """
    report = RankReport()

    def pretrain(*arguments: Any, **named: Any) -> None:
        provider = _dataset_provider(arguments, named)
        args = _script_arguments(named)
        _initialize_parallel(world, place, args)
        _draw(provider, args, steps, report)

    rank = _initialize_rank(world, place, arguments)
    training: Any = importlib.import_module("megatron.training")
    training.pretrain = pretrain
    install(own_get_batch=own_get_batch)
    sizes = (part for name, flag in SIZES.items() for part in (flag, str(getattr(world, name))))
    sys.argv = [script, *arguments, *sizes]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    if not report.num_rows:
        raise ConfigError(f"{script} did not call pretrain() of megatron.training on rank {rank}")
    return report


def _initialize_rank(world: RankLayout, place: RankPlace, arguments: list[str]) -> int:
    """Set up environment and process group of a rank; return its number."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    inner, outer, size = place.data, place.pipeline, world.data
    if "--use-tp-pp-dp-mapping" in arguments:
        inner, outer, size = place.pipeline, place.data, world.pipeline
    rank = world.tensor * (place.context + world.context * (inner + size * outer))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": "0"}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world.size)
    if not torch.cuda.is_available():  # validate_args() reads the GPU's properties
        gpu = SimpleNamespace(major=9, minor=0)
        cuda: Any = torch.cuda
        cuda.get_device_capability = lambda *_: (gpu.major, gpu.minor)
        cuda.get_device_properties = lambda *_: gpu
    return rank


def _dataset_provider(arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
    """Return the script's function that builds datasets: the first one passed to pretrain()."""
    functions = (value for value in arguments if hasattr(value, "__code__"))
    provider = named.get("train_valid_test_dataset_provider") or next(functions, None)
    if provider is None:
        raise ConfigError("the script passes pretrain() no function that builds its datasets")
    return provider  # type: ignore[no-any-return]


def _script_arguments(named: dict[str, Any]) -> Any:
    """Return the script's arguments; parse them if the script has not (Megatron up to 0.17)."""
    variables = importlib.import_module("megatron.training.global_vars")
    if variables._GLOBAL_ARGS is None:
        parser = importlib.import_module("megatron.training.arguments")
        args = parser.parse_args(named.get("extra_args_provider"))
        parser.validate_args(args, named.get("args_defaults", {}))
        variables.set_global_variables(args)
    return variables.get_args()


def _initialize_parallel(world: RankLayout, place: RankPlace, args: Any) -> None:
    state = importlib.import_module("megatron.core.parallel_state")
    mapped = getattr(args, "use_tp_pp_dp_mapping", False)
    state.initialize_model_parallel(
        world.tensor,
        world.pipeline,
        context_parallel_size=world.context,
        order="tp-cp-ep-pp-dp" if mapped else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    actual = RankPlace(
        data=state.get_data_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_rank(),
    )
    if actual != place or state.get_tensor_model_parallel_rank():
        raise ConfigError(f"{HOST} places the rank at {actual}, but megapack expected {place}")


def _draw(provider: Callable[..., Any], args: Any, steps: int, report: RankReport) -> None:
    training = importlib.import_module("megatron.training.training")
    samplers = importlib.import_module("megatron.training.datasets.data_samplers")
    counts = importlib.import_module("megatron.core.num_microbatches_calculator")
    training.update_train_iters(args)
    args.num_workers = 0  # the same rows, without starting processes
    train, valid, test = provider(training.get_train_valid_test_num_samples())
    for name, part in (("train", train), ("valid", valid), ("test", test)):
        datasets = part if isinstance(part, list) else [part]
        report.num_rows[name] = sum(len(d) for d in datasets if d is not None)
    if train is None:
        return
    if not isinstance(train, PackedGPTDataset) or train.rows is None:
        raise ConfigError(
            f"the script trains on {type(train).__name__}, not on packed rows: leave out "
            "--mock-data and --fim-data, and give --data-path and a --split with training data"
        )
    report.row, report.block = args.seq_length, train.rows.options.rows_per_block
    loader = samplers.build_pretraining_data_loader(train, 0)
    pairs = zip(iter(loader.batch_sampler), loader, strict=False)
    consumed = 0
    for step in range(min(steps, args.train_iters)):
        counts.update_num_microbatches(consumed, consistency_check=True)
        for _ in range(counts.get_num_microbatches()):
            numbers, batch = next(pairs)
            report.drawn.append(_measure(step, train, numbers, batch))
        consumed += counts.get_current_global_batch_size()
    if report.drawn:  # empty with --train-iters 0
        report.documents = list(_first_documents(train, report.drawn[0].rows[0]))


def _measure(step: int, train: Any, numbers: list[int], batch: dict[str, Any]) -> Drawn:
    samples = [segments for i in numbers for _, segments in train.rows.segments_of(i)]
    lengths = [length for segments in samples for _, _, length in segments]
    return Drawn(
        step=step,
        rows=tuple(int(i) for i in numbers),
        capacity=batch["tokens"].numel() // len(samples),
        segments=len(lengths),
        longest=int(batch["max_seqlen"].max()),
        labels=int(batch["loss_mask"].sum()),
        padding=batch["tokens"].numel() - sum(lengths),
    )


def _first_documents(train: Any, row: int) -> Iterator[str]:
    tokenizer = importlib.import_module("megatron.training").get_tokenizer()
    samples, rows = train.rows.packed.samples, train.rows
    bounds, tokens = rows[row]["cu_seqlens"].tolist(), train[row]["tokens"]
    if "cu_seqlens_padded" in rows[row]:
        bounds = rows[row]["cu_seqlens_padded"].tolist()
    source, segments = rows.segments_of(row)[0]
    places = list(zip(bounds, segments, strict=False))[:SHOWN_DOCUMENTS]
    for at, (document, begin, length) in places:
        ids = tokens[at : at + min(length, SHOWN_TOKENS)].tolist()
        try:
            text = repr(tokenizer.detokenize(ids))
        except Exception:  # a tokenizer that cannot decode may raise any error
            text = f"tokens {ids}"
        place = f"{samples.names[source]}, document {document}, tokens {begin} to {begin + length}"
        yield f"{place}: {text}"


MICRO_STEPS_SHOWN = 4
SIZES = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
}
Failure = tuple[int, str]


def main(argv: Sequence[str]) -> int:
    """Check every layout; return the exit status."""
    args = _parser().parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forked processes must not share a GPU context
    try:
        if not Path(args.script).is_file():
            raise ConfigError(f"the script {args.script} does not exist")
        if args.steps < 1:
            raise ConfigError(f"--steps is {args.steps}; it must be 1 or more")
        worlds = [_world(text) for text in args.ranks] or [_default_world(args.arguments)]
        sys.path.insert(0, str(Path(args.script).resolve().parent))
        importlib.import_module("megatron.training")  # once, before the fork
    except ConfigError as error:
        return _fail(exit_code(error), str(error))
    except ImportError as error:
        return _fail(2, f"the Megatron-LM of {args.script} cannot be imported: {error}")
    return max(_check(world, args) for world in worlds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megapack.integrations.hosts.megatron check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--ranks",
        action="append",
        default=[],
        metavar="DPxTPxPPxCP",
        help="a layout: data-, tensor-, pipeline- and context-parallel size, which override the "
        "script's flags; omitted sizes are 1; repeat --ranks for several layouts (default: two "
        "data-parallel ranks, and the other sizes from the script's flags)",
    )
    choices = ("auto", "yes", "no")
    add("--steps", type=int, default=10, help="iterations to draw (default %(default)s)")
    add("--own-get-batch", choices=choices, default="auto", help="same as for the run")
    add("--debug", action="store_true", help="print all of Megatron's output if it fails")
    add("script", help="Megatron-LM's pretrain_gpt.py, or one of your own")
    add("arguments", nargs=argparse.REMAINDER, help="the flags of the run")
    return parser


def _world(text: str) -> RankLayout:
    sizes = [int(size) for size in text.split("x")] if re.fullmatch(r"\d+(x\d+){0,3}", text) else []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--ranks is {text!r}; it must be DPxTPxPPxCP, each 1 or more (8x2x1x1)")
    data, tensor, pipeline, context = [*sizes, 1, 1, 1][:4]
    return RankLayout(data=data, tensor=tensor, pipeline=pipeline, context=context)


def _default_world(arguments: Sequence[str]) -> RankLayout:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, flag in SIZES.items():
        parser.add_argument(flag, type=int, default=1, dest=name)
    known, _ = parser.parse_known_args(list(arguments))
    return RankLayout(data=2, **vars(known))


def _check(world: RankLayout, args: argparse.Namespace) -> int:
    """Draw on all ranks of a layout and print what they read; return the exit status."""
    _print(f"{world}: {world.size} ranks")
    places = [RankPlace(data=data) for data in range(world.data)]
    places += [
        RankPlace(data=0, pipeline=pipeline, context=context)
        for pipeline in range(world.pipeline)
        for context in range(world.context)
        if pipeline or context
    ]
    jobs = [(world, place, args) for place in places]
    size = min(len(places), len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("fork").Pool(size, maxtasksperchild=1) as pool:
        results = list(pool.imap(_one_rank, jobs, chunksize=1))
    failures = [result for result in results if not isinstance(result, RankReport)]
    if failures:
        return _fail(*failures[0])
    reports = [result for result in results if isinstance(result, RankReport)]
    problems = list(_report(world, reports))
    for problem in problems:
        _fail(1, problem)
    return int(bool(problems))


def _one_rank(job: tuple[RankLayout, RankPlace, argparse.Namespace]) -> RankReport | Failure:
    """Draw in this process of the pool; collect Megatron's output, to report it after an error."""
    world, place, args = job
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            options = {"steps": args.steps, "own_get_batch": args.own_get_batch}
            return draw_rank(world, place, args.script, args.arguments, **options)
        except (MegapackError, OSError) as error:
            return exit_code(error), str(error)
        except (Exception, SystemExit) as error:  # from the script's parser or its own checks
            if args.debug:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()]
            last = "\n".join(lines if args.debug else lines[-1:])
            reason = str(error) if isinstance(error, Exception) and not args.debug else last
            return 2, f"{args.script} refuses these flags: {type(error).__name__}: {reason}"


def _report(world: RankLayout, reports: list[RankReport]) -> Iterator[str]:
    """Print the steps; yield a message for each difference between ranks."""
    data_ranks, others = reports[: world.data], reports[world.data :]
    first = data_ranks[0]
    rows = ", ".join(f"{name} {count:,}" for name, count in first.num_rows.items())
    _print(f"  {HOST}: rows of {first.row:,} tokens, one bucket per {first.block}; {rows}")
    _print(f"  {'step':>4} {'micro':>5} {'bucket':>7} {'rows':>13} {'segments':>8} {'longest':>7}")
    if any(len(report.drawn) != len(first.drawn) for report in data_ranks):
        yield "data-parallel ranks have different numbers of micro batches"
        return
    shown: dict[int, int] = {}
    for number, together in enumerate(zip(*(report.drawn for report in data_ranks), strict=True)):
        step = together[0].step
        shown[step] = shown.get(step, 0) + 1
        buckets = sorted({drawn.capacity for drawn in together})
        if shown[step] <= MICRO_STEPS_SHOWN:
            _print(_line(shown[step], together, first.row))
        if len(buckets) > 1:
            yield f"step {step + 1}, micro step {shown[step]}: ranks are in buckets {buckets}"
        if any(report.drawn[number] != together[0] for report in others):
            yield f"step {step + 1}: pipeline stages or context-parallel ranks read different rows"
    every = [drawn for report in data_ranks for drawn in report.drawn]
    total = sum(len(drawn.rows) for drawn in every) * first.row
    _print(
        f"  {len(first.drawn)} micro steps, {total:,} tokens, "
        f"{sum(drawn.labels for drawn in every):,} labels, "
        f"{sum(drawn.padding for drawn in every) / max(1, total):.3%} padding"
    )
    for text in first.documents:
        _print(f"  {text}")


def _line(micro_step: int, together: tuple[Drawn, ...], row: int) -> str:
    rows = sorted(i for drawn in together for i in drawn.rows)
    buckets = sorted({drawn.capacity for drawn in together})
    padding = sum(drawn.padding for drawn in together) / (len(rows) * row)
    return (
        f"  {together[0].step + 1:>4} {micro_step:>5} {'/'.join(map(str, buckets)):>7} "
        f"{f'{rows[0]}-{rows[-1]}':>13} {sum(d.segments for d in together):>8} "
        f"{max(d.longest for d in together):>7}  {sum(d.labels for d in together):,} labels, "
        f"{padding:.2%} padding, {'one bucket' if len(buckets) == 1 else 'NOT ONE BUCKET'}"
    )


def _print(text: str) -> None:
    print(printable(text), flush=True)  # noqa: T201


def _fail(status: int, message: str) -> int:
    print(f"megapack check: error: {printable(message)}", file=sys.stderr)  # noqa: T201
    return status

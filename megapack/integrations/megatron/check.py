"""What a run would read, before it has a GPU: one command in the place of the launch command.

    python -m megapack.integrations.megatron check --ranks 4x2x1x1 --ranks 8x2x1x1 \\
        pretrain_gpt.py <the script's own flags>

The script runs with its own argument parser, dataset provider and sampler, without a GPU and
without torchrun, once for every rank that reads data: all data-parallel ranks, and beside the
first of them its pipeline stages and context-parallel ranks. Instead of training it draws the
micro batches of the first steps. Of each is printed: capacity of its bucket, rows, documents and
parts of documents (segments), max_seqlen, tokens with a label, share of padding, and whether all
ranks are in one bucket. Flags under which the run would be refused are named.

Exit status: 0 all ranks agree; 1 data is at fault, or ranks disagree; 2 flags or a manifest are.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapack.errors import ConfigError, MegapackError, exit_code
from megapack.integrations.megatron.one_rank import (
    Drawn,
    RankLayout,
    RankPlace,
    RankReport,
    draw_rank,
)

__all__ = ["main"]

MICRO_STEPS_SHOWN = 4
SIZES = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
}
Failure = tuple[int, str]


def main(argv: Sequence[str]) -> int:
    """Check every layout; the exit status."""
    args = _parser().parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # processes are forked, and a GPU has nothing to do
    try:
        if not Path(args.script).is_file():
            raise ConfigError(f"there is no script {args.script}")
        worlds = [_world(text) for text in args.ranks] or [_default_world(args.arguments)]
        sys.path.insert(0, str(Path(args.script).resolve().parent))
        importlib.import_module("megatron.training")  # once, for all ranks
    except ConfigError as error:
        return _fail(exit_code(error), str(error))
    except ImportError as error:
        return _fail(
            2, f"Megatron-LM, a part of which {args.script} is, cannot be imported: {error}"
        )
    return max(_check(world, args) for world in worlds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megapack.integrations.megatron check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks",
        action="append",
        default=[],
        metavar="DPxTPxPPxCP",
        help="a layout: data-, tensor-, pipeline- and context-parallel size; those at the end may "
        "be left out and are then 1; give it again for another (default: two data-parallel ranks, "
        "the rest from the script's flags, which --ranks goes before)",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="iterations to draw (default %(default)s)"
    )
    parser.add_argument(
        "--own-get-batch",
        choices=("auto", "yes", "no"),
        default="auto",
        help="as for the run itself",
    )
    parser.add_argument(
        "--debug", action="store_true", help="all that Megatron said where it refuses"
    )
    parser.add_argument("script", help="Megatron-LM's pretrain_gpt.py, or one of your own")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the run, unchanged")
    return parser


def _world(text: str) -> RankLayout:
    sizes = [int(size) for size in text.split("x")] if re.fullmatch(r"\d+(x\d+){0,3}", text) else []
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"--ranks is {text!r}; it must be DPxTPxPPxCP, sizes of 1 or more, as 8x2x1x1"
        )
    data, tensor, pipeline, context = [*sizes, 1, 1, 1][:4]
    return RankLayout(data=data, tensor=tensor, pipeline=pipeline, context=context)


def _default_world(arguments: Sequence[str]) -> RankLayout:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, flag in SIZES.items():
        parser.add_argument(flag, type=int, default=1, dest=name)
    known, _ = parser.parse_known_args(list(arguments))
    return RankLayout(data=2, **vars(known))


def _check(world: RankLayout, args: argparse.Namespace) -> int:
    """Draw on all ranks of a layout and print what they read; the exit status."""
    _say(f"{world}: {world.size} ranks")
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
        found = list(pool.imap(_one_rank, jobs, chunksize=1))
    failures = [one for one in found if not isinstance(one, RankReport)]
    if failures:
        return _fail(*failures[0])
    reports = [one for one in found if isinstance(one, RankReport)]
    problems = list(_report(world, reports))
    for problem in problems:
        _fail(1, problem)
    return int(bool(problems))


def _one_rank(job: tuple[RankLayout, RankPlace, argparse.Namespace]) -> RankReport | Failure:
    """In a process of its own; what Megatron says is kept for the case that it fails."""
    world, place, args = job
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            return draw_rank(
                world,
                place,
                args.script,
                args.arguments,
                steps=args.steps,
                own_get_batch=args.own_get_batch,
            )
        except (MegapackError, OSError) as error:
            return exit_code(error), str(error)
        except (Exception, SystemExit) as error:  # of the script: its parser, or its own checks
            if args.debug:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            said.seek(0)
            lines = [line for line in said.read().splitlines() if line.strip()]
            last = "\n".join(lines if args.debug else lines[-1:])
            why = str(error) if isinstance(error, Exception) and not args.debug else last
            return 2, f"{args.script} refuses these flags: {type(error).__name__}: {why}"


def _report(world: RankLayout, reports: list[RankReport]) -> Iterator[str]:
    """Print the steps; yield in which ways ranks disagree."""
    first, *others = reports[: world.data]
    rows = ", ".join(f"{name} {count:,}" for name, count in first.num_rows.items())
    _say(f"  {first.host}: rows of {first.row:,} tokens, one bucket per {first.block}; {rows}")
    _say(f"  {'step':>4} {'micro':>5} {'bucket':>7} {'rows':>13} {'segments':>8} {'longest':>7}")
    if any(len(one.drawn) != len(first.drawn) for one in others):
        yield "data-parallel ranks have different numbers of micro batches"
        return
    shown: dict[int, int] = {}
    for number, together in enumerate(zip(*(one.drawn for one in (first, *others)), strict=True)):
        step = together[0].step
        shown[step] = shown.get(step, 0) + 1
        buckets = sorted({drawn.capacity for drawn in together})
        if shown[step] <= MICRO_STEPS_SHOWN:
            _say(_line(shown[step], together, first.row))
        if len(buckets) > 1:
            yield f"step {step + 1}, micro step {shown[step]}: ranks are in buckets {buckets}"
        if any(one.drawn[number] != together[0] for one in reports[world.data :]):
            yield f"step {step + 1}: pipeline stages or context-parallel ranks read other rows"
    every = [drawn for one in (first, *others) for drawn in one.drawn]
    total = sum(len(drawn.rows) for drawn in every) * first.row
    _say(
        f"  {len(first.drawn)} micro steps, {total:,} tokens, "
        f"{sum(drawn.labels for drawn in every):,} labels, "
        f"{sum(drawn.padding for drawn in every) / max(1, total):.3%} padding"
    )
    for text in first.documents:
        _say(f"  {text}")


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


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what the command is for


def _fail(status: int, message: str) -> int:
    print(f"megapack check: error: {message}", file=sys.stderr)  # noqa: T201
    return status

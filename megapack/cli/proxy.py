"""Write a proxy of a run: the same program on a fraction of its tokens, for cheap decisions.

FILE is a configuration of megapack-pretrain. The proxy is a folder: run.yaml (the configuration),
blend.yaml (the manifest, if the run has one) and samples (.samples files that name whole documents
of the run's datasets; no token is copied). Start it with `megapack-pretrain --config DIR/run.yaml`.

By default, the proxy takes fewer steps of the same size. --tokens-per-step makes them smaller (with
the scale times the run's tokens per step, the proxy takes as many steps as the run). Stages, ramps,
growing windows, warmup, skipped steps and run_tokens scale by the same factor; weights, orders,
epoch limits, fill-in-the-middle and packing stay. So every source is repeated equally often. A
larger scale contains the documents of a smaller one. The table shows the epochs of every source in
both; a scale at which a stage has no step is refused.

  share      tokens of the chosen documents / tokens of the source
  error      deviation of the samples' tokens, with padding, from the scale: documents are whole;
             if it exceeds 1 %, the report names the smallest scale at which it does not
  of run     epochs of the whole run
  epochs     epochs of the whole proxy
  differs    largest relative deviation of the proxy's epochs from the run's, at the end of a stage
  drawn      samples that the proxy had drawn by then: draws and samples are whole, so a source with
             few of them deviates more

examples:
  megapack-build proxy run.yaml proxy64 --scale 1/64
  megapack-build proxy run.yaml proxy64 --scale 1/64 --tokens-per-step 65536
  megapack-build proxy run.yaml proxy1024 --scale 1/1024 --dry-run --json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megapack.cli.arguments import add_shared, local_folder, positive, share
from megapack.cli.output import Screen, print_result, print_table
from megapack.config import load_config
from megapack.errors import printable
from megapack.training.config import PretrainConfig
from megapack.training.proxy import RUN, Proxy, plan_proxy
from megapack.units import count, counted, percent

SHOWN = 20  # sources in the table: those that differ most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML of the run")
    parser.add_argument("folder", metavar="DIR", type=local_folder, help="folder of the proxy")
    add_scale(parser)
    add_shared(parser, "--overwrite", "--dry-run", "--json")


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a proxy."""
    parser.add_argument(
        "--scale",
        type=share,
        required=True,
        metavar="S",
        help="tokens of the proxy / tokens of the run, as in 1/64",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=positive,
        metavar="N",
        help="tokens of a step of the proxy (default: those of the run)",
    )
    parser.add_argument(
        "--group-file",
        action="append",
        default=[],
        metavar="FILE.npy",
        help="groups that a source was packed with (pack --groups FILE.npy); its checksum "
        "identifies the source (repeatable)",
    )
    add_shared(parser, "--seed", help="of the choice of documents")
    add_shared(parser, "--set", "--threads")


def planned(args: argparse.Namespace, folder: Path) -> Proxy:
    """Return the proxy that the options describe."""
    return plan_proxy(
        load_config(PretrainConfig, args.config, args.set),
        args.scale,
        folder,
        tokens_per_step=args.tokens_per_step,
        seed=args.seed,
        groups=args.group_file,
        threads=args.threads,
    )


def title_of(args: argparse.Namespace) -> str:
    return f"Proxy of {printable(args.config)} at scale {args.scale}, written by megapack-build."


def run(args: argparse.Namespace) -> None:
    proxy = planned(args, args.folder)
    if not args.dry_run:
        proxy.write(title_of(args), overwrite=args.overwrite)
    print_result(args, facts_of(proxy), lambda: _show(proxy, args))


def facts_of(proxy: Proxy) -> dict[str, Any]:
    """Return the report on a proxy as JSON."""
    return {
        "folder": str(proxy.folder),
        "scale": str(proxy.scaling.share),
        "num_steps": proxy.config.num_steps,
        "tokens_per_step": proxy.config.data.tokens_per_step,
        "micro_batch_tokens": proxy.config.data.micro_batch_tokens,
        "stages": [{"of_step": of, "step": step} for of, step in proxy.stages],
        "rounded": [vars(rounding) for rounding in proxy.scaling.rounded],
        "sources": [
            {
                "name": source.name,
                "documents": source.samples.num_documents,
                "tokens": source.samples.num_tokens,
                "of_tokens": source.samples.of_tokens,
                "error": source.samples.error,
                "exact_scale": source.samples.exact_scale,
                "epochs": source.epochs,
                "of_epochs": source.of_epochs,
                "largest_difference": source.largest_difference[0],
                "samples_drawn_then": source.largest_difference[1],
            }
            for source in proxy.sources
        ],
    }


_COLUMNS: dict[str, Any] = {
    "source": lambda source: source.name,
    "documents": lambda source: count(source.samples.num_documents),
    "tokens": lambda source: count(source.samples.num_tokens),
    "share": lambda source: percent(source.samples.num_tokens / source.samples.of_tokens, 4),
    "error": lambda source: percent(source.samples.error),
    "of run": lambda source: f"{source.of_epochs[-1]:.4f}",
    "epochs": lambda source: f"{source.epochs[-1]:.4f}",
    "differs": lambda source: percent(source.largest_difference[0]),
    "drawn": lambda source: count(source.largest_difference[1]),
}


def _show(proxy: Proxy, args: argparse.Namespace) -> None:
    config, (of_steps, steps) = proxy.config, proxy.stages[-1]
    Screen().write_line(
        f"{args.scale} of {args.config}: {count(steps)} of {counted(of_steps, 'step')}, "
        f"{count(config.data.tokens_per_step)} tokens per step, in "
        f"micro batches of {count(config.data.micro_batch_tokens)}",
        style="bold",
    )
    sources = sorted(proxy.sources, key=lambda source: -abs(source.largest_difference[0]))
    print_table(_COLUMNS, sources[:SHOWN])
    if len(sources) > SHOWN:
        print(f"and {counted(len(sources) - SHOWN, 'source')} that differ less (--json lists all)")
    for source in sources[:SHOWN]:
        if source.samples.exact_scale is not None:
            print(
                f"{source.name}: whole documents miss the scale by "
                f"{percent(source.samples.error)}; by less than 1 % at scale "
                f"1/{source.samples.exact_scale}"
            )
    for rounding in proxy.scaling.rounded:
        print(f"{rounding.key}: {rounding.of} -> {rounding.value} (exactly {rounding.exact:.6g})")
    note = "would be written to" if args.dry_run else "megapack-pretrain --config"
    print(f"\n{note} {proxy.folder / RUN}")

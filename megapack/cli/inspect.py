"""Look inside the files megapack makes (and those other tools made).

An .idx (or the prefix of a dataset) shows what is stored and how long the documents are; a
.samples file shows how it was packed and what the packing is worth. With --sample, one sample
is shown as training sees it: its text, where documents begin and end, and which tokens have no
label.

examples:
  megapack-build inspect data/train
  megapack-build inspect data/train.samples
  megapack-build inspect data/train.samples --sample 17 --tokenizer tokenizer.model
  megapack-build inspect data/train.samples --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megapack.cli.inspect_sample import print_sample, view_sample
from megapack.cli.report import Screen
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.storage import IndexedDataset

__all__ = ["add_arguments", "run"]

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
BAR = 40  # characters of the longest bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a dataset prefix, an .idx, or a .samples file")
    parser.add_argument(
        "--data-prefix",
        help="the dataset of a .samples file (default: where it lay when it was packed)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="show sample N of a .samples file")
    parser.add_argument("--tokenizer", help="turns ids into text, as in megapack-build tokenize")
    parser.add_argument("--full", action="store_true", help="do not shorten the text of segments")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def run(args: argparse.Namespace) -> int:
    console = Screen(highlight=False)
    if args.path.endswith(".samples"):
        index = SampleIndex.load(args.path)
        if args.sample is not None:
            _show_sample(console, index, args)
        elif args.json:
            print(json.dumps(describe_index(index), indent=2))
        else:
            _print_index(console, args.path, index)
        return 0
    if args.sample is not None:
        raise ConfigError(f"--sample needs a .samples file; {args.path} is a dataset")
    facts = describe_dataset(IndexedDataset(args.path))
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_dataset(console, facts)
    return 0


def _show_sample(console: Console, index: SampleIndex, args: argparse.Namespace) -> None:
    if not 0 <= args.sample < index.num_samples:
        raise ConfigError(
            f"--sample {args.sample}: {args.path} has samples 0 to {index.num_samples - 1}"
        )
    prefix = args.data_prefix or (index.source or {}).get("prefix")
    if prefix is None:
        raise ConfigError(f"{args.path} does not say which dataset it is of; give --data-prefix")
    if not IndexedDataset.exists(prefix) and args.data_prefix is None:
        # A dataset and its index often travel together.
        prefix = str(Path(args.path).with_name(Path(prefix).name))
    decode = None
    if args.tokenizer is not None:
        from megapack.tokenization.decode import load_decoder  # noqa: PLC0415

        decode = load_decoder(args.tokenizer)
    segments = view_sample(IndexedDataset(prefix), index, args.sample)
    print_sample(console, index, args.sample, segments, decode, full=args.full)


def describe_dataset(dataset: IndexedDataset) -> dict[str, Any]:
    """Facts about a dataset as JSON values; lengths in tokens per document."""
    lengths = dataset.document_lengths
    quantiles = np.quantile(lengths, QUANTILES).round().astype(int) if lengths.size else []
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)).tolist()
    return {
        "prefix": str(dataset.prefix),
        "dtype": dataset.dtype.name,
        "num_sequences": len(dataset),
        "num_documents": dataset.num_documents,
        "num_empty_documents": int((lengths == 0).sum()),
        "num_tokens": int(dataset.num_tokens),
        "mean_length": float(lengths.mean()) if lengths.size else 0.0,
        "length_quantiles": {f"{q:g}": int(v) for q, v in zip(QUANTILES, quantiles, strict=False)},
        "documents_up_to_power_of_two": {str(2**k): n for k, n in enumerate(counts)},
        "fingerprint": dataset.fingerprint,
        "meta": dataset.meta,
    }


def describe_index(index: SampleIndex) -> dict[str, Any]:
    """Facts about a .samples file as JSON values."""
    return {
        "strategy": index.strategy,
        "parameters": index.parameters,
        "seed": index.seed,
        "decisions": index.decisions,
        "bucket_capacity": index.bucket_capacity.tolist(),
        "fingerprint": index.fingerprint,
        "source": index.source,
        "metrics": index.metrics(),
    }


def _print_dataset(console: Console, facts: dict[str, Any]) -> None:
    console.print(f"{facts['prefix']}: {facts['dtype']} tokens", style="bold")
    console.print(
        f"{facts['num_documents']:,} documents ({facts['num_empty_documents']:,} empty) in "
        f"{facts['num_sequences']:,} sequences, {facts['num_tokens']:,} tokens, "
        f"{facts['mean_length']:,.1f} per document"
    )
    meta = facts["meta"]
    if meta is None:
        console.print("no .meta.json: not built by megapack, or moved without it")
    else:
        told = {k: v for k, v in meta.items() if isinstance(v, (str, int)) and k not in facts}
        console.print(", ".join(f"{key} {value}" for key, value in told.items()))
    table = Table("quantile", "tokens", title="document lengths", title_justify="left")
    for quantile, value in facts["length_quantiles"].items():
        table.add_row(f"{float(quantile):.0%}", f"{value:,}")
    console.print(table)
    _print_histogram(console, facts["documents_up_to_power_of_two"])


def _print_histogram(console: Console, counts: dict[str, int]) -> None:
    tallest = max(counts.values(), default=0)
    for upper, count in counts.items():
        if count:
            bar = "#" * max(1, round(BAR * count / tallest))
            console.print(f"{'<= ' + format(int(upper), ','):>14} {bar:{BAR}} {count:,}")


def _print_index(console: Console, path: str, index: SampleIndex) -> None:
    metrics = index.metrics()
    source = (index.source or {}).get("prefix", "bare lengths")
    console.print(f"{path}: {index.strategy} of {source}", style="bold")
    chosen = ", ".join(f"{k}={v}" for k, v in sorted(index.parameters.items()))
    console.print(f"seed={index.seed}, {chosen}")
    for name, why in index.decisions.items():
        console.print(f"{name}: {why}")
    table = Table("bucket", "samples", "tokens", "share of tokens", "filled")
    for b, capacity in enumerate(index.bucket_capacity.tolist()):
        samples, tokens = metrics["samples_per_bucket"][b], metrics["tokens_per_bucket"][b]
        table.add_row(
            f"{capacity:,}",
            f"{samples:,}",
            f"{tokens:,}",
            f"{tokens / max(1, metrics['placed_tokens']):.1%}",
            f"{tokens / max(1, samples * capacity):.3%}",
        )
    for column in table.columns:
        column.justify = "right"
    console.print(table)
    console.print(
        f"padding {metrics['padding_ratio']:.3%}, truncated documents "
        f"{metrics['truncation_ratio']:.3%} (longer than the largest bucket: "
        f"{metrics['truncation_floor']:.3%}), documents per sample "
        f"{metrics['concatenation_ratio']:.3f}, dropped tokens {metrics['dropped_tokens']:,}, "
        f"repeated tokens {metrics['repeated_tokens']:,}"
    )

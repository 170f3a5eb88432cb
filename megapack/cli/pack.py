"""Pack the documents of a dataset into samples.

Reads the document lengths of PREFIX.idx (never the tokens), packs them with a strategy and writes
one .samples file, which training maps into memory. The same command always writes the same bytes;
if they are there already, nothing is done.

examples:
  megapack-build pack --data-prefix corpus_text_document --buckets 1024,2048,4096,8192,16384
  megapack-build pack --data-prefix corpus_text_document --output concat.samples \\
      --strategy concat --buckets 4096 --seed 7 --threads 16
  megapack-build pack --data-prefix corpus_text_document --strategy seamless --buckets 2048 \\
      --preset paper
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import Any

from megapack.cli.report import Work, count, note, percent, print_table
from megapack.errors import FormatError
from megapack.packing import STRATEGIES, Parameter, SampleIndex, find_strategy, pack
from megapack.storage import IndexedDataset, read_document_lengths

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-prefix", metavar="PREFIX", required=True, help="PREFIX.bin/.idx")
    parser.add_argument("--output", metavar="FILE", help="default: PREFIX.samples")
    parser.add_argument(
        "--strategy", metavar="NAME", default="bucket", help="see below (default: %(default)s)"
    )
    parser.add_argument(
        "--buckets",
        metavar="L,L,...",
        type=_capacities,
        required=True,
        help="capacities in tokens; one for the strategies of one length",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(default: all)")
    parser.add_argument(
        "--alignment",
        metavar="M",
        type=int,
        default=1,
        help="leave room for segments that begin at multiples of M, which is 2 x context parallel "
        "size (default: %(default)s, no room)",
    )
    parser.add_argument("--preset", metavar="NAME", help="the parameters of a paper, see below")
    parser.add_argument("--force", action="store_true", help="pack again even if FILE is the same")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    group = parser.add_argument_group("parameters of the strategies")
    for name, parameters in _parameters_by_name().items():
        _add_parameter(group, name, parameters)
    parser.epilog = _describe_strategies()


def run(args: argparse.Namespace) -> int:
    strategy = find_strategy(args.strategy)
    known = _parameters_by_name()
    given = {name: value for name, value in vars(args).items() if name in known}
    resolved = strategy.resolve(given, preset=args.preset, capacity=args.buckets[-1])
    output = Path(args.output or f"{args.data_prefix}.samples")
    dataset = IndexedDataset(args.data_prefix)
    source = {"fingerprint": dataset.fingerprint, "prefix": str(args.data_prefix)}
    aligned = {"alignment": args.alignment} if args.alignment != 1 else {}
    wanted = {
        "strategy": args.strategy,
        "parameters": resolved | aligned,
        "buckets": args.buckets,
        "seed": args.seed,
        "fingerprint": source["fingerprint"],
    }
    index = None if args.force else _existing(output, wanted)
    if index is None:
        lengths = read_document_lengths(args.data_prefix)
        with Work(f"packing {len(lengths):,} documents") as work:
            index = pack(
                lengths,
                args.strategy,
                buckets=args.buckets,
                seed=args.seed,
                threads=args.threads,
                progress=work,
                **resolved,
                **aligned,
            )
        index.save(output, source=source)
    if args.json:
        print(json.dumps(index.metrics(), indent=2))
    else:
        _print_composition(index, output)
    return 0


def _existing(output: Path, wanted: dict[str, Any]) -> SampleIndex | None:
    """The index of an earlier run of the same command, if it stands at ``output``."""
    if not output.exists():
        return None
    try:
        index = SampleIndex.load(output)
        index.verify()
    except FormatError as error:
        note(f"{error}; it is replaced")
        return None
    found = {
        "strategy": index.strategy,
        "parameters": index.parameters,
        "buckets": index.buckets,
        "seed": index.seed,
        "fingerprint": (index.source or {}).get("fingerprint"),
    }
    different = [key for key in wanted if found[key] != wanted[key]]
    if different:
        note(f"{output} is replaced: it was packed with another {' and '.join(different)}")
        return None
    note(f"{output} is there already, packed from the same documents in the same way")
    return index


def _print_composition(index: SampleIndex, output: Path) -> None:
    m = index.metrics()
    rows = []
    columns = (index.bucket_capacity.tolist(), m["samples_per_bucket"], m["tokens_per_bucket"])
    for capacity, samples, tokens in zip(*columns, strict=True):
        padding = samples * capacity - tokens
        rows.append(
            (
                count(capacity),
                count(samples),
                count(tokens),
                percent(tokens / max(1, m["placed_tokens"])),
                percent(padding / max(1, samples * capacity), 3),
            )
        )
    print_table(("bucket", "samples", "tokens", "of all", "padding"), rows)
    floor = f"{percent(m['truncation_floor'], 3)} is longer than the largest bucket"
    facts = [
        ("padding ratio r_pad", percent(m["padding_ratio"], 3), ""),
        ("truncation ratio r_tru", percent(m["truncation_ratio"], 3), floor),
        ("concatenation ratio r_cat", f"{m['concatenation_ratio']:.3f}", "documents per sample"),
        ("dropped tokens", count(m["dropped_tokens"]), percent(m["dropped_ratio"], 3)),
        ("repeated tokens", count(m["repeated_tokens"]), percent(m["repeated_ratio"], 3)),
    ]
    print()
    for name, value, remark in facts:
        print(f"{name:26} {value:>16}  {remark}".rstrip())
    for name, reason in index.decisions.items():
        print(f"{name:26} {reason}")
    print(
        f"\n{output}: {count(m['num_documents'])} documents, {count(m['num_tokens'])} tokens -> "
        f"{count(m['num_samples'])} samples"
    )


def _capacities(text: str) -> list[int]:
    try:
        return sorted(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of capacities (as in 1024,2048)"
        ) from None


def _parameters_by_name() -> dict[str, dict[str, Parameter]]:
    """Parameter name -> strategy name -> what it means there."""
    table: dict[str, dict[str, Parameter]] = {}
    for strategy in STRATEGIES.values():
        for parameter in strategy.parameters:
            table.setdefault(parameter.name, {})[strategy.name] = parameter
    return table


def _add_parameter(
    group: argparse._ArgumentGroup, name: str, parameters: dict[str, Parameter]
) -> None:
    meanings: dict[tuple[str, str], list[str]] = {}
    for strategy, parameter in parameters.items():
        default = "" if parameter.default is None else f" (default: {parameter.default})"
        meanings.setdefault((parameter.help, default), []).append(strategy)
    text = "; ".join(
        f"{', '.join(strategies)}: {meaning}{default}"
        for (meaning, default), strategies in meanings.items()
    ).replace("%", "%%")
    first = next(iter(parameters.values()))
    option = "--" + name.replace("_", "-")
    if first.kind is bool:
        group.add_argument(
            option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    else:
        metavar = "|".join(first.choices) or "X"
        group.add_argument(
            option, type=first.kind, metavar=metavar, default=argparse.SUPPRESS, help=text
        )


def _describe_strategies() -> str:
    lines = ["strategies:"]
    for strategy in STRATEGIES.values():
        extras = "".join(f"; --preset {preset}" for preset in strategy.presets)
        text = f"{strategy.description} [{strategy.source}{extras}]"
        body = textwrap.wrap(text, width=76)
        lines += [f"  {strategy.name}", *(f"      {line}" for line in body)]
    return "\n".join(lines)

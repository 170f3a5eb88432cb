"""Pack the documents of a dataset into samples.

Reads the document lengths from PREFIX.idx (only strategy tree reads the tokens), packs them with a
strategy and writes one .samples file, which training maps into memory. The same command always
writes the same bytes. If the output exists with these bytes, nothing is done; other content is
replaced only with --overwrite.

--output NAME.shards.json makes one source of many datasets without merging them: each dataset is
packed on its own into NAME.shards/, and the manifest, which is written last, lists what a run must
know about each of them. If the command was stopped, run it again to resume. To add datasets later,
run it with all of them: it packs only the new ones, and refuses datasets that have changed. To use
several machines, run it on each with its own --part I/N, then on one without --part.

PREFIX and --output may be addresses (s3://bucket/folder/name); a file appears there when it is
complete. The datasets of a manifest at an address must be in its folder or below.

examples:
  megapack-build pack corpus_text_document --buckets 1024,2048,4096,8192,16384
  megapack-build pack corpus_text_document --output concat.samples \\
      --strategy concat --buckets 4096 --seed 7 --threads 16
  megapack-build pack corpus_text_document --strategy seamless --buckets 2048 \\
      --preset paper
  megapack-build pack corpus_text_document --buckets 8192,32768 \\
      --documents rest.npy --output rest.samples
  megapack-build pack pages --buckets 8192 --second images --second-capacity 16
  megapack-build pack 'web/*.idx' --buckets 8192 --output web.shards.json
  megapack-build pack 's3://bucket/web/*.idx' --buckets 8192 \\
      --output s3://bucket/web.shards.json
"""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.cli.arguments import (
    PACKING,
    Arguments,
    add_dataset_argument,
    add_shared,
    capacities,
    check_second_options,
    part_of,
    share,
)
from megapack.cli.datasets import dataset_prefixes, documents_of
from megapack.cli.output import Work, is_part, note, print_result, print_table
from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, Parameter, SampleIndex, check_packing, how_it_differs, pack
from megapack.packing.groups import groups_checksum, read_groups
from megapack.packing.metrics import array_checksum
from megapack.packing.sample_index import describe_source
from megapack.packing.second import read_second, second_checksum
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import ShardedIndex, is_shard_manifest, load_shards
from megapack.packing.strategies import TREE
from megapack.packing.trees import tokens_checksum, tokens_of
from megapack.storage import IndexedDataset
from megapack.storage.dataset import open_index, read_documents
from megapack.storage.files import check_not_read, check_target
from megapack.storage.index_file import IndexFile, prefix_of
from megapack.storage.index_writer import SUFFIXES
from megapack.storage.metadata import differing_tokens
from megapack.storage.remote.copies import local_output_file
from megapack.units import count, counted, percent

# ---- Metrics of a packing, as `pack` and `inspect` print them ------------------------------------


def print_composition(index: SampleIndex) -> None:
    """Print a row per bucket, the ratios of the papers and the decisions of the strategy."""
    m = index.metrics()
    buckets = [index.bucket_capacity.tolist(), m["samples_per_bucket"], m["tokens_per_bucket"]]

    def padding(capacity: int, samples: int, held: int) -> str:
        return percent((samples * capacity - held) / max(1, samples * capacity), 3)

    columns: dict[str, Any] = {
        "bucket": lambda bucket: count(bucket[0]),
        "samples": lambda bucket: count(bucket[1]),
        "tokens": lambda bucket: count(bucket[2]),
        "of all": lambda bucket: percent(bucket[2] / max(1, m["placed_tokens"])),
        "padding": lambda bucket: padding(*bucket[:3]),
    }
    if "second_per_bucket" in m:
        buckets += [m["second_per_bucket"], index.parameters["second_capacity"]]
        columns["second"] = lambda bucket: count(bucket[3])
        columns["second padding"] = lambda bucket: padding(bucket[4], bucket[1], bucket[3])
    print_table(columns, zip(*buckets, strict=True))
    bound = f"lower bound {percent(m['truncation_floor'], 3)}: longer than the largest bucket"
    facts = [
        ("padding ratio r_pad", percent(m["padding_ratio"], 3), ""),
        ("truncation ratio r_tru", percent(m["truncation_ratio"], 3), bound),
        ("concatenation ratio r_cat", f"{m['concatenation_ratio']:.3f}", "documents per sample"),
        ("dropped tokens", count(m["dropped_tokens"]), percent(m["dropped_ratio"], 3)),
        ("repeated tokens", count(m["repeated_tokens"]), percent(m["repeated_ratio"], 3)),
    ]
    if "second_padding_ratio" in m:
        remark = "of the second capacities"
        facts.append(("second padding ratio", percent(m["second_padding_ratio"], 3), remark))
    if "num_groups" in m:
        longer = f"{count(m['num_groups_longer_than_largest_bucket'])} longer than the largest"
        facts += [
            ("groups of documents", count(m["num_groups"]), ""),
            ("groups cut", count(m["num_cut_groups"]), f"{longer} bucket"),
        ]
    if "shared_tokens" in m:
        share = percent(m["shared_tokens"] / max(1, m["num_tokens"]), 3)
        facts.append(("shared tokens", count(m["shared_tokens"]), f"{share}, computed once"))
    if "num_documents_with_fim_room" in m:
        with_room = m["num_documents_with_fim_room"]
        without = m["num_documents"] - m["num_empty_documents"] - with_room
        remark = f"for {index.fim_room} more tokens; FIM leaves {count(without)} others unchanged"
        facts.append(("documents with FIM room", count(with_room), remark))
    print()
    for name, value, remark in facts:
        print(f"{name:26} {value:>16}  {remark}".rstrip())
    for name, reason in index.decisions.items():
        print(f"{name:26} {reason}")


# ---- Content of a shard manifest, as `pack` and `inspect` print it -------------------------------

_SHARD_COLUMNS: dict[str, Any] = {
    "shard": lambda shard: shard.prefix,
    "documents": lambda shard: count(shard.num_documents),
    "tokens": lambda shard: count(shard.num_tokens),
    "samples": lambda shard: count(sum(shard.samples_per_bucket)),
    "type": lambda shard: shard.dtype,
    "columns": lambda shard: ", ".join(shard.columns),
}


def describe_shards(index: ShardedIndex) -> dict[str, Any]:
    return {
        "manifest": str(index.path),
        "num_shards": len(index.shards),
        "num_documents": index.num_documents,
        "num_tokens": index.num_tokens,
        "num_samples": index.num_samples,
        "bucket_capacity": index.bucket_capacity.tolist(),
        "samples_per_bucket": np.diff(index.bucket_sample_offsets).tolist(),
        "fingerprint": index.fingerprint,
        **({"columns": list(index.columns)} if index.columns else {}),
    }


def print_shards(index: ShardedIndex, remark: str = "", *, each: bool = False) -> None:
    """Print a row per bucket, with ``each`` a row per shard, and the sums with a ``remark``."""
    facts = describe_shards(index)
    buckets = list(zip(facts["bucket_capacity"], facts["samples_per_bucket"], strict=True))
    positions = max(1, sum(capacity * number for capacity, number in buckets))
    print_table(
        {
            "bucket": lambda bucket: count(bucket[0]),
            "samples": lambda bucket: count(bucket[1]),
            "of all tokens": lambda bucket: percent(bucket[0] * bucket[1] / positions),
        },
        buckets,
    )
    if each:
        print()
        print_table(_SHARD_COLUMNS, index.shards)
    print(
        f"\n{index.path}: {counted(facts['num_shards'], 'dataset')}{remark}, "
        f"{count(index.num_documents)} documents, {count(index.num_tokens)} tokens -> "
        f"{count(index.num_samples)} samples"
    )
    for name, spec in index.columns.items():
        lacking = sum(name not in shard.columns for shard in index.shards)
        remark = f", missing in {counted(lacking, 'dataset')}" if lacking else ""
        print(f"column {name}: {spec.dtype} {list(spec.shape)} of {spec.of}{remark}")
    if index.arranged is not None:
        print(f"arranged in the order of seed {index.arranged.seed}")
    without_meta = sum(shard.max_token_id is None for shard in index.shards)
    if without_meta:
        note(
            f"{counted(without_meta, 'dataset')} without .meta.json: their token ids are not "
            "checked against the vocabulary of a model; `megapack-build import` writes a .meta.json"
        )


# ---- Options -------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="only the .idx is read")
    add_shared(
        parser,
        "--output",
        help="NAME.shards.json for many datasets; may be an address (default: PREFIX.samples)",
    )
    add_shared(parser, "--overwrite")
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        default="bucket",
        help="packing strategy, from the list below (default: %(default)s)",
    )
    parser.add_argument(
        "--buckets",
        metavar="L,L,...",
        type=capacities,
        required=True,
        help="bucket capacities in tokens; exactly one for strategies of fixed length",
    )
    parser.add_argument(
        "--documents",
        metavar="FILE",
        help="pack only these documents: a .npy of document numbers, or text with one per line "
        "(default: all)",
    )
    parser.add_argument(
        "--match-repetition",
        metavar="SHARE",
        type=share,
        default=1.0,
        help="pack only this share of the documents (0.02, or 2/100), for a proxy run with that "
        "share of the final run's tokens; a larger share contains every smaller one (default: 1)",
    )
    add_shared(parser, *PACKING)
    parser.add_argument(
        "--preset", metavar="NAME", help="use the parameters of a paper, from the list below"
    )
    add_shared(parser, "--json")
    add_sharing(parser.add_argument_group("many datasets (the output does not depend on these)"))
    group = parser.add_argument_group("parameters of the strategies")
    for name, parameters in _parameters_by_name().items():
        _add_parameter(group, name, parameters)
    parser.epilog = _describe_strategies()


def add_sharing(group: Arguments) -> None:
    add_shared(group, "--workers")
    group.add_argument(
        "--part", type=part_of, metavar="I/N", help="build only part I of N, counted from 0"
    )
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        help="run processes on this machine, or one Ray task per shard (default: local)",
    )
    group.add_argument(
        "--ray-address",
        metavar="A",
        help="address of a running Ray cluster (default: Ray's own rule)",
    )


def _parameters_by_name() -> dict[str, dict[str, Parameter]]:
    """Return parameter name -> strategy name -> its declaration there."""
    table: dict[str, dict[str, Parameter]] = {}
    for strategy in (*STRATEGIES.values(), TREE):
        for parameter in strategy.parameters:
            table.setdefault(parameter.name, {})[strategy.name] = parameter
    return table


def _add_parameter(
    group: argparse._ArgumentGroup, name: str, parameters: dict[str, Parameter]
) -> None:
    """Declare one option for a parameter that several strategies may have."""
    meanings: dict[str, list[str]] = {}
    for strategy, parameter in parameters.items():
        default = "" if parameter.default is None else f" (default: {parameter.default})"
        meanings.setdefault(f"{parameter.help}{default}", []).append(strategy)
    text = "; ".join(f"{', '.join(names)}: {meaning}" for meaning, names in meanings.items())
    first = next(iter(parameters.values()))
    settings: dict[str, Any] = {"type": first.kind, "metavar": "|".join(first.choices) or "X"}
    if first.kind is bool:
        settings = {"action": argparse.BooleanOptionalAction}
    option, text = "--" + name.replace("_", "-"), text.replace("%", "%%")
    group.add_argument(option, default=argparse.SUPPRESS, help=text, **settings)


def _describe_strategies() -> str:
    lines = ["strategies:"]
    for strategy in (*STRATEGIES.values(), TREE):
        presets = "".join(f"; --preset {preset}" for preset in strategy.presets)
        second = "; --second" if strategy.two_capacities else ""
        text = f"{strategy.description} [{strategy.source}{presets}{second}]"
        lines += [f"  {strategy.name}", *(f"      {line}" for line in textwrap.wrap(text, 76))]
    return "\n".join(lines)


# ---- One dataset, or with --output NAME.shards.json many as one source ---------------------------


def run(args: argparse.Namespace) -> None:
    check_second_options(args)
    declared = _parameters_by_name()
    parameters = {name: value for name, value in vars(args).items() if name in declared}
    names = ("buckets", "second_capacity", "preset", "alignment", "fim_room", "match_repetition")
    options = {name: getattr(args, name) for name in names}
    grouped = args.groups is not None
    if args.output is not None and is_shard_manifest(args.output):
        options |= {"groups": grouped, "second": args.second}
        _pack_many(args, {"strategy": args.strategy, **options, **parameters})
        return
    prefix = _only_prefix(args)
    method = check_packing(args.strategy, parameters=parameters, groups=grouped, **options)
    output = args.output or f"{prefix}.samples"
    files = [prefix + suffix for suffix in SUFFIXES]
    check_not_read(output, [*files, *filter(None, (args.documents, args.groups, args.second))])
    documents = open_index(prefix)
    chosen = None if args.documents is None else _chosen_documents(args.documents, documents)
    tokens = (
        tokens_of(IndexedDataset(prefix), args.strategy) if method.strategy.needs_tokens else {}
    )
    identity = {
        "strategy": args.strategy,
        "parameters": method.parameters,
        "buckets": method.buckets,
        "seed": args.seed,
        "dataset": documents.fingerprint,
        "chosen": None if chosen is None else array_checksum(chosen),
        "tokens": tokens_checksum(tokens),
    }
    group_ids = args.groups and read_groups(args.groups, prefix, documents.num_documents)
    if group_ids is not None:
        identity["groups"] = groups_checksum(group_ids)
    second = None if args.second is None else read_second(args.second, prefix)
    if second is not None:
        identity["second"] = second_checksum(second)
    with local_output_file(output) as file:
        difference = partial(how_it_differs, file, **identity)
        if check_target(file, overwrite=args.overwrite, difference=difference, name=output):
            lengths = documents.document_lengths()
            if chosen is not None:
                # Documents that are not chosen count as empty, so document numbers stay valid.
                all_lengths, lengths = lengths, np.zeros_like(lengths)
                lengths[chosen] = all_lengths[chosen]
            with Work(f"packing {counted(len(lengths), 'document')}") as work:
                index = pack(
                    lengths,
                    args.strategy,
                    seed=args.seed,
                    threads=args.threads,
                    progress=work,
                    groups=group_ids,
                    second=second,
                    **tokens,
                    **options,
                    **parameters,
                )
            source = describe_source(documents, prefix)
            if chosen is not None:
                source["documents"] = identity["chosen"]
            if tokens:
                source["tokens"] = identity["tokens"]
            if args.second is not None:
                source["second"] = args.second
            index.save(file, source=source, overwrite=True)
        else:
            note(f"nothing to do: {output} exists already, with these documents and options")
            index = SampleIndex.load(file)
    metrics = index.metrics()

    def show() -> None:
        print_composition(index)
        print(
            f"\n{output}: {count(index.num_documents)} documents, "
            f"{count(metrics['num_tokens'])} tokens -> {count(index.num_samples)} samples"
        )

    print_result(args, metrics, show)
    _note_many_cut(metrics["truncation_floor"], int(index.bucket_capacity[-1]), prefix)


_MANY_CUT = 0.5  # of the documents


def _note_many_cut(longer: float, largest: int, prefix: str) -> None:
    """Print a note if so many documents are longer than the largest bucket that it may be a
    mistake."""
    if longer > _MANY_CUT:
        note(
            f"{percent(longer)} of the documents are longer than the largest bucket, "
            f"{count(largest)} tokens, and are cut; to see what larger buckets would save: "
            f"megapack-build compare {shlex.quote(prefix)} --buckets {largest},{4 * largest}"
        )


def _only_prefix(args: argparse.Namespace) -> str:
    if len(args.prefixes) != 1 or args.part is not None or args.executor is not None:
        number, output = counted(len(args.prefixes), "dataset"), args.output or "one .samples"
        raise ConfigError(
            f"{number} to pack into {output}: give one dataset, or pack many as one source with "
            "--output NAME.shards.json (--part and --executor work only with that)"
        )
    return prefix_of(args.prefixes[0])


def _chosen_documents(path: str, documents: IndexFile) -> NDArray[np.int64]:
    chosen = read_documents(path)
    if len(chosen) and chosen[-1] >= documents.num_documents:
        raise ConfigError(
            f"--documents {path} has document {chosen[-1]}, and {documents.name} has "
            f"{documents.num_documents} (counted from 0); give the list of this dataset"
        )
    return chosen


def _pack_many(args: argparse.Namespace, options: Mapping[str, Any]) -> None:
    if args.documents is not None:
        raise ConfigError("--documents works with one dataset only; pack that dataset separately")
    if args.groups not in (None, "auto"):
        raise ConfigError(
            f"--groups {args.groups} works with one dataset only; for many give --groups auto, "
            "which reads the PREFIX.groups of each"
        )
    if args.second is not None and args.second.endswith(".npy"):
        raise ConfigError(
            f"--second {args.second} works with one dataset only; for many give the name of a "
            "column that each of them has"
        )
    prefixes = documents_of(dataset_prefixes(args.prefixes))
    plan = plan_packing(
        args.output, prefixes, {**options, "seed": args.seed}, overwrite=args.overwrite
    )
    i, n = args.part or (0, 1)
    prefixes_of_part = plan.prefixes[i::n]
    with Work(f"packing {counted(len(prefixes_of_part), 'dataset')}") as work:
        documents = sum(open_index(prefix).num_documents for prefix in prefixes_of_part)
        shards = pack_shards(
            plan,
            work.counting(documents, lambda piece: piece.documents),
            workers=args.workers,
            threads=args.threads,
            part=args.part,
            executor=args.executor or "local",
            ray_address=args.ray_address,
            overwrite=args.overwrite,
        )
    if is_part(args, f"{counted(len(shards), 'dataset')} packed", str(plan.manifest)):
        return
    index = load_shards(plan.manifest)
    for difference in differing_tokens(
        lambda fact: ((shard.prefix, shard.document_token(fact)) for shard in index.shards)
    ):
        note(f"{difference}: build them alike (--prepend-bos, --append-eod) unless intended")
    new, kept = len(index.shards) - len(plan.known), len(index.shards) - len(prefixes)
    remark = f", {count(new)} of them new" if plan.known else ""
    if kept:
        remark += f" and {count(kept)} from an earlier command (--overwrite drops these)"
    facts = {**describe_shards(index), "num_new_shards": new}
    print_result(args, facts, lambda: print_shards(index, remark))

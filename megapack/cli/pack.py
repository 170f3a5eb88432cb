"""Pack the documents of a dataset into samples.

Reads the document lengths of PREFIX.idx (never the tokens), packs them with a strategy and writes
one .samples file, which training maps into memory. The same command always writes the same bytes;
if they are there already, nothing is done, and anything else is replaced only with --overwrite.

Many datasets become one source, without being merged, by --output NAME.shards.json: each is packed
by itself, its .samples lies in NAME.shards/, and the manifest, written last, says of each what a
run must know before it opens it. The same command goes on where it was stopped. Datasets that come
later are added by the same command, which packs only them; one that has changed is an error.
Several machines: each runs the command with its own --part I/N, then one of them without.

PREFIX and --output may be addresses (s3://bucket/folder/name); what is written there appears when
it is complete. A manifest at an address is of datasets beside or below it.

examples:
  megapack-build pack corpus_text_document --buckets 1024,2048,4096,8192,16384
  megapack-build pack corpus_text_document --output concat.samples \\
      --strategy concat --buckets 4096 --seed 7 --threads 16
  megapack-build pack corpus_text_document --strategy seamless --buckets 2048 \\
      --preset paper
  megapack-build pack corpus_text_document --buckets 8192,32768 \\
      --documents rest.npy --output rest.samples
  megapack-build pack 'web/*.idx' --buckets 8192 --output web.shards.json
  megapack-build pack 's3://bucket/web/*.idx' --buckets 8192 \\
      --output s3://bucket/web.shards.json
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.cli.arguments import (
    Arguments,
    add_dataset_argument,
    add_shared,
    capacities,
    part_of,
    share,
)
from megapack.cli.datasets import dataset_prefixes, documents_of
from megapack.cli.output import Work, is_part, note, print_table, printed_as_json
from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, Parameter, SampleIndex, check_packing, how_it_differs, pack
from megapack.packing.groups import groups_checksum, read_groups
from megapack.packing.metrics import array_checksum
from megapack.packing.sample_index import describe_source
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import ShardedIndex, is_shard_manifest, load_shards
from megapack.storage.dataset import open_index, read_documents
from megapack.storage.files import check_not_read, check_target
from megapack.storage.index_file import IndexFile, prefix_of
from megapack.storage.index_writer import SUFFIXES
from megapack.storage.remote.copies import local_output_file
from megapack.units import count, counted, percent

# ---- What a packing is worth, as `pack` and `inspect` print it ----------------------------------


def print_composition(index: SampleIndex) -> None:
    """A row per bucket, the ratios of the papers, and what was decided."""
    m = index.metrics()
    rows = []
    columns = (index.bucket_capacity.tolist(), m["samples_per_bucket"], m["tokens_per_bucket"])
    for capacity, samples, tokens in zip(*columns, strict=True):
        share = percent(tokens / max(1, m["placed_tokens"]))
        padding = percent((samples * capacity - tokens) / max(1, samples * capacity), 3)
        rows.append((*map(count, (capacity, samples, tokens)), share, padding))
    print_table(("bucket", "samples", "tokens", "of all", "padding"), rows)
    bound = f"lower bound {percent(m['truncation_floor'], 3)}: longer than the largest bucket"
    facts = [
        ("padding ratio r_pad", percent(m["padding_ratio"], 3), ""),
        ("truncation ratio r_tru", percent(m["truncation_ratio"], 3), bound),
        ("concatenation ratio r_cat", f"{m['concatenation_ratio']:.3f}", "documents per sample"),
        ("dropped tokens", count(m["dropped_tokens"]), percent(m["dropped_ratio"], 3)),
        ("repeated tokens", count(m["repeated_tokens"]), percent(m["repeated_ratio"], 3)),
    ]
    if "num_groups" in m:
        longer = f"{count(m['num_groups_longer_than_largest_bucket'])} longer than the largest"
        facts += [
            ("groups of documents", count(m["num_groups"]), ""),
            ("groups cut", count(m["num_cut_groups"]), f"{longer} bucket"),
        ]
    if "num_documents_with_fim_room" in m:
        found, room = m["num_documents_with_fim_room"], index.fim_room
        others = m["num_documents"] - m["num_empty_documents"] - found
        remark = f"for {room} tokens more; {count(others)} others stay as they are"
        facts.append(("documents with FIM room", count(found), remark))
    print()
    for name, value, remark in facts:
        print(f"{name:26} {value:>16}  {remark}".rstrip())
    for name, reason in index.decisions.items():
        print(f"{name:26} {reason}")


# ---- What a shard manifest holds, as `pack` and `inspect` tell it -------------------------------


def describe_shards(index: ShardedIndex) -> dict[str, Any]:
    """Facts about a source of many datasets as JSON values."""
    return {
        "manifest": str(index.path),
        "num_shards": len(index.shards),
        "num_documents": index.num_documents,
        "num_tokens": index.num_tokens,
        "num_samples": index.num_samples,
        "bucket_capacity": index.bucket_capacity.tolist(),
        "samples_per_bucket": np.diff(index.bucket_sample_offsets).tolist(),
        "fingerprint": index.fingerprint,
    }


def print_shards(index: ShardedIndex, remark: str = "", *, each: bool = False) -> None:
    """A row per bucket and, with ``each``, per shard, then the sums; ``remark`` follows the number
    of shards."""
    facts = describe_shards(index)
    buckets = list(zip(facts["bucket_capacity"], facts["samples_per_bucket"], strict=True))
    positions = max(1, sum(capacity * number for capacity, number in buckets))
    print_table(
        ("bucket", "samples", "of all tokens"),
        [(count(c), count(n), percent(c * n / positions)) for c, n in buckets],
    )
    if each:
        print()
        print_table(
            ("shard", "documents", "tokens", "samples", "type", "labels", "weights"),
            [
                (s.prefix, *map(count, (s.num_documents, s.num_tokens, sum(s.samples_per_bucket))))
                + (s.dtype, "yes" if s.labels else "", "yes" if s.weights else "")
                for s in index.shards
            ],
        )
    print(
        f"\n{index.path}: {counted(facts['num_shards'], 'dataset')}{remark}, "
        f"{count(index.num_documents)} documents, {count(index.num_tokens)} tokens -> "
        f"{count(index.num_samples)} samples"
    )
    if index.arranged is not None:
        print(f"arranged in the order of seed {index.arranged.seed}")
    unknown = sum(shard.max_token_id is None for shard in index.shards)
    if unknown:
        note(
            f"{counted(unknown, 'dataset')} without .meta.json: nobody checks their token ids "
            "against a model (`megapack-build import` writes it)"
        )


# ---- `pack` of many datasets as one source: --output NAME.shards.json ---------------------------


def add_sharing(group: Arguments) -> None:
    """Options that share the work out."""
    add_shared(group, "--workers")
    group.add_argument("--part", type=part_of, metavar="I/N", help="build part I of N only, from 0")
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        help="processes of this machine, or one Ray task per shard (local)",
    )
    group.add_argument("--ray-address", metavar="A", help="of a running cluster (Ray's own rule)")


def run_shards(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Pack, and say what the source then has. ``options`` are those of ``pack`` but its seed."""
    if args.documents is not None:
        raise ConfigError("--documents is for one dataset; pack its rest by itself")
    if args.groups not in (None, "auto"):
        raise ConfigError(
            f"--groups {args.groups} is for one dataset; of many each has its PREFIX.groups: give "
            "--groups auto"
        )
    prefixes = documents_of(dataset_prefixes(args.prefixes))
    plan = plan_packing(
        args.output, prefixes, {**options, "seed": args.seed}, overwrite=args.overwrite
    )
    i, n = args.part or (0, 1)
    mine = plan.prefixes[i::n]
    with Work(f"packing {counted(len(mine), 'dataset')}") as work:
        documents = sum(open_index(prefix).num_documents for prefix in mine)
        shards = pack_shards(
            plan,
            work.counting(documents, lambda more: more.documents),
            workers=args.workers,
            threads=args.threads,
            part=args.part,
            executor=args.executor or "local",
            ray_address=args.ray_address,
            overwrite=args.overwrite,
        )
    if is_part(args, f"{counted(len(shards), 'dataset')} packed", str(plan.manifest)):
        return 0
    index = load_shards(plan.manifest)
    new, kept = len(index.shards) - len(plan.known), len(index.shards) - len(prefixes)
    if not printed_as_json(args, {**describe_shards(index), "num_new_shards": new}):
        remark = f", {count(new)} of them new" if plan.known else ""
        remark += f" and {count(kept)} not named now (--overwrite leaves them out)" if kept else ""
        print_shards(index, remark)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="only the .idx is read")
    add_shared(
        parser,
        "--output",
        help="NAME.shards.json for many; may be an address (default: PREFIX.samples)",
    )
    add_shared(parser, "--overwrite")
    parser.add_argument(
        "--strategy", metavar="NAME", default="bucket", help="see below (default: %(default)s)"
    )
    parser.add_argument(
        "--buckets",
        metavar="L,L,...",
        type=capacities,
        required=True,
        help="capacities in tokens; one for the strategies of one length",
    )
    parser.add_argument(
        "--documents",
        metavar="FILE",
        help="pack only these documents: a .npy of their numbers, or text with one per line",
    )
    parser.add_argument(
        "--match-repetition",
        metavar="SHARE",
        type=share,
        default=1.0,
        help="pack this share of the documents (0.02, or 2/100), for a proxy run of so many of "
        "the run's tokens; a smaller share lies inside of a larger one",
    )
    add_shared(parser, "--groups", "--seed", "--threads", "--alignment", "--fim-room")
    parser.add_argument("--preset", metavar="NAME", help="the parameters of a paper, see below")
    add_shared(parser, "--json")
    add_sharing(parser.add_argument_group("many datasets (what is written never depends on it)"))
    group = parser.add_argument_group("parameters of the strategies")
    for name, parameters in _parameters_by_name().items():
        _add_parameter(group, name, parameters)
    parser.epilog = _describe_strategies()


def run(args: argparse.Namespace) -> int:
    known = _parameters_by_name()
    given = {name: value for name, value in vars(args).items() if name in known}
    names = ("buckets", "preset", "alignment", "fim_room", "match_repetition")
    options = {name: getattr(args, name) for name in names}
    grouped = args.groups is not None
    if args.output is not None and is_shard_manifest(args.output):
        return run_shards(args, {"strategy": args.strategy, **options, "groups": grouped, **given})
    prefix = _only(args)
    method = check_packing(args.strategy, parameters=given, groups=grouped, **options)
    output = args.output or f"{prefix}.samples"
    files = [prefix + suffix for suffix in SUFFIXES]
    check_not_read(output, [*files, *filter(None, (args.documents, args.groups))])
    documents = open_index(prefix)
    chosen = None if args.documents is None else _chosen(args.documents, documents)
    wanted = {
        "strategy": args.strategy,
        "parameters": method.parameters,
        "buckets": method.buckets,
        "seed": args.seed,
        "dataset": documents.fingerprint,
        "chosen": None if chosen is None else array_checksum(chosen),
    }
    ids = None
    if args.groups is not None:
        ids = read_groups(args.groups, prefix, documents.num_documents)
        wanted["groups"] = groups_checksum(ids)
    with local_output_file(output) as file:
        difference = partial(how_it_differs, file, **wanted)
        if check_target(file, overwrite=args.overwrite, difference=difference, name=output):
            lengths = documents.document_lengths()
            if chosen is not None:
                only = np.zeros_like(lengths)
                only[chosen] = lengths[chosen]
                lengths = only
            with Work(f"packing {counted(len(lengths), 'document')}") as work:
                index = pack(
                    lengths,
                    args.strategy,
                    seed=args.seed,
                    threads=args.threads,
                    progress=work,
                    groups=ids,
                    **options,
                    **given,
                )
            source = describe_source(documents, prefix)
            if chosen is not None:
                source["documents"] = wanted["chosen"]
            index.save(file, source=source, overwrite=True)
        else:
            note(f"nothing to do: {output} is there already, of the same documents and options")
            index = SampleIndex.load(file)
    if not printed_as_json(args, index.metrics()):
        print_composition(index)
        print(
            f"\n{output}: {count(index.num_documents)} documents, "
            f"{count(index.metrics()['num_tokens'])} tokens -> {count(index.num_samples)} samples"
        )
    return 0


def _only(args: argparse.Namespace) -> str:
    """The prefix of the one dataset."""
    if len(args.prefixes) != 1 or args.part is not None or args.executor is not None:
        named, into = counted(len(args.prefixes), "dataset"), args.output or "one .samples"
        raise ConfigError(
            f"{named} to pack into {into}: give one, or pack many as one source with --output "
            "NAME.shards.json (--part and --executor are for those)"
        )
    return prefix_of(args.prefixes[0])


def _chosen(path: str, documents: IndexFile) -> NDArray[np.int64]:
    """The numbers of --documents, ascending."""
    chosen = read_documents(path)
    if len(chosen) and chosen[-1] >= documents.num_documents:
        raise ConfigError(
            f"--documents {path} has document {chosen[-1]}, and {documents.name} has "
            f"{documents.num_documents} (counted from 0); is it a list of another dataset?"
        )
    return chosen


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
    how: dict[str, Any] = {"type": first.kind, "metavar": "|".join(first.choices) or "X"}
    if first.kind is bool:
        how = {"action": argparse.BooleanOptionalAction}
    option = "--" + name.replace("_", "-")
    group.add_argument(option, default=argparse.SUPPRESS, help=text, **how)


def _describe_strategies() -> str:
    lines = ["strategies:"]
    for strategy in STRATEGIES.values():
        extras = "".join(f"; --preset {preset}" for preset in strategy.presets)
        text = f"{strategy.description} [{strategy.source}{extras}]"
        body = textwrap.wrap(text, width=76)
        lines += [f"  {strategy.name}", *(f"      {line}" for line in body)]
    return "\n".join(lines)

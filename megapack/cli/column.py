"""Add, list, remove and export columns: data that belongs to the tokens of a dataset.

  megapack-build column add PREFIX NAME SOURCE        # a row per token, in the order of PREFIX.bin
  megapack-build column list PREFIX [PREFIX ...]
  megapack-build column remove PREFIX NAME
  megapack-build column export PREFIX NAME OUTPUT

SOURCE is FILE.npy, or a dataset with a number for each token of PREFIX: labels of GPT-NeoX, or
labels and loss weights that earlier versions wrote. OUTPUT is FILE.npy, or the prefix of such a
dataset.

A column is PREFIX.NAME.col, described in PREFIX.meta.json: a number per token, or a row of numbers
of one shape. With --of token it describes the token (the experts that it was routed to); with --of
target it describes predicting the token (its advantage, a teacher's logits), and a batch has it at
the position before, like a label. Padding and inserted tokens get the --fill value. Of the columns
labels (-100: no loss) and weights, batches make their labels and loss mask.

  megapack-build column add web advantages advantages.npy --dtype float32 --of target
  megapack-build column add web logits teacher.npy --dtype bfloat16 --of target
  megapack-build column add web experts experts.npy --fill 255
  megapack-build inspect web.samples --sample 0           # shows the columns next to the tokens
  megapack-build column export web logits logits.npy      # bfloat16 as float32
  megapack-build column add chats labels chats.labels
  megapack-build column export chats labels chats_label_document    # for label_data_paths of NeoX

`tokenize --column` and `import --column` write columns with the dataset. merge, verify, repair and
upload treat columns like tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

from megapack.cli.arguments import add_shared, number, refuse_without
from megapack.cli.datasets import dataset_prefixes, local_file
from megapack.cli.output import print_result, print_table
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import (
    add_column,
    export_column,
    export_dataset,
    find_column,
    remove_column,
    spec_of,
    values_of_dataset,
)
from megapack.storage.columns import Column
from megapack.storage.tokens import open_npy
from megapack.units import counted

_WORDS = {
    "add": ("PREFIX", "NAME", "SOURCE"),
    "list": ("PREFIX",),
    "remove": ("PREFIX", "NAME"),
    "export": ("PREFIX", "NAME", "OUTPUT"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=tuple(_WORDS), metavar="ACTION", help="add, list, remove or export"
    )
    parser.add_argument(
        "words", nargs="+", metavar="PREFIX", help="dataset, and what follows it above"
    )
    add_shared(
        parser,
        "--dtype",
        help="of an added column: also float32, bfloat16 or float16 (default: that of the .npy)",
    )
    parser.add_argument(
        "--fill",
        type=number,
        metavar="X",
        help="number in rows of padding and inserted tokens (default: 0; of labels, -100)",
    )
    parser.add_argument(
        "--of",
        choices=("token", "target"),
        help="whether a row describes the token, or predicting it (default: token; of labels and "
        "weights, target)",
    )
    add_shared(parser, "--overwrite", "--json")


def run(args: argparse.Namespace) -> None:
    action, words = args.action, args.words
    wanted = _WORDS[action]
    if len(words) != len(wanted) and not (action == "list" and words):
        raise ConfigError(
            f"column {action} takes {' '.join(wanted)}, not {' '.join(words)}; see --help"
        )
    if action != "add":
        refuse_without("column add", dtype=args.dtype, fill=args.fill, of=args.of)
    {"add": _add, "list": _list, "remove": _remove, "export": _export}[action](args)


def describe_column(prefix: str, column: Column) -> dict[str, Any]:
    spec = column.spec
    facts = {"prefix": prefix, "name": column.name, "dtype": spec.dtype, "shape": list(spec.shape)}
    return facts | {"fill": spec.fill, "of": spec.of, "bytes": column.entry.bytes}


def _add(args: argparse.Namespace) -> None:
    prefix, name = dataset_prefixes(args.words[:1])[0], args.words[1]
    source = args.words[2]
    if not source.endswith(".npy") and IndexedDataset.exists(source):
        values = values_of_dataset(name, source, prefix)
    else:
        values = open_npy(source)
    spec = spec_of(name, values, dtype=args.dtype, fill=args.fill, of=args.of)
    is_new = add_column(prefix, name, values, spec, overwrite=args.overwrite)
    column = IndexedDataset(prefix).columns[name]
    text = f"{prefix}: column {name}, {spec}, {counted(column.rows.shape[0], 'row')}"
    if not is_new:
        text = f"nothing to do: {prefix} has this column {name} already"
    print_result(args, {**describe_column(prefix, column), "is_new": is_new}, text)


def _list(args: argparse.Namespace) -> None:
    facts = [
        describe_column(prefix, column)
        for prefix in dict.fromkeys(dataset_prefixes(args.words))
        for column in IndexedDataset(prefix).columns.values()
    ]
    table = {
        "dataset": lambda row: row["prefix"],
        "column": lambda row: row["name"],
        "dtype": lambda row: row["dtype"],
        "shape": lambda row: row["shape"] or "",
        "of": lambda row: row["of"],
        "fill": lambda row: row["fill"],
        "bytes": lambda row: f"{row['bytes']:,}",
    }
    print_result(args, facts, (lambda: print_table(table, facts)) if facts else "no columns")


def _remove(args: argparse.Namespace) -> None:
    prefix, name = dataset_prefixes(args.words[:1])[0], args.words[1]
    remove_column(prefix, name)
    print_result(args, {"prefix": prefix, "name": name}, f"{prefix}: removed column {name}")


def _export(args: argparse.Namespace) -> None:
    prefix, name = dataset_prefixes(args.words[:1])[0], args.words[1]
    output = local_file(args.words[2], "OUTPUT")
    column = find_column(IndexedDataset(prefix).columns, name, prefix)
    if output.suffix == ".npy":
        export_column(column, output, overwrite=args.overwrite)
    else:
        export_dataset(prefix, name, output, overwrite=args.overwrite)
    facts = {**describe_column(prefix, column), "output": str(output)}
    print_result(args, facts, f"{output}: {counted(column.rows.shape[0], 'row')} of {column.spec}")

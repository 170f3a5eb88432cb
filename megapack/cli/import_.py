"""Index token files of other tools, without copying tokens where the layout allows.

  megapack-build import neox/data_text_document --output-prefix corpus
  megapack-build import fineweb_00000.ds --output-prefix corpus
  megapack-build import train.bin --output-prefix corpus --dtype uint16 --eod-token 50256
  megapack-build import dump.npy --output-prefix distill --eod-token 2 \\
      --column logits=logits.npy:bfloat16[64],target --column ids=ids.npy:int32[64],target

Kinds: mmididx (Megatron, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed), datatrove (.ds with
.ds.index), dolma (OLMo's headerless .npy with .csv.gz), llm.c (.bin with a header, also of
modded-nanogpt), npy, and flat (only tokens: nanoGPT's .bin).

Bounds, widths, counts, loss masks and tokenizer names next to the file are read and compared with
it; contradictions are errors. For an unknown format the error names a command that converts it. A
loss mask becomes the column labels. If the file holds plain tokens from its first byte, PREFIX.bin
is a hard or symbolic link to it; if PREFIX.bin is the file itself (train.bin -> train), only the
.idx is added. PREFIX may be an address. --column adds a teacher's dump, one row per token of the
file.
"""

from __future__ import annotations

import argparse
from typing import Any

from numpy.typing import NDArray

from megapack.cli.arguments import add_shared, token_id
from megapack.cli.output import print_result
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import spec_of
from megapack.storage.columns import ColumnSpec
from megapack.storage.foreign import KINDS
from megapack.storage.importing import LINKS, SEPARATED, import_dataset
from megapack.storage.tokens import open_npy
from megapack.tokenization.corpus.token_values import ColumnOption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="file or prefix of another tool")
    add_shared(parser, "--output-prefix")
    parser.add_argument(
        "--kind",
        choices=("auto", *KINDS),
        default="auto",
        help="kind of the file (default: auto, by its name and content)",
    )
    add_shared(parser, "--dtype", help="required if the file does not record it")
    add_shared(
        parser,
        "--eod-token",
        help="it separates the documents of files without bounds; a name needs --tokenizer",
    )
    parser.add_argument(
        "--eod-at",
        choices=SEPARATED,
        help="where in a document the --eod-token is (default: start for llm.c, else end)",
    )
    add_shared(parser, "--tokenizer", help="needed if --eod-token is a name")
    parser.add_argument(
        "--link",
        choices=LINKS,
        default="auto",
        help="whether PREFIX.bin is a link or a copy (default: auto, a link if possible)",
    )
    add_shared(parser, "--vocab-size", help="larger ids are errors")
    add_shared(
        parser,
        "--column",
        help="SOURCE is a .npy with a row per token of the file (default TYPE: that of the .npy, "
        "token, fill=0)",
    )
    add_shared(parser, "--overwrite", "--json")


def _columns(options: list[str]) -> dict[str, tuple[NDArray[Any], ColumnSpec]]:
    """Open the files of --column. Raises ConfigError if one does not have its type."""
    columns: dict[str, tuple[NDArray[Any], ColumnSpec]] = {}
    for option in map(ColumnOption.parse, options):
        if option.name in columns:
            raise ConfigError(f"--column names {option.name} twice; give each another name")
        values = open_npy(option.key)
        spec = spec_of(option.name, values, dtype=option.dtype, fill=option.fill, of=option.of)
        if option.shape not in (None, spec.shape):
            raise ConfigError(
                f"--column {option.name}: {option.key} has rows of shape {list(spec.shape)}, not "
                f"{list(option.shape or ())}; leave the shape out, or give another file"
            )
        columns[option.name] = values, spec
    return columns


def run(args: argparse.Namespace) -> None:
    result = import_dataset(
        args.path,
        args.output_prefix,
        kind=args.kind,
        dtype=args.dtype,
        eod_token=token_id(args.eod_token, args.tokenizer),
        eod_at=args.eod_at,
        link=args.link,
        vocab_size=args.vocab_size,
        columns=_columns(args.column),
        overwrite=args.overwrite,
    )
    made = IndexedDataset(args.output_prefix)
    counts = {"num_documents": made.num_documents, "num_tokens": made.num_tokens}
    print_result(args, {"prefix": args.output_prefix, **counts, "summary": result}, result)

"""Index token files of other tools, without copying tokens where the layout allows.

  megapack-build import neox/data_text_document --output-prefix corpus
  megapack-build import fineweb_00000.ds --output-prefix corpus
  megapack-build import train.bin --output-prefix corpus --dtype uint16 --eod-token 50256

Kinds: mmididx (Megatron, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed), datatrove (.ds with
.ds.index), dolma (OLMo's headerless .npy with .csv.gz), llm.c (.bin with a header, also of
modded-nanogpt), npy, and flat (only tokens: nanoGPT's .bin).

Bounds, widths, counts, loss masks and tokenizer names next to the file are read and compared with
it; contradictions are errors. For an unknown format the error names a command that converts it. A
loss mask becomes PREFIX.labels. If the file holds plain tokens from its first byte, PREFIX.bin is a
hard or symbolic link to it; if PREFIX.bin is the file itself (train.bin -> train), only the .idx is
added. PREFIX may be an address.
"""

from __future__ import annotations

import argparse

from megapack.cli.arguments import add_shared, token_id
from megapack.storage.foreign import KINDS
from megapack.storage.importing import LINKS, SEPARATED, import_dataset


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
    add_shared(parser, "--overwrite")


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
        overwrite=args.overwrite,
    )
    print(result)

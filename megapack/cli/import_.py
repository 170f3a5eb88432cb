"""Index other tools' token files, without copying a token where the layout allows.

  megapack-build import neox/data_text_document --output-prefix corpus
  megapack-build import fineweb_00000.ds --output-prefix corpus
  megapack-build import train.bin --output-prefix corpus --dtype uint16 --eod-token 50256

Kinds: mmididx (Megatron, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed), datatrove (.ds with
.ds.index), dolma (OLMo's headerless .npy with .csv.gz), llm.c (.bin with a header, also of
modded-nanogpt), npy, and flat (nothing but tokens: nanoGPT's .bin). Bounds, widths, counts, loss
masks and tokenizer names next to the file are read and compared with it. Contradictions are
refused; formats that are not read are named, with a command that converts them. A loss mask becomes
PREFIX.labels. The .bin becomes a hard or symbolic link where the file holds plain tokens from its
first byte on; an output prefix that names the file itself (train.bin -> train) only adds the .idx.
PREFIX may be an address.
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
        "--kind", choices=("auto", *KINDS), default="auto", help="of the file (default: auto)"
    )
    add_shared(parser, "--dtype", help="needed where the file does not say")
    add_shared(
        parser,
        "--eod-token",
        help="separates documents in files without recorded bounds; a name needs --tokenizer",
    )
    parser.add_argument(
        "--eod-at",
        choices=SEPARATED,
        help="where documents have that id (default: start for llm.c, else end)",
    )
    add_shared(parser, "--tokenizer", help="knows the name that --eod-token gives")
    parser.add_argument(
        "--link", choices=LINKS, default="auto", help="how .bin gets the tokens (default: auto)"
    )
    add_shared(parser, "--vocab-size", help="larger ids are refused")
    add_shared(parser, "--overwrite")


def run(args: argparse.Namespace) -> int:
    print(
        import_dataset(
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
    )
    return 0

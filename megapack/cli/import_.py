"""Index other people's token files, without copying a token where the layout allows.

  megapack-build import neox/data_text_document --output-prefix corpus
  megapack-build import fineweb_00000.ds --output-prefix corpus
  megapack-build import train.bin --output-prefix corpus --dtype uint16 --eod-token 50256

Kinds: mmididx (Megatron, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed), tntidx (the format before it),
datatrove (.ds with .ds.index), llm.c (.bin with a header), npy, and flat (nothing but tokens:
nanoGPT's .bin, OLMo's headerless .npy). The .bin becomes a hard or symbolic link where the source
holds plain tokens from its first byte on; an output prefix that names the source itself
(train.bin -> train) only adds the .idx.
"""

from __future__ import annotations

import argparse

from megapack.storage.foreign import KINDS
from megapack.storage.importing import LINKS, import_dataset

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="file or prefix")
    parser.add_argument("--output-prefix", required=True, help="prefix of the dataset")
    parser.add_argument(
        "--kind", choices=("auto", *KINDS), default="auto", help="of the source (default: auto)"
    )
    parser.add_argument("--dtype", help="of the tokens, where the file does not say it")
    parser.add_argument("--eod-token", type=int, help="id that ends documents without an index")
    parser.add_argument(
        "--eod-at",
        choices=("end", "start"),
        help="where that id stands (default: start for llm.c, else end)",
    )
    parser.add_argument(
        "--link", choices=LINKS, default="auto", help="how .bin gets the tokens (default: auto)"
    )
    parser.add_argument("--vocab-size", type=int, help="number of token ids; larger are refused")


def run(args: argparse.Namespace) -> int:
    print(
        import_dataset(
            args.source,
            args.output_prefix,
            kind=args.kind,
            dtype=args.dtype,
            eod_token=args.eod_token,
            eod_at=args.eod_at,
            link=args.link,
            vocab_size=args.vocab_size,
        )
    )
    return 0

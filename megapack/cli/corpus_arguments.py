"""Arguments that say what a corpus is; shared by the commands that read text."""

from __future__ import annotations

import argparse
import re

from megapack.tokenization.pieces import FORMATS

__all__ = ["add_corpus_arguments", "byte_count"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_count(text: str) -> int:
    """``64M`` -> 67108864; K, M, G and T are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 64M or 1.5G")
    return int(float(match[1]) * _UNITS[match[2]])


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """--input and everything about how documents are found in it."""
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, globs or directories: .jsonl, .json, .ndjson, .parquet; every other file is "
        "one document; all but .parquet also as .gz and .zst",
    )
    group.add_argument(
        "--suffix",
        nargs="+",
        default=[],
        metavar="S",
        help="what to take from directories, as .py, .rst.gz or 'train-*.jsonl' (default: .jsonl, "
        ".json, .ndjson, .txt, each also .gz and .zst, and .parquet)",
    )
    group.add_argument(
        "--format", choices=FORMATS, help="what every file is (default: by its suffix)"
    )
    group.add_argument(
        "--json-key", default="text", metavar="KEY", help="JSON key or parquet column (text)"
    )
    group.add_argument(
        "--max-input-bytes",
        type=byte_count,
        metavar="SIZE",
        help="take whole files, in order, up to this size in all",
    )
    group.add_argument(
        "--max-document-bytes",
        type=byte_count,
        default="1G",
        metavar="SIZE",
        help="a longer line or file is a fault; bounds memory (1G)",
    )
    group.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="malformed JSON, missing key, wrong type, invalid UTF-8: stop, or drop and count "
        "such documents (fail)",
    )

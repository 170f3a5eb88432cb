"""Arguments that say what a corpus is; shared by the commands that read text."""

from __future__ import annotations

import argparse

from megapack.cli.arguments import byte_count
from megapack.tokenization.corpus.pieces import FORMATS

__all__ = ["add_corpus_arguments"]


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
        "--json-key",
        default="text",
        metavar="KEY",
        help="JSON key or parquet column; data.text reaches into objects and structs (text)",
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

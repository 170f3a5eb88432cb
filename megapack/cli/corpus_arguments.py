"""Arguments that say what a corpus is; shared by the commands that read text."""

from __future__ import annotations

import argparse

from megapack.cli.arguments import Arguments, add_tokenizer, byte_count
from megapack.errors import ConfigError
from megapack.tokenization.pieces import FORMATS

__all__ = ["add_corpus_arguments", "add_json_key", "add_tokenizer_files", "tokenizer_source"]


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


def add_json_key(parser: argparse.ArgumentParser) -> None:
    """--json-key, of commands that read one."""
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="JSON key or parquet column; data.text reaches into objects and structs (text)",
    )


def add_tokenizer_files(parser: Arguments) -> None:
    """--tokenizer, and Megatron's names for its kinds; ``tokenizer_source`` says what was given."""
    add_tokenizer(parser)
    parser.add_argument(
        "--tokenizer-model", dest="tokenizer", metavar="T", help="the same, as Megatron calls it"
    )
    parser.add_argument(
        "--vocab-file", metavar="FILE", help="GPT-2's vocab.json, instead of --tokenizer"
    )
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt beside it")


def tokenizer_source(args: argparse.Namespace) -> str:
    """What ``TokenizerFiles.open`` takes.

    Raises:
        ConfigError: none was given, or one too many.
    """
    pair = (args.vocab_file, args.merge_file)
    if (args.tokenizer is None) == (pair == (None, None)) or (None in pair and any(pair)):
        raise ConfigError("give --tokenizer, or --vocab-file together with --merge-file")
    return args.tokenizer or ",".join(pair)

"""Options that are fields of BuildConfig, which defines their names, types, choices and defaults.

add_fields(group, append_eod="end every document with EOD")  # --append-eod, a flag
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from megapack.cli.arguments import Arguments, byte_count, part_of, token_argument
from megapack.tokenization.corpus.inputs import DATA_SUFFIXES
from megapack.tokenization.pipeline.plan import OPTIONS, BuildConfig

_HINTS = typing.get_type_hints(BuildConfig)
_FIELDS = {field.name: field for field in dataclasses.fields(BuildConfig)}
# Last word of a field's name -> metavar, and metavar -> conversion.
_METAVARS = {"key": "KEY", "bytes": "SIZE", "memory": "SIZE", "words": "N", "token": "T"}
_METAVARS |= {"fraction": "F", "address": "A", "split": "W,W,W", "part": "I/N"}
_TYPES: dict[str, Any] = {"SIZE": byte_count, "I/N": part_of, "T": token_argument}


def add_fields(group: Arguments, **texts: str | dict[str, Any]) -> None:
    """Declare fields as options: name -> help, or name -> help and other arguments of argparse."""
    for name, text in texts.items():
        hint = _HINTS[name]
        option: dict[str, Any] = {"help": text} if isinstance(text, str) else dict(text)
        if hint is bool:
            option["action"] = "store_true"
        else:
            # The strings of a Literal and the types of a union.
            hints = (hint, *typing.get_args(hint))
            inner = [value for one in hints for value in typing.get_args(one)]
            default = _FIELDS[name].default
            if default is not dataclasses.MISSING:
                option.setdefault("default", default)
            if metavar := _METAVARS.get(name.rpartition("_")[2]):
                option |= {"metavar": metavar, "type": _TYPES.get(metavar)}
            if choices := [value for value in inner if isinstance(value, str)]:
                option.setdefault("choices", choices)
            elif option.get("type") is None and {int, float} & {hint, *inner}:
                option["type"] = float if float in (hint, *inner) else int
        group.add_argument("--" + OPTIONS.get(name, name).replace("_", "-"), **option)


def values_of(args: Any) -> dict[str, Any]:
    """Return the fields of BuildConfig from a parsed command line."""
    values = {name: getattr(args, OPTIONS.get(name, name)) for name in _FIELDS}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def add_corpus_arguments(parser: Arguments) -> None:
    """Declare --input and the options that say how to read documents from it."""
    add_fields(
        parser.add_argument_group("corpus"),
        inputs={
            "nargs": "+",
            "required": True,
            "metavar": "PATH",
            "help": "files, globs or directories: JSON Lines (.jsonl, .json, .ndjson), .parquet, "
            ".arrow (also as saved by `datasets`); any other file is one document; all except "
            ".parquet and .arrow also as .gz and .zst",
        },
        suffixes={
            "nargs": "+",
            "metavar": "S",
            "help": "files to read from directories, as in .py, .rst.gz or 'train-*.jsonl' "
            f"(default: {DATA_SUFFIXES})",
        },
        format="format of every file (default: by its suffix)",
        json_key="JSON key or column of the text; data.text reaches into objects and structs "
        "(default: text)",
        max_input_bytes="read whole files, in order, up to this size in total; the first file is "
        "always read (default: all)",
        max_document_bytes="longest line or file in bytes; a longer one is a fault (default: 1G)",
        on_error="at faults (malformed JSON, missing key, wrong type, invalid UTF-8): stop, or "
        "drop and count the document (default: fail)",
    )

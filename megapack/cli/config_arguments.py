"""Options that are fields of BuildConfig: their names, types, choices and defaults stand there."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from megapack.cli.arguments import Arguments, byte_count
from megapack.tokenization.corpus.inputs import DATA_SUFFIXES
from megapack.tokenization.pipeline.plan import OPTIONS, BuildConfig

__all__ = ["add_corpus_arguments", "add_fields", "values_of"]

_HINTS = typing.get_type_hints(BuildConfig)
_FIELDS = {field.name: field for field in dataclasses.fields(BuildConfig)}


def add_fields(group: Arguments, **texts: str | dict[str, Any]) -> None:
    """Declare fields, each with its help, or with a dict of it and of other things of argparse."""
    for name, text in texts.items():
        hint = _HINTS[name]
        option: dict[str, Any] = {"help": text} if isinstance(text, str) else dict(text)
        if hint is bool:
            option["action"] = "store_true"
        else:
            inner = [value for part in (hint, *typing.get_args(hint)) for value in _values(part)]
            default = _FIELDS[name].default
            if default is not dataclasses.MISSING:
                option.setdefault("default", default)
            if choices := [value for value in inner if isinstance(value, str)]:
                option.setdefault("choices", choices)
            elif "type" not in option and {int, float} & {hint, *inner}:
                option["type"] = float if float in (hint, *inner) else int
        group.add_argument("--" + OPTIONS.get(name, name).replace("_", "-"), **option)


def _values(hint: Any) -> tuple[Any, ...]:
    """The strings of a Literal, the types of a union."""
    return typing.get_args(hint)


def values_of(args: Any) -> dict[str, Any]:
    """The fields of BuildConfig as a command line gave them."""
    values = {name: getattr(args, OPTIONS.get(name, name)) for name in _FIELDS}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def add_corpus_arguments(parser: Arguments) -> None:
    """--input and everything about how documents are found in it."""
    size = {"type": byte_count, "metavar": "SIZE"}
    add_fields(
        parser.add_argument_group("corpus"),
        inputs={
            "nargs": "+",
            "required": True,
            "metavar": "PATH",
            "help": "files, globs or directories: JSON Lines (.jsonl, .json, .ndjson), .parquet, "
            ".arrow (also what `datasets` saved); every other file is one document; all but "
            ".parquet and .arrow also as .gz and .zst",
        },
        suffixes={
            "nargs": "+",
            "metavar": "S",
            "help": "what to take from directories, as .py, .rst.gz or 'train-*.jsonl' (default: "
            f"{DATA_SUFFIXES})",
        },
        format="what every file is (default: by its suffix)",
        json_key={
            "metavar": "KEY",
            "help": "JSON key or column; data.text reaches into objects and structs (text)",
        },
        max_input_bytes={
            **size,
            "help": "take whole files, in order, up to this size in all; the first always",
        },
        max_document_bytes={**size, "help": "a longer line or file is a fault; bounds memory (1G)"},
        on_error="malformed JSON, missing key, wrong type, invalid UTF-8: stop, or drop and count "
        "such documents (fail)",
    )

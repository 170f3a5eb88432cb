"""Values of a document's tokens: columns and loss weights that a corpus contains.

- ``ColumnOption``: one ``--column``, as in ``rewards=meta.rewards:float32,target``
- ``TokenValues``: read the rows of a document; ``LossWeights``: the same for ``--weights-key``
- ``infer_type``: dtype and shape of a value

A document's value is JSON in one of three forms: a list of one row per token, spans of the text, or
the path of a .npy. Tokens at characters 0-2, 2-5, 5-6 and 6-8 of "ab cd ef"::

    values = TokenValues("column rewards", ColumnSpec(dtype="float32", fill=0))
    values.read("[1, 2, 3, 4]", 4, text, spans)      # -> [1, 2, 3, 4]
    values.read("[[2, 5, 0.5]]", 4, text, spans)     # -> [0, 0.5, 0, 0]
    values.read('"dump/7.npy"', 4, text, spans)      # -> the rows in that file
    values.read("null", 4, text, spans)              # -> [0, 0, 0, 0]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError, DataError
from megapack.storage.columns import (
    DTYPES,
    INTERPRETED,
    WEIGHTS,
    ColumnSpec,
    check_column_name,
    column_spec,
    rows_of,
)
from megapack.storage.tokens import open_npy
from megapack.tokenization.corpus.documents import Place, TextBlock

Spans = Callable[[str], NDArray[np.int64]]  # text -> (num_tokens, 2), characters of each token

_DTYPE = re.compile(r"([a-z]+[0-9]+)(?:\[([0-9]+(?:,[0-9]+)*)\])?")
_FORM = "NAME=KEY, NAME=KEY:float32 or NAME=KEY:float16[8],target,fill=-1"


@dataclass(frozen=True)
class ColumnOption:
    """Column to read from a corpus: its name, the key of its values, and its type. A dtype or a
    shape of None is taken from the first document."""

    name: str
    key: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    of: Literal["token", "target"] | None = None  # this and fill: see ``column_spec``
    fill: float | None = None

    @staticmethod
    def parse(text: str) -> ColumnOption:
        """Parse the value of ``--column``. Raises ConfigError if it has another form."""
        name, equals, source = text.partition("=")
        key, _, described = source.rpartition(":") if ":" in source else (source, "", "")
        if not (equals and key):
            raise ConfigError(f"--column is {text!r}; it must be {_FORM}")
        check_column_name(name)
        facts: dict[str, Any] = {}
        for part in re.split(r",(?![^\[]*\])", described) if described else ():
            dtype = _DTYPE.fullmatch(part)
            if part in ("token", "target"):
                facts["of"] = part
            elif part.startswith("fill="):
                facts["fill"] = _number(part.removeprefix("fill="), text)
            elif dtype is not None and dtype[1] in DTYPES:
                facts["dtype"] = dtype[1]
                facts["shape"] = tuple(map(int, dtype[2].split(","))) if dtype[2] else ()
            else:
                raise ConfigError(
                    f"--column {text}: {part!r} is not a dtype ({', '.join(DTYPES)}), token, "
                    f"target or fill=NUMBER; it must be {_FORM}"
                )
        option = ColumnOption(name, key, **facts)
        if option.dtype is not None:
            option.spec(option.dtype, option.shape or ())
        return option

    def spec(self, dtype: str, shape: tuple[int, ...]) -> ColumnSpec:
        """Return the column's type. Raises ConfigError if it is not valid."""
        return column_spec(self.name, dtype, shape, fill=self.fill, of=self.of)

    def spec_for(self, first: tuple[str, Place] | None, note: Callable[[str], None]) -> ColumnSpec:
        """Return the column's type, by default that of the first document's value (from
        ``first_value``), which ``note`` reports. Raises ConfigError if nothing decides it, and
        DataError if the value is damaged."""
        if self.dtype is not None:
            return self.spec(self.dtype, self.shape or ())
        given, inferred = f"--column {self.name}={self.key}", None
        if first is not None:
            value, place = first
            try:
                inferred = infer_type(value, Path(place.path).parent)
            except DataError as error:
                raise DataError(f"{place}: {given}: {error}") from error
        if inferred is None:
            raise ConfigError(
                f"no document of a sample has {self.key!r}, which would give {given} its type: "
                f"check the key, or give the type, as in {given}:float32"
            )
        spec = self.spec(*inferred)
        note(f"column {self.name} is {spec}, as in {place}; {given}:TYPE gives another type")
        return spec


def first_value(blocks: Iterable[TextBlock], name: str) -> tuple[str, Place] | None:
    """Return the first value in blocks of documents, and its document's place."""
    for block in blocks:
        for i, value in enumerate(block.values.get(name, ())):
            if value not in ("", "null", "[]"):
                return value, block.place(i)
    return None


def _number(text: str, option: str) -> float:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    raise ConfigError(f"--column {option}: fill is {text!r}; it must be a number")


@dataclass(frozen=True)
class TokenValues:
    """Reader of one kind of value: ``what`` is its name for messages (``column rewards``), ``spec``
    the type of the rows. Tokens without a value get the fill value."""

    what: str
    spec: ColumnSpec

    def read(
        self, value: str, num_tokens: int, text: str, spans: Spans, folder: Path = Path()
    ) -> NDArray[Any]:
        """Return the rows of a document's tokens, (num_tokens, *shape), as ``spec`` stores them.

        Args:
            value: JSON, one of: a list of one row per token; a list of half-open character spans
                [begin, end, row]: a token that contains a character of a span gets its row (the
                last span wins), all others the fill value; the path of a .npy with one row per
                token, relative to ``folder``; "", null or []: no values.
            num_tokens: tokens of the document, without the frame.
            spans: returns the characters of each token of ``text`` (``Encoder.spans``).

        Raises:
            DataError: ``value`` has another form or number of rows, or a row of another type.
        """
        content = read_value(value, folder)
        filled = np.tile(self.spec.fill_row, (num_tokens, 1)).view(self.spec.numpy_dtype)
        filled = filled.reshape(num_tokens, *self.spec.shape)
        if content is None or len(content) == 0:
            return filled
        if are_spans(content, self.spec.shape):
            token_spans = spans(text)
            rows = self.rows([row for _, _, row in content])
            for (begin, end, _), row in zip(content, rows, strict=True):
                if not 0 <= begin < min(end, len(text)):
                    raise DataError(
                        f"there is the span [{begin:g}, {end:g}), which is empty or outside the "
                        f"{len(text)} characters of the text"
                    )
                filled[(token_spans[:, 0] < end) & (token_spans[:, 1] > begin)] = row
            return filled
        rows = self.rows(content)
        if len(rows) != num_tokens:
            raise DataError(
                f"there are {len(rows)} rows, but the document has {num_tokens} tokens: give one "
                "row per token, or spans [begin, end, row] of characters"
            )
        return rows

    def rows(self, values: Any) -> NDArray[Any]:
        return self.spec.rows(values)

    def framed(self, rows: NDArray[Any], before: int, after: int) -> NDArray[Any]:
        """Return rows with those of inserted tokens: ``before`` in front, ``after`` at the end."""
        fill = self.spec.fill_row.view(self.spec.numpy_dtype).reshape(1, *self.spec.shape)
        return np.concatenate([np.repeat(fill, before, 0), rows, np.repeat(fill, after, 0)])


class LossWeights(TokenValues):
    """Loss weights: float16; 1 for a token without a given weight."""

    def __init__(self) -> None:
        super().__init__("loss weights", replace(INTERPRETED[WEIGHTS], fill=1))

    def rows(self, values: Any) -> NDArray[Any]:
        return rows_of(WEIGHTS, self.spec, values)

    def framed(self, rows: NDArray[Any], before: int, after: int) -> NDArray[Any]:
        # The last token's weight also applies to the end-of-document label.
        return np.concatenate([np.ones(before, np.float16), rows, np.repeat(rows[-1:], after)])


def read_value(value: str, folder: Path) -> Any:
    """Parse a document's value: None, a list, or the array of the .npy that it names. Raises
    DataError if it is anything else."""
    try:
        content = json.loads(value or "null")
        if isinstance(content, str):
            array = np.asarray(open_npy(folder / content))
            content = array.view(np.uint16) if array.dtype == "V2" else array  # bfloat16
            if content.dtype.kind not in "biuf":
                raise TypeError(f"{folder / value} has dtype {content.dtype}")
    except Exception as error:  # raised by json, numpy or zipfile
        raise DataError(f"they are not numbers: {str(error)[:200]}") from error
    is_scalar = isinstance(content, np.ndarray) and content.ndim == 0
    if is_scalar or not isinstance(content, list | np.ndarray | None):
        raise DataError(f"they are {value[:40]}; give a list, spans or the path of a .npy")
    return content


def are_spans(content: Any, shape: tuple[int, ...] | None = None) -> bool:
    """Return whether a value is a list of spans. A row of shape [3] is not one; without ``shape``,
    lists of three items that begin with two integers are spans."""
    if isinstance(content, np.ndarray):
        return content.ndim == 2 and content.shape[1] == 3 and shape == ()
    for item in content:
        if not isinstance(item, list) or len(item) != 3:
            return False
        if not all(isinstance(number, int) and number is not True for number in item[:2]):
            return False
        if shape and not isinstance(item[2], list):
            return False
    return True


def infer_type(value: str, folder: Path) -> tuple[str, tuple[int, ...]] | None:
    """Return dtype and shape of a document's values; None if it has none. Floats are float32 and
    integers int64, unless a .npy says otherwise. Raises DataError for other values."""
    content = read_value(value, folder)
    if content is None or len(content) == 0:
        return None
    is_file = isinstance(content, np.ndarray)
    if not is_file and are_spans(content):
        content = [row for _, _, row in content]
    try:
        array = np.asarray(content)
    except ValueError as error:
        raise DataError(f"their rows have different shapes: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"they are {array.dtype}, not numbers")
    names = {"f": "float32", "b": "uint8", "i": "int64", "u": "uint64"}
    exact = is_file and array.dtype.name in DTYPES
    return array.dtype.name if exact else names[array.dtype.kind], array.shape[1:]

"""Documents after reading and before tokenization.

- ReadOptions: keys of documents in files; ``key_path``, ``key_names``: nested keys (``a.b``)
- TextBlock: many documents as one flat UTF-8 buffer; readers yield it, tokenizers take it
- Place, Faults: counts of faulty documents by kind, and the places of a few
- parse_split, ordered_split, hashed_split: training, validation and test documents

    block = TextBlock.of_texts(["one", "", "three"])
    block.offsets.tolist()                                 # -> [0, 3, 3, 8]
    block.checked(Faults(), known_utf8=True).strings()     # -> ["one", "three"]
    ordered_split(parse_split("80,10,10"), 20)             # -> [range(0, 16), range(16, 18), ...]
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError

OnError = Literal["fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Keys and limits of documents in files."""

    # Key of the text, or column of a table. `a.b`: key "a.b", else key b of the object at key a.
    json_key: str = "text"
    # lists: conversations. A document becomes the JSON of its list of messages or, if it has
    # ``extra_keys``, of an object with this list as "messages" and their values.
    values: Literal["strings", "lists"] = "strings"
    extra_keys: tuple[tuple[str, str], ...] = ()  # (name in the object, key)
    split_key: str | None = None  # documents get the hash of its value
    # Documents get the JSON of the values of these keys: (name, key). See ``token_values``.
    value_keys: tuple[tuple[str, str], ...] = ()
    group_key: str | None = None  # documents get a group from its value; without the key, none
    block_bytes: int = 4 << 20  # text per block; memory grows with it
    max_document_bytes: int = 1 << 30  # a longer line or file is a fault ("too long")

    def __post_init__(self) -> None:
        for name in ("max_document_bytes", "block_bytes"):
            if getattr(self, name) < 1 << 10:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1024")
        # Readers check only lines longer than a block, so a block must not exceed the limit.
        object.__setattr__(self, "block_bytes", min(self.block_bytes, self.max_document_bytes))

    def keys(self) -> dict[str, str]:
        """Return the required keys, the text first -> the option of each."""
        keys = {self.json_key: "--json-key" if self.values == "strings" else "--messages-key"}
        if self.split_key is not None:
            keys.setdefault(self.split_key, "--split-key")
        return keys


def key_path(tree: object, key: str) -> list[str] | None:
    """Return the path of ``key`` in nested mappings; None if it is missing. Same rule as
    csrc/core/text/jsonl.cpp: look up the whole key; if it is missing, look up the part before the
    first dot, and in its value the part after the dot."""
    if not isinstance(tree, Mapping):
        return None
    if key in tree:
        return [key]
    first, dot, remainder = key.partition(".")
    below = key_path(tree.get(first), remainder) if dot else None
    return None if below is None else [first, *below]


def key_names(tree: Mapping[str, Any]) -> list[str]:
    """Return the keys of a mapping; nested ones as ``a.b``."""
    names = []
    for name, value in tree.items():
        inner = key_names(value) if isinstance(value, Mapping) else []
        names += [f"{name}.{name_inside}" for name_inside in inner] or [name]
    return names


def json_kind(value: object) -> str:
    """Return JSON's name for the type of a parsed value."""
    names = {type(None): "null", bool: "true or false", str: "a string", list: "a list"}
    return {**names, dict: "an object"}.get(type(value), "a number")


def offsets_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return running sums from 0 (int64, one entry more than ``lengths``)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Documents in the order of the corpus.

    ``text`` is uint8; document ``i`` is ``text[offsets[i]:offsets[i + 1]]``; ``offsets`` is int64,
    ``len(block) + 1``. Per document: ``positions`` (int64), from which ``locate`` makes a Place;
    ``hashes`` (uint64) of the split key, if any; ``values``, name -> JSON of the values of a
    ``ReadOptions.value_keys``, "" or "null" if the document has none; ``groups`` (int64), ids by
    the group key, -1 if the document has none.
    """

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    locate: Callable[[int], Place]
    hashes: NDArray[np.uint64] | None = None
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: NDArray[np.int64] | None = None

    @staticmethod
    def of_texts(
        texts: Iterable[str | bytes], locate: Callable[[int], Place] | None = None
    ) -> TextBlock:
        """Return a block of texts; ``locate`` maps an index to a Place (``text <index>``)."""
        data = [text.encode("utf-8") if isinstance(text, str) else text for text in texts]
        flat = np.frombuffer(b"".join(data), np.uint8)
        offsets = offsets_of([len(item) for item in data])
        nowhere = lambda i: Place(f"text {i}", "file")  # noqa: E731
        return TextBlock(flat, offsets, np.arange(len(data)), locate or nowhere)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def place(self, i: int) -> Place:
        return self.locate(int(self.positions[i]))

    def strings(self) -> list[str]:
        data, bounds = self.text.data, self.offsets.tolist()
        return [str(data[a:b], "utf-8") for a, b in itertools.pairwise(bounds)]

    def select(self, keep: NDArray[np.bool_]) -> TextBlock:
        """Return the documents where ``keep`` is true; if it drops none, without a copy."""
        if keep.all():
            return self
        lengths = np.diff(self.offsets)
        text = self.text
        if lengths[~keep].any():
            text = text[np.repeat(keep, lengths)]
        hashes = None if self.hashes is None else self.hashes[keep]
        kept = keep.tolist()
        values = {name: [*itertools.compress(texts, kept)] for name, texts in self.values.items()}
        groups = None if self.groups is None else self.groups[keep]
        offsets, positions = offsets_of(lengths[keep]), self.positions[keep]
        return TextBlock(text, offsets, positions, self.locate, hashes, values, groups)

    def in_groups(self, hashes: NDArray[np.uint64], none: NDArray[np.bool_]) -> TextBlock:
        """Return the block with groups from the hashes of a key; ``none``: documents without it."""
        ids = (hashes >> np.uint64(1)).astype(np.int64)
        return replace(self, groups=np.where(none, -1, ids))

    def text_hashes(self, *, seed: int = 0) -> NDArray[np.uint64]:
        """Return xxh3-64 of every document's text; hashes with different seeds are independent."""
        data, pairs = self.text.data, itertools.pairwise(self.offsets.tolist())
        return np.array([xxhash.xxh3_64_intdigest(data[a:b], seed) for a, b in pairs], np.uint64)

    def drop(self, bad: NDArray[np.bool_], kind: str, faults: Faults) -> TextBlock:
        """Return the block without documents where ``bad`` is true; record each as ``kind``."""
        if not bad.any():
            return self
        faults.record_rows(kind, np.flatnonzero(bad), self.place)
        return self.select(~bad)

    def checked(self, faults: Faults, *, known_utf8: bool) -> TextBlock:
        """Drop empty documents and, unless ``known_utf8``, documents of invalid UTF-8."""
        block = self
        if not known_utf8:
            invalid = _core.valid_utf8(block.text, block.offsets) == 0
            block = block.drop(invalid, "invalid UTF-8", faults)
        return block.drop(np.diff(block.offsets) == 0, "empty document", faults)


def chats_of(messages: Iterable[str], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return conversations as JSON: objects of messages and other values, or lists of messages.
    ``messages`` are the JSON of lists ("" if a document has none); ``columns`` the JSON of every
    document's value by name ("" and "null" mean none): ["[1]"], {"tools": ["[3]"]} ->
    ['{"messages": [1], "tools": [3]}']."""
    chats = []
    for i, text in enumerate(messages):
        values = {name: column[i] for name, column in columns.items()}
        extra = [f"{json.dumps(n)}: {v}" for n, v in values.items() if v not in ("", "null")]
        chats.append(f'{{"messages": {text}, {", ".join(extra)}}}' if text and extra else text)
    return chats


# Kinds of faults that ordinary text has, so they never stop a build. Other kinds stop it unless
# `--on-error skip` is given.
_BENIGN = frozenset(
    {"blank line", "chat without assistant", "empty document", "too few words", "too many words"}
)
_COUNT_BLOCK = 1 << 24
_MAX_PLACES = 3  # kept per kind


@dataclass(frozen=True, slots=True)
class Place:
    """Origin of a document; prints as ``path:line`` (files) or ``path row N`` (tables)."""

    path: str
    unit: Literal["byte", "line", "row", "file"]
    position: int = 0

    def __str__(self) -> str:
        if self.unit == "file":
            return self.path
        if self.unit == "row":
            return f"{self.path} row {self.position}"
        line = self.position if self.unit == "line" else self._count_lines()
        return f"{self.path}:{line}"

    def _count_lines(self) -> int:
        # Readers start in the middle of large files, so line numbers are counted here, for the few
        # places that are shown.
        newlines, bytes_left = 0, self.position
        with Path(self.path).open("rb") as file:
            while block := file.read(min(bytes_left, _COUNT_BLOCK)):
                newlines += block.count(b"\n")
                bytes_left -= len(block)
        return newlines + 1


@dataclass
class Faults:
    """Counts of faulty documents by kind, and the first few places of each kind in corpus order."""

    on_error: OnError = "fail"
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)

    def record(self, kind: str, place: Place, detail: str = "") -> None:
        """Count one document under a short name of its fault ("malformed JSON"). Raises DataError,
        with ``detail``, if ``on_error`` is "fail", except for benign kinds."""
        if kind not in _BENIGN and self.on_error == "fail":
            reason = f" ({detail})" if detail else ""
            raise DataError(
                f"{place}: {kind}{reason}; repair the input, or drop such documents with "
                "--on-error skip (they are counted and reported)"
            )
        self._add(kind, 1, [place])

    def record_rows(
        self,
        kind: str,
        rows: NDArray[np.intp],
        place: Callable[[int], Place],
        detail: Callable[[int], str] = lambda _: "",
    ) -> None:
        """Count many documents of one kind; ``place`` and ``detail`` are called with a row, for the
        few that are shown. Raises as ``record``."""
        if len(rows):
            first = int(rows[0])
            stops = kind not in _BENIGN and self.on_error == "fail"
            self.record(kind, place(first), detail(first) if stops else "")
            shown = rows[1:_MAX_PLACES]
            self._add(kind, len(rows) - 1, [place(int(row)) for row in shown])

    def add(self, later: Faults) -> None:
        for kind, count in later.counts.items():
            self._add(kind, count, later.places.get(kind, []))

    def _add(self, kind: str, count: int, places: Sequence[Place]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        kept = self.places.setdefault(kind, [])
        kept += places[: _MAX_PLACES - len(kept)]


def lacks_documents(kinds: Iterable[str]) -> bool:
    """Return whether one of these kinds is dropped only with ``--on-error skip``."""
    return not _BENIGN.issuperset(kinds)


def fault_lines(counts: Mapping[str, int], places: Mapping[str, Sequence[object]]) -> list[str]:
    """Return one printable line per kind of fault, most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"{count:,} x {kind} (first: {', '.join(map(str, places.get(kind, ())))})"
        for kind, count in ordered
    ]


SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, ...]:
    """Parse ``"98,1,1"`` -> (98.0, 1.0, 1.0): weights of train, valid and test; missing ones are 0.
    Raises ConfigError for other forms, negative weights, and all 0."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"split {text!r} is not a list of numbers like 98,1,1") from error
    usable = len(weights) <= len(SPLIT_NAMES) and min(weights) >= 0 < sum(weights) < float("inf")
    if not usable:
        raise ConfigError(
            f"split {text!r} must have one to three weights, none negative and at least one above 0"
        )
    return tuple(weights + [0.0] * (len(SPLIT_NAMES) - len(weights)))


def _bounds(weights: Sequence[float]) -> list[float]:
    """Return running sums of the normalized weights, from 0 to 1."""
    total = sum(weights)
    return [0.0, *itertools.accumulate(weight / total for weight in weights)]


def ordered_split(weights: Sequence[float], num_documents: int) -> list[range]:
    """Return consecutive ranges of documents, rounded as megatron-core does."""
    bounds = _bounds(weights)
    positions = [round(bound * float(num_documents)) for bound in bounds]
    return [range(begin, end) for begin, end in itertools.pairwise(positions)]


def hashed_split(weights: Sequence[float], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the split of every document (int64) from its hash (uint64). Hashes are uniform, so the
    shares follow the weights. A document keeps its split when the corpus grows or is reordered."""
    bounds = np.array(_bounds(weights)[1:-1])
    # A double holds integers of up to 53 bits exactly.
    fractions = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
    result: NDArray[np.int64] = np.searchsorted(bounds, fractions, side="right")
    return result

"""What a document is on its way from a file to a tokenizer.

- ReadOptions: how documents are found in files; ``key_path``, ``key_names``: keys as ``a.b``
- TextBlock: many documents as one flat UTF-8 buffer; what readers give and tokenizers take
- Place, Faults: documents that may not pass, counted by kind and shown by place
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
    """How documents are found in files."""

    # Also the column of a table. Where there is no key `a.b`, it is key b of the object at key a.
    json_key: str = "text"
    # lists: the JSON of a list of messages, or, where the document has other keys of ``beside``, of
    # an object with the list under "messages" and their values.
    values: Literal["strings", "lists"] = "strings"
    beside: tuple[tuple[str, str], ...] = ()  # of a conversation: (name in that object, key)
    split_key: str | None = None  # another key; documents carry its hash
    weights_key: str | None = None  # another key; documents carry the JSON of its value
    group_key: str | None = None  # the same; a document without it is on its own
    block_bytes: int = 4 << 20  # of text in one block; memory follows it
    max_document_bytes: int = 1 << 30  # a longer line or file is a fault ("too long")

    def __post_init__(self) -> None:
        for name in ("max_document_bytes", "block_bytes"):
            if getattr(self, name) < 1 << 10:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1024")
        # A line in a block is not measured, so none may be longer than that.
        object.__setattr__(self, "block_bytes", min(self.block_bytes, self.max_document_bytes))

    def keys(self) -> dict[str, str]:
        """The keys that a document must have, its text first -> the option that names each."""
        keys = {self.json_key: "--json-key" if self.values == "strings" else "--messages-key"}
        if self.split_key is not None:
            keys.setdefault(self.split_key, "--split-key")
        return keys


def key_path(tree: object, key: str) -> list[str] | None:
    """Where ``key`` lies in nested mappings, found as csrc/core/text/jsonl.cpp finds it: under the
    whole of it, else under its part before the first dot and there under the rest.
    """
    if not isinstance(tree, Mapping):
        return None
    if key in tree:
        return [key]
    first, dot, rest = key.partition(".")
    below = key_path(tree.get(first), rest) if dot else None
    return None if below is None else [first, *below]


def key_names(tree: Mapping[str, Any]) -> list[str]:
    """The keys of a mapping, those of mappings in it behind a dot."""
    names = []
    for name, value in tree.items():
        inner = key_names(value) if isinstance(value, Mapping) else []
        names += [f"{name}.{below}" for below in inner] or [name]
    return names


def json_kind(value: object) -> str:
    """JSON's name for the type of a value that Python's json has read."""
    names = {type(None): "null", bool: "true or false", str: "a string", list: "a list"}
    return {**names, dict: "an object"}.get(type(value), "a number")


def offsets_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Running sums from 0 (int64, one entry more than there are lengths)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Documents in the order of the corpus.

    ``text`` is uint8; document ``i`` is ``text[offsets[i]:offsets[i + 1]]``; ``offsets`` is int64
    of ``len(block) + 1``. ``positions`` (int64, one per document) is what ``locate`` turns into a
    place to show. ``hashes`` (uint64, one per document) are of the key that splits the corpus,
    where one was asked for; ``weights`` the JSON of what each says of its loss weights, "" or
    "null" where it says nothing; ``groups`` (int64, one per document) are ids of the key that
    groups it, -1 where a document has none.
    """

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    locate: Callable[[int], Place]
    hashes: NDArray[np.uint64] | None = None
    weights: Sequence[str] | None = None
    groups: NDArray[np.int64] | None = None

    @staticmethod
    def of_texts(
        texts: Iterable[str | bytes], locate: Callable[[int], Place] | None = None
    ) -> TextBlock:
        """A block of texts, by default of no file; ``locate`` is given their numbers."""
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
        """The documents as Python strings."""
        data, bounds = self.text.data, self.offsets.tolist()
        return [str(data[a:b], "utf-8") for a, b in itertools.pairwise(bounds)]

    def select(self, keep: NDArray[np.bool_]) -> TextBlock:
        """The documents where ``keep`` is true; copies text only if some of it goes."""
        if keep.all():
            return self
        lengths = np.diff(self.offsets)
        text = self.text
        if lengths[~keep].any():
            text = text[np.repeat(keep, lengths)]
        hashes = None if self.hashes is None else self.hashes[keep]
        weights = self.weights and list(itertools.compress(self.weights, keep.tolist()))
        groups = None if self.groups is None else self.groups[keep]
        offsets = offsets_of(lengths[keep])
        positions = self.positions[keep]
        return TextBlock(text, offsets, positions, self.locate, hashes, weights, groups)

    def in_groups(self, hashes: NDArray[np.uint64], none: NDArray[np.bool_]) -> TextBlock:
        """The block with groups by the hashes of a key; ``none``: documents that lack it."""
        ids = (hashes >> np.uint64(1)).astype(np.int64)
        return replace(self, groups=np.where(none, -1, ids))

    def text_hashes(self, *, seed: int = 0) -> NDArray[np.uint64]:
        """xxh3-64 of every document's text; independent for different seeds."""
        data, pairs = self.text.data, itertools.pairwise(self.offsets.tolist())
        return np.array([xxhash.xxh3_64_intdigest(data[a:b], seed) for a, b in pairs], np.uint64)

    def drop(self, bad: NDArray[np.bool_], kind: str, faults: Faults) -> TextBlock:
        """Without the documents where ``bad`` is true; each is recorded as ``kind``."""
        if not bad.any():
            return self
        faults.record_rows(kind, np.flatnonzero(bad), self.place)
        return self.select(~bad)

    def checked(self, faults: Faults, *, known_utf8: bool) -> TextBlock:
        """Without empty documents and, unless known to have none, without invalid UTF-8."""
        block = self
        if not known_utf8:
            invalid = _core.valid_utf8(block.text, block.offsets) == 0
            block = block.drop(invalid, "invalid UTF-8", faults)
        return block.drop(np.diff(block.offsets) == 0, "empty document", faults)


def chats_of(messages: Iterable[str], beside: Mapping[str, Sequence[str]]) -> list[str]:
    """Conversations, in JSON, with what their documents say beside the messages; the list of
    messages alone where that is nothing.

        chats_of(["[1]", "[2]"], {"tools": ["[3]", "null"]})
        # -> ['{"messages": [1], "tools": [3]}', '[2]']

    Args:
        messages: JSON of lists; "" where a document is none.
        beside: name -> the JSON of every document's value; "" and "null" say nothing.
    """
    chats = []
    for i, said in enumerate(messages):
        values = {name: column[i] for name, column in beside.items()}
        more = [f"{json.dumps(n)}: {v}" for n, v in values.items() if v not in ("", "null")]
        chats.append(f'{{"messages": {said}, {", ".join(more)}}}' if said and more else said)
    return chats


# What never stops a build: ordinary text has it, and nobody can do anything about it. Everything
# else stops it unless `--on-error skip` was given.
_BENIGN = frozenset(
    {"blank line", "chat without assistant", "empty document", "too few words", "too many words"}
)
_COUNT_BLOCK = 1 << 24
_MAX_PLACES = 3  # that are kept of a kind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a document comes from; prints as ``path:line`` (files), ``path row N`` (parquet)."""

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
        # Readers enter large files in the middle and do not know the line number; it is needed
        # only for the few places that are shown.
        newlines, left = 0, self.position
        with Path(self.path).open("rb") as file:
            while block := file.read(min(left, _COUNT_BLOCK)):
                newlines += block.count(b"\n")
                left -= len(block)
        return newlines + 1


@dataclass
class Faults:
    """Counts by kind, and the first few places of each kind in the order of the corpus."""

    on_error: OnError = "fail"
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)

    def record(self, kind: str, place: Place, detail: str = "") -> None:
        """Count one document. Raises DataError unless the kind is benign or skipping is asked for.

        Args:
            kind: what is wrong, in a few words ("malformed JSON"); counts are kept per kind.
            place: the document.
            detail: what exactly is wrong; shown only when the build stops here.
        """
        if kind not in _BENIGN and self.on_error == "fail":
            reason = f" ({detail})" if detail else ""
            raise DataError(
                f"{place}: {kind}{reason}; mend the input, or drop such documents with "
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
        """Count many documents of one kind. Raises as ``record``.

        Args:
            rows: of the documents.
            place, detail: of a row, as ``record`` takes them; asked of the few that are shown.
        """
        if len(rows):
            first = int(rows[0])
            stops = kind not in _BENIGN and self.on_error == "fail"
            self.record(kind, place(first), detail(first) if stops else "")
            shown = rows[1:_MAX_PLACES]
            self._add(kind, len(rows) - 1, [place(int(row)) for row in shown])

    def add(self, later: Faults) -> None:
        """Take over what was recorded later in the corpus."""
        for kind, count in later.counts.items():
            self._add(kind, count, later.places.get(kind, []))

    def _add(self, kind: str, count: int, places: Sequence[Place]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        mine = self.places.setdefault(kind, [])
        mine += places[: _MAX_PLACES - len(mine)]


def lacks_documents(kinds: Iterable[str]) -> bool:
    """Whether some were left out that only ``--on-error skip`` leaves out."""
    return not _BENIGN.issuperset(kinds)


def fault_lines(counts: Mapping[str, int], places: Mapping[str, Sequence[object]]) -> list[str]:
    """One printable line per kind of fault, most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"{count:,} x {kind} (first: {', '.join(map(str, places.get(kind, ())))})"
        for kind, count in ordered
    ]


SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, ...]:
    """``"98,1,1"`` -> (98.0, 1.0, 1.0): weights of train, valid and test; missing ones are 0.

    Raises:
        ConfigError: not one to three numbers, a negative one, or nothing above 0.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"split {text!r} is not a list of numbers as 98,1,1") from error
    usable = len(weights) <= len(SPLIT_NAMES) and min(weights) >= 0 < sum(weights) < float("inf")
    if not usable:
        raise ConfigError(f"split {text!r} must have one to three weights, none below 0, not all 0")
    return tuple(weights + [0.0] * (len(SPLIT_NAMES) - len(weights)))


def _bounds(weights: Sequence[float]) -> list[float]:
    """Running sums of the normalized weights, from 0 to 1."""
    total = sum(weights)
    return [0.0, *itertools.accumulate(weight / total for weight in weights)]


def ordered_split(weights: Sequence[float], num_documents: int) -> list[range]:
    """Consecutive ranges of documents, rounded as megatron-core rounds them."""
    bounds = _bounds(weights)
    at = [round(bound * float(num_documents)) for bound in bounds]
    return [range(begin, end) for begin, end in itertools.pairwise(at)]


def hashed_split(weights: Sequence[float], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The split of every document: uint64 hashes are uniform, so shares follow the weights.

    A document keeps its split when the corpus grows or is read in another order.
    """
    bounds = np.array(_bounds(weights)[1:-1])
    # 53 bits are what a double holds exactly.
    fractions = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
    result: NDArray[np.int64] = np.searchsorted(bounds, fractions, side="right")
    return result

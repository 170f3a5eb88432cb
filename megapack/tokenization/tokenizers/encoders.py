"""Encoders: one class per backend, all returning the same flat arrays of token ids.

- Encoder: ``encode`` blocks of documents, ``decode`` ids to readable text
- open_encoder: open a backend by name; open_reference: open the backend that defines the ids
- GuardedEncoder: gigatoken, but the reference for documents on which the two may differ

    encoder = open_encoder(TokenizerFiles.open("bytes"), "bytes")
    encoder.encode(TextBlock.of_texts(["a", "", "bc"]))    # -> ([97, 98, 99], [0, 1, 1, 3])

Each backend gets the input form that it reads fastest, and returns arrays without a Python object
per token if it can. No backend adds special tokens: coding.py adds tokens around documents.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError, FormatError, first_line, is_foreign, require
from megapack.tokenization.corpus.documents import TextBlock, offsets_of
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles
from megapack.tokenization.tokenizers.verified import find_guard

Ids = NDArray[np.int32] | NDArray[np.uint32]
Encoded = tuple[Ids, NDArray[np.int64]]

# kind of tokenizer -> its backends, the reference first.
BACKENDS: dict[str, tuple[str, ...]] = {
    "bytes": ("bytes",),
    "sentencepiece": ("sentencepiece", "gigatoken"),
    "hf": ("tokenizers", "gigatoken"),
}


class Limits(NamedTuple):
    """Resources of an encoder. The ids do not depend on them."""

    threads: int = 1
    memory_bytes: int = 2 << 30  # process memory above which caches are dropped


class Encoder(abc.ABC):
    backend: str

    def __init__(self, files: TokenizerFiles, limits: Limits = Limits()) -> None:  # noqa: B008
        self._files = files
        self._limits = limits
        # The Rust libraries read this variable when they start their thread pool.
        os.environ["RAYON_NUM_THREADS"] = str(limits.threads)
        os.environ["RUST_BACKTRACE"] = "0"  # we report a panic in one line
        self._load()

    @abc.abstractmethod
    def _load(self) -> None: ...

    @abc.abstractmethod
    def encode(self, block: TextBlock) -> Encoded:
        """Return the token ids of all documents, and their offsets (int64, ``len(block) + 1``)."""

    def spans(self, text: str) -> NDArray[np.int64]:
        """Return the characters [begin, end) of each token of a text: int64, (tokens, 2). Raises
        ConfigError if the backend cannot report them (gigatoken)."""
        del text
        raise ConfigError(f"backend {self.backend} does not report the characters of a token")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the readable text of token ids; special tokens appear by name. Raises DataError if
        an id is outside the vocabulary."""
        size = self._files.vocab_size
        outside = [token for token in ids if not 0 <= token < size]
        if outside:
            raise DataError(
                f"token id {outside[0]} is outside the {size:,} ids of {self._files.name}: "
                "give the tokenizer that made the ids"
            )
        return self._decode(list(ids))

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids that are in the vocabulary."""

    def _named(self, ids: list[int], decode: Callable[[list[int]], str]) -> str:
        """Decode ids; write special tokens, which ``decode`` would drop, by name."""
        names = {token: text for text, token in self._files.special.items()}
        runs = itertools.groupby(ids, lambda token: token in names)
        return "".join(
            "".join(names[token] for token in run) if special else decode(list(run))
            for special, run in runs
        )


def guarded_name(files: TokenizerFiles) -> str:
    """Return the backend name of the guarded pair: ``gigatoken+tokenizers``."""
    return f"gigatoken+{BACKENDS[files.kind][0]}"


def open_encoder(files: TokenizerFiles, backend: str, limits: Limits = Limits()) -> Encoder:  # noqa: B008
    """Load a tokenizer with a backend: one of ``BACKENDS[files.kind]``, or the ``guarded_name``
    (probe.py resolves ``auto``). Raises ConfigError if the backend cannot run this tokenizer, and
    MegapackError if it is not installed."""
    if backend == guarded_name(files):
        return GuardedEncoder(files, limits)
    require_backend(files, backend)
    classes: tuple[type[Encoder], ...] = (_Bytes, _SentencePiece, _HuggingFace, _Gigatoken)
    return next(each for each in classes if each.backend == backend)(files, limits)


def open_reference(files: TokenizerFiles, limits: Limits = Limits()) -> Encoder:  # noqa: B008
    """Load the backend that defines the ids. Raises the same errors as ``open_encoder``."""
    return open_encoder(files, BACKENDS[files.kind][0], limits)


def require_backend(files: TokenizerFiles, backend: str) -> None:
    """Raise ConfigError if a backend does not run tokenizers of this kind."""
    if backend not in BACKENDS[files.kind]:
        choices = ", ".join(BACKENDS[files.kind])
        raise ConfigError(
            f"backend {backend!r} does not run {files.name}, a {files.kind} tokenizer; "
            f"choose from {choices}"
        )


class _Bytes(Encoder):
    backend = "bytes"

    def _load(self) -> None:
        pass

    def encode(self, block: TextBlock) -> Encoded:
        return block.text.astype(np.int32), block.offsets

    def spans(self, text: str) -> NDArray[np.int64]:
        lengths = [len(character.encode("utf-8")) for character in text]
        begin = np.repeat(np.arange(len(text)), lengths)
        return np.stack([begin, begin + 1], axis=1)

    def _decode(self, ids: list[int]) -> str:
        return self._named(ids, lambda run: bytes(run).decode("utf-8", errors="replace"))


class _SentencePiece(Encoder):
    backend = "sentencepiece"

    def _load(self) -> None:
        module = require("sentencepiece", f"tokenizer {self._files.name}")
        self._processor = module.SentencePieceProcessor(model_proto=self._files.definition())
        self._returns_arrays = hasattr(self._processor, "EncodeAsNumpy")  # 0.2.1 and later

    def encode(self, block: TextBlock) -> Encoded:
        texts = block.strings()
        if not texts:
            return _joined([])
        kind: Any = "numpy" if self._returns_arrays else int
        rows = self._processor.Encode(texts, out_type=kind, num_threads=self._limits.threads)
        return _joined(rows)

    def spans(self, text: str) -> NDArray[np.int64]:
        if hasattr(self._processor, "EncodeAsOffsetMapping"):  # 0.2.3 and later
            pairs = self._processor.Encode(text, return_type="offset_mapping")["offsets"]
        else:
            pieces = self._processor.Encode(text, out_type="immutable_proto").pieces
            pairs = [(piece.begin, piece.end) for piece in pieces]
        spans = np.array(pairs, np.int64).reshape(-1, 2)
        # A space added before the text has no character: report the one after it.
        return np.stack([spans[:, 0], np.maximum(spans[:, 1], spans[:, 0] + 1)], axis=1)

    def _decode(self, ids: list[int]) -> str:
        return self._named(ids, self._processor.decode)


# Rust prints "thread 'NAME' panicked at FILE:LINE:", a message and hints; pyo3 one more line.
_PANIC = re.compile(
    rb"\n?thread '[^\n]*panicked at [\s\S]*?(?:note: [^\n]*RUST_BACKTRACE[^\n]*(?:\n|$)|$)"
    rb"|--- PyO3 is resuming a panic[^\n]*\n(?:Python stack trace below:\n)?"
)
_stderr_lock = threading.Lock()


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Keep the messages of Rust panics in the block off stderr: each is an exception, too, which
    the caller reports in one line. Other output to stderr appears after the block."""
    with _stderr_lock:
        sink = os.memfd_create("stderr")
        try:
            stderr = os.dup(2)
        except OSError:  # stderr is closed
            os.close(sink)
            yield
            return
        os.dup2(sink, 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            if num_bytes := os.fstat(sink).st_size:
                os.write(2, _PANIC.sub(b"", os.pread(sink, num_bytes, 0)))
            os.close(stderr)
            os.close(sink)


class _HuggingFace(Encoder):
    backend = "tokenizers"

    def _load(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self._limits.threads > 1 else "false"
        self._tokenizer = load_tokenizers(self._files)
        self._tokenizer.encode_special_tokens = self._files.special_as_text

    def encode(self, block: TextBlock) -> Encoded:
        texts = block.strings()
        with without_panics():
            rows = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return _joined([np.array(row.ids, np.int32) for row in rows])

    def spans(self, text: str) -> NDArray[np.int64]:
        tokenizer = self._spanning  # loaded first, since loading uses without_panics, too
        with without_panics():
            encoding = tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.offsets, np.int64).reshape(-1, 2)

    @functools.cached_property
    def _spanning(self) -> Any:
        """Tokenizer whose spans cover white space."""
        tokenizers = require("tokenizers", f"tokenizer {self._files.name}")
        tokenizer = load_tokenizers(self._files)
        tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        return tokenizer

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class _Gigatoken(Encoder):
    backend = "gigatoken"

    def _load(self) -> None:
        name = self._files.name
        gigatoken = require("gigatoken", f"backend gigatoken of {name}")
        self._awkward = require("awkward", f"backend gigatoken of {name}")
        kind = gigatoken.Tokenizer
        load = kind.from_json if self._files.kind == "hf" else kind.from_sentencepiece
        try:
            with without_panics():
                self._tokenizer = load(self._files.definition())
        except BaseException as error:
            if not is_foreign(error):
                raise
            raise ConfigError(f"gigatoken cannot run {name}: {first_line(error)}") from error
        # gigatoken caches every word. Allow at least half of the limit for this cache.
        half = self._limits.memory_bytes // 2
        self._ceiling = max(self._limits.memory_bytes, resident_bytes() + half)

    def encode(self, block: TextBlock) -> Encoded:
        if resident_bytes() > self._ceiling:
            del self._tokenizer  # first: two tokenizers might not fit in memory
            self._load()
        texts = self._array(block)
        with without_panics():
            rows = self._tokenizer.encode_batch(texts, parallel=self._limits.threads > 1)
        layout = self._awkward.to_packed(rows).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data, np.int64)

    def _decode(self, ids: list[int]) -> str:
        return bytes(self._tokenizer.decode(ids)).decode("utf-8", errors="replace")

    def _array(self, block: TextBlock) -> Any:
        """Return the block as an awkward array of strings, without a copy."""
        contents = self._awkward.contents
        characters = contents.NumpyArray(block.text, parameters={"__array__": "char"})
        offsets = self._awkward.index.Index64(block.offsets)
        strings = contents.ListOffsetArray(offsets, characters, parameters={"__array__": "string"})
        return self._awkward.Array(strings)


def load_tokenizers(files: TokenizerFiles) -> Any:
    module = require("tokenizers", f"tokenizer {files.name}")
    try:
        with without_panics():
            return module.Tokenizer.from_buffer(files.definition())
    except BaseException as error:
        if not is_foreign(error):
            raise
        raise FormatError(f"tokenizers cannot run {files.name}: {first_line(error)}") from error


def resident_bytes() -> int:
    """Return the memory of this process; 0 if the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")


def _joined(rows: Sequence[Any]) -> Encoded:
    offsets = offsets_of([len(row) for row in rows])
    return np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32, copy=False), offsets


# ---- gigatoken for verified tokenizers and documents, else the reference ------------------------


class GuardedEncoder(Encoder):
    """gigatoken, but the reference for documents on which the two may differ (verified.py). Raises
    ConfigError if gigatoken is not verified for this kind of tokenizer, or cannot run it."""

    def _load(self) -> None:
        files = self._files
        self.backend = guarded_name(files)
        guard = find_guard(files.kind, files.definition())
        if isinstance(guard, str):
            raise ConfigError(f"gigatoken is not verified for {files.name}: {guard}")
        as_text = files.controls if files.special_as_text else ()
        self._contents = (*guard.contents, *(text.encode("utf-8") for text in as_text))
        self._characters = guard.characters
        self._fast = open_encoder(files, "gigatoken", self._limits)

    @functools.cached_property
    def reference(self) -> Encoder:
        """Reference encoder, loaded on first use: most corpora have no document that needs it."""
        return open_reference(self._files, self._limits)

    def _decode(self, ids: list[int]) -> str:
        return self.reference.decode(ids)

    def encode(self, block: TextBlock) -> Encoded:
        guarded = documents_with(block, self._contents)
        if len(self._characters):
            has_one = _core.has_characters(block.text, block.offsets, self._characters)
            guarded |= has_one.astype(np.bool_)
        if not guarded.any():
            return self._fast.encode(block)
        return _woven(
            guarded,
            self._fast.encode(block.select(~guarded)),
            self.reference.encode(block.select(guarded)),
        )


_MANY = 16


def documents_with(block: TextBlock, contents: Sequence[bytes]) -> NDArray[np.bool_]:
    """Return a mask of the documents that contain one of ``contents``. A match that crosses into
    the next document counts, too: the reference then encodes a document that does not need it."""
    result = np.zeros(len(block), np.bool_)
    if not contents:
        return result
    data = block.text.tobytes()
    if len(contents) <= _MANY:
        searches: list[Callable[[int], int]] = [partial(data.find, content) for content in contents]
    else:  # one pass over the text; slower than a few separate searches
        pattern = re.compile(b"|".join(map(re.escape, contents)))
        searches = [lambda begin: match.start() if (match := pattern.search(data, begin)) else -1]
    for search in searches:
        position = search(0)
        while position >= 0:
            document = int(np.searchsorted(block.offsets, position, "right")) - 1
            result[document] = True
            position = search(int(block.offsets[document + 1]))
    return result


def _woven(guarded: NDArray[np.bool_], fast: Encoded, reference: Encoded) -> Encoded:
    """Merge the results of both encoders in the order of the block's documents."""
    lengths = np.empty(len(guarded), np.int64)
    lengths[~guarded], lengths[guarded] = np.diff(fast[1]), np.diff(reference[1])
    offsets = offsets_of(lengths)
    from_reference = np.repeat(guarded, lengths)
    ids = np.empty(int(offsets[-1]), np.int32)
    ids[~from_reference], ids[from_reference] = fast[0], reference[0]
    return ids, offsets

"""Who runs a tokenizer: one class per backend, all giving the same flat arrays of token ids.

Each backend is fed the form it takes fastest and asked for the form that makes no Python object per
token, where it has one. None of them adds special tokens: megapack frames documents itself.
"""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError
from megapack.tokenization.blocks import TextBlock
from megapack.tokenization.optional import require
from megapack.tokenization.tokenizer import TokenizerFiles

__all__ = ["BACKENDS", "Encoder", "Ids", "Limits", "open_encoder", "require_backend"]

Ids = NDArray[np.int32] | NDArray[np.uint32]

# kind of tokenizer -> its backends, the reference first.
BACKENDS: dict[str, tuple[str, ...]] = {
    "bytes": ("bytes",),
    "sentencepiece": ("sentencepiece", "gigatoken"),
    "hf": ("tokenizers", "gigatoken"),
}


class Encoder(abc.ABC):
    """A loaded tokenizer."""

    backend: str

    @abc.abstractmethod
    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        """Token ids of all documents, and where each begins (int64, ``len(block) + 1``)."""


class Limits(NamedTuple):
    """What an encoder may use; the ids do not depend on it."""

    threads: int = 1
    memory_bytes: int = 2 << 30  # of the process, above which caches are dropped


def open_encoder(files: TokenizerFiles, backend: str, limits: Limits = Limits()) -> Encoder:  # noqa: B008
    """Load ``files`` with a backend of its kind.

    Args:
        backend: one of ``BACKENDS[files.kind]``; ``auto`` is decided elsewhere (probe.py).

    Raises:
        ConfigError: the backend does not run this kind of tokenizer, or cannot run this one.
        MegapackError: the backend is not installed.
    """
    require_backend(files, backend)
    classes: dict[str, type[_Loaded]] = {
        "bytes": _Bytes,
        "sentencepiece": _SentencePiece,
        "tokenizers": _HuggingFace,
        "gigatoken": _Gigatoken,
    }
    return classes[backend](files, limits)


def require_backend(files: TokenizerFiles, backend: str) -> None:
    """ConfigError when a backend does not run tokenizers of this kind."""
    if backend not in BACKENDS[files.kind]:
        choices = ", ".join(BACKENDS[files.kind])
        raise ConfigError(
            f"backend {backend!r} does not run {files.source}, a {files.kind} tokenizer; "
            f"choose from {choices}"
        )


class _Loaded(Encoder):
    def __init__(self, files: TokenizerFiles, limits: Limits) -> None:
        self._files = files
        self._limits = limits
        # Read by the Rust libraries when their thread pool first starts.
        os.environ["RAYON_NUM_THREADS"] = str(limits.threads)
        self._load()

    @abc.abstractmethod
    def _load(self) -> None: ...


class _Bytes(_Loaded):
    backend = "bytes"

    def _load(self) -> None:
        pass

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        return block.text.astype(np.int32), block.offsets


class _SentencePiece(_Loaded):
    backend = "sentencepiece"

    def _load(self) -> None:
        module = require("sentencepiece", None, f"tokenizer {self._files.source}")
        self._processor = module.SentencePieceProcessor(model_file=str(self._files.path))
        self._returns_arrays = hasattr(self._processor, "EncodeAsNumpy")  # 0.2.1 and later

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        texts = block.strings()
        if not texts:
            return _joined([])
        kind: Any = "numpy" if self._returns_arrays else int
        rows = self._processor.Encode(texts, out_type=kind, num_threads=self._limits.threads)
        return _joined(rows)


class _HuggingFace(_Loaded):
    backend = "tokenizers"

    def _load(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self._limits.threads > 1 else "false"
        module = require("tokenizers", "tokenizers", f"tokenizer {self._files.source}")
        self._tokenizer = module.Tokenizer.from_file(str(self._files.path))
        # A file saved after fine-tuning may carry both; either would corrupt a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        rows = self._tokenizer.encode_batch_fast(block.strings(), add_special_tokens=False)
        return _joined([np.array(row.ids, np.int32) for row in rows])


class _Gigatoken(_Loaded):
    backend = "gigatoken"

    def _load(self) -> None:
        source = self._files.source
        gigatoken = require("gigatoken", "gigatoken", f"backend gigatoken of {source}")
        self._awkward = require("awkward", "gigatoken", f"backend gigatoken of {source}")
        try:
            self._tokenizer = gigatoken.Tokenizer(self._files.path)
        except (RuntimeError, ValueError, NotImplementedError, KeyError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"gigatoken cannot run {source}: {reason}") from error
        # It remembers every word it has seen; half the limit is left to it at least.
        half = self._limits.memory_bytes // 2
        self._ceiling = max(self._limits.memory_bytes, resident_bytes() + half)

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        if resident_bytes() > self._ceiling:
            del self._tokenizer  # first, so that two are never there
            self._load()
        rows = self._tokenizer.encode_batch(self._array(block), parallel=self._limits.threads > 1)
        layout = self._awkward.to_packed(rows).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data, np.int64)

    def _array(self, block: TextBlock) -> Any:
        """The block as an awkward array of strings; no byte is copied."""
        contents = self._awkward.contents
        characters = contents.NumpyArray(block.text, parameters={"__array__": "char"})
        offsets = self._awkward.index.Index64(block.offsets)
        strings = contents.ListOffsetArray(offsets, characters, parameters={"__array__": "string"})
        return self._awkward.Array(strings)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")


def _joined(rows: list[Any]) -> tuple[Ids, NDArray[np.int64]]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    if not rows:
        return np.zeros(0, np.int32), offsets
    return np.concatenate([np.asarray(row, np.int32) for row in rows]), offsets

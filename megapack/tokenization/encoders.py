"""Who runs a tokenizer: one class per backend, all giving the same flat arrays of token ids.

Each backend is fed the form it takes fastest and asked for the form that makes no Python object per
token, where it has one. None of them adds special tokens: megapack frames documents itself.
"""

from __future__ import annotations

import abc
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError
from megapack.tokenization.blocks import TextBlock
from megapack.tokenization.optional import require
from megapack.tokenization.tokenizer import TokenizerFiles

__all__ = ["BACKENDS", "Encoder", "Ids", "open_encoder"]

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


def open_encoder(files: TokenizerFiles, backend: str, *, threads: int = 1) -> Encoder:
    """Load ``files`` with a backend of its kind.

    Args:
        backend: one of ``BACKENDS[files.kind]``; ``auto`` is decided elsewhere (probe.py).
        threads: how many the backend may use; the ids do not depend on it.

    Raises:
        ConfigError: the backend does not run this kind of tokenizer, or cannot run this one.
        MegapackError: the backend is not installed.
    """
    if backend not in BACKENDS[files.kind]:
        choices = ", ".join(BACKENDS[files.kind])
        raise ConfigError(
            f"backend {backend!r} does not run {files.source}, a {files.kind} tokenizer; "
            f"choose from {choices}"
        )
    classes: dict[str, type[_Loaded]] = {
        "bytes": _Bytes,
        "sentencepiece": _SentencePiece,
        "tokenizers": _HuggingFace,
        "gigatoken": _Gigatoken,
    }
    return classes[backend](files, threads)


class _Loaded(Encoder):
    def __init__(self, files: TokenizerFiles, threads: int) -> None:
        self._threads = threads
        self._load(files)

    @abc.abstractmethod
    def _load(self, files: TokenizerFiles) -> None: ...


class _Bytes(_Loaded):
    backend = "bytes"

    def _load(self, files: TokenizerFiles) -> None:
        pass

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        return block.text.astype(np.int32), block.offsets


class _SentencePiece(_Loaded):
    backend = "sentencepiece"

    def _load(self, files: TokenizerFiles) -> None:
        module = require("sentencepiece", None, f"tokenizer {files.source}")
        self._processor = module.SentencePieceProcessor(model_file=str(files.path))
        self._returns_arrays = hasattr(self._processor, "EncodeAsNumpy")  # 0.2.1 and later

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        texts = block.strings()
        if not texts:
            return _joined([])
        kind: Any = "numpy" if self._returns_arrays else int
        rows = self._processor.Encode(texts, out_type=kind, num_threads=self._threads)
        return _joined(rows)


class _HuggingFace(_Loaded):
    backend = "tokenizers"

    def _load(self, files: TokenizerFiles) -> None:
        # Read by the Rust library when its thread pool first starts.
        os.environ["RAYON_NUM_THREADS"] = str(self._threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self._threads > 1 else "false"
        module = require("tokenizers", "tokenizers", f"tokenizer {files.source}")
        self._tokenizer = module.Tokenizer.from_file(str(files.path))
        # A file saved after fine-tuning may carry both; either would corrupt a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        rows = self._tokenizer.encode_batch_fast(block.strings(), add_special_tokens=False)
        return _joined([np.array(row.ids, np.int32) for row in rows])


class _Gigatoken(_Loaded):
    backend = "gigatoken"

    def _load(self, files: TokenizerFiles) -> None:
        why = f"backend gigatoken of {files.source}"
        gigatoken = require("gigatoken", "gigatoken", why)
        self._awkward = require("awkward", "gigatoken", why)
        try:
            self._tokenizer = gigatoken.Tokenizer(files.path)
        except (RuntimeError, ValueError, NotImplementedError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"gigatoken cannot run {files.source}: {reason}") from error

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        rows = self._tokenizer.encode_batch(self._array(block), parallel=self._threads > 1)
        layout = self._awkward.to_packed(rows).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data, np.int64)

    def _array(self, block: TextBlock) -> Any:
        """The block as an awkward array of strings; no byte is copied."""
        contents = self._awkward.contents
        characters = contents.NumpyArray(block.text, parameters={"__array__": "char"})
        offsets = self._awkward.index.Index64(block.offsets)
        strings = contents.ListOffsetArray(offsets, characters, parameters={"__array__": "string"})
        return self._awkward.Array(strings)


def _joined(rows: list[Any]) -> tuple[Ids, NDArray[np.int64]]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    if not rows:
        return np.zeros(0, np.int32), offsets
    return np.concatenate([np.asarray(row, np.int32) for row in rows]), offsets

"""Train a tokenizer on a sample of the corpus."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megapack.errors import ConfigError, DataError, require
from megapack.storage.files import atomic_write, check_not_read, check_target, target_of
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.readers import plan_shards, read_blocks
from megapack.tokenization.corpus.streams import InputFile

_SLICE_BYTES = 1 << 20
_FEWEST = 300  # ids of a vocabulary
_MAX_SENTENCE_BYTES = 4096

# Split of Llama 3's published tokenizer: contractions, runs of letters, up to three digits,
# punctuation with its line end, white space.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    path: Path
    written: bool  # False: the output existed with equal content
    vocab_size: int
    num_documents: int
    num_text_bytes: int
    faults: Faults


def train_tokenizer(
    files: Sequence[InputFile],
    output: str,
    *,
    read: ReadOptions,
    faults: Faults,
    type: Literal["sentencepiece", "bpe-json"] = "sentencepiece",
    vocab_size: int = 32000,
    sample_bytes: int = 64 << 20,
    special_tokens: Sequence[str] = (),
    overwrite: bool = False,
) -> TrainResult:
    """Train on a sample of ``files`` and write ``output`` (.model, or tokenizer.json), unless it
    has equal content already.

    The sample consists of evenly spaced slices of ``sample_bytes`` in all, so the result depends on
    inputs and options only. Raises ConfigError if ``output`` is not a file name, or exists with
    different content and ``overwrite`` is False, if ``vocab_size`` is below 300 or larger than the
    text can fill, or if a special token is empty; and DataError if a document is faulty or the
    corpus has none.
    """
    if vocab_size < _FEWEST:
        raise ConfigError(
            f"vocabulary size {vocab_size} is below {_FEWEST}; single bytes alone need 256"
        )
    if "" in special_tokens:
        raise ConfigError("a special token is '' (empty): leave it out")
    path = target_of(output)
    check_not_read(path, [file.path for file in files])
    counted = _Counted(_sample(files, sample_bytes, read, faults))
    train = _sentencepiece if type == "sentencepiece" else _bpe_json
    data, actual_size = train(counted, vocab_size, special_tokens)

    def difference() -> str | None:
        same = path.read_bytes() == data
        return None if same else "these inputs and options give a different tokenizer"

    written = check_target(output, overwrite=overwrite, difference=difference)
    if written:
        with atomic_write(path) as file:
            file.write(data)
    return TrainResult(
        path=Path(output),
        written=written,
        vocab_size=actual_size,
        num_documents=counted.num_documents,
        num_text_bytes=counted.num_text_bytes,
        faults=faults,
    )


class _Counted:
    """Counts texts while it yields them. Raises DataError at the end if there were none."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.num_documents = 0
        self.num_text_bytes = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_documents += 1
            self.num_text_bytes += len(text.encode("utf-8"))
            yield text
        if not self.num_documents:
            raise DataError("the corpus has no documents to train a tokenizer on")


def _sample(
    files: Sequence[InputFile], sample_bytes: int, read: ReadOptions, faults: Faults
) -> Iterator[str]:
    shards = plan_shards(files, shard_bytes=_SLICE_BYTES, json_key=read.json_key)
    num_slices = min(len(shards), max(1, sample_bytes // _SLICE_BYTES))
    bytes_left = sample_bytes
    for i in range(num_slices):
        for block in read_blocks(shards[i * len(shards) // num_slices].pieces, read, faults):
            yield from block.strings()
            bytes_left -= len(block.text)
            if bytes_left <= 0:
                return


def _lines(texts: Iterator[str]) -> Iterator[str]:
    """Yield sentences for sentencepiece: lines with their line breaks, long ones in parts."""
    for text in texts:
        for line in text.splitlines(keepends=True):
            for begin in range(0, len(line), _MAX_SENTENCE_BYTES // 4):
                part = line[begin : begin + _MAX_SENTENCE_BYTES // 4].replace("\x00", "")
                if part:
                    yield part


def _sentencepiece(
    texts: _Counted, vocab_size: int, special_tokens: Sequence[str]
) -> tuple[bytes, int]:
    module = require("sentencepiece", "training a sentencepiece model")
    model = io.BytesIO()
    try:
        module.SentencePieceTrainer.Train(
            sentence_iterator=_lines(iter(texts)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            # Lossless settings: keep indentation and all spaces.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=1,
            user_defined_symbols=[*special_tokens],
            minloglevel=2,
        )
    except RuntimeError as error:
        if limit := re.search(r"value <= (\d+)", str(error)):
            fewer = f"--vocab-size {limit[1]} or less, or " if int(limit[1]) >= _FEWEST else ""
            raise ConfigError(
                f"vocabulary size {vocab_size:,} is too large: this text yields only {limit[1]} "
                f"pieces; give {fewer}more text"
            ) from error
        raise ConfigError(f"sentencepiece cannot train: {error}; try a smaller --vocab-size") from (
            error
        )
    data = model.getvalue()
    return data, int(module.SentencePieceProcessor(model_proto=data).GetPieceSize())


def _bpe_json(texts: _Counted, vocab_size: int, special_tokens: Sequence[str]) -> tuple[bytes, int]:
    tokenizers = require("tokenizers", "training a tokenizer.json")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PATTERN), "isolated"),
            byte_level(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|begin_of_text|>", *special_tokens],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
    return text.encode("utf-8"), int(tokenizer.get_vocab_size())

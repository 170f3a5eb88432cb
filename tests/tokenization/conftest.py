"""Corpora and tokenizers for the tokenization tests: real files, trained here."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.streams import InputFile
from megapack.tokenization.pipeline.plan import BuildConfig
from megapack.tokenization.pipeline.run import BuildResult, build
from megapack.tokenization.tokenizers.train import train_tokenizer

from .helpers import Build, Silence, write_jsonl


@pytest.fixture
def run_build(tmp_path: Path) -> Build:
    """Build paths, or records as x.jsonl, into ``tmp_path/out``; by default with the byte
    tokenizer.
    """

    def run(*inputs: object, **options: Any) -> BuildResult:
        files = [write_jsonl(tmp_path / "x.jsonl", x) if isinstance(x, list) else x for x in inputs]
        options["tokenizer"] = str(options.get("tokenizer", "bytes"))
        options["output_prefix"] = str(tmp_path / options.get("output_prefix", "out"))
        progress = options.pop("progress", Silence())
        return build(BuildConfig(inputs=tuple(map(str, files)), **options), progress)

    return run


@pytest.fixture(scope="session")
def source_files() -> list[InputFile]:
    """Return about a megabyte of the standard library's source files."""
    stdlib = sysconfig.get_path("stdlib")
    return find_inputs([f"{stdlib}/*.py"], max_bytes=1_000_000)


@pytest.fixture(scope="session")
def source_texts(source_files: Sequence[InputFile]) -> list[str]:
    return [Path(file.path).read_bytes().decode("utf-8") for file in source_files]


@pytest.fixture
def corpus(tmp_path: Path, source_texts: list[str]) -> Path:
    """Write the source files as JSON Lines."""
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in source_texts])


@pytest.fixture(scope="session")
def bpe_json(tmp_path_factory: pytest.TempPathFactory, source_files: list[InputFile]) -> Path:
    """Train a byte-level BPE tokenizer.json with Llama 3's split, 2000 ids."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_tokenizer(
        source_files,
        str(path),
        read=ReadOptions(),
        faults=Faults("skip"),
        type="bpe-json",
        vocab_size=2000,
        special_tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    )
    return path


@pytest.fixture(scope="session")
def sp_model(tmp_path_factory: pytest.TempPathFactory, source_files: list[InputFile]) -> Path:
    """Train a sentencepiece BPE model with byte fallback, 2000 ids."""
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    read, faults = ReadOptions(), Faults("skip")
    sizes = {"vocab_size": 2000, "sample_bytes": 1 << 19}
    train_tokenizer(source_files, str(path), read=read, faults=faults, **sizes)
    return path

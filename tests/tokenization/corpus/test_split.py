"""Dataset splits: Megatron's consecutive ranges, and hashes that keep each document's split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from peers import peer

from megapack import IndexedDataset
from megapack.errors import ConfigError, DataError
from megapack.tokenization.corpus.documents import (
    Faults,
    TextBlock,
    hashed_split,
    ordered_split,
    parse_split,
)
from megapack.tokenization.tokenizers.coding import Frame, TextCoder
from megapack.tokenization.tokenizers.encoders import Encoder, Ids
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

from ..helpers import Build, Silence

NAMES = ("train", "valid", "test")


@given(
    weights=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any),
    num_documents=st.integers(0, 10**9),
)
def test_ordered_split_equals_megatron(weights: list[int], num_documents: int) -> None:
    megatron = peer("megatron.core.datasets.blended_megatron_dataset_config")
    text = ",".join(map(str, weights))
    matrix = megatron.convert_split_vector_to_split_matrix(megatron.parse_and_normalize_split(text))
    bounds = [pair or (0, 0) for pair in matrix]
    expected = [range(*(round(bound * float(num_documents)) for bound in pair)) for pair in bounds]
    found = ordered_split(parse_split(text), num_documents)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        assert not ours or ours == theirs
    assert sum(map(len, found)) == num_documents


def test_hashed_splits_follow_the_weights() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, 200_000, dtype=np.uint64)
    split = hashed_split((90.0, 5.0, 5.0), hashes)
    shares = np.bincount(split, minlength=3) / len(hashes)
    np.testing.assert_allclose(shares, (0.9, 0.05, 0.05), atol=0.003)
    ends = np.array([0, 2**64 - 1], np.uint64)
    assert hashed_split((1.0, 1.0, 0.0), ends).tolist() == [0, 1], "weight 0 is never chosen"
    assert hashed_split((0.0, 0.0, 1.0), ends).tolist() == [2, 2]


class Recorder(Encoder):
    """Byte tokenizer that records its texts."""

    backend = "bytes"

    def _load(self) -> None:
        self.texts: list[str] = []

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        self.texts += block.strings()
        return block.text.astype(np.int32), block.offsets

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def test_verification_covers_every_split() -> None:
    files = TokenizerFiles.open("bytes")
    reference = Recorder(files)
    frame = Frame(dtype="uint16", vocab_size=256, prefix=(), suffix=())
    coder = TextCoder(Recorder(files), frame, reference=reference, verify_fraction=0.2)
    block = TextBlock.of_texts([f"document {i}" for i in range(4000)])
    coder.code(block, Faults())
    assert 600 < len(reference.texts) < 1000
    sample = TextBlock.of_texts(reference.texts)
    split = hashed_split((90.0, 5.0, 5.0), sample.text_hashes())
    shares = np.bincount(split, minlength=3) / len(sample)
    np.testing.assert_allclose(shares, (0.9, 0.05, 0.05), atol=0.03)
    again = Recorder(files)
    TextCoder(Recorder(files), frame, reference=again, verify_fraction=0.2).code(block, Faults())
    assert again.texts == reference.texts, "every run checks the same documents"


@pytest.mark.parametrize("text", ["", "1,2,3,4", "-1,2", "0,0,0", "a", "inf,1", "nan"])
def test_invalid_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        parse_split(text)


def test_ordered_split_cuts_shards(tmp_path: Path, run_build: Build) -> None:
    texts = [f"document {i} " * (1 + i % 5) for i in range(101)]
    records = [{"text": text} for text in texts]
    run_build(records, split="70,20,10", append_eod=True, shard_bytes=700)
    found: list[str] = []
    sizes = []
    for name in NAMES:
        dataset = IndexedDataset(tmp_path / f"out_{name}")
        assert dataset.meta is not None and dataset.meta["document_end_token"] == 256
        sizes.append(len(dataset))
        found += [bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in dataset[:]]
    assert found == texts
    assert sizes == [len(r) for r in ordered_split((70.0, 20.0, 10.0), 101)]
    assert not IndexedDataset.exists(tmp_path / "out")


def test_split_key_keeps_documents_together(tmp_path: Path, run_build: Build) -> None:
    def split_of(name: str, records: list[dict[str, str]]) -> dict[str, set[str]]:
        how = {"split": "60,20,20", "split_by": "hash", "split_key": "site", "shard_bytes": 2000}
        run_build(records, output_prefix=name, **how)
        return {
            split: {
                bytes(tokens.astype(np.uint8)).decode().split()[0]
                for tokens in IndexedDataset(tmp_path / f"{name}_{split}")[:]
            }
            for split in NAMES
        }

    records = [{"site": f"s{i % 40}", "text": f"s{i % 40} page {i}"} for i in range(400)]
    first = split_of("first", records)
    assert sum(map(len, first.values())) == 40, "no site is in two splits"
    grown = [{"site": f"n{i}", "text": f"n{i} new"} for i in range(30)] + records[::-1]
    second = split_of("second", grown)
    for split in NAMES:
        assert first[split] <= second[split], "a document changed its split when the corpus grew"


def test_empty_split_is_an_error(tmp_path: Path, run_build: Build) -> None:
    records, progress = [{"text": f"t{i}"} for i in range(10)], Silence()
    with pytest.raises(DataError, match="out_valid would have no documents"):
        run_build(records, split="98,1,1", progress=progress)
    assert "the valid split may get none of about" in progress.notes[0]
    assert not IndexedDataset.exists(tmp_path / "out_train"), "all splits or none"
    result = run_build(records, split="80,20", overwrite=True)
    assert list(result.prefixes) == ["_train", "_valid"]
    assert not IndexedDataset.exists(tmp_path / "out_test")

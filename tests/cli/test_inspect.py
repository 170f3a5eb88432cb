"""megapack-build inspect: what is printed is what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megapack import IndexedDataset, IndexedDatasetBuilder, SampleIndex, pack
from megapack.cli.inspect_sample import view_sample
from megapack.cli.main import main

EOD = 256
TEXTS = ["alpha", "beta gamma delta epsilon", "zeta", "a document longer than a sample" * 3]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four documents of bytes, ended by <eod>, and their packing into buckets of 16 and 32."""
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, vocab_size=259) as builder:
        for text in TEXTS:
            builder.add_document([*text.encode(), EOD])
    dataset = IndexedDataset(prefix)
    pack(dataset.document_lengths, "bucket", buckets=[16, 32]).save(
        tmp_path / "corpus.samples", source=dataset
    )
    return prefix


def test_a_dataset_is_described_by_its_own_numbers(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(corpus), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    lengths = [len(text) + 1 for text in TEXTS]
    assert facts["num_documents"] == len(TEXTS)
    assert facts["num_tokens"] == sum(lengths)
    assert facts["length_quantiles"]["1"] == max(lengths)
    assert sum(facts["documents_up_to_power_of_two"].values()) == len(TEXTS)


def test_an_index_is_described_by_its_own_metrics(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{corpus}.samples", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["strategy"] == "bucket"
    assert facts["bucket_capacity"] == [16, 32]
    assert facts["metrics"]["num_documents"] == len(TEXTS)


@pytest.mark.parametrize("suffix", ["", ".samples"])
def test_tables_for_people_are_printed(
    corpus: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{corpus}{suffix}"]) == 0
    assert "documents" in capsys.readouterr().out


def test_every_document_appears_with_its_text_in_some_sample(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ""
    for sample in range(SampleIndex.load(f"{corpus}.samples").num_samples):
        command = ["inspect", f"{corpus}.samples", "--sample", str(sample), "--tokenizer", "bytes"]
        assert main([*command, "--full"]) == 0
        shown += capsys.readouterr().out
    for text in TEXTS[:3]:
        assert f"{text}<eod>" in shown
    assert shown.count("<eod>") == len(TEXTS)
    assert "goes on elsewhere" in shown


def test_labels_are_counted_as_training_counts_them(corpus: Path) -> None:
    dataset, index = IndexedDataset(corpus), SampleIndex.load(f"{corpus}.samples")
    expected = index.label_tokens(dataset.document_lengths)
    assert expected.sum() == dataset.num_tokens - len(TEXTS)
    for sample in range(index.num_samples):
        views = view_sample(dataset, index, sample)
        assert sum(view.num_labels for view in views) == expected[sample]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["{}", "--sample", "0"], 2, "--sample needs a .samples file"),
        (["{}.samples", "--sample", "99"], 2, "has samples 0 to"),
        (["{}.missing"], 1, "No such file"),
        (["{}.samples", "--sample", "0", "--tokenizer", "nowhere.model"], 2, "no tokenizer at"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    corpus: Path,
    arguments: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", *(a.format(corpus) for a in arguments)]) == status
    assert message in capsys.readouterr().err


def test_an_index_of_another_dataset_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "other", dtype=np.uint16) as builder:
        builder.add_document([1, 2, 3])
    command = ["inspect", f"{corpus}.samples", "--sample", "0"]
    assert main([*command, "--data-prefix", str(tmp_path / "other")]) == 1
    assert "do not belong together" in capsys.readouterr().err

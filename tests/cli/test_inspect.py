"""megapack-build inspect prints the content of files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import needs_torch  # noqa: F401
import numpy as np
import pytest
from commands import printed

from megapack import IndexedDataset, IndexedDatasetBuilder, SampleIndex, pack
from megapack.cli.inspect import view_sample
from megapack.cli.main import main
from megapack.data import PackedDataset
from megapack.packing.trees import tokens_of
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from tests.reference.gather import NO_LABEL, gather

EOD = 256
TEXTS = ["alpha", "beta gamma delta epsilon", "zeta", "a document longer than a sample" * 3]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write four documents of bytes that end in <eod>, packed into buckets of 16 and 32."""
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, vocab_size=259) as builder:
        for text in TEXTS:
            builder.add_document([*text.encode(), EOD])
    dataset = IndexedDataset(prefix)
    index = pack(dataset.document_lengths, "bucket", buckets=[16, 32])
    index.save(f"{prefix}.samples", source=dataset)
    return prefix


def test_inspect_prints_the_counts_of_files(corpus: Path) -> None:
    command = ["inspect", f"{corpus}.samples", "--data-prefix", str(corpus), "--json"]
    index, dataset = json.loads(printed(*command))
    assert (index["strategy"], index["bucket_capacity"]) == ("bucket", [16, 32])
    assert index["metrics"]["num_documents"] == dataset["num_documents"] == len(TEXTS)
    lengths = [len(text) + 1 for text in TEXTS]
    assert dataset["num_tokens"] == sum(lengths)
    assert dataset["length_quantiles"]["1"] == max(lengths)
    assert sum(dataset["documents_up_to_power_of_two"].values()) == len(TEXTS)
    text = printed(*command[:-1])
    assert "padding ratio r_pad" in text and "4 documents (0 empty) in 4 sequences" in text


def test_every_document_is_in_some_sample(corpus: Path) -> None:
    shown = ""
    for sample in range(SampleIndex.load(f"{corpus}.samples").num_samples):
        command = ["inspect", f"{corpus}.samples", "--sample", str(sample), "--tokenizer", "bytes"]
        shown += printed(*command, "--full")
    for text in TEXTS[:3]:
        assert f"{text}<eod>" in shown
    assert shown.count("<eod>") == len(TEXTS)
    assert "continues elsewhere" in shown


def test_text_is_shown_on_an_ascii_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that stdout cannot encode must not raise UnicodeEncodeError."""
    with IndexedDatasetBuilder(tmp_path / "d", dtype=np.uint16, vocab_size=259) as builder:
        builder.add_document([*"caf\xe9".encode(), EOD])
    dataset = IndexedDataset(tmp_path / "d")
    pack(dataset.document_lengths, "bucket", buckets=[16]).save(
        tmp_path / "d.samples", source=dataset
    )
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    command = ["inspect", tmp_path / "d.samples", "--sample", 0]
    assert main([*map(str, command), "--tokenizer", "bytes"]) == 0
    assert b"caf\\xe9<eod>" in screen.buffer.getvalue()  # type: ignore[attr-defined]


def test_label_counts_equal_those_of_training(corpus: Path) -> None:
    dataset, index = IndexedDataset(corpus), SampleIndex.load(f"{corpus}.samples")
    expected = index.label_tokens(dataset.document_lengths)
    assert expected.sum() == dataset.num_tokens - len(TEXTS)
    for sample in range(index.num_samples):
        views = view_sample(dataset, index, sample)
        assert sum(view.num_labels for view in views) == expected[sample]


@pytest.fixture
def labels(corpus: Path) -> list[list[int]]:
    """Write labels, which leave out every third token."""
    dataset = IndexedDataset(corpus)
    chosen = [
        [-100 if i % 3 == 0 else token for i, token in enumerate(dataset[d].tolist())]
        for d in range(dataset.num_documents)
    ]
    add_column(corpus, "labels", chosen, INTERPRETED["labels"])
    return chosen


def test_labels_of_a_dataset_equal_those_of_training(corpus: Path, labels: list[list[int]]) -> None:
    dataset, index = IndexedDataset(corpus), SampleIndex.load(f"{corpus}.samples")
    documents = [dataset[d].tolist() for d in range(dataset.num_documents)]
    seen = 0
    for sample in range(index.num_samples):
        bucket, segments = index.sample(sample)
        capacity = int(index.bucket_capacity[bucket])
        shape = {"num_rows": 1, "row_tokens": capacity, "capacity": capacity}
        batch = gather(documents, [segments], **shape, chosen=labels)
        views = view_sample(dataset, index, sample)
        shown = [has for view in views for has in view.has_label]
        assert shown == [label != NO_LABEL for label in batch.labels[: len(shown)]]
        said = printed("inspect", f"{corpus}.samples", "--sample", sample)
        assert f" {sum(shown)} labels" in said
        seen += sum(shown)
    assert 0 < seen < dataset.num_tokens - len(TEXTS)


def test_loss_weights_follow_their_tokens(corpus: Path) -> None:
    dataset = IndexedDataset(corpus)
    lengths = dataset.document_lengths.tolist()
    weights = ([1] * (n // 2) + [0.25] * (n - n // 2) for n in lengths)
    add_column(corpus, "weights", weights, INTERPRETED["weights"])
    index = SampleIndex.load(f"{corpus}.samples")
    packed = PackedDataset(dataset, index)
    for sample in range(index.num_samples):
        shown = [w for view in view_sample(dataset, index, sample) for w in view.weights or ()]
        assert shown == packed[sample]["loss_mask"][: len(shown)].tolist()
    text = printed("inspect", f"{corpus}.samples", "--sample", 0)
    assert "<0.25>" in text and "loss weights of 0.25 to 1, together " in text


def test_prefix_trees_are_shown_as_training_gets_them(tmp_path: Path) -> None:
    texts = [[7, 8, 1, 2], [7, 8, 3], [7, 8, 3, 4], [9], [7, 8, 3], []]
    with IndexedDatasetBuilder(tmp_path / "d", dtype=np.uint16, vocab_size=16) as builder:
        for text in texts:
            builder.add_document(text)
    drawn = [np.arange(len(text)) / 2 for text in texts]
    for add in (False, True):
        if add:
            add_column(tmp_path / "d", "weights", drawn, INTERPRETED["weights"])
        dataset = IndexedDataset(tmp_path / "d")
        index = pack(dataset.document_lengths, "tree", buckets=8, **tokens_of(dataset, "tree"))
        index.save(tmp_path / "d.samples", source=dataset, overwrite=True)
        batch = PackedDataset(dataset, index, attention="tree").micro_batch([0])
        views = view_sample(dataset, index, 0)
        shown = {
            "loss_mask": [w for view in views for w in view.weights or ()],
            "position_ids": [i for view in views for i in range(view.begin, view.end)],
            "tokens": [token for view in views for token in view.token_ids],
        }
        for name, values in shown.items():
            assert values == batch[name][0, : len(values)].tolist(), name
        has_label = [has for view in views for has in view.has_label]
        assert has_label == (batch["labels"][0, : len(has_label)] >= 0).tolist()
        assert sum(view.num_ends for view in views) == 5
    text = printed("inspect", tmp_path / "d.samples", "--sample", 0)
    assert "continues segment 0, the end of 2 documents; " in text and "position_ids 2..2" in text


def test_labels_of_earlier_versions_are_refused(corpus: Path) -> None:
    with IndexedDatasetBuilder(f"{corpus}.labels", dtype=np.int32) as builder:
        builder.add_document([1, 2, 3])
    said = printed("inspect", f"{corpus}.samples", "--sample", "0", status=2)
    assert f"column add {corpus} labels {corpus}.labels" in said


@pytest.mark.parametrize(
    ("recorded", "token", "message"),
    [
        ({"name": "llama.model", "vocab_size": 32000}, 65, "names llama.model (32,000 ids)"),
        (None, 300, "token id 300 is not one of its 259 ids"),
        ({"name": "llama.model"}, 300, "its metadata names llama.model"),
    ],
)
def test_wrong_tokenizer_is_refused(
    recorded: dict[str, object] | None, token: int, message: str, tmp_path: Path
) -> None:
    """The message names the tokenizer, not only "must be in range(0, 256)"."""
    prefix = tmp_path / "other"
    metadata = {"tokenizer": recorded}
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, metadata=metadata) as builder:
        builder.add_document([65, token])
    dataset = IndexedDataset(prefix)
    pack(dataset.document_lengths, "bucket", buckets=[16]).save(f"{prefix}.samples", source=dataset)
    command = ["inspect", f"{prefix}.samples", "--sample", "0", "--tokenizer", "bytes"]
    said = printed(*command, status=2)
    assert f"{prefix} was not made by bytes" in said
    assert message in said


def test_recorded_command_is_one_line_on_a_pipe(tmp_path: Path) -> None:
    """``inspect corpus | grep command`` works; terminal markup in it is plain text."""
    command = f"megapack-build tokenize --input '[bold]*.jsonl' {'x' * 300} --output-prefix p"
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, metadata={"command": command}) as builder:
        builder.add_document([1, 2, 3])
    assert f"command: {command}" in printed("inspect", prefix).splitlines()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["{}", "--sample", "0"], 2, "--sample needs one .samples file"),
        (["{}.samples", "--sample", "99"], 2, "samples, counted from 0"),
        ([], 2, "nothing to inspect"),
        (["{}.samples", "{}", "{}.samples", "--sample", "0"], 2, "needs one .samples file"),
        (["{}.missing"], 1, "No such file"),
        (["{}.samples", "--sample", "0", "--tokenizer", "nowhere.model"], 2, "no tokenizer at"),
        (["{}.samples", "--fim", "b.yaml"], 2, "--fim b.yaml works only with --sample I: give"),
        (["{}.samples", "--tokenizer", "bytes"], 2, "--tokenizer bytes works only with --sample I"),
        (["{}.samples", "--sample", "0", "--epoch", "2"], 2, "--epoch 2 works only with --fim"),
        (["{}.samples", "--sample", "0", "--fim", "b.yaml", "--epoch", "-1"], 2, "--epoch is -1"),
        (["{}.samples", "--sample", "0", "--json"], 2, "--json describes files, and --sample"),
        (["{}.samples", "--shards"], 2, "--shards works only with a shard manifest"),
    ],
)
def test_wrong_requests_are_refused(
    corpus: Path, arguments: list[str], status: int, message: str
) -> None:
    words = (word.format(corpus) for word in arguments)
    assert message in printed("inspect", *words, status=status)


def test_foreign_index_is_refused(corpus: Path, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "other", dtype=np.uint16) as builder:
        builder.add_document([1, 2, 3])
    command = ["inspect", f"{corpus}.samples", "--sample", "0", "--data-prefix"]
    assert "do not belong together" in printed(*command, tmp_path / "other", status=1)

"""megapack-build tokenize and train-tokenizer: output, exit status, messages."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import build, printed
from tokenizers import pre_tokenizers

from megapack import IndexedDataset


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [f"def function_{i}(x):\n    return x + {i}\n" * 20 for i in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokenize(
    corpus: Path, prefix: Path, *more: object, status: int = 0
) -> subprocess.CompletedProcess[str]:
    words = ("--tokenizer", "bytes", "--workers", "1", *more)
    done = build("tokenize", "--input", corpus, "--output-prefix", prefix, *words)
    assert done.returncode == status, done
    return done


def ids_of(prefix: object) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_tokenize_writes_a_dataset_and_reports_it(tmp_path: Path, corpus: Path) -> None:
    options = ("--append-eod", "--shard-bytes", "10K")
    done = tokenize(corpus, tmp_path / "out", *options)
    for line in (
        "tokenizer  bytes (259 ids, bytes)",
        "EOD        <eod> = 256",
        "documents  60 (",
        f"tokens     {IndexedDataset(tmp_path / 'out').num_tokens:,} (uint16)",
        f"dataset    {tmp_path}/out.bin, {tmp_path}/out.idx: 60 documents, ",
    ):
        assert line in done.stdout
    assert "47.2 KiB in 5 shards; about " in done.stderr
    assert "nothing to do" in tokenize(corpus, tmp_path / "out", *options).stdout
    without = tokenize(corpus, tmp_path / "without").stdout
    assert "EOD        none: no token ends a document; --append-eod adds one" in without


def test_dry_run_writes_nothing(tmp_path: Path, corpus: Path) -> None:
    prefix = tmp_path / "not" / "yet" / "out"
    options = ("--append-eod", "--shard-bytes", "10K", "--split", "90,10", "--dry-run")
    before = sorted(tmp_path.rglob("*"))
    out = tokenize(corpus, prefix, *options).stdout
    assert re.search(r"^plan       [0-9a-f]{32}$", out, re.MULTILINE)
    for line in (
        "input      1 file, 47.2 KiB (jsonl 1)",
        "documents  text under 'text', faults stop the build",
        "tokenizer  bytes (259 ids, bytes)",
        "EOD        <eod> = 256",
        "split      train 90.00 %, valid 10.00 %, by order",
        "shards     5 of about 10 KiB of text, 0 finished",
        f"dataset    {prefix}_valid.bin, {prefix}_valid.idx",
    ):
        assert line in out
    told = json.loads(tokenize(corpus, prefix, *options, "--json").stdout)
    assert sorted(tmp_path.rglob("*")) == before
    done = json.loads(tokenize(corpus, prefix, *options[:-1], "--json").stdout)
    assert told["digest"] == done["digest"]
    assert told["plan"]["inputs"][0][0] == str(corpus)
    assert 0.9 < told["estimate"]["num_tokens"] / done["num_tokens"] < 1.1
    documents = {prefix: held["documents"] for prefix, held in done["datasets"].items()}
    assert documents == {f"{prefix}_train": 54, f"{prefix}_valid": 6}
    assert "nothing to do" in tokenize(corpus, prefix, *options).stdout
    tokenize(
        corpus, prefix, "--split", "90,10", "--dry-run", status=2
    )  # the folder holds another plan


def test_keys_make_megatrons_datasets(tmp_path: Path, corpus: Path) -> None:
    records = [{"text": f"body {i}", "title": f"title {i}"} for i in range(20)]
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = ("--json-keys", "text", "title", "--append-eod")
    out = tokenize(corpus, tmp_path / "out", *keys).stdout
    for key in ("text", "title"):
        prefix = f"{tmp_path}/out_{key}_document"
        assert f"{prefix}.bin" in out
        texts = [bytes(ids[:-1].tolist()).decode() for ids in IndexedDataset(prefix)[:]]
        assert texts == [record[key] for record in records]
        tokenize(corpus, tmp_path / key, "--json-key", key, "--append-eod")
        assert ids_of(tmp_path / key) == ids_of(prefix)
    tokenize(corpus, tmp_path / "one", "--json-keys", "text")
    assert IndexedDataset.exists(tmp_path / "one_text_document"), "Megatron's spelling, its name"
    assert not IndexedDataset.exists(tmp_path / "one")


def test_megatron_options_are_translated_or_refused(tmp_path: Path, corpus: Path) -> None:
    model = tmp_path / "t.model"
    printed("train-tokenizer", "--input", corpus, "--output", model, "--vocab-size", "320")
    common = ["tokenize", "--input", corpus, "--append-eod", "--workers", "1"]
    common += ["--tokenizer-model", model, "--keep-sequential-samples", "--output-prefix"]
    printed(*common, tmp_path / "a", "--tokenizer-type", "SentencePieceTokenizer")
    tokenize(corpus, tmp_path / "b", "--tokenizer", model, "--append-eod")
    assert ids_of(tmp_path / "a") == ids_of(tmp_path / "b")
    for more, message in (
        (("--tokenizer-type", "GPT2BPETokenizer"), "is not a GPT2BPETokenizer"),
        (("--partitions", "4"), "unknown option --partitions; did you mean '--part'?"),
        (("--vocab-file", "v.json"), "describe one tokenizer together: give both"),
        (("--json-keys", "a/b"), "'a/b' cannot be part of a file name"),
        (("--json-keys", "a", "--messages-key", "m"), "replaces --json-key and --messages-key"),
    ):
        assert message in printed(*common, tmp_path / "c", *more, status=2)
    said = printed("tokenize", "--input", corpus, "--output-prefix", "c", status=2)
    assert "--tokenizer is missing" in said


@pytest.mark.parametrize("name", ["q.bin", "q.idx", "q"])
def test_a_prefix_may_be_named_by_one_of_its_files(tmp_path: Path, corpus: Path, name: str) -> None:
    out = tokenize(corpus, tmp_path / name).stdout
    assert f"dataset    {tmp_path}/q.bin, {tmp_path}/q.idx: " in out
    suffixes = {path.name.removeprefix("q.") for path in tmp_path.glob("q*")}
    assert suffixes == {"bin", "idx", "meta.json", "manifest.json"}
    assert "nothing to do" in tokenize(corpus, tmp_path / name).stdout
    said = tokenize(corpus, tmp_path / name, "--append-eod", status=2).stderr
    assert "Replace it with --overwrite" in said


def test_names_that_are_too_long_are_refused_before_any_work(tmp_path: Path, corpus: Path) -> None:
    for length in (229, 235, 245):
        said = tokenize(corpus, tmp_path / ("n" * length), status=2).stderr
        assert "choose a shorter one" in said
        assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_an_end_token_may_be_named_by_its_id(tmp_path: Path, corpus: Path) -> None:
    tokenize(corpus, tmp_path / "out", "--append-eod", "--eod-token", "258")
    assert {int(tokens[-1]) for tokens in IndexedDataset(tmp_path / "out")[:]} == {258}
    done = tokenize(corpus, tmp_path / "o", "--append-eod", "--eod-token", "259", status=2)
    assert "eod token is 259, " in done.stderr and "is 258" in done.stderr


def test_skipped_documents_are_listed_with_place(tmp_path: Path, corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write("not json\n{}\n")
    said = tokenize(corpus, tmp_path / "out", status=1).stderr
    assert f"megapack-build tokenize: error: {corpus}:61: malformed JSON (" in said
    assert not (tmp_path / "out.bin").exists()
    done = tokenize(corpus, tmp_path / "out", "--on-error", "skip")
    assert f"skipped 1 x malformed JSON (first: {corpus}:61)" in done.stderr
    assert f"skipped 1 x missing key (first: {corpus}:62)" in done.stderr
    assert "2 skipped)" in done.stdout


def test_wrong_arguments(tmp_path: Path, corpus: Path) -> None:
    for more, status, message in (
        (("--input", tmp_path / "gone.jsonl"), 1, "No such file"),
        (("--input", tmp_path / "*.csv"), 2, "no file matches"),
        (("--tokenizer", "no/such"), 2, "no tokenizer at no/such"),
        (("--backend", "tokenizers"), 2, "'tokenizers' does not run bytes"),
        (("--part", "half"), 2, "'half' is not of the form I/N"),
        (("--shard-bytes", "many"), 2, "'many' is not a size"),
        (("--split-by", "wall"), 2, "is unknown (known: "),
    ):
        assert message in tokenize(corpus, tmp_path / "out", *more, status=status).stderr


def test_the_command_in_the_meta_file_builds_the_same_dataset(tmp_path: Path, corpus: Path) -> None:
    more = ("--append-eod", "--min-words", "5", "--dtype", "int32", "--shard-bytes", "10K")
    tokenize(corpus, tmp_path / "out", *more, "--block-bytes", "2K")
    first, dataset = ids_of(tmp_path / "out"), IndexedDataset(tmp_path / "out")
    assert dataset.meta is not None and dataset.dtype == np.int32
    program, *arguments = dataset.meta["command"].split()
    assert program == "megapack-build"
    for path in tmp_path.glob("out.*"):
        path.unlink()
    printed(*arguments)
    assert ids_of(tmp_path / "out") == first


def test_merge_joins_the_shards_that_were_kept(tmp_path: Path, corpus: Path) -> None:
    tokenize(corpus, tmp_path / "out", "--keep-shards", "--shard-bytes", "10K")
    shards = sorted(str(path)[:-4] for path in (tmp_path / "out.build").glob("*/shard-*.idx"))
    assert len(shards) > 3
    printed("merge", *shards, "--output-prefix", tmp_path / "merged")
    assert ids_of(tmp_path / "merged") == ids_of(tmp_path / "out")


def test_trained_tokenizer_works(tmp_path: Path, corpus: Path) -> None:
    for name, more in (("t.model", ()), ("t.json", ("--type", "bpe-json"))):
        train = ["train-tokenizer", "--input", corpus, "--output", tmp_path / name]
        said = printed(*train, "--vocab-size", "320", *more)
        assert f"{name}: 320 tokens, learned from 60 documents" in said
        prefix = tmp_path / f"out-{name}"
        tokenize(corpus, prefix, "--tokenizer", tmp_path / name, "--append-eod")
        assert (IndexedDataset(prefix).vocab_size, len(IndexedDataset(prefix))) == (320, 60)


def test_gpt2_vocab_and_merges_are_a_tokenizer(tmp_path: Path, corpus: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"
    names = [*alphabet, "de", "<|endoftext|>"]
    vocab.write_text(json.dumps({name: i for i, name in enumerate(names)}))
    merges.write_text("#version: 0.2\nd e\n")
    command = ["tokenize", "--input", corpus, "--output-prefix", tmp_path / "out"]
    pair = ["--vocab-file", vocab, "--merge-file", merges]
    assert "EOD        <|endoftext|> = 257" in printed(*command, *pair, "--append-eod")
    document = IndexedDataset(tmp_path / "out")[0].tolist()
    assert (document[0], document[-1]) == (256, 257), "def begins with de"
    one = "--vocab-file and --merge-file describe one tokenizer together: give both"
    assert "--tokenizer is missing" in printed(*command, status=2)
    for wrong in (pair[:2], [*pair, "--tokenizer", "bytes"]):
        assert one in printed(*command, *wrong, status=2)
    printed(*command, "--tokenizer-model", "bytes", "--overwrite")


def test_left_out_files_are_listed_before_the_build(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "notes.rst").write_text("text")
    said = tokenize(corpus, tmp_path / "out", "--input", corpus, tmp_path).stderr
    assert f"note: named several times, but read once: 1 file (first: {corpus} is {corpus})" in said
    assert "note: not taken from folders: 1 file (.rst 1); choose with --suffix" in said


def test_training_again_does_nothing(tmp_path: Path, corpus: Path) -> None:
    output = tmp_path / "t.json"
    command = ["train-tokenizer", "--input", corpus, "--output", output]
    command += ["--type", "bpe-json", "--vocab-size", "300"]
    assert f"{output}: 300 tokens, learned from 60 documents" in printed(*command)
    before = output.read_bytes()
    assert f"nothing to do: {output} exists already" in printed(*command)
    other = [*command, "--special-token", "<|x|>"]
    assert "replace it with --overwrite" in printed(*other, status=2).lower()
    assert output.read_bytes() == before
    printed(*other, "--overwrite")
    assert output.read_bytes() != before

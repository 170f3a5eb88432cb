"""tokenize and train-tokenizer as people run them: output, exit status, messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import printed
from tokenizers import pre_tokenizers

from megapack import IndexedDataset
from megapack.cli.main import main


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [f"def function_{i}(x):\n    return x + {i}\n" * 20 for i in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokenize(corpus: Path, prefix: Path, *more: str) -> int:
    command = ["tokenize", "--input", str(corpus), "--output-prefix", str(prefix)]
    return main([*command, "--tokenizer", "bytes", "--workers", "1", *more])


def test_text_becomes_a_dataset_and_the_report_says_what_it_holds(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(corpus, tmp_path / "out", "--append-eod", "--shard-bytes", "10K") == 0
    out, err = capsys.readouterr()
    assert "tokenizer  bytes (259 ids, bytes)" in out
    assert "EOD        <eod> = 256" in out
    assert "documents  60 (" in out
    assert f"tokens     {IndexedDataset(tmp_path / 'out').num_tokens:,} (uint16)" in out
    assert f"dataset    {tmp_path}/out.bin, {tmp_path}/out.idx: 60 documents, " in out
    assert "47.2 KiB in 5 shards; about " in err
    assert tokenize(corpus, tmp_path / "out", "--append-eod", "--shard-bytes", "10K") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_dry_run_writes_not(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "not" / "yet" / "out"
    options = ("--append-eod", "--shard-bytes", "10K", "--split", "90,10", "--dry-run")
    before = sorted(tmp_path.rglob("*"))
    assert tokenize(corpus, prefix, *options) == 0
    out = capsys.readouterr().out
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
    assert tokenize(corpus, prefix, *options, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(tmp_path.rglob("*")) == before
    assert tokenize(corpus, prefix, *options[:-1], "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert told["digest"] == done["digest"]
    assert told["plan"]["inputs"][0][0] == str(corpus)
    assert 0.9 < told["estimate"]["num_tokens"] / done["num_tokens"] < 1.1
    assert {p: held["documents"] for p, held in done["datasets"].items()} == {
        f"{prefix}_train": 54,
        f"{prefix}_valid": 6,
    }
    assert tokenize(corpus, prefix, *options) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert tokenize(corpus, prefix, "--split", "90,10", "--dry-run") == 2, (
        "another plan stands here"
    )


def test_keys_make_megatrons_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "x.jsonl"
    records = [{"text": f"body {i}", "title": f"title {i}"} for i in range(20)]
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert tokenize(corpus, tmp_path / "out", "--json-keys", "text", "title", "--append-eod") == 0
    out = capsys.readouterr().out
    for key in ("text", "title"):
        prefix = f"{tmp_path}/out_{key}_document"
        assert f"{prefix}.bin" in out
        found = [
            bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in IndexedDataset(prefix)[:]
        ]
        assert found == [record[key] for record in records]
        alone = tmp_path / key
        assert tokenize(corpus, alone, "--json-key", key, "--append-eod") == 0
        for suffix in ("bin", "idx"):
            assert Path(f"{alone}.{suffix}").read_bytes() == Path(f"{prefix}.{suffix}").read_bytes()
    assert tokenize(corpus, tmp_path / "one", "--json-keys", "text") == 0
    assert IndexedDataset.exists(tmp_path / "one_text_document"), "Megatron's spelling, its name"
    assert not IndexedDataset.exists(tmp_path / "one")


def test_megatrons_spellings_mean_the_same_or_are_refused(tmp_path: Path, corpus: Path) -> None:
    model = tmp_path / "t.model"
    train = ["train-tokenizer", "--input", str(corpus), "--output", str(model)]
    assert main([*train, "--vocab-size", "320"]) == 0
    common = ["tokenize", "--input", str(corpus), "--append-eod", "--workers", "1"]
    common += ["--tokenizer-model", str(model), "--keep-sequential-samples"]
    ours = [*common, "--output-prefix", str(tmp_path / "a")]
    assert main([*ours, "--tokenizer-type", "SentencePieceTokenizer"]) == 0
    assert tokenize(corpus, tmp_path / "b", "--tokenizer", str(model), "--append-eod") == 0
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    for more, message in (
        (("--tokenizer-type", "GPT2BPETokenizer"), "is no GPT2BPETokenizer"),
        (("--partitions", "4"), "--partitions is not needed: leave it out"),
        (("--vocab-file", "v.json"), "name one tokenizer, both together"),
        (("--json-keys", "a/b"), "'a/b' cannot be part of a file's name"),
        (("--json-keys", "a", "--messages-key", "m"), "leave out --json-key and --messages-key"),
    ):
        assert message in printed(*common, "--output-prefix", tmp_path / "c", *more, status=2)
    assert "--tokenizer is missing" in printed(
        "tokenize", "--input", corpus, "--output-prefix", "c", status=2
    )


@pytest.mark.parametrize("name", ["q.bin", "q.idx", "q"])
def test_a_prefix_may_be_named_by_one_of_its_files(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert tokenize(corpus, tmp_path / name) == 0
    assert f"dataset    {tmp_path}/q.bin, {tmp_path}/q.idx: " in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("q*")} == {
        "q.bin",
        "q.idx",
        "q.meta.json",
        "q.manifest.json",
    }
    assert tokenize(corpus, tmp_path / name) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert tokenize(corpus, tmp_path / name, "--append-eod") == 2
    assert "Replace it with --overwrite" in capsys.readouterr().err


def test_names_that_are_too_long_are_refused_before_any_work(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in (229, 235, 245):
        assert tokenize(corpus, tmp_path / ("n" * length)) == 2
        assert "choose a shorter one" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_an_end_token_may_be_named_by_its_id(tmp_path: Path, corpus: Path) -> None:
    assert tokenize(corpus, tmp_path / "out", "--append-eod", "--eod-token", "258") == 0
    assert {int(tokens[-1]) for tokens in IndexedDataset(tmp_path / "out")[:]} == {258}
    assert tokenize(corpus, tmp_path / "o", "--append-eod", "--eod-token", "259") == 2


def test_skips_are_placed(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with corpus.open("a") as file:
        file.write("not json\n{}\n")
    assert tokenize(corpus, tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert f"megapack-build tokenize: error: {corpus}:61: malformed JSON (" in err
    assert not (tmp_path / "out.bin").exists()
    assert tokenize(corpus, tmp_path / "out", "--on-error", "skip") == 0
    out, err = capsys.readouterr()
    assert f"skipped 1 x malformed JSON (first: {corpus}:61)" in err
    assert f"skipped 1 x missing key (first: {corpus}:62)" in err
    assert "2 skipped)" in out


def test_wrong_arguments(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, status, message in (
        (("--input", str(tmp_path / "gone.jsonl")), 1, "No such file"),
        (("--input", str(tmp_path / "*.csv")), 2, "no file matches"),
        (("--tokenizer", "no/such"), 2, "there is no tokenizer at no/such"),
        (("--backend", "tokenizers"), 2, "'tokenizers' does not run bytes"),
    ):
        assert tokenize(corpus, tmp_path / "out", *more) == status, more
        assert message in capsys.readouterr().err
    for more, message in (
        (("--part", "half"), "'half' is not of the form I/N"),
        (("--shard-bytes", "many"), "'many' is not a size"),
        (("--split-by", "wall"), "invalid choice"),
    ):
        with pytest.raises(SystemExit) as stopped:
            tokenize(corpus, tmp_path / "out", *more)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_the_command_in_the_meta_file_builds_the_same_dataset(tmp_path: Path, corpus: Path) -> None:
    more = ("--append-eod", "--min-words", "5", "--dtype", "int32", "--shard-bytes", "10K")
    assert tokenize(corpus, tmp_path / "out", *more, "--block-bytes", "2K") == 0
    first = (tmp_path / "out.bin").read_bytes()
    meta = IndexedDataset(tmp_path / "out").meta
    assert meta is not None
    assert IndexedDataset(tmp_path / "out").dtype == np.int32
    program, *arguments = meta["command"].split()
    assert program == "megapack-build"
    for path in tmp_path.glob("out.*"):
        path.unlink()
    assert main(arguments) == 0
    assert (tmp_path / "out.bin").read_bytes() == first


def test_merge_joins_the_shards_that_were_kept(tmp_path: Path, corpus: Path) -> None:
    assert tokenize(corpus, tmp_path / "out", "--keep-shards", "--shard-bytes", "10K") == 0
    shards = sorted(str(path)[:-4] for path in (tmp_path / "out.build").glob("*/shard-*.idx"))
    assert len(shards) > 3
    assert main(["merge", *shards, "--output-prefix", str(tmp_path / "merged")]) == 0
    for suffix in ("bin", "idx"):
        merged, whole = (tmp_path / f"{name}.{suffix}" for name in ("merged", "out"))
        assert merged.read_bytes() == whole.read_bytes()


def test_trained_one_works(tmp_path: Path, corpus: Path) -> None:
    for name, more in (("t.model", ()), ("t.json", ("--type", "bpe-json"))):
        train = ["train-tokenizer", "--input", str(corpus), "--output", str(tmp_path / name)]
        assert f"{name}: 320 tokens, learned from 60 documents" in printed(
            *train, "--vocab-size", "320", *more
        )
        prefix = tmp_path / f"out-{name}"
        assert tokenize(corpus, prefix, "--tokenizer", str(tmp_path / name), "--append-eod") == 0
        dataset = IndexedDataset(prefix)
        assert dataset.vocab_size == 320
        assert len(dataset) == 60


def test_gpt2s_two_files_are_a_tokenizer_as_megatron_names_them(
    tmp_path: Path, corpus: Path
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"
    names = [*alphabet, "de", "<|endoftext|>"]
    vocab.write_text(json.dumps({name: i for i, name in enumerate(names)}))
    merges.write_text("#version: 0.2\nd e\n")
    command = ["tokenize", "--input", str(corpus), "--output-prefix", str(tmp_path / "out")]
    pair = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    assert "EOD        <|endoftext|> = 257" in printed(*command, *pair, "--append-eod")
    document = IndexedDataset(tmp_path / "out")[0].tolist()
    assert (document[0], document[-1]) == (256, 257), "def begins with de"
    for wrong in ([], pair[:2], [*pair, "--tokenizer", "bytes"]):
        assert main([*command, *wrong]) == 2
    assert main([*command, "--tokenizer-model", "bytes", "--overwrite"]) == 0


def test_what_is_left_out_is_said_before_the_build(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.rst").write_text("text")
    assert tokenize(corpus, tmp_path / "out", "--input", str(corpus), str(tmp_path)) == 0
    err = capsys.readouterr().err
    assert f"note: named again and read once: 1 file (first: {corpus} is {corpus})" in err
    assert "note: not taken from folders: 1 file (.rst 1); choose with --suffix" in err


def test_training_is_once(tmp_path: Path, corpus: Path) -> None:
    output = tmp_path / "t.json"
    command = ["train-tokenizer", "--input", str(corpus), "--output", str(output)]
    command += ["--type", "bpe-json", "--vocab-size", "300"]
    assert f"{output}: 300 tokens, learned from 60 documents" in printed(*command)
    before = output.read_bytes()
    assert f"nothing to do: {output} is there already" in printed(*command)
    other = [*command, "--special-token", "<|x|>"]
    assert "replace it with --overwrite" in printed(*other, status=2).lower()
    assert output.read_bytes() == before
    assert main([*other, "--overwrite"]) == 0
    assert output.read_bytes() != before

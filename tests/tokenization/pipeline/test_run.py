"""A build gives the same bytes for any number of workers, shards and parts; Megatron reads them."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from peers import peer
from programs import PEAK_BYTES, PYTHON, ended
from tokenizers import Tokenizer, processors

from megapack import IndexedDataset
from megapack.errors import ConfigError, DataError, FormatError
from megapack.tokenization.pipeline.worker import prefetch
from megapack.tokenization.tokenizers import probe
from megapack.tokenization.tokenizers.encoders import without_panics
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

from ..helpers import Build, Silence, files_of, write_jsonl


@pytest.mark.multiprocess
def test_bytes_do_not_depend_on_workers_blocks_shards_or_parts(
    tmp_path: Path, corpus: Path, bpe_json: Path, run_build: Build, source_texts: list[str]
) -> None:
    plan = {"tokenizer": bpe_json, "append_eod": True, "shard_bytes": 50_000}

    def run(name: str, **options: Any) -> tuple[bytes, bytes]:
        run_build(corpus, output_prefix=name, **{**plan, **options})
        return files_of(tmp_path / name)

    alone = run("w1")
    assert run("small", shard_bytes=1 << 14) == run("one", shard_bytes=1 << 30) == alone
    assert run("w2", workers=2) == alone
    assert run("w3", workers=3, block_bytes=7000) == alone
    for i in range(3):
        assert run_build(corpus, output_prefix="parts", part=(i, 3), **plan).state == "part"
        assert not IndexedDataset.exists(tmp_path / "parts")
    assert run("parts", finish=True) == alone

    tokenizer = Tokenizer.from_file(str(bpe_json))
    eod = tokenizer.token_to_id("<|endoftext|>")
    dataset = IndexedDataset(tmp_path / "w1")
    theirs = peer("megatron.core.datasets.indexed_dataset").IndexedDataset(str(tmp_path / "w1"))
    assert len(dataset) == len(theirs) == len(source_texts)
    for i, (tokens, text) in enumerate(zip(dataset[:], source_texts, strict=True)):
        assert tokens.tolist() == [*tokenizer.encode(text, add_special_tokens=False).ids, eod]
        np.testing.assert_array_equal(theirs[i], tokens)


BOUNDARIES: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({}, [[97, 98], [99]]),
    ({"append_eod": True}, [[97, 98, 256], [99, 256]]),
    ({"prepend_bos": True}, [[257, 97, 98], [257, 99]]),
    ({"append_eod": True, "prepend_bos": True}, [[257, 97, 98, 256], [257, 99, 256]]),
    ({"append_eod": True, "eod_token": "<pad>"}, [[97, 98, 258], [99, 258]]),
]


def test_bos_and_eod_are_added(tmp_path: Path, run_build: Build) -> None:
    for options, documents in BOUNDARIES:
        run_build([{"text": "ab"}, {"text": "c"}], **options, overwrite=True)
        found = [tokens.tolist() for tokens in IndexedDataset(tmp_path / "out")[:]]
        assert found == documents, options


def test_word_limits_are_counted(tmp_path: Path, run_build: Build) -> None:
    records = [{"text": "w " * n} for n in (49, 50, 51, 100, 101)]
    result = run_build(records, min_words=50, max_words=100)
    assert result.totals.num_documents == 3
    assert result.totals.skipped == {"too few words": 1, "too many words": 1}
    assert result.totals.skipped_at["too many words"] == [f"{tmp_path}/x.jsonl:5"]


def test_loss_weights_stay_with_their_documents(tmp_path: Path, run_build: Build) -> None:
    """Also after dropped documents, and in each split; EOD has the last token's weight."""
    rows = [{"text": "a" * n, "w": [n / 8] * n} for n in range(1, 20)]
    rows = [{"text": "abc", "w": [1]}, *rows, {"text": "z"}]
    options = {"append_eod": True, "weights_key": "w"}
    for how in ({}, {"split": "60,40,0"}, {"split": "60,40,0", "split_by": "hash"}):
        result = run_build(rows, output_prefix=str(len(how)), on_error="skip", **options, **how)
        assert result.totals.skipped == {"unusable loss weights": 1}
        seen = 0
        for stream in ["_train", "_valid"] if how else [""]:
            dataset = IndexedDataset(result.prefixes[stream])
            weights = dataset.columns["weights"].rows
            each_weights = np.split(weights, dataset.document_offsets[1:-1])
            for tokens, own in zip(dataset[:], each_weights, strict=True):
                wanted = 1 if tokens[0] == ord("z") else (len(tokens) - 1) / 8
                assert own.tolist() == [wanted] * len(tokens)
                seen += 1
        assert seen == 20
    with pytest.raises(DataError, match=r"x.jsonl:1: unusable loss weights .there are 1 rows"):
        run_build(rows, **options)
    with pytest.raises(ConfigError, match="--weights-key is for text"):
        run_build(rows, **options, messages_key="m")
    # In a table without the column, all weights are 1.
    pq.write_table(pa.table({"text": ["ab", "c"]}), tmp_path / "x.parquet")
    result = run_build(tmp_path / "x.parquet", output_prefix="table", **options)
    assert IndexedDataset(result.prefixes[""]).columns["weights"].rows.tolist() == [1] * 5


HELLO = "hello <|eot_id|> world"


def test_special_tokens_in_texts_are_counted_or_encoded_as_text(
    run_build: Build, bpe_json: Path
) -> None:
    rows = [{"text": HELLO}, {"text": "plain"}, {"text": HELLO * 2}]
    found = run_build(rows, tokenizer=bpe_json, shard_bytes=30)
    assert found.totals.special_tokens_found == {"<|eot_id|>": 3}
    again = run_build(rows, tokenizer=bpe_json, shard_bytes=30)
    assert again.state == "complete"
    assert again.totals.special_tokens_found == {"<|eot_id|>": 3}
    with pytest.raises(ConfigError, match="special_tokens was 'ids', is 'text'"):
        run_build(rows, tokenizer=bpe_json, shard_bytes=30, special_tokens="text")
    text = run_build(rows, tokenizer=bpe_json, output_prefix="text", special_tokens="text")
    assert text.totals.special_tokens_found == {}
    assert text.totals.num_tokens > found.totals.num_tokens
    for more in ({"messages_key": "m"}, {"backend": "gigatoken"}):
        with pytest.raises(ConfigError, match="--special-tokens text is for plain text"):
            run_build(rows, tokenizer=bpe_json, special_tokens="text", **more)


@pytest.mark.parametrize(
    "option",
    [{"chat_loss": "turn"}, {"chat_format": "headers"}, {"tools_key": ""}],
)
def test_options_of_conversations_need_them(run_build: Build, option: dict[str, str]) -> None:
    name = "--" + next(iter(option)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{name} .*is for conversations: give --messages-key"):
        run_build([{"text": "a"}], tokenizer="bytes", **option)


def test_tokens_that_only_the_tokenizer_adds_are_reported(
    tmp_path: Path, run_build: Build, bpe_json: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(bpe_json))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|eot_id|> $A <|end_header_id|>",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("<|eot_id|>", "<|end_header_id|>")],
    )
    path, progress = tmp_path / "framing.json", Silence()
    tokenizer.save(str(path))
    run_build([{"text": "a"}], tokenizer=path, progress=progress)
    begins, ends = progress.notes
    assert "begins every text with <|eot_id|>; this build adds none: --prepend-bos" in begins
    assert "ends every text with <|end_header_id|>" in ends and "--append-eod" in ends
    progress = Silence()
    options = {"prepend_bos": True, "bos_token": "<|eot_id|>", "append_eod": True}
    options |= {"eod_token": "<|end_header_id|>", "output_prefix": "both"}
    run_build([{"text": "a"}], tokenizer=path, progress=progress, **options)
    assert not progress.notes


def test_library_failure_names_or_skips_the_document(
    tmp_path: Path, run_build: Build, bpe_json: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A panic of a Rust library is a BaseException, which `except Exception` misses, and it prints
    to stderr."""
    tree = json.loads(bpe_json.read_bytes())
    tree["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(x+x+)+y"
    path = tmp_path / "backtracking.json"
    path.write_text(json.dumps(tree))
    rows = [{"text": "fine"}, {"text": "x" * 40}, {"text": "fine, too"}]
    with pytest.raises(DataError, match=r"x\.jsonl:2: tokenizer failed .*retry-limit"):
        run_build(rows, tokenizer=path)
    result = run_build(rows, tokenizer=path, on_error="skip")
    assert result.totals.skipped == {"tokenizer failed": 1}
    assert result.totals.num_documents == 2
    workers = {"workers": 2, "shard_bytes": 20, "output_prefix": "parallel"}
    with pytest.raises(DataError, match=r"x\.jsonl:2: tokenizer failed .*retry-limit"):
        run_build(rows, tokenizer=path, **workers)
    assert "panic" not in capfd.readouterr().err


def test_other_output_to_stderr_stays(capfd: pytest.CaptureFixture[str]) -> None:
    panic = (
        b"\nthread '<unnamed>' (123) panicked at src/lib.rs:5:9:\nno\nmatch\n"
        b"note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n"
    )
    with without_panics():
        os.write(2, b"one\n" + panic + b"two\n" + panic)
    os.write(2, b"three\n")
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tree: tree["model"]["vocab"].update(zz=2**31 + 5),
            "token id 2147483653; ids must be in",
        ),
        (lambda tree: tree["model"]["merges"].append(["no", "where"]), "cannot be used: .*no"),
        (
            lambda tree: tree["pre_tokenizer"].update(pretokenizers=[{"type": "x"}]),
            "cannot be used",
        ),
    ],
)
def test_invalid_tokenizer_is_an_error_of_one_line(
    tmp_path: Path, run_build: Build, bpe_json: Path, change: Any, message: str
) -> None:
    tree = json.loads(bpe_json.read_bytes())
    change(tree)
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(FormatError, match=message) as raised:
        run_build([{"text": "a"}], tokenizer=path)
    assert "\n" not in str(raised.value)
    path.write_text("[" * 200_000)
    with pytest.raises(FormatError, match="RecursionError"):
        run_build([{"text": "a"}], tokenizer=path)


def test_tokenizer_that_aborts_or_never_returns_is_refused(
    bpe_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TokenizerFiles.open(str(bpe_json))
    monkeypatch.setattr(probe, "open_reference", lambda _: os.abort())
    with pytest.raises(FormatError, match="the process that ran it exited"):
        probe.require_runnable(files)
    monkeypatch.setattr(probe, "_TRIAL_SECONDS", 1)
    monkeypatch.setattr(probe, "open_reference", lambda _: sum(itertools.repeat(0)))
    with pytest.raises(FormatError, match="more than 1 s"):
        probe.require_runnable(files)


def test_empty_corpus_is_an_error(tmp_path: Path, run_build: Build) -> None:
    with pytest.raises(DataError, match=r"no documents .*3 x empty document"):
        run_build([{"text": ""}] * 3)
    with pytest.raises(DataError, match="no documents"):
        run_build([], output_prefix="other")
    assert not list(tmp_path.glob("o*.bin"))


def test_finished_build_is_found(tmp_path: Path, corpus: Path, run_build: Build) -> None:
    run_build(corpus)
    before = files_of(tmp_path / "out")
    again = run_build(corpus)
    assert again.state == "complete"
    assert again.totals.num_documents == len(IndexedDataset(tmp_path / "out"))
    assert run_build(corpus, shard_bytes=2000).state == "complete", "the documents are the same"
    with pytest.raises(ConfigError, match=r"eod was None, is \['<eod>', 256\]\n.*--overwrite"):
        run_build(corpus, append_eod=True)
    assert files_of(tmp_path / "out") == before
    assert run_build(corpus, append_eod=True, overwrite=True).state == "built"
    assert files_of(tmp_path / "out") != before


def test_finished_build_is_found_by_contents(
    tmp_path: Path, corpus: Path, run_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied, touched or renamed: the bytes decide."""
    run_build(corpus)
    os.utime(corpus, ns=(1, 1))
    assert run_build(corpus).state == "complete"
    monkeypatch.chdir(tmp_path)
    assert run_build(corpus.name).state == "complete"
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus.read_bytes())
    assert run_build(copy).state == "complete"
    changed = bytearray(corpus.read_bytes())
    changed[-5] ^= 1
    copy.write_bytes(changed)
    with pytest.raises(ConfigError, match=r"copy\.jsonl is new"):
        run_build(copy)


def test_finished_build_of_many_files_is_found_by_contents(
    tmp_path: Path, run_build: Build
) -> None:
    """More files than digests in one task: each is compared with its own."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(80):
        (folder / f"{i:02}.txt").write_text(f"document {i:02}")
    run_build(folder)
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    assert run_build(folder).state == "complete"
    (folder / "77.txt").write_text("Document 77")
    message = rf"it was built with a different plan:\n  input {folder}/77\.txt changed"
    with pytest.raises(ConfigError, match=message):
        run_build(folder)


def test_other_dataset_is_not_replaced(tmp_path: Path, corpus: Path, run_build: Build) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"out.{suffix}").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match=r"out\.bin exists already: .*--overwrite"):
        run_build(corpus)
    run_build(corpus, overwrite=True)
    assert len(IndexedDataset(tmp_path / "out"))


def test_stopped_build_resumes(tmp_path: Path, run_build: Build) -> None:
    records: list[Any] = [{"text": "x" * 500}] * 100
    corpus = write_jsonl(tmp_path / "x.jsonl", [*records, {"no": "text"}, *records])  # once: mtime
    with pytest.raises(DataError, match="missing key"):
        run_build(corpus, shard_bytes=5000)
    result = run_build(corpus, shard_bytes=5000, on_error="skip")
    assert result.num_shards_kept >= 5
    assert (result.totals.num_documents, result.totals.num_skipped) == (200, 1)
    meta = IndexedDataset(tmp_path / "out").meta
    assert meta is not None and "--on-error skip" in meta["command"]
    with pytest.raises(ConfigError, match="on_error was 'skip', is 'fail'"):
        run_build(corpus, shard_bytes=5000, on_error="fail")


# Half of a file, one flipped bit, a .bin that is missing or longer.
@pytest.mark.parametrize("damage", ["bin", "idx", "meta.json", "json", "gone", "longer"])
def test_only_damaged_shards_are_rebuilt(
    tmp_path: Path, corpus: Path, run_build: Build, damage: str
) -> None:
    options: dict[str, Any] = {"shard_bytes": 100_000, "keep_shards": True}
    result = run_build(corpus, **options)
    whole = files_of(tmp_path / "out")
    (tmp_path / "out.manifest.json").unlink()
    shard = tmp_path / "out.build" / result.plan.digest / "shard-000001"
    if damage == "gone":
        Path(f"{shard}.bin").unlink()
    elif damage == "longer":
        with Path(f"{shard}.bin").open("ab") as file:
            file.write(b"\0\0")
    else:
        path = Path(f"{shard}.{damage}")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage in ("bin", "idx") else data[: len(data) // 2])
    result = run_build(corpus, **options)
    assert result.num_shards_kept == result.num_shards - 1
    assert files_of(tmp_path / "out") == whole


class StopsWhileJoining(Silence):
    """Ctrl-C while shards are joined."""

    def join(self, done: int, total: int) -> None:
        super().join(done, total)
        if 2 * done > total:
            raise KeyboardInterrupt


@pytest.mark.parametrize("split", [None, "60,20,20"])
def test_join_that_deletes_shards_can_be_stopped(
    corpus: Path, run_build: Build, monkeypatch: pytest.MonkeyPatch, split: str | None
) -> None:
    options = {"shard_bytes": 50_000, "split": split}
    calm = run_build(corpus, output_prefix="calm", **options)
    monkeypatch.setattr("megapack.tokenization.pipeline.run.free_bytes", lambda path: 0)
    with pytest.raises(KeyboardInterrupt):
        run_build(corpus, progress=StopsWhileJoining(), **options)
    progress = Silence()
    again = run_build(corpus, progress=progress, **options)
    assert 0 < again.num_shards_kept < again.num_shards, "some had been given up"
    assert progress.joined[-1][0] == progress.joined[-1][1] == len(progress.joined)
    for stream, prefix in again.prefixes.items():
        assert files_of(prefix) == files_of(calm.prefixes[stream])


def test_documents_are_counted(corpus: Path, run_build: Build, source_texts: list[str]) -> None:
    for workers in (1, 2):
        progress, how = Silence(), {"shard_bytes": 1 << 17, "output_prefix": f"by-{workers}"}
        run_build(corpus, workers=workers, progress=progress, **how)
        assert sum(counted.documents for counted in progress.counted) == len(source_texts)


def test_verify_fraction_stops_at_a_difference(run_build: Build, sp_model: Path) -> None:
    records = [{"text": "harmless"}] * 50 + [{"text": "a control symbol <s> in the text"}]
    options = {"tokenizer": sp_model, "verify_fraction": 1.0}
    with pytest.raises(DataError, match=r"x\.jsonl:51, token .*--backend sentencepiece"):
        run_build(records, backend="gigatoken", **options)
    result = run_build(records, backend="auto", overwrite=True, **options)
    assert result.plan.backend == "gigatoken+sentencepiece"


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"workers": 0}, "workers is 0"),
    ({"verify_fraction": 2.0}, "must be at least 0 and at most 1"),
    ({"part": (3, 3)}, "part is 3/3"),
    ({"part": (0, 2), "finish": True}, "give one of them"),
    ({"output_prefix": "out\udcff"}, r"out\\xff is not UTF-8"),
    ({"messages_key": "m", "min_words": 5}, "--min-words"),
    ({"min_words": -3}, "min_words is -3; it must be at least 0"),
    ({"min_words": 50, "max_words": 10}, "--min-words 50 is above --max-words 10"),
    ({"split_key": "id"}, "--split-key needs"),
    ({"split": "1,x"}, "not a list of numbers"),
    ({"shard_bytes": 0}, "it must be at least 1"),
]


def test_contradicting_options_are_refused(corpus: Path, run_build: Build) -> None:
    for options, message in CONTRADICTIONS:
        with pytest.raises(ConfigError, match=message):
            run_build(corpus, **options)


def test_tiny_shards_are_reported(run_build: Build) -> None:
    progress = Silence()
    run_build([{"text": "x" * 6000}], shard_bytes=5, progress=progress)
    assert "--shard-bytes 5 makes about 1,202 shards" in progress.notes[0]


ROOT = Path(__file__).parents[3]
TOKENIZE = """
import sys
from megapack.cli.main import main
assert main(sys.argv[1:]) == 0
print(peak_bytes())
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (4, 40):
        text = "x = 1\n" * 5000  # 30 kB
        corpus = write_jsonl(tmp_path / f"{megabytes}.jsonl", [{"text": text}] * (33 * megabytes))
        how = ["--tokenizer", "bytes", "--shard-bytes", "1G", "--block-bytes", "1M"]
        how += ["--output-prefix", tmp_path / f"out{megabytes}"]
        done = ended(*PYTHON, PEAK_BYTES + TOKENIZE, "tokenize", "--input", corpus, *how, cwd=ROOT)
        peaks.append(int(done.stdout.split()[-1]) / 2**20)
    assert peaks[1] - peaks[0] < 25, f"MiB: {peaks}"


# ---- prefetch yields the same items, and ends with its consumer


def counting(closed: list[bool], fail_at: int = 1000) -> Generator[int, None, None]:
    try:
        for i in itertools.count():
            if i == fail_at:
                raise OSError("the disk")
            yield i
    finally:
        closed.append(True)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("megapack-prefetch")]


def test_prefetch_keeps_order_and_raises_at_the_end() -> None:
    closed: list[bool] = []
    seen = []
    with pytest.raises(OSError, match="the disk"):
        for item in prefetch(prefetch(counting(closed, fail_at=50))):
            seen.append(item)
    assert seen == list(range(50)) and closed and not threads()


def test_prefetch_ends_with_its_consumer() -> None:
    closed: list[bool] = []
    items = prefetch(counting(closed))
    assert next(items) == 0 and threads()
    items.close()
    assert closed and not threads()


def test_prefetch_in_a_garbage_cycle_ends() -> None:
    """A failed build: its traceback references the frames that reference the generator."""
    closed: list[bool] = []
    items = prefetch(counting(closed))
    next(items)
    cycle: list[object] = [items]
    cycle.append(cycle)
    del items, cycle
    gc.collect()
    assert closed and not threads()

"""A build carries its plan: what decides an id or a byte is in its digest; two plans never mix."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapack import IndexedDataset
from megapack.errors import ConfigError, MegapackError
from megapack.storage.files import WriterLock
from megapack.tokenization.pipeline.plan import Plan

from ..helpers import Build, Silence, WriteJsonl, files_of

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"


@pytest.fixture
def corpus(tmp_path: Path, write_jsonl: WriteJsonl) -> Path:
    texts = [f"document {i} " * 20 for i in range(100)]
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])


@pytest.fixture
def tokenizer(tmp_path: Path, bpe_json: Path) -> Path:
    """A tokenizer of its own, with a configuration and a chat template."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    shutil.copy(bpe_json, directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_parts_of_two_plans_never_join(tmp_path: Path, corpus: Path, run_build: Build) -> None:
    sharding: dict[str, Any] = {"shard_bytes": 4000}
    plain = run_build(corpus, part=(0, 2), **sharding)
    other = run_build(corpus, part=(1, 2), append_eod=True, **sharding)
    assert plain.plan.digest != other.plan.digest
    progress = Silence()
    with pytest.raises(MegapackError, match=r"shard 0 is not finished; .* of this plan \d+ of \d+"):
        run_build(corpus, finish=True, append_eod=True, progress=progress, **sharding)
    (said,) = progress.notes
    assert "KiB of another plan; --overwrite removes it" in said
    assert "eod was None, is ['<eod>', 256]" in said
    assert not IndexedDataset.exists(tmp_path / "out")
    run_build(corpus, part=(0, 2), append_eod=True, **sharding)
    run_build(corpus, finish=True, append_eod=True, **sharding)
    assert all(tokens[-1] == 256 for tokens in IndexedDataset(tmp_path / "out")[:])
    meta = IndexedDataset(tmp_path / "out").meta
    assert meta is not None and meta["document_end_token"] == 256


def test_a_changed_plan_is_another_build_and_says_what_the_first_left_behind(
    tmp_path: Path, corpus: Path, write_jsonl: WriteJsonl, run_build: Build
) -> None:
    run_build(corpus, part=(0, 2), shard_bytes=4000)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"shard_bytes": 2000}, "shard_bytes was 4000, is 2000"),
        ({"prepend_bos": True}, "bos was None, is ['<bos>', 257]"),
        ({"dtype": "int32"}, "dtype was 'uint16', is 'int32'"),
        ({"min_words": 3}, "min_words was None, is 3"),
        ({"max_document_bytes": 1 << 20, "block_bytes": 1 << 20}, "read: max_document_bytes was"),
    ]
    for options, difference in changes:
        progress = Silence()
        result = run_build(
            corpus, progress=progress, **{"shard_bytes": 4000, "keep_shards": True, **options}
        )
        assert (result.state, result.num_shards_kept) == ("built", 0)
        assert any(difference in note for note in progress.notes), progress.notes
        for suffix in ("bin", "idx", "meta.json", "manifest.json"):
            (tmp_path / f"out.{suffix}").unlink()
    assert len(list((tmp_path / "out.build").iterdir())) == 1 + len(changes)
    write_jsonl(corpus, [{"text": "other"}])
    progress = Silence()
    result = run_build(corpus, shard_bytes=4000, overwrite=True, progress=progress)
    assert (result.totals.num_documents, result.num_shards_kept) == (1, 0)
    assert not progress.notes and not (tmp_path / "out.build").exists(), "--overwrite removes all"


def test_rewritten_file_of_the_same_size_is_another_plan(corpus: Path, run_build: Build) -> None:
    run_build(corpus)
    facts = corpus.stat()
    corpus.write_text(corpus.read_text().replace("document", "DOCUMENT"))
    os.utime(corpus, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert corpus.stat().st_size == facts.st_size
    with pytest.raises(ConfigError, match=rf"input {re.escape(str(corpus))} changed"):
        run_build(corpus)


@pytest.mark.parametrize(("num_ids", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_ids_are_stored_as_megatron_will_read_them(
    tmp_path: Path, corpus: Path, run_build: Build, num_ids: int, dtype: str
) -> None:
    """Its readers take vocabularies below 65,500 as uint16, and all others as int32."""
    words = {"document": 0, **{f"w{number}": number for number in range(1, num_ids)}}
    tokenizer = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": words, "unk_token": "document"}
    tokenizer.write_text(json.dumps({"version": "1.0", "model": model}))
    run_build(corpus, tokenizer=str(tokenizer), backend="tokenizers")
    assert IndexedDataset(tmp_path / "out").dtype == dtype


def test_overwrite_removes_what_plans_left(tmp_path: Path, corpus: Path, run_build: Build) -> None:
    """One rule for every command: replaced is what differs."""
    run_build(corpus)
    before = (tmp_path / "out.bin").stat()
    left = tmp_path / "out.build" / "another"
    left.mkdir(parents=True)
    (left / "plan.json").write_text("{}")
    assert run_build(corpus, overwrite=True).state == "found"
    assert (tmp_path / "out.bin").stat() == before and not left.exists()
    (tmp_path / "out.manifest.json").write_text("damaged")
    assert run_build(corpus, overwrite=True).state == "built"
    (tmp_path / "out.bin").unlink()
    assert run_build(corpus, overwrite=True).state == "built", "half of a dataset is none"


def test_a_part_that_starts_over_leaves_the_other_parts(corpus: Path, run_build: Build) -> None:
    options: dict[str, Any] = {"shard_bytes": 4000}
    parts = [run_build(corpus, part=(i, 2), **options) for i in range(2)]
    again = run_build(corpus, part=(0, 2), overwrite=True, **options)
    assert (again.num_shards, again.num_shards_kept) == (parts[0].num_shards, 0)
    other = run_build(corpus, part=(1, 2), **options)
    assert other.num_shards_kept == other.num_shards == parts[1].num_shards
    assert run_build(corpus, finish=True, **options).state == "built"
    found = run_build(corpus, part=(0, 2), **options)
    assert found.state == "found", "all is done; a part has nothing to do"


def edit_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("[", "<"))


def edit_config(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))


def edit_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


EDITS = {
    "chat_template.jinja": edit_template,
    "tokenizer_config.json": edit_config,
    "tokenizer.json": edit_tokenizer,
}


@pytest.fixture
def chats(tmp_path: Path, write_jsonl: WriteJsonl) -> Path:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    return write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 20)


@pytest.mark.parametrize("name", EDITS)
def test_tokenizer_files_are_in(tokenizer: Path, chats: Path, run_build: Build, name: str) -> None:
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "messages_key": "messages"}
    assert run_build(chats, **options).state == "built"
    assert run_build(chats, **options).state == "found"
    EDITS[name](tokenizer)
    with pytest.raises(ConfigError, match=rf"tokenizer: files was .*{re.escape(name)}"):
        run_build(chats, **options)


def test_another_version_of_a_library_is_another_plan(
    corpus: Path, tokenizer: Path, run_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "backend": "tokenizers"}
    first = run_build(corpus, **options)
    assert run_build(corpus, **options).state == "found"
    before = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{before(name)}.post1")
    assert first.plan.libraries["tokenizers"] == before("tokenizers")
    with pytest.raises(ConfigError, match=r"libraries: tokenizers was '.*', is '.*\.post1'"):
        run_build(corpus, **options)


class Edits(Silence):
    """Changes the tokenizer when the plan is made and its workers are about to start."""

    def __init__(self, edit: Callable[[], None]) -> None:
        super().__init__()
        self.edit = edit

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        self.edit()


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", EDITS)
def test_a_worker_whose_machine_has_other_files_builds_nothing(
    tmp_path: Path, tokenizer: Path, chats: Path, run_build: Build, name: str
) -> None:
    progress = Edits(lambda: EDITS[name](tokenizer))
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "messages_key": "messages"}
    machine = re.escape(socket.gethostname())
    with pytest.raises(ConfigError, match=rf"{machine} would not give the ids .*{re.escape(name)}"):
        run_build(chats, workers=2, shard_bytes=1000, progress=progress, **options)
    assert not list(tmp_path.glob("out.build/*/shard-*")), "no shard was begun"


def test_shard_of_another_plan_is_rebuilt(tmp_path: Path, corpus: Path, run_build: Build) -> None:
    options: dict[str, Any] = {"shard_bytes": 4000, "keep_shards": True}
    plain = run_build(corpus, **options)
    other = run_build(corpus, **options, append_eod=True, output_prefix=str(tmp_path / "other"))
    shutil.copytree(
        tmp_path / "out.build" / plain.plan.digest,
        tmp_path / "other.build" / other.plan.digest,
        dirs_exist_ok=True,
    )
    before = files_of(tmp_path / "other")
    (tmp_path / "other.manifest.json").unlink()
    again = run_build(corpus, **options, append_eod=True, output_prefix=str(tmp_path / "other"))
    assert again.num_shards_kept == 0
    assert files_of(tmp_path / "other") == before


def test_manifest_is_plan(tmp_path: Path, corpus: Path, tokenizer: Path, run_build: Build) -> None:
    result = run_build(corpus, tokenizer=str(tokenizer), append_eod=True, split="90,10")
    assert not (tmp_path / "out.build").exists(), "the shards are gone when all is done"
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    tree = json.loads(json.dumps(result.plan.tree()))
    assert {key: manifest[key] for key in tree} == tree
    assert manifest["digest"] == result.plan.digest
    assert manifest["inputs"][0][:2] == [str(corpus), corpus.stat().st_size]
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert manifest["num_documents"] == len(texts) == 100
    assert manifest["num_text_bytes"] == sum(len(text.encode()) for text in texts)
    split = [IndexedDataset(tmp_path / f"out_{name}") for name in ("train", "valid")]
    assert manifest["num_tokens"] == sum(len(dataset.tokens) for dataset in split)
    for dataset in split:
        assert dataset.meta is not None and result.plan.eod is not None
        assert dataset.meta["plan"] == result.plan.digest
        assert dataset.meta["tokenizer"]["digest"] == result.plan.tokenizer.digest
        assert dataset.meta["document_end_token"] == result.plan.eod.id
        assert dataset.meta["command"].startswith("megapack-build tokenize --input ")
        assert "--append-eod" in dataset.meta["command"]


def test_equal_digests(tmp_path: Path, corpus: Path, tokenizer: Path, run_build: Build) -> None:
    def plan(name: str, **options: Any) -> Plan:
        options.setdefault("tokenizer", str(tokenizer))
        return run_build(corpus, output_prefix=str(tmp_path / name), **options).plan

    first = plan("a", shard_bytes=5000)
    moved = tmp_path / "elsewhere"
    shutil.copytree(tokenizer, moved)
    for name, options in {
        "b": {"block_bytes": 2000},
        "c": {"on_error": "skip"},
        "d": {"tokenizer": str(moved)},
        "e": {"worker_memory": 1 << 30, "keep_shards": True},
    }.items():
        assert plan(name, shard_bytes=5000, **options).digest == first.digest, options


def test_shards_in_work_are_not_removed(tmp_path: Path, corpus: Path, run_build: Build) -> None:
    options: dict[str, Any] = {"shard_bytes": 4000}
    result = run_build(corpus, keep_shards=True, **options)
    directory = tmp_path / "out.build" / result.plan.digest
    with WriterLock(tmp_path / "out.build", what="a test", shared=True):
        assert run_build(corpus, **options).state == "found"
        assert directory.exists()
    assert run_build(corpus, **options).state == "found"
    assert not directory.exists()


def test_incomplete_shards_no_use(
    tmp_path: Path, write_jsonl: WriteJsonl, run_build: Build
) -> None:
    records: list[Any] = [{"text": "x" * 500}] * 20
    corpus = write_jsonl(tmp_path / "x.jsonl", [*records, {"no": "text"}, *records])
    parts: dict[str, Any] = {"shard_bytes": 2000, "on_error": "skip"}
    run_build(corpus, part=(0, 1), **parts)
    with pytest.raises(ConfigError, match=r"built with --on-error skip .*1 x missing key"):
        run_build(corpus, finish=True, shard_bytes=2000)
    assert not IndexedDataset.exists(tmp_path / "out")

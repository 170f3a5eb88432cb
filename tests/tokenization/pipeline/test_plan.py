"""The plan's digest covers all that affects an id or a byte; shards of two plans never mix."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from peers import peer
from programs import ended

from megapack import IndexedDataset, executors
from megapack.errors import ConfigError, DataError, MegapackError
from megapack.executors import Counted, Report, run_shards
from megapack.storage.locks import WriterLock, make_own_folder
from megapack.tokenization.pipeline.plan import BuildConfig
from megapack.tokenization.pipeline.run import build, preview
from megapack.tokenization.pipeline.workspace import Totals, Workspace, directory_bytes

from ..helpers import Build, Silence, files_of, write_jsonl

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    records = [{"text": f"document {i} " * 20} for i in range(100)]
    return write_jsonl(tmp_path / "corpus.jsonl", records)


@pytest.fixture
def tokenizer(tmp_path: Path, bpe_json: Path) -> Path:
    """Make a tokenizer directory with a configuration and a chat template."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    shutil.copy(bpe_json, directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_parts_of_two_plans_never_join(tmp_path: Path, records: Path, run_build: Build) -> None:
    plain, progress = run_build(records, part=(0, 2), shard_bytes=4000), Silence()
    changed = {"append_eod": True, "shard_bytes": 4000}
    assert plain.plan.digest != run_build(records, part=(1, 2), **changed).plan.digest
    with pytest.raises(MegapackError, match=r"shard 0 is not finished, .* \d+ of \d+ are missing"):
        run_build(records, finish=True, progress=progress, **changed)
    (message,) = progress.notes
    assert "KiB of shards of another plan; --overwrite removes them" in message
    assert "eod was None, is ['<eod>', 256]" in message
    assert not IndexedDataset.exists(tmp_path / "out")
    run_build(records, part=(0, 2), **changed)
    run_build(records, finish=True, **changed)
    assert all(tokens[-1] == 256 for tokens in IndexedDataset(tmp_path / "out")[:])
    meta = IndexedDataset(tmp_path / "out").meta
    assert meta is not None and meta["document_end_token"] == 256


def test_changed_plan_is_another_build_and_reports_old_shards(
    tmp_path: Path, records: Path, run_build: Build
) -> None:
    run_build(records, part=(0, 2), shard_bytes=4000)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"shard_bytes": 2000}, "shard_bytes was 4000, is 2000"),
        ({"prepend_bos": True}, "bos was None, is ['<bos>', 257]"),
        ({"dtype": "int32"}, "dtype was 'uint16', is 'int32'"),
        ({"min_words": 3}, "min_words was None, is 3"),
        ({"max_document_bytes": 1 << 20, "block_bytes": 1 << 20}, "read: max_document_bytes was"),
    ]
    for options, difference in changes:
        progress = Silence()
        plan = {"shard_bytes": 4000, "keep_shards": True, **options}
        result = run_build(records, progress=progress, **plan)
        assert (result.state, result.num_shards_kept) == ("built", 0)
        assert any(difference in note for note in progress.notes), progress.notes
        for suffix in ("bin", "idx", "meta.json", "manifest.json"):
            (tmp_path / f"out.{suffix}").unlink()
    assert len(list((tmp_path / "out.build").glob("*/"))) == 1 + len(changes)
    write_jsonl(records, [{"text": "other"}])
    progress = Silence()
    result = run_build(records, shard_bytes=4000, overwrite=True, progress=progress)
    assert (result.totals.num_documents, result.num_shards_kept) == (1, 0)
    assert not progress.notes and not (tmp_path / "out.build").exists(), "--overwrite removes all"


@pytest.mark.parametrize(
    ("options", "uses_gigatoken"),
    [
        ({}, True),
        ({"messages_key": "messages", "chat_format": "headers"}, True),
        ({"messages_key": "messages"}, False),
        ({"weights_key": "weights"}, False),
        ({"columns": ("n=n",)}, False),
    ],
    ids=["text", "headers", "template", "weights", "columns"],
)
def test_builds_that_need_the_reference_import_no_gigatoken(
    options: dict[str, Any], uses_gigatoken: bool
) -> None:
    """Regression: a build of chats imported packages for .2 s that it did not use."""
    config = BuildConfig(inputs=("x",), tokenizer="bytes", output_prefix="out", **options)
    assert bool(config.packages) == uses_gigatoken


def test_rewritten_file_of_the_same_size_is_another_plan(records: Path, run_build: Build) -> None:
    run_build(records)
    facts = records.stat()
    records.write_text(records.read_text().replace("document", "DOCUMENT"))
    os.utime(records, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert records.stat().st_size == facts.st_size
    with pytest.raises(ConfigError, match=rf"input {re.escape(str(records))} changed"):
        run_build(records)


@pytest.mark.parametrize(("num_ids", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_dtype_of_ids_is_megatrons(
    tmp_path: Path, records: Path, run_build: Build, num_ids: int, dtype: str
) -> None:
    """Megatron's readers take vocabularies below 65,500 as uint16, all others as int32."""
    words = {"document": 0, **{f"w{number}": number for number in range(1, num_ids)}}
    tokenizer = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": words, "unk_token": "document"}
    tokenizer.write_text(json.dumps({"version": "1.0", "model": model}))
    run_build(records, tokenizer=tokenizer, backend="tokenizers")
    assert IndexedDataset(tmp_path / "out").dtype == dtype


def test_overwrite_removes_shards_of_other_plans(
    tmp_path: Path, records: Path, run_build: Build
) -> None:
    run_build(records)
    before = (tmp_path / "out.bin").stat()
    left = tmp_path / "out.build" / "another"
    make_own_folder(left.parent)
    left.mkdir()
    (left / "plan.json").write_text("{}")
    assert run_build(records, overwrite=True).state == "complete"
    assert (tmp_path / "out.bin").stat() == before and not left.exists()
    (tmp_path / "out.manifest.json").write_text("damaged")
    assert run_build(records, overwrite=True).state == "built"
    (tmp_path / "out.bin").unlink()
    assert run_build(records, overwrite=True).state == "built", "half of a dataset is none"


def test_overwrite_of_a_part_keeps_other_parts(records: Path, run_build: Build) -> None:
    options = {"shard_bytes": 4000}
    parts = [run_build(records, part=(i, 2), **options) for i in range(2)]
    again = run_build(records, part=(0, 2), overwrite=True, **options)
    assert (again.num_shards, again.num_shards_kept) == (parts[0].num_shards, 0)
    other = run_build(records, part=(1, 2), **options)
    assert other.num_shards_kept == other.num_shards == parts[1].num_shards
    assert run_build(records, finish=True, **options).state == "built"
    assert run_build(records, part=(0, 2), **options).state == "complete", "nothing to do"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    return write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 20)


def test_plan_covers_tokenizer_files(tokenizer: Path, chats: Path, run_build: Build) -> None:
    """All files of ``TokenizerFiles.identity`` are in the plan."""
    options = {"tokenizer": tokenizer, "messages_key": "messages"}
    assert run_build(chats, **options).state == "built"
    assert run_build(chats, **options).state == "complete"
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE.replace("[", "<"))
    with pytest.raises(ConfigError, match=r"tokenizer: files was .*chat_template\.jinja"):
        run_build(chats, **options)


def test_library_version_changes_the_plan(
    records: Path, tokenizer: Path, run_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tokenizer": tokenizer, "backend": "tokenizers"}
    first = run_build(records, **options)
    assert run_build(records, **options).state == "complete"
    before = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{before(name)}.post1")
    assert first.plan.libraries["tokenizers"] == before("tokenizers")
    with pytest.raises(ConfigError, match=r"libraries: tokenizers was '.*', is '.*\.post1'"):
        run_build(records, **options)


@pytest.mark.multiprocess
def test_machine_with_other_files_builds_nothing(
    tmp_path: Path, tokenizer: Path, chats: Path, run_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(*_: object) -> None:  # the plan is made, and its workers are about to start
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))

    monkeypatch.setattr(Silence, "start", edit)
    options = {"tokenizer": tokenizer, "messages_key": "messages"}
    machine = re.escape(socket.gethostname())
    with pytest.raises(ConfigError, match=rf"{machine} would not .*tokenizer_config\.json"):
        run_build(chats, workers=2, shard_bytes=1000, **options)
    assert not list(tmp_path.glob("out.build/*/shard-*")), "no shard was begun"


def test_shard_of_another_plan_is_rebuilt(tmp_path: Path, records: Path, run_build: Build) -> None:
    options = {"shard_bytes": 4000, "keep_shards": True}
    plain = run_build(records, **options)
    other = run_build(records, **options, append_eod=True, output_prefix="other")
    shards = tmp_path / "out.build" / plain.plan.digest
    theirs = tmp_path / "other.build" / other.plan.digest
    shutil.copytree(shards, theirs, dirs_exist_ok=True)
    before = files_of(tmp_path / "other")
    (tmp_path / "other.manifest.json").unlink()
    again = run_build(records, **options, append_eod=True, output_prefix="other")
    assert again.num_shards_kept == 0
    assert files_of(tmp_path / "other") == before


def test_manifest_contains_the_plan(
    tmp_path: Path, records: Path, tokenizer: Path, run_build: Build
) -> None:
    result = run_build(records, tokenizer=tokenizer, append_eod=True, split="90,10")
    assert not (tmp_path / "out.build").exists(), "the shards are gone when all is done"
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    tree = json.loads(json.dumps(result.plan.tree()))
    assert {key: manifest[key] for key in tree} == tree
    assert manifest["digest"] == result.plan.digest
    assert manifest["inputs"][0][:2] == [str(records), records.stat().st_size]
    texts = [json.loads(line)["text"] for line in records.read_text().splitlines()]
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


def test_equal_digests(tmp_path: Path, records: Path, tokenizer: Path, run_build: Build) -> None:
    def digest(name: str, **options: Any) -> str:
        options = {"tokenizer": tokenizer, "shard_bytes": 5000, **options}
        return run_build(records, output_prefix=name, **options).plan.digest

    first, moved = digest("a"), shutil.copytree(tokenizer, tmp_path / "elsewhere")
    for name, options in {
        "b": {"block_bytes": 2000},
        "c": {"on_error": "skip"},
        "d": {"tokenizer": moved},
        "e": {"worker_memory": 1 << 30, "keep_shards": True},
    }.items():
        assert digest(name, **options) == first, options


def test_dataset_that_appears_during_a_start_is_kept(
    tmp_path: Path, records: Path, run_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second build checked before the first one was done, and replaced its dataset."""
    finished = Workspace.finished

    def slow(workspace: Workspace) -> Totals | None:
        found = finished(workspace)
        monkeypatch.undo()
        run_build(records)
        return found

    for options in ({"append_eod": True}, {}):
        monkeypatch.setattr(Workspace, "finished", slow)
        if options:
            with pytest.raises(ConfigError, match=r"(?s)eod was None, .*--overwrite"):
                run_build(records, **options)
        else:
            assert run_build(records).state == "complete"
        assert IndexedDataset(tmp_path / "out")[0][-1] != 256
    assert directory_bytes(tmp_path / "out.build" / "gone meanwhile") == 0


@pytest.mark.parametrize("more", [{}, {"weights_key": "w"}, {"group_key": "g"}])
def test_estimate_includes_labels_weights_and_groups(tmp_path: Path, more: dict[str, Any]) -> None:
    rows = [{"text": "word " * (1 + i % 9), "w": [[0, 2, 0.5]], "g": i} for i in range(3000)]
    corpus = write_jsonl(tmp_path / "x.jsonl", rows)
    prefix = str(tmp_path / "out")
    config = BuildConfig(inputs=(str(corpus),), tokenizer="bytes", output_prefix=prefix, **more)
    progress = Silence()
    expected = preview(config, progress).estimate.num_bytes
    assert not progress.notes
    for name in more:
        preview(dataclasses.replace(config, **{name: "misspelled"}), progress)
        assert "no document of a sample has 'misspelled'; see --" in progress.notes[-1]
    build(config, Silence())
    paths = (path for end in ("bin", "idx", "col") for path in tmp_path.glob(f"*.{end}"))
    held = sum(path.stat().st_size for path in paths)
    assert expected == pytest.approx(held, rel=0.1)


def test_shards_in_progress_are_kept(tmp_path: Path, records: Path, run_build: Build) -> None:
    options = {"shard_bytes": 4000}
    result = run_build(records, keep_shards=True, **options)
    directory = tmp_path / "out.build" / result.plan.digest
    with WriterLock(tmp_path / "out.build", what="a test", shared=True):
        assert run_build(records, **options).state == "complete"
        assert directory.exists()
    assert run_build(records, **options).state == "complete"
    assert not directory.exists()


def test_shards_that_lack_documents_are_refused(tmp_path: Path, run_build: Build) -> None:
    texts = [{"text": "x" * 500}] * 20
    records = write_jsonl(tmp_path / "x.jsonl", [*texts, {"no": "text"}, *texts])
    run_build(records, part=(0, 1), shard_bytes=2000, on_error="skip")
    with pytest.raises(ConfigError, match=r"built with --on-error skip .*1 x missing key"):
        run_build(records, finish=True, shard_bytes=2000)
    assert not IndexedDataset.exists(tmp_path / "out")


# ---- One dataset from many machines: Slurm's array as plain processes, and a Ray cluster that
# loses a node in the middle


ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "launch" / "tokenize_slurm.sh"


@pytest.fixture
def alone(tmp_path: Path, corpus: Path, run_build: Build) -> tuple[bytes, bytes]:
    """Build the corpus on one machine."""
    run_build(corpus, append_eod=True, output_prefix="alone")
    return files_of(tmp_path / "alone")


SBATCH = """#!/bin/bash
# Stub of sbatch: runs a job at once, the tasks of an array in parallel; prints a job number.
tasks=
while [[ $1 == --* ]]; do
    case $1 in --array=0-*) tasks=${1#--array=0-} ;; esac
    echo "$1" >> "$SBATCH_LOG"
    shift
done
if [[ -n $tasks ]]; then
    for i in $(seq 0 "$tasks"); do
        SLURM_ARRAY_TASK_ID=$((5 + i)) SLURM_ARRAY_TASK_MIN=5 SLURM_CPUS_PER_TASK=1 \\
            SLURM_ARRAY_TASK_COUNT=$((tasks + 1)) "$@" > /dev/null &
    done
    wait
else
    "$@" > /dev/null
fi
echo $RANDOM
"""


@pytest.mark.multiprocess
def test_script_submits_an_array(tmp_path: Path, corpus: Path, alone: tuple[bytes, bytes]) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(SBATCH)
    (tools / "sbatch").chmod(0o755)
    build, log = f"{sys.executable} -m megapack.cli.main", tmp_path / "sbatch.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEGAPACK_BUILD": build}
    environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    environment |= {"SBATCH_LOG": str(log), "TASK_OPTIONS": "--mem=1G"}
    words = ["--input", corpus, "--tokenizer", "bytes", "--append-eod", "--shard-bytes", "30K"]
    words += ["--output-prefix", tmp_path / "out"]
    assert "2 tasks" in ended(SCRIPT, "2", *words, env=environment).stdout
    message = log.read_text().split()
    assert {"--array=0-1", "--mem=1G", "--kill-on-invalid-dep=yes"} <= set(message)
    assert any(option.startswith("--dependency=afterok:") for option in message)
    assert files_of(tmp_path / "out") == alone
    ended(SCRIPT, status=2, env=environment)  # which shows its usage


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Start a Ray node with one CPU; tests add and remove others."""
    ray, cluster_utils = peer("ray"), peer("ray.cluster_utils")
    # Workers must find megapack; processes of one machine need no authentication.
    settings = {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_raylet_start_wait_time_s": "300",  # a busy machine takes longer than 60
    }
    before = dict(os.environ)
    os.environ.update(settings)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


class KillsANode(Silence):
    """Removes a node as soon as two shards are done."""

    def __init__(self, cluster: Any, node: Any) -> None:
        super().__init__()
        self.cluster, self.node = cluster, node

    def advance(self, more: Counted) -> None:
        super().advance(more)
        if len(self.counted) == 2:
            self.cluster.remove_node(self.node, allow_graceful=False)


@pytest.mark.multiprocess
def test_ray_cluster_that_loses_a_node_makes_the_same_dataset(
    tmp_path: Path,
    cluster: Any,
    corpus: Path,
    alone: tuple[bytes, bytes],
    run_build: Build,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the error of a task is the error itself, also where paths are relative to a folder that
    the cluster was not started in, and where the command's machine has more cores than any node;
    one test, for clusters are slow to start."""
    write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}] * 50 + [{"no": "text"}])
    monkeypatch.chdir(tmp_path)
    relative: Any = {"inputs": ("x.jsonl",), "output_prefix": "bad", "tokenizer": "bytes"}
    on_ray: Any = {"executor": "ray", "shard_bytes": 200, "workers": 999}
    with pytest.raises(DataError, match=r"x\.jsonl:51: missing key") as caught:
        build(BuildConfig(**relative, **on_ray), Silence())
    assert "Traceback" not in str(caught.value)

    class Missing:
        threads = 1

        def build(self, index: int, report: Report) -> None:
            open("gone")  # noqa: PTH123,SIM115

    class Killed(Missing):
        def build(self, index: int, report: Report) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(FileNotFoundError, match=rf"'gone' \(on {socket.gethostname()}\)"):
        run_shards(Missing(), [0], lambda _: None, executor="ray")
    with (
        monkeypatch.context() as patch,
        pytest.raises(MegapackError, match="The task ran 1 times; "),
    ):
        patch.setattr(executors, "_RETRIES", 0)
        run_shards(Killed(), [0], lambda _: None, executor="ray")
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    progress = KillsANode(cluster, node)
    result = run_build(
        corpus, append_eod=True, executor="ray", shard_bytes=30_000, progress=progress
    )
    assert len(progress.counted) == result.num_shards > 10
    assert files_of(tmp_path / "out") == alone
    nodes = peer("ray").nodes
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and sum(n["Alive"] for n in nodes()) > 1:
        time.sleep(0.2)
    assert sum(n["Alive"] for n in nodes()) == 1, "the node was really gone"

"""A teacher's dump equals its outputs for every document alone, also after kills."""

from __future__ import annotations

import json
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapack.errors import ConfigError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training.model.loss import NO_TEACHER
from megapack.training.model.training_model import TrainingModel
from megapack.training.teacher import (
    Job,
    WindowPlan,
    build_parser,
    by_document,
    check_model,
    check_options,
)
from megapack.units import short

from .conftest import VOCAB, Corpus, write_documents
from .packing_helpers import tiny_model
from .processes import ROOT, Zygote

TEACHER = ROOT / "launch" / "teacher.py"
SIZES = ["--context", "64", "--overlap", "16", "--forward-tokens", "256", "--part-tokens", "1500"]
COLUMNS = ("teacher_ids", "teacher_logits")


# ---- The plan


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    context=st.integers(1, 20),
    overlap=st.integers(0, 19),
    room=st.integers(0, 30),
    part=st.integers(1, 60),
)
def test_every_token_is_predicted_once_from_enough_context(
    lengths: list[int], context: int, overlap: int, room: int, part: int
) -> None:
    overlap = min(overlap, context - 1)
    sizes = {"forward_tokens": context + room, "part_tokens": part}
    plan = WindowPlan.of(np.array(lengths, np.int32), context=context, overlap=overlap, **sizes)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    predicted = []
    windows = zip(plan.begins, plan.ends, plan.first_targets, strict=True)
    for begin, end, first in windows:
        document = int(np.searchsorted(starts, begin, side="right")) - 1
        assert starts[document] <= begin < end < starts[document + 1] and end - begin <= context
        assert begin < first <= end
        assert first - begin >= min(overlap + 1, first - starts[document])
        predicted.extend(range(first, end + 1))
    firsts = {int(at) for at, n in zip(starts, lengths, strict=False) if n}
    assert predicted == [i for i in range(sum(lengths)) if i not in firsts]
    # Forwards and parts are consecutive, within their limits, and as large as possible.
    tokens = (plan.ends - plan.begins).tolist()
    for a, b in zip(plan.forwards, plan.forwards[1:], strict=False):
        assert sum(tokens[a:b]) <= context + room < sum(tokens[a : b + 1]) or b == len(tokens)
    assert plan.forwards[0] == plan.parts[0] == plan.rows[0] == 0
    assert plan.rows[-1] == sum(lengths) and (np.diff(plan.rows) >= 0).all()
    for p in range(len(plan.parts) - 1):
        inside = plan.forwards[plan.parts[p]], plan.forwards[plan.parts[p + 1]]
        rows = [*plan.first_targets[slice(*inside)], *plan.ends[slice(*inside)]]
        assert all(plan.rows[p] <= row < plan.rows[p + 1] for row in rows)


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_rows_in_parts_are_cut_into_documents(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    parts = np.split(np.arange(total), cuts)
    expected = np.split(np.arange(total), np.cumsum(lengths)[:-1]) if lengths else []
    for rows, wanted in zip(by_document(parts, lengths), expected, strict=True):
        assert rows.tolist() == wanted.tolist()


# ---- The dump


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is sure enough to have an order of tokens."""
    model = tiny_model("llama_tiny", seed=3, vocab_size=VOCAB + 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    path = tmp_path_factory.mktemp("teacher") / "model"
    model.save(path)
    return path


def _words(teacher: Path, prefix: Path, *more: str) -> list[str]:
    words = ["--model", str(teacher), "--data", str(prefix), "--top-k", "8"]
    return [*words, "--dtype", "float32", *SIZES, *more]


@pytest.fixture
def prefix(corpus: Corpus, tmp_path: Path) -> Path:
    """A copy of the training documents, without columns."""
    for path in corpus.directory.glob("train.*"):
        if path.suffix in (".bin", ".idx", ".json"):
            shutil.copy(path, tmp_path / path.name)
    return tmp_path / "train"


def _contents(prefix: Path) -> dict[str, bytes]:
    files = [*(f".{name}.col" for name in COLUMNS), ".meta.json"]
    return {name: Path(f"{prefix}{name}").read_bytes() for name in files}


@pytest.fixture(scope="module")
def whole(
    corpus: Corpus, teacher: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The training documents with the columns of an undisturbed dump by one rank."""
    folder = tmp_path_factory.mktemp("whole")
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(f"{corpus.train}{suffix}", folder / f"train{suffix}")
    argv = [str(TEACHER), *_words(teacher, folder / "train")]
    output = zygote.start(argv, 1, folder / "log").succeed()
    assert "teacher_ids (int32 [8]) and teacher_logits (float32 [8]) for" in output
    assert not list(folder.glob("*.teacher-*")), "the parts are removed"
    return folder / "train"


def _by_definition(model: TrainingModel, tokens: Any) -> torch.Tensor:
    """Return log-probabilities of all ids for every token but the first, window by window."""
    context, overlap = 64, 16
    results: list[torch.Tensor] = []
    begin = 0
    while len(results) < len(tokens) - 1:
        window = torch.tensor(tokens[begin : begin + context].astype(np.int64))
        logits = model.model(input_ids=window[None], use_cache=False).logits[0, :, :VOCAB]
        known = len(results) - begin
        results.extend(logits.float().log_softmax(1)[known : len(tokens) - 1 - begin])
        begin += context - overlap
    return torch.stack(results)


def test_rows_are_the_outputs_of_documents_alone(whole: Path, teacher: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager")
    dataset = IndexedDataset(whole)
    ids, logits = (dataset.columns[name] for name in COLUMNS)
    assert (ids.spec.of, logits.spec.of) == ("target", "target")
    assert (ids.spec.shape, logits.spec.dtype, logits.spec.fill) == ((8,), "float32", NO_TEACHER)
    longest = int(dataset.document_lengths.argmax())
    assert dataset.document_lengths[longest] > 2 * 64, "several windows"
    for document in [*range(20), longest]:
        begin, end = dataset.document_offsets[document : document + 2].tolist()
        assert not ids.rows[begin].any() and (logits.rows[begin] == NO_TEACHER).all()
        with torch.no_grad():
            expected = _by_definition(TrainingModel(model, chunk_tokens=8), dataset[document])
        values = torch.tensor(logits.rows[begin + 1 : end])
        chosen = torch.tensor(ids.rows[begin + 1 : end].astype(np.int64))
        torch.testing.assert_close(values, expected.topk(8)[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, expected.gather(1, chosen), rtol=1e-4, atol=1e-4)
        assert (chosen < VOCAB).all(), "ids of the tokenizer only"
    facts = json.loads(Path(f"{whole}.meta.json").read_text())["teacher"]
    assert facts["model"] == "model" and (facts["context"], facts["overlap"]) == (64, 16)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_dump_continues_with_the_same_bytes(
    prefix: Path, whole: Path, teacher: Path, zygote: Zygote, ranks: int
) -> None:
    argv, log = [str(TEACHER), *_words(teacher, prefix)], prefix.with_name("log")
    faults = {"faults": {"kill_in_part": [5]}}
    codes = zygote.start(argv, ranks, log, {rank: faults for rank in range(ranks)}).wait()
    assert -signal.SIGKILL in codes
    (folder,) = prefix.parent.glob("train.teacher-*/")
    done = sorted(path.name for path in folder.glob("0*"))
    assert 0 < len(done) < 16
    before = {name: (folder / name).stat().st_mtime_ns for name in done}
    # Killed again, between the two columns.
    faults = {"faults": {"kill_between_columns": []}}
    codes = zygote.start(argv, 1, log, {0: faults}).wait()
    assert codes == [-signal.SIGKILL]
    assert {name: (folder / name).stat().st_mtime_ns for name in done} == before
    assert list(IndexedDataset(prefix).columns) == ["teacher_ids"]
    zygote.start(argv, ranks, log).succeed()
    assert _contents(prefix) == _contents(whole)
    assert not folder.exists()


def test_a_dataset_without_meta_file_is_continued(
    prefix: Path, teacher: Path, zygote: Zygote
) -> None:
    """The first column writes the meta file, which does not change the job."""
    Path(f"{prefix}.meta.json").unlink()
    argv, log = [str(TEACHER), *_words(teacher, prefix)], prefix.with_name("log")
    faults = {"faults": {"kill_between_columns": []}}
    assert zygote.start(argv, 1, log, {0: faults}).wait() == [-signal.SIGKILL]
    zygote.start(argv, 1, log).succeed()
    assert sorted(IndexedDataset(prefix).columns) == sorted(COLUMNS)


def test_other_settings_do_not_use_the_parts(prefix: Path, teacher: Path, zygote: Zygote) -> None:
    log = prefix.with_name("log")
    faults = {"faults": {"kill_in_part": [2]}}
    zygote.start([str(TEACHER), *_words(teacher, prefix)], 1, log, {0: faults}).wait()
    argv = [str(TEACHER), *_words(teacher, prefix, "--top-k", "5")]
    zygote.start(argv, 1, log, {0: faults}).wait()
    folders = sorted(prefix.parent.glob("train.teacher-*/"))
    assert len(folders) == 2
    stored = {json.loads((f / "job.json").read_text())["top_k"] for f in folders}
    assert stored == {5, 8}
    (damaged,) = (f for f in folders if '"top_k": 5' in (f / "job.json").read_text())
    content = bytearray((damaged / "00000000").read_bytes())
    content[100] ^= 1
    (damaged / "00000000").write_bytes(content)
    zygote.start(argv, 1, log).end_with(1, "00000000 is damaged; remove it and start the command")
    (damaged / "00000000").unlink()
    zygote.start(argv, 1, log).succeed("teacher_ids (int32 [5])")


# ---- Errors come before the work


def _args(*words: str) -> Any:
    return build_parser().parse_args(list(words))


def test_wrong_options_are_refused(teacher: Path, whole: Path, tmp_path: Path) -> None:
    cases = [
        (["--overlap", "64"], "--overlap is 64; it must be"),
        (["--forward-tokens", "63"], "--forward-tokens is 63 and --context 64"),
        (["--top-k", "0"], "--top-k is 0"),
        (["--ids", "teacher_logits"], "are both 'teacher_logits'"),
        (["--ids", "tokens"], "column name 'tokens' is a name of megapack's batches"),
        (["--data", "s3://bucket/x"], "s3://bucket/x is in an object store"),
        (["--model", str(tmp_path)], "has no config.json"),
    ]
    for words, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_options(_args(*_words(teacher, whole, *words)))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"is a run; export its model \(megapack-export"):
        check_options(_args(*_words(tmp_path, whole)))


def test_a_teacher_that_does_not_fit_is_refused(teacher: Path, tmp_path: Path) -> None:
    from megapack.training.config import ModelConfig  # noqa: PLC0415

    with IndexedDatasetBuilder(tmp_path / "wide", np.int32, vocab_size=500) as builder:
        builder.add_document([1, 2, 499])
    config = ModelConfig(pretrained=str(teacher))
    with pytest.raises(ConfigError, match="the vocabulary has 128 tokens, the dataset 500"):
        check_model(config, [IndexedDataset(tmp_path / "wide")], _args(*_words(teacher, tmp_path)))
    with IndexedDatasetBuilder(tmp_path / "unknown", np.int32) as builder:
        builder.add_document([1, 2, 499])
    (tmp_path / "unknown.meta.json").unlink()
    with pytest.raises(ConfigError, match=r"has token id 499, and .* has ids below 128"):
        unknown = IndexedDataset(tmp_path / "unknown")
        check_model(config, [unknown], _args(*_words(teacher, tmp_path)))
    dataset = write_documents(tmp_path / "documents", 5, seed=1)
    args = _args(*_words(teacher, tmp_path / "documents", "--top-k", "65"))
    with pytest.raises(ConfigError, match=r"--top-k is 65; .* has 64 token ids"):
        check_model(config, [dataset], args)
    with IndexedDatasetBuilder(tmp_path / "long", np.int32, vocab_size=VOCAB) as builder:
        builder.add_document([1] * 70_000)
    args = _args(*_words(teacher, tmp_path / "long", "--context", "65000"))
    with pytest.raises(ConfigError, match="--context is 65000, and max_position_embeddings of"):
        check_model(config, [IndexedDataset(tmp_path / "long")], args)


def test_existing_columns_are_kept(whole: Path, teacher: Path, zygote: Zygote) -> None:
    before = _contents(whole)
    argv = [str(TEACHER), *_words(teacher, whole, "--top-k", "4")]
    log = whole.with_name("again")
    zygote.start(argv, 2, log).end_with(2, "has a column teacher_ids already; give other names")
    assert _contents(whole) == before
    assert not list(whole.parent.glob("*.teacher-*"))


def test_columns_are_replaced_on_request(prefix: Path, teacher: Path, zygote: Zygote) -> None:
    other = prefix.with_name("other")
    write_documents(other, 9, seed=1)
    for k in ("4", "3"):
        words = _words(teacher, prefix, str(other), "--top-k", k, "--overwrite")
        words.insert(4, words.pop(words.index(str(other))))
        zygote.start([str(TEACHER), *words], 1, prefix.with_name("log")).succeed()
    for one in (prefix, other):
        assert IndexedDataset(one).columns["teacher_ids"].spec.shape == (3,)


def test_progress_counts_all_ranks(
    prefix: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job.of(IndexedDataset(prefix), _args(*_words(teacher, prefix)))
    at_start, missing = list(job.parts), list(job.parts)[4:]
    job.show(at_start, missing, 2.0)
    done = int(job.plan.rows[4])
    speed, left = done / 2, timedelta(seconds=round((job.dataset.num_tokens - done) / done * 2))
    expected = f"{short(done)} of 23.8 k tokens, {speed:,.0f} tok/s, {left} left\n"
    assert capsys.readouterr().err == f"{prefix}: {expected}"

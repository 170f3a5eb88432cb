"""A resume compares every key that determines a run, new keys by default."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from megapack.config import load_config, to_dict
from megapack.data.resume import check_record, flatten, is_within, tokenizer_digest
from megapack.errors import ConfigError, FormatError, ResumeError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder, metadata
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from megapack.training import trainer as trainer_module
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import Resume
from megapack.training.engine.directory import CheckpointManifest
from megapack.training.engine.inputs import (
    NO_EFFECT,
    Inputs,
    check_run,
    run_record,
    verify_samples,
)
from megapack.training.engine.world import World
from megapack.training.start import find_start, with_decisions
from megapack.training.trainer import Trainer
from tests.integrations.harness import run_ranks

from .conftest import Corpus


@pytest.fixture(scope="module")
def path(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.config(tmp_path_factory.mktemp("record") / "run")


def _opened(path: Path, *overrides: str) -> tuple[PretrainConfig, Any, dict[str, Any]]:
    config = load_config(PretrainConfig, path, overrides)
    inputs = Inputs(config)
    architecture = check_run(config, inputs, 1)
    return config, inputs, run_record(config, inputs, architecture, attention="sdpa")


def _checkpoint(path: Path) -> Resume:
    _, inputs, record = _opened(path)
    state = {"data": inputs.schedule.state_dict(3), "run": record, "lr": 0.003}
    manifest = CheckpointManifest(step=3, world_size=1, zero_stage=1, state=state, files={})
    return Resume(tag="step_00000003_tokens_3072", manifest=manifest, universal=False)


@pytest.fixture(scope="module")
def found(path: Path) -> Resume:
    """Return a checkpoint of the unchanged run."""
    return _checkpoint(path)


def _resumed(path: Path, found: Resume, *overrides: str) -> None:
    config, inputs, record = _opened(path, *overrides)
    find_start(config, inputs, found, record)


def _others(value: Any) -> Iterator[Any]:
    """Return other values of a key, as in JSON."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, None)
    elif isinstance(value, str):
        yield f"{value}x"
    elif isinstance(value, list):
        yield [*value, 1]
    elif value is None:
        yield from (1, "x", False)
    else:
        yield {"other": 1}


def test_every_key_of_the_configuration_is_compared_or_listed(path: Path) -> None:
    config, _, record = _opened(path)
    keys = flatten(to_dict(config))

    def is_listed(key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in NO_EFFECT)

    assert {key for key in keys if not is_listed(key)} <= record.keys()
    for name in NO_EFFECT:  # each exists
        assert any(key == name or key.startswith(f"{name}.") for key in keys), name
    changes = [(key, other) for key, value in record.items() for other in _others(value)]
    changes = [(key, other) for key, other in changes if key != "data.content"]
    assert len(changes) >= 60
    for key, other in [*changes, ("engine.deepspeed.new", 1), ("mixing.options.smoothing", 0.5)]:
        with pytest.raises(ResumeError) as error:
            check_record(record | {key: other}, record)
        assert f"{key} was {record.get(key)!r:.200} and is {other!r}" in str(error.value)
        assert f"checkpoint.allow_change=[{key}]" in str(error.value), "the remedy works at once"
        [change] = check_record(record | {key: other}, record, [key])
        assert change.startswith(key)
    assert check_record(record, record) == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=5", "seed was 0 and is 5"),
        ("data.tokens_per_step=2048", "tokens_per_step was 1024 and is 2048"),
        ("data.order=uniform", "order was "),
        ("data.loss=sequence_mean", "loss was None and is 'sequence_mean'"),
        ("data.attention=sample", "data.attention was 'document' and is 'sample'"),
        ("data.label_boundary=sample", "data.label_boundary was 'document' and is 'sample'"),
        ("data.positions=sample", "data.positions was 'segment' and is 'sample'"),
        ("model.overrides={hidden_act: gelu}", "model.hidden_act was 'silu' and is 'gelu'"),
        ("model.overrides={num_key_value_heads: 1}", "model.num_key_value_heads was "),
        ("model.overrides={rms_norm_eps: 0.01}", "model.rms_norm_eps was "),
        ("model.overrides={rope_theta: 123}", "rope_theta was "),
        ("model.overrides={tie_word_embeddings: false}", "model.tie_word_embeddings was True"),
        ("model.z_loss=0.001", "model.z_loss was 0.0 and is 0.001"),
        ("engine.precision=bf16", "engine.precision was 'fp32' and is 'bf16'"),
        ("optimizer.weight_decay=1", "optimizer.weight_decay was 0.1 and is 1.0"),
        ("learning_rate.kind=wsd", "learning_rate.kind was 'cosine' and is 'wsd'"),
    ],
)
def test_changed_run_is_not_resumed(override: str, named: str, path: Path, found: Resume) -> None:
    with pytest.raises(ResumeError) as error:
        _resumed(path, found, override)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "override",
    ["logging.every=1", "engine.zero_stage=2", "checkpoint.keep=9", "data.micro_batch_tokens=128"],
)
def test_keys_without_effect_may_change(override: str, path: Path, found: Resume) -> None:
    _resumed(path, found, override)


def test_checkpoint_without_record_is_resumed_on_request_only(found: Resume) -> None:
    record = found.manifest.state["run"]
    with pytest.raises(ResumeError, match=r"no record of the run .* set .*=\[run\]"):
        check_record(record, None)
    [change] = check_record(record, None, ["run"])
    assert "nothing else was compared" in change


def test_jump_of_the_learning_rate_is_reported(
    path: Path, found: Resume, caplog: pytest.LogCaptureFixture
) -> None:
    found.manifest.state["lr"] = 0.00123
    _resumed(path, found, "num_steps=20")
    assert (
        "the learning rate of step 3 is " in caplog.text and "would have had 0.00123" in caplog.text
    )


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to every value of nested mappings and lists."""
    items = enumerate(tree) if isinstance(tree, list) else ()
    for key, value in tree.items() if isinstance(tree, dict) else items:
        yield (*place, key)
        yield from _places(value, (*place, key))


def test_damaged_manifests_are_refused_in_one_line(
    path: Path, found: Resume, tmp_path: Path
) -> None:
    """Accepted damage is found when the weights are loaded, which contain the same state."""
    folder = tmp_path / found.tag
    folder.mkdir()
    config, inputs, record = _opened(path)
    found.manifest.write(folder)
    whole = (folder / "manifest.json").read_text()
    refused = 0
    places = [place for place in _places(json.loads(whole)) if place[0] != "files"]
    for place, value in itertools.product(places, (None, "x", [1], {"x": 1}, "gone")):
        tree = json.loads(whole)
        *parents, last = place
        node = functools.reduce(operator.getitem, parents, tree)
        node[last] = value
        if value == "gone":
            del node[last]
        (folder / "manifest.json").write_text(json.dumps(tree))
        try:
            damaged = Resume(
                tag=found.tag, manifest=CheckpointManifest.read(folder), universal=False
            )
            find_start(config, with_decisions(config, inputs, None, damaged), damaged, record)
        except (ResumeError, ConfigError) as error:
            refused += 1
            assert "\n" not in str(error) and str(error), place
    assert refused > 3.5 * len(places) > 300


@pytest.mark.parametrize("with_meta", [True, False])
def test_other_bytes_of_the_same_lengths_are_refused(
    corpus: Corpus, with_meta: bool, tmp_path: Path
) -> None:
    for file in corpus.directory.glob("*"):
        if file.is_file() and (with_meta or not file.name.endswith(".meta.json")):
            shutil.copy(file, tmp_path)
    path = Corpus(tmp_path).config(
        tmp_path / "run", model={"preset": "llama_tiny", "vocab_size": 64}
    )
    _, _, record = _opened(path)
    tokens = np.fromfile(tmp_path / "train.bin", np.uint16)
    tokens[len(tokens) // 2] ^= 1
    other = tmp_path / "other.bin"
    tokens.tofile(other)
    other.rename(tmp_path / "train.bin")
    with pytest.raises(ResumeError, match=r"data.content was .* and is "):
        check_record(_opened(path)[2], record)
    assert check_record(_opened(path)[2], record, ["data.content"])


class _Alone(World):
    """The only process of a run, without a process group."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def _trainer(path: Path) -> tuple[Any, PretrainConfig]:
    """Return what ``Trainer.check_files`` needs of a trainer, and its configuration."""
    config, inputs, record = _opened(path)
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.inputs, trainer.record = config, inputs, record
    trainer.decisions, trainer.stamps = None, inputs.file_stamps()
    return trainer, config


def _check_on_ranks(rank: int, size: int, path: Path, target: Path) -> tuple[list[str], str]:
    """Change a byte between sampled blocks; return the files that this rank read, and the error.
    Ranks 0 and 1 are on one host, rank 2 on another."""
    metadata.SAMPLED_BYTES = 2
    read: list[str] = []
    stock = trainer_module.verify_files

    def verify_files(inputs: Inputs) -> None:
        read.append(inputs.data.datasets[0].prefix)
        stock(inputs)

    trainer_module.verify_files = verify_files
    trainer, _ = _trainer(path)
    here = {"rank": rank, "size": size, "local_rank": rank, "device": torch.device("cpu")}
    trainer.world = World(**here, host=f"host{rank // 2}")
    trainer.check_files()
    if rank == 0:
        with target.open("r+b") as file:
            file.seek(16)
            byte = file.read(1)[0]
            file.seek(16)
            file.write(bytes([byte ^ 1]))
    trainer.world.gather(None)
    try:
        trainer.check_files()
    except ResumeError as error:
        return read, str(error)
    return read, ""


@pytest.mark.multiprocess
def test_one_rank_of_each_host_reads_changed_files_and_all_ranks_fail(
    corpus: Corpus, tmp_path: Path, free_port: int
) -> None:
    for file in corpus.directory.glob("train*"):
        shutil.copy(file, tmp_path)
    path = Corpus(tmp_path).config(tmp_path / "run", data={"valid_prefix": str(corpus.valid)})
    answers = run_ranks(_check_on_ranks, 3, free_port, path, tmp_path / "train.bin")
    assert [len(read) for read, _ in answers] == [1, 0, 1]
    for _, error in answers:
        assert "the data changed while the run was reading them" in error
        assert "train.bin does not have the checksum" in error


def test_first_start_compares_tokens_with_their_meta_file(corpus: Corpus, tmp_path: Path) -> None:
    for file in corpus.directory.glob("train*"):
        shutil.copy(file, tmp_path)
    path = Corpus(tmp_path).config(tmp_path / "run", data={"valid_prefix": str(corpus.valid)})
    world = _Alone(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host="here")
    documents = IndexedDataset(tmp_path / "train")
    add_column(documents.prefix, "weights", np.ones(documents.num_tokens), INTERPRETED["weights"])
    verify_samples(_opened(path)[1], world)
    column = tmp_path / "train.weights.col"
    whole = column.read_bytes()
    column.write_bytes(bytes(4) + whole[4:])
    with pytest.raises(
        FormatError, match=r"data: .*train\.weights\.col does not have the checksum"
    ):
        verify_samples(_opened(path)[1], world)
    column.write_bytes(whole)
    target = tmp_path / "train.bin"
    tokens = np.fromfile(target, np.uint16)
    tokens[len(tokens) // 3] ^= 1
    tokens.tofile(target)
    with pytest.raises(FormatError, match=r"data: .*train\.bin does not have the checksum of its"):
        verify_samples(_opened(path)[1], world)
    (tmp_path / "train.meta.json").unlink()  # the remedy
    column.unlink()  # of the meta file
    verify_samples(_opened(path, "model.vocab_size=64")[1], world)


@pytest.mark.parametrize("change", ["rename", "in place", "one byte", "samples", "touch"])
def test_running_run_detects_changed_files(
    change: str, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "SAMPLED_BYTES", 2)  # the file is far below 1 MiB
    for file in corpus.directory.glob("train*"):
        shutil.copy(file, tmp_path)
    data = {"valid_prefix": str(corpus.valid)}
    path = Corpus(tmp_path).config(tmp_path / "run", data=data)
    trainer, config = _trainer(path)
    alone = _Alone(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host="here")
    trainer.world = alone
    trainer.check_files()
    target = tmp_path / "train.bin"
    tokens = np.fromfile(target, np.uint16)
    tokens[::7] ^= 1
    if change == "rename":
        tokens.tofile(tmp_path / "new.bin")
        (tmp_path / "new.bin").rename(target)
    elif change == "in place":
        with target.open("r+b") as file:
            file.write(tokens.tobytes())
    elif change == "one byte":  # between sampled blocks
        with target.open("r+b") as file:
            file.seek(16)
            byte = file.read(1)[0]
            file.seek(16)
            file.write(bytes([byte ^ 1]))
    elif change == "samples":
        lengths = IndexedDataset(tmp_path / "train").document_lengths
        pack(lengths, "bucket", buckets=[64, 128]).save(tmp_path / "train.samples", overwrite=True)
    else:
        target.touch()
        return trainer.check_files()
    for fresh in ((), (Inputs(config),)):
        with pytest.raises(ResumeError, match=r"the data changed while the run .*train\."):
            trainer.check_files(*fresh)


def test_tokenizer_digests_differ() -> None:
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    def digest(vocab: dict[str, int], **special: str) -> str:
        inner = Tokenizer(models.WordLevel(vocab, unk_token="a"))
        return tokenizer_digest(PreTrainedTokenizerFast(tokenizer_object=inner, **special))

    digests = [digest({"a": 0, "b": 1}), digest({"a": 1, "b": 0})]
    digests.append(digest({"a": 0, "b": 1}, eos_token="b"))
    assert len(set(digests)) == 3 and digests[0] == digest({"a": 0, "b": 1})


# ---- Single changes before a resume: refused by key with both values, or without effect ----------
# The changed values come from the types of the fields. Fields that need a particular one:
_VALUES: dict[str, Any] = {
    "seed": 5, "num_steps": 9, "stop_at": 7, "model.overrides": {"hidden_act": "gelu"},
    "model.vocab_size": 256, "model.vocab_multiple": 256, "model.attention_backend": "segmentwise",
    "data.tokens_per_step": 2048, "data.order": "uniform", "data.row_tokens": 256,
    "data.cost_window": 2, "data.micro_batch_tokens": 128, "data.pad_last": True,
    "optimizer.betas": [0.9, 0.99], "optimizer.ema_decay": 0.9, "learning_rate.warmup_steps": 3,
    "checkpoint.every": 4, "checkpoint.keep_every": 6, "checkpoint.keep_steps": [6],
    "evaluation.every": 4, "evaluation.max_tokens": 512, "evaluation.buckets": [64],
    "engine.zero_stage": 2, "engine.mlp_chunk_tokens": 64,
    "engine.deepspeed": {"gradient_predivide_factor": 2.0},
}  # fmt: skip
# These name another run or other files, need two sources or ranks, or exclude other settings.
_NOT_TRIED = {
    "run_dir", "num_epochs", "model.preset", "model.pretrained", "model.config", "data.blend",
    "data.prefix", "data.index", "data.valid_prefix", "data.valid_index", "data.num_cycles",
    "data.mix", "data.micro_step_tokens", "data.attention", "checkpoint.branch_from",
    "checkpoint.mirror", "checkpoint.resume", "checkpoint.allow_change", "mixing.rule",
    "mixing.options", "logging.wandb_project", "engine.sequence_parallel_size", "data.fim",
    "model.tokenizer", "model.allow_missing", "engine.compile", "engine.offload_activations",
    "optimizer.kind", "model.attention_dropout", "model.z_loss", "data.columns", "distill",
    "model.replay_routes",
}  # fmt: skip
# Keys whose effect is another key's.
_RESOLVED = {"model.overrides": "model.hidden_act", "model.vocab_multiple": "model.vocab_size"}


def _other_value(value: Any, kind: Any = None) -> Any:
    if isinstance(value, bool):
        return not value
    if get_origin(kind) is Literal:
        return next(other for other in get_args(kind) if other != value)
    return value + (0.01 if isinstance(value, float) else 1)


def field_changes(config: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield key, option and another value for every field of a configuration."""
    for name, kind in get_type_hints(type(config)).items():
        key, value = f"{prefix}{name}", getattr(config, name)
        if is_dataclass(value):
            yield from field_changes(value, f"{key}.")
        elif key in _VALUES:
            yield key, key, _VALUES[key]
        elif key not in _NOT_TRIED:
            yield key, key, _other_value(value, kind)


def _model_changes(record: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield key, option and another value for numbers and switches of the transformers model."""
    for key, value in record.items():
        section, _, name = key.partition(".")
        if section != "model" or key in (*_NOT_TRIED, *_VALUES) or "." in name:
            continue
        if isinstance(value, (bool, int, float)):
            # The sizes must divide each other.
            other = value * 2 if re.search("hidden_size|heads|head_dim", name) else None
            yield key, "model.overrides", {name: _other_value(value) if other is None else other}


def _outcome(path: Path, found: Resume, override: str, key: str) -> str:
    """Resume with a change; return the part of the message that names the key and both values, or
    ``no effect``; other texts are faults."""
    try:
        _resumed(path, found, override)
    except ResumeError as error:
        name = _RESOLVED.get(key, key).rpartition(".")[2]
        match = re.search(rf"[\w.]*{name}\S* was (.+?) and is (.+?)(; |\. |$)", str(error))
        return f"refused: {match[0]:.70}" if match else f"FAULT: key not named: {error}"
    except ConfigError as error:
        return f"FAULT: not a valid value: {error}"
    return "no effect" if is_within(key, NO_EFFECT) else "FAULT: the run continues"


PARTS = [0, *(pytest.param(part, marks=pytest.mark.pages) for part in range(1, 6))]


@pytest.mark.parametrize("part", PARTS)
def test_single_changes_before_a_resume(part: int, path: Path, found: Resume) -> None:
    """Print the table with ``-s -m "pages or not pages"``."""
    config, _, record = _opened(path)
    changes = [*field_changes(config), *_model_changes(record)]
    assert len(changes) >= 60 and {key for key, _, _ in changes} >= _VALUES.keys()
    outcomes = {}
    for key, option, value in changes[part :: len(PARTS)]:
        outcomes[key] = _outcome(path, found, f"{option}={json.dumps(value)}", key)
        print(f"{key:40} {outcomes[key]}")
    assert not [text for text in outcomes.values() if text.startswith("FAULT")]
    assert len({text.partition(":")[0] for text in outcomes.values()}) == 2


def _retokenized(folder: Path) -> None:
    tokens = np.fromfile(folder / "train.bin", np.uint16)
    tokens[5] ^= 1
    tokens.tofile(folder / "train.bin")


def _shortened(folder: Path) -> None:
    lengths = IndexedDataset(folder / "train").document_lengths.copy()
    lengths[-1] += 1
    with IndexedDatasetBuilder(folder / "train", np.uint16, overwrite=True) as builder:
        builder.add_documents(np.ones(lengths.sum(), np.uint16), np.cumsum([0, *lengths]))
    _repacked(folder, [32, 64, 128])


def _repacked(folder: Path, buckets: list[int]) -> None:
    dataset = IndexedDataset(folder / "train")
    index = pack(dataset.document_lengths, "bucket", buckets=buckets)
    index.save(folder / "train.samples", source=dataset, overwrite=True)


def _labelled(folder: Path) -> None:
    documents = IndexedDataset(folder / "train")
    labels = documents.tokens.astype(np.int32)
    add_column(folder / "train", "labels", labels, INTERPRETED["labels"])


def _weighted(folder: Path) -> None:
    weights = np.ones(IndexedDataset(folder / "train").num_tokens, np.float16)
    add_column(folder / "train", "weights", weights, INTERPRETED["weights"])


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a token of .bin": (_retokenized, "data.content"),
    "a length of .idx": (_shortened, "indices"),
    "the buckets of .samples": (functools.partial(_repacked, buckets=[64, 128]), "indices"),
    "labels appear": (_labelled, "data.content"),
    "loss weights appear": (_weighted, "token_weights"),
}


@pytest.mark.parametrize("change", FILES)
def test_changed_files_before_a_resume(change: str, corpus: Corpus, tmp_path: Path) -> None:
    for file in corpus.directory.glob("train*"):
        shutil.copy(file, tmp_path)
    data = {"valid_prefix": str(corpus.valid)}
    sections: Any = {"data": data, "model": {"preset": "llama_tiny", "vocab_size": 64}}
    path = Corpus(tmp_path).config(tmp_path / "run", **sections)
    edit, key = FILES[change]
    found = _checkpoint(path)
    _resumed(path, found)
    edit(tmp_path)
    with pytest.raises(ResumeError, match=rf"{key} was .+ and is ") as error:
        _resumed(path, found)
    print(f"{change:40} refused: {error.value!s:.100}")

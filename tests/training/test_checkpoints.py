"""Overrides must be fields of the model; tensors of checkpoints must match it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.metadata import file_checksum
from megapack.training.config import ModelConfig
from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.directory import FileFacts
from megapack.training.engine.export import end_token, open_tokenizer
from megapack.training.engine.world import RankProgress, World
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model
from megapack.training.model.training_model import TrainingModel

from .conftest import NewRun, Run
from .packing_helpers import VOCAB, tiny_model
from .processes import wait_for, wait_for_step


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 2 layers with a tied head."""
    directory = tmp_path_factory.mktemp("llama")
    tiny_model("llama_tiny", seed=3).save(directory)
    return directory


# --- overrides ---


def _rope(kind: str, theta: float = 1e4, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


@pytest.mark.parametrize("source", ["preset", "checkpoint"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 32}, r"hiden_size: no field of a llama.*did you mean 'hidden_size'\?"),
        ({"to_dict": 1}, r"to_dict: no field"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; it must be 1 or more"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0; it must be 1 or more"),
        ({"hidden_size": -64}, r"hidden_size is -64; it must be 1 or more"),
        ({"num_attention_heads": 5}, r"num_attention_heads: .*multiple"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: .* 4 is not a multiple"),
        ({"hidden_size": "64"}, r"hidden_size: .*expected int, got str"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan; it must be finite"),
        (_rope("yarm"), r"rope_parameters: .*yarm"),
        (_rope("yarn"), r"rope_parameters.*factor"),
        (_rope("linear", factor=-2.0), r"rope_parameters: .*factor.*got -2"),
        (_rope("default", -1e4), r"rope_parameters: rope_theta.*positive"),
        (_rope("default", facter=2), r"rope_parameters: .*facter"),
    ],
    ids=str,
)
def test_unknown_overrides_are_named(
    llama: Path, source: str, overrides: dict[str, Any], message: str
) -> None:
    base: Any = {"preset": "llama_tiny"} if source == "preset" else {"pretrained": str(llama)}
    with pytest.raises(ConfigError, match=rf"^model\.overrides\.{message}") as refused:
        model_configuration(ModelConfig(**base, overrides=overrides), 1)
    assert "\n" not in str(refused.value)


def test_overrides_of_other_architectures_are_checked(tmp_path: Path) -> None:
    for name, value, message in (
        ("n_head", 5, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ("n_layer", 0, "must be 1 or more"),
        ("num_attention_heads", 0, "must be 1 or more"),
        ("n_heads", 4, "did you mean 'n_head'"),
    ):
        for preset in ("gpt2_tiny", "gpt2_tiny_alibi"):
            with pytest.raises(ConfigError, match=rf"^model\.overrides\.{name}.*{message}"):
                model_configuration(ModelConfig(preset=preset, overrides={name: value}), 1)
    AutoConfig.for_model("mixtral", num_local_experts=4).save_pretrained(tmp_path)
    wrong = ModelConfig(pretrained=str(tmp_path), overrides={"num_experts_per_tok": 5})
    with pytest.raises(
        ConfigError, match=r"overrides\.num_experts_per_tok.*is 5, but there are 4 experts"
    ):
        model_configuration(wrong, 1)


def test_valid_overrides_are_applied(llama: Path) -> None:
    wide = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    for theta, more in ((1e6, {"rope_theta": 1e6}), (7, _rope("default", 7))):
        config = ModelConfig(preset="llama_tiny", overrides={**wide, **more})
        made = model_configuration(config, VOCAB)
        assert made.hidden_size == 96 and made.head_dim == 16
        assert made.rope_parameters["rope_theta"] == theta
    longer = ModelConfig(pretrained=str(llama), overrides={"max_position_embeddings": 2**20})
    assert model_configuration(longer, VOCAB).max_position_embeddings == 2**20
    alibi = ModelConfig(preset="gpt2_tiny_alibi", overrides={"n_head": 2})
    assert len(model_configuration(alibi, VOCAB).alibi_slopes) == 2


# --- tensors ---


def opened(directory: Path, *allowed: str, seed: int = 0, **overrides: Any) -> TrainingModel:
    config = ModelConfig(pretrained=str(directory), overrides=overrides, allow_missing=allowed)
    return build_model(config, model_configuration(config, VOCAB), backend="sdpa", seed=seed)


def changed(llama: Path, directory: Path, without: str = "", **more: Tensor) -> Path:
    """Write the checkpoint without one tensor, and with others."""
    tensors = load_file(llama / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name != without}
    directory.mkdir()
    (directory / "config.json").write_bytes((llama / "config.json").read_bytes())
    path = directory / "model.safetensors"
    save_file({**tensors, **more}, path, metadata={"format": "pt"})
    return directory


def test_missing_tensors_of_a_checkpoint_are_named(llama: Path, tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    torn = changed(llama, tmp_path / "torn", without=down)
    with pytest.raises(
        ConfigError, match=rf"lacks tensors.*random values: {down}; .*allow_missing"
    ):
        opened(torn)
    with pytest.raises(ConfigError, match=r"random values: model\.layers\.2\.input_.*and 6 more"):
        opened(llama, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"lacks tensors.*: lm_head\.weight;"):
        opened(llama, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lacks tensors.*down_proj"):
        opened(torn, "lm_head.*")
    first, same, other = (opened(torn, "*.down_proj.*", seed=seed) for seed in (1, 1, 2))
    random = [dict(m.named_parameters())[f"model.{down}"] for m in (first, same, other)]
    assert torch.equal(random[0], random[1]) and not torch.equal(random[0], random[2])
    assert len(opened(llama, "model.layers.2.*", num_hidden_layers=3).layers) == 3


def test_tensors_unknown_to_the_model_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model lacks.*lost: model\.layers\.1\.inp.*6 more"):
        opened(llama, num_hidden_layers=1)
    assert len(opened(llama, "model.layers.1.*", num_hidden_layers=1).layers) == 1
    more = changed(llama, tmp_path / "more", **{"model.extra": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"the model lacks.*lost: model\.extra;"):
        opened(more)


def test_tensors_of_other_shapes_are_named_with_both_shapes(llama: Path) -> None:
    shapes = r"down_proj\.weight \(64, 128\) instead of \(64, 96\), .* and 3 more"
    with pytest.raises(ConfigError, match=rf"other shapes.*layers\.0\.mlp\.{shapes}"):
        opened(llama, intermediate_size=96)
    model = opened(llama, "*.mlp.*", intermediate_size=96)
    assert model.layers[0].mlp.down_proj.weight.shape == (64, 96)


def test_tied_head_stays_tied_and_separate_head_is_refused(llama: Path, tmp_path: Path) -> None:
    tied = opened(llama).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    embedding = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    twice = changed(llama, tmp_path / "twice", **{"lm_head.weight": embedding.clone()})
    again = opened(twice).model
    assert again.lm_head.weight is again.model.embed_tokens.weight
    apart = changed(llama, tmp_path / "apart", **{"lm_head.weight": embedding + 1})
    with pytest.raises(ConfigError, match=r"a head that differs.*tie_word_embeddings to false"):
        opened(apart)
    untied = opened(apart, tie_word_embeddings=False).model
    assert torch.equal(untied.lm_head.weight, embedding + 1)


def test_run_does_not_start_from_a_torn_checkpoint(
    new_run: NewRun, llama: Path, tmp_path: Path
) -> None:
    """The check also runs if ZeRO-3 divides parameters while loading."""
    torn = changed(llama, tmp_path / "torn", without="model.layers.1.mlp.down_proj.weight")
    model = {"preset": None, "pretrained": str(torn)}
    run = new_run(num_steps=1, model=model, engine={"zero_stage": 3})
    run.start().end_with(2, "random values: model.layers.1.mlp.down_proj.weight")
    run.succeed("model.allow_missing=['*.down_proj.*']")


# ---- Asynchronous checkpoints contain their step, and count when complete


EVERY_THREE = {"every": 3, "keep": 3}
THIRD, SIXTH = "step_00000003_tokens_3072", "step_00000006_tokens_6144"


@pytest.fixture(scope="module")
def blocking(module_run: NewRun) -> Run:
    """Return a run that writes its checkpoints synchronously."""
    run = module_run(checkpoint={**EVERY_THREE, "asynchronous": False})
    run.succeed()
    return run


def _gated(gate: Path, tag: str) -> dict[int, dict[str, Any]]:
    return {rank: {"writes_wait_for": [str(gate), tag]} for rank in range(2)}


def _assert_same(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in ours.items():
            _assert_same(value, theirs[key], f"{where}/{key}")
    elif isinstance(ours, (list, tuple)):
        _assert_same(dict(enumerate(ours)), dict(enumerate(theirs)), where)


def test_training_continues_while_a_checkpoint_is_written(
    new_run: NewRun, blocking: Run, tmp_path: Path
) -> None:
    run, gate = new_run(checkpoint=EVERY_THREE), tmp_path / "gate"
    ranks = run.start(faults=_gated(gate, THIRD))
    wait_for_step(run.dir, 5, ranks=2)
    assert run.tags() == [f"{THIRD}.partial"]
    gate.touch()
    ranks.succeed(f"{THIRD}: training waited ")
    assert [line["loss"] for line in run.log] == [line["loss"] for line in blocking.log]
    for tag in (THIRD, SIXTH):
        ours, theirs = (
            {path.name: torch.load(path, weights_only=False) for path in found.glob("*.pt")}
            for found in (run.checkpoints / tag, blocking.checkpoints / tag)
        )
        assert len(ours) == 3
        _assert_same(ours, theirs, tag)


def test_run_killed_while_writing_resumes(new_run: NewRun, blocking: Run, tmp_path: Path) -> None:
    run = new_run(checkpoint=EVERY_THREE)
    ranks = run.start(faults=_gated(tmp_path / "never", SIXTH))
    wait_for_step(run.dir, 7, ranks=2)
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    assert (run.checkpoints / f"{SIXTH}.partial").is_dir() and run.latest == THIRD
    assert run.end["reason"] == "running"
    run.start().succeed(f"continuing at step 3 from {THIRD}")
    losses = [line["loss"] for line in blocking.log]
    assert [line["loss"] for line in run.log] == pytest.approx(losses, rel=1e-9)
    assert not list(run.checkpoints.glob("*.partial"))


def test_nan_loss_keeps_the_checkpoint_in_progress(new_run: NewRun, tmp_path: Path) -> None:
    run, gate = new_run(checkpoint=EVERY_THREE), tmp_path / "gate"
    faults = {"writes_wait_for": [str(gate), THIRD], "nan_weight_after": [3]}
    ranks = run.start(ranks=1, faults={0: faults})
    log = run.dir / "log.jsonl"
    wait_for(lambda: log.exists() and '"loss": null' in log.read_text(), "the loss")
    gate.touch()
    ranks.end_with(1, "is not a number")
    assert run.latest == THIRD
    assert run.end["reason"] == "error" and run.end["saved"] == 3


def test_interrupted_conversion_kills_its_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt kills the converter. That of a killed rank must not write into the folder of the
    next start (regression: the loaded checkpoint could be a mixture of both)."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background process of a shell ignores it
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host="here")
    store = CheckpointStore(tmp_path, alone, keep=1, zero_stage=1)
    left = tmp_path / f"step_00000002_tokens_9.{'0a' * 16}.universal"
    folders_of_user = [tmp_path / f"step_notes.{kind}" for kind in ("partial", "universal")]
    for folder in (left, *folders_of_user):
        folder.mkdir()
    store._clear_partial()
    assert not left.exists()
    left.mkdir()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            store._convert("step_00000002_tokens_9")
    folders = {process.args[process.args.index("--output_folder") + 1] for process in started}
    assert len(folders) == 2 and not left.exists()
    assert all(folder.exists() for folder in folders_of_user)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_reading_and_writing_a_large_file_is_progress(tmp_path: Path) -> None:
    """Regression: a check or an export longer than the hang timeout ended a healthy run."""
    progress = RankProgress()
    path = tmp_path / "large"
    path.write_bytes(bytes(3 << 20))
    expected = FileFacts(bytes=3 << 20, xxh3=file_checksum(path))
    read = partial(progress.inside, "the check")
    assert expected.problem(path, "checksum", read) is None
    assert progress.signs == 3
    with progress.while_written(tmp_path / "export", "the export"):
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "model").write_bytes(bytes(1 << 20))
        wait_for(lambda: progress.place == "the export", "a sign")


def test_every_loaded_tensor_is_progress(llama: Path) -> None:
    signs: list[int] = []
    config = ModelConfig(pretrained=str(llama))
    architecture, loading = model_configuration(config, VOCAB), lambda: signs.append(1)
    build_model(config, architecture, backend="sdpa", seed=0, progress=loading)
    assert len(signs) >= len(load_file(llama / "model.safetensors"))


# ---- Exports: weights, tokenizer, end token


LETTERS, END = 20, 20


def _write(folder: Path, **metadata: int) -> IndexedDataset:
    """Return documents that count up from a random letter to the last one."""
    folder.mkdir(exist_ok=True)
    documents = [
        [*range(first, LETTERS), END]
        for first in np.random.default_rng(0).integers(0, LETTERS - 1, 600)
    ]
    options: Any = {"vocab_size": END + 1, "metadata": metadata or None}
    with IndexedDatasetBuilder(folder / "text", np.uint16, **options) as builder:
        for document in documents:
            builder.add_document(np.array(document, np.uint16))
    return IndexedDataset(folder / "text")


def _tokenizer(folder: Path) -> Path:
    words = {**{chr(ord("a") + i): i for i in range(LETTERS)}, "<|end|>": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_exported_model_generates_until_the_end_token(new_run: NewRun, tmp_path: Path) -> None:
    dataset = _write(tmp_path, document_end_token=END)
    samples = tmp_path / "text.samples"
    pack(dataset.document_lengths, "bucket", buckets=[32]).save(samples, source=dataset)
    run = new_run(
        num_steps=60,
        model={"tokenizer": str(_tokenizer(tmp_path))},
        data={"prefix": dataset.prefix, "index": str(samples), "valid_prefix": None},
        optimizer={"lr": 0.01},
        checkpoint={"export": True},
        engine={"zero_stage": 0},
    )
    run.succeed("data.micro_batch_tokens=1024", launcher=False)

    exported = run.dir / "model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    prompt = tokenizer("p q", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=40, do_sample=False)[0])
    assert text.split() == ["p", "q", "r", "s", "t", "<|end|>"]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == END
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == END
    written = json.loads((exported / "config.json").read_text())
    assert written["eos_token_id"] == END
    assert written["pad_token_id"] is None, "an embedding would not train the row of the end token"


def test_end_token_is_that_of_the_datasets(tmp_path: Path) -> None:
    ends = _write(tmp_path / "a", document_end_token=END)
    other, silent = _write(tmp_path / "b", document_end_token=3), _write(tmp_path / "c")
    found = [
        end_token(list(datasets))
        for datasets in ((ends, ends), (ends, other), (ends, silent), (silent,))
    ]
    assert found == [END, None, None, None]


def test_configured_tokenizer_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer .*nowhere.* cannot be loaded"):
        open_tokenizer(str(tmp_path / "nowhere"), required=True)
    assert open_tokenizer(str(tmp_path / "nowhere"), required=False) is None


def _sentencepiece_model(path: Path, *, add_dummy_prefix: bool) -> str:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([f"a line of {i} words, (with) signs" for i in range(300)]),
        model_prefix=str(path), vocab_size=330, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix, minloglevel=2,
    )  # fmt: skip
    return f"{path}.model"


def test_sentencepiece_tokenizer_is_exported_only_with_equal_ids(tmp_path: Path) -> None:
    """By default transformers puts a space before a text; our documents have none."""
    path = _sentencepiece_model(tmp_path / "own", add_dummy_prefix=False)
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    open_tokenizer(path, required=True).save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in ("a line", " of\n\n  12 words\t(x)", "na\u00efve \u4e2d"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == model.encode(text)
        assert len(model.encode(text)) > 1
    # If a text begins with a space, sentencepiece adds another one, transformers does not.
    other = _sentencepiece_model(tmp_path / "other", add_dummy_prefix=True)
    with pytest.raises(ConfigError, match="transformers and sentencepiece give different ids"):
        open_tokenizer(other, required=True)

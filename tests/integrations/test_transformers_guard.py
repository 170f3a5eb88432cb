"""Refusals before the first step of models that train packed rows wrongly."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from megapack import attention
from megapack.data import PackedDataset, Schedule
from megapack.data.report import steps_without_labels
from megapack.errors import ConfigError, MegapackWarning
from megapack.integrations.hosts import transformers as adapter
from megapack.integrations.hosts.transformers import MicroBatches, PackedTrainer, check_model
from megapack.packing import pack
from tests.integrations.samples import make_dataset

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ITS_OWN: dict[str, dict[str, Any]] = {
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
    "qwen3_next": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


@pytest.fixture(autouse=True)
def on_a_cpu() -> None:
    attention.register("sdpa")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> MicroBatches:
    dataset = make_dataset(tmp_path_factory.mktemp("guard"), [40, 24, 50, 14, 64, 30, 34] * 4)
    data = PackedDataset(dataset, pack(dataset.document_lengths, buckets=[64]))
    return MicroBatches(data, Schedule(data, tokens_per_step=128), micro_batch_tokens=64)


@pytest.mark.parametrize("implementation", ["eager", "megapack"])
def test_models_that_mix_documents_are_refused(
    batches: MicroBatches, tmp_path: Path, implementation: str
) -> None:
    """Which these are says tests/attention/test_architectures.py."""
    config = AutoConfig.for_model("bloom", **SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with pytest.raises(ConfigError, match="bloom"):
        packed_trainer(batches, tmp_path, model).train()


@pytest.mark.parametrize(
    ("name", "package"),
    [("bamba", "mamba_ssm"), ("falcon_h1", "mamba_ssm"), ("qwen3_next", "causal_conv1d")],
)
def test_recurrent_layers_get_segments_or_name_the_missing_package(
    batches: MicroBatches, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(name, **{**SMALL, **ITS_OWN[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ConfigError, match=f"packed sequences apart without `{package}`"):
        check_model(model, batches.dataset)
    # Also in the run's own model; every kernel gets the same segments.
    told: list[Any] = []

    def conv(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        told.append(kwargs["seq_idx"].tolist())
        return hidden_states

    monkeypatch.setattr(sys.modules[type(model).__module__], "causal_conv1d_fn", conv)
    with contextlib.suppress(ValueError):  # of the kernel behind it
        model(
            torch.arange(1, 9)[None],
            **attention.varlen_arguments(torch.tensor([0, 3, 8], dtype=torch.int32), 5),
        )
    assert told == [[[0, 0, 0, 1, 1, 1, 1, 1]]] * len(told)
    assert told or package == "mamba_ssm"  # which fuses the convolution with the rest


def small_llama() -> Any:
    config = AutoConfig.for_model("llama", **SMALL)
    return AutoModelForCausalLM.from_config(config, attn_implementation="megapack")


def packed_trainer(
    batches: MicroBatches, folder: Path, model: Any = None, **options: Any
) -> PackedTrainer:
    model = small_llama() if model is None else model
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return PackedTrainer(model=model, args=arguments, train_dataset=batches)


def test_probe_finds_lost_boundaries(
    batches: MicroBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = adapter.model_inputs

    def without_a_boundary(batch: Any) -> dict[str, Any]:
        inputs = stock(batch)
        ends = inputs["cu_seq_lens_q"]
        assert len(ends) > 2
        return {**inputs, "cu_seq_lens_q": ends[[0, -1]], "cu_seq_lens_k": ends[[0, -1]]}

    monkeypatch.setattr(adapter, "model_inputs", without_a_boundary)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM lets token .* see another document"):
        packed_trainer(batches, tmp_path).train()
    trainer = packed_trainer(batches, tmp_path)
    trainer.probe = False
    assert trainer.train().global_step == 1


@pytest.mark.parametrize("path", ["the batch", "the loss", "the model"])
def test_labels_shifted_twice_are_found(
    path: str, batches: MicroBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = packed_trainer(batches, tmp_path)
    if path == "the batch":
        stock = adapter.model_inputs

        def shifted(batch: Any) -> dict[str, Any]:
            inputs = stock(batch)
            return {**inputs, "shift_labels": inputs["shift_labels"].roll(-1, dims=1)}

        monkeypatch.setattr(adapter, "model_inputs", shifted)
    elif path == "the loss":

        def next_but_one(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            del num_items_in_batch
            return torch.nn.functional.cross_entropy(outputs.logits[0, :-2], labels[0, 2:])

        trainer.compute_loss_func = next_but_one
    else:
        loss_function = trainer.model.loss_function

        def without_shift_labels(*args: Any, shift_labels: Any = None, **options: Any) -> Any:
            return loss_function(*args, shift_labels=shift_labels.roll(1, dims=1), **options)

        trainer.model.loss_function = without_shift_labels
    with pytest.raises(ConfigError, match=r"the loss of LlamaForCausalLM uses label .* shifted"):
        trainer.train()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_of_a_sure_model_pass(
    batches: MicroBatches, tmp_path: Path, smoothing: float
) -> None:
    """Its own gradient there is 0, or, smoothed, lower at other labels."""
    model = small_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.mul_(1e-2)
        model.lm_head.weight.copy_(100 * model.model.embed_tokens.weight.roll(1, 0))
    trained = packed_trainer(batches, tmp_path, model, label_smoothing_factor=smoothing).train()
    assert smoothing or trained.training_loss < 1e-6


def test_probe_does_not_change_training(
    batches: MicroBatches, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = []
    for probe in (True, False):
        torch.manual_seed(3)
        trainer = packed_trainer(batches, tmp_path)
        trainer.probe = probe
        with caplog.at_level("INFO", "megapack"):
            trainer.train()
        trained.append(trainer.model.state_dict())
    said = [record.message for record in caplog.records if "probed in" in record.message]
    assert len(said) == 1
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


@pytest.mark.parametrize("alpha", [4.0])
def test_neftune_scales_noise_by_the_length_of_each_document(
    batches: MicroBatches, tmp_path: Path, alpha: float
) -> None:
    model = small_llama()
    embeddings, seen = model.get_input_embeddings(), []
    trainer = packed_trainer(batches, tmp_path, model, neftune_noise_alpha=alpha)
    trainer.probe = False

    def keep(module: Any, args: Any, arguments: dict[str, Any], outputs: Any) -> None:
        del module, args, outputs
        seen.append((arguments["cu_seq_lens_q"].tolist(), noise[-1]))

    noise: list[torch.Tensor] = []

    def measure(layer: Any, args: Any, arguments: dict[str, Any]) -> None:
        del layer, arguments
        tokens = told[-1]
        noise.append((args[0] - torch.nn.functional.embedding(tokens, embeddings.weight))[0])

    told: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda module, args, arguments: told.append(arguments["input_ids"]), with_kwargs=True
    )
    model.model.layers[0].register_forward_pre_hook(measure, with_kwargs=True)
    model.register_forward_hook(keep, with_kwargs=True)
    trainer.train()
    assert seen
    for ends, of_tokens in seen:
        for begin, end in itertools.pairwise(ends):
            most = alpha / ((end - begin) * 64) ** 0.5
            found = of_tokens[begin:end].abs().max()
            assert 0.9 * most < found <= most * 1.0001
    assert not hasattr(embeddings, "neftune_noise_alpha")  # all is as before
    assert not embeddings._forward_hooks


@pytest.mark.parametrize("labeled", [0, 1])
def test_corpus_without_labels_is_refused(tmp_path: Path, labeled: int) -> None:
    """Documents of one token have no label; the probe runs on a micro batch without labels."""
    dataset = make_dataset(tmp_path, [1] * 512 + [64, 64] * labeled)
    data = PackedDataset(dataset, pack(dataset.document_lengths, "concat", buckets=[64]))
    schedule = Schedule(data, tokens_per_step=128)
    steps = schedule.num_steps()
    unlabeled = sum(not schedule.step(i).num_label_tokens for i in range(steps))
    assert 0 < unlabeled <= steps - labeled
    said = steps_without_labels(schedule, steps)
    assert said is not None and f"{unlabeled} of {steps}" in said
    batches = MicroBatches(data, schedule, micro_batch_tokens=64)
    trainer = packed_trainer(batches, tmp_path)
    trainer.args.max_steps = steps
    if labeled:
        assert trainer.train().global_step == steps
        return
    with pytest.raises(ConfigError, match=r"no token of the run's .* has a label"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [{"train_sampling_strategy": "group_by_length"}, {"auto_find_batch_size": True}],
    ids=str,
)
def test_ignored_options_are_refused(
    batches: MicroBatches, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is .* Leave it out"):
        packed_trainer(batches, tmp_path, **options).train()


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_models_with_rope_that_depends_on_the_row_are_refused(
    batches: MicroBatches, tmp_path: Path, name: str
) -> None:
    """A bucket of 64 tokens reaches beyond 32, and does not beyond 64."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    for switch in (32, 64):
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
        rope["original_max_position_embeddings"] = switch
        fields = {**SMALL, "max_position_embeddings": 256, "rope_parameters": rope}
        fields |= {"original_max_position_embeddings": switch} if name == "phi3" else {}
        none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        config = AutoConfig.for_model(name, **{**fields, **none})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="megapack")
        trainer = packed_trainer(batches, tmp_path, model)
        if switch == 64:
            assert trainer.train().global_step == 1
            continue
        with pytest.raises(ConfigError, match=r"original_max_position_embeddings \(32\)"):
            trainer.train()


def test_ids_above_the_models_vocabulary_are_refused_at_start(tmp_path: Path) -> None:
    """They would be an IndexError inside the model, at the first step that has one."""
    config = AutoConfig.for_model("llama", **{**SMALL, "vocab_size": 500})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    dataset = make_dataset(tmp_path, [40, 24, 501] * 4)
    data = PackedDataset(dataset, pack(dataset.document_lengths, buckets=[64]))
    embeddings = model.get_input_embeddings()
    for wrapped in (torch.nn.Sequential(embeddings), embeddings):  # as PEFT's adapters do
        model.set_input_embeddings(wrapped)
        with pytest.raises(ConfigError, match=r"text holds token id 999, .* ids below 500"):
            check_model(model, data)
    model.resize_token_embeddings(1000)
    check_model(model, data)


def test_other_models_get_a_warning() -> None:
    with pytest.warns(MegapackWarning, match="Linear is not a transformers model"):
        check_model(torch.nn.Linear(2, 2))

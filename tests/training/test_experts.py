"""A mixture of experts trains with its architecture's loss, for every division of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import LoadBalancing, token_mask
from megapack.config import load_config
from megapack.data import BucketBatchSampler
from megapack.training.config import ModelConfig, PretrainConfig
from megapack.training.engine.inputs import Inputs
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model
from megapack.training.model.training_model import TrainingModel

from .conftest import VOCAB, NewRun
from .packing_helpers import documents, pack_documents

COEFFICIENT = 0.1
SIZES: dict[str, Any] = {
    **{"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    **{"num_experts_per_tok": 2, "router_aux_loss_coef": COEFFICIENT},
    **{"output_router_logits": True, "pad_token_id": None},
}
ARCHITECTURES = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 6},
}


def saved(name: str, directory: Path) -> Path:
    """Return a checkpoint whose routers prefer some experts, so that balancing has an effect."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **SIZES, **ARCHITECTURES[name]), dtype=torch.float32
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            alpha = 1.0 if key.endswith("gate.weight") else 0.2
            parameter.add_(torch.randn(parameter.shape), alpha=alpha)
    model.save_pretrained(directory)
    return directory


def opened(directory: Path, **overrides: Any) -> TrainingModel:
    config = ModelConfig(pretrained=str(directory), overrides=overrides)
    return build_model(config, model_configuration(config, 1), backend="sdpa", seed=0)


# --- the loss of one micro batch ---


@given(
    layers=st.integers(1, 3),
    real=st.integers(0, 12),
    padding=st.integers(0, 5),
    chosen=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_loss_is_as_defined(layers: int, real: int, padding: int, chosen: int, seed: int) -> None:
    """For a micro batch of padding alone, loss and gradient are 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = tuple(
        torch.randn(real + padding, 4, generator=generator).requires_grad_() for _ in range(layers)
    )
    mask = torch.randperm(real + padding, generator=generator) < real
    balancing = LoadBalancing(num_experts=4, experts_per_token=chosen, coefficient=1.0)
    loss = balancing.loss(logits, mask)
    if real:
        expected = balance_of([layer[mask] for layer in logits], chosen)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    else:
        loss.backward()
        assert loss.item() == 0 and not any(layer.grad.any() for layer in logits)


def test_tokens_are_those_of_segments_without_padding() -> None:
    cu_seqlens = torch.tensor([0, 3, 4, 6, 9, 9, 9], dtype=torch.int32)
    mask = token_mask(cu_seqlens, torch.tensor([0, -1, 2, -1], dtype=torch.int32), 9)
    assert mask.tolist() == [True, True, True, False, True, True, False, False, False]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_ignore_padding(name: str, checkpointing: bool, tmp_path: Path) -> None:
    model = opened(saved(name, tmp_path))
    docs = documents([37, 90, 66])
    full, padded = pack_documents(docs), pack_documents(docs, padding=40)
    count = int((full.labels >= 0).sum())
    shifted = F.pad(full.labels[:, :-1], (1, 0), value=-100)
    segments = {"cu_seq_lens_q": full.cu_seqlens, "max_length_q": full.max_seqlen}
    theirs = model.model(
        input_ids=full.tokens, position_ids=full.position_ids, labels=shifted, **segments
    )
    assert theirs.aux_loss.item() > 2.02, "the routers must be unbalanced"
    theirs.loss.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.checkpoint_activations()
    ids = torch.tensor([0, 0, 0, -1], dtype=torch.int32)
    loss, losses, balance, _ = model(**padded.arguments(), dataset_ids=ids, scale=1 / count)
    loss.backward()
    assert loss.item() == pytest.approx(float(theirs.loss), rel=1e-6)
    assert balance.item() / count == pytest.approx(float(theirs.aux_loss), rel=1e-6)
    rest = float(theirs.loss) - COEFFICIENT * float(theirs.aux_loss)
    assert losses.sum().item() / count == pytest.approx(rest, rel=1e-5)
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[key], rtol=1e-3, atol=1e-6), key
    with torch.no_grad():
        assert model.eval()(**padded.arguments())[2] is None, "validation has no balancing loss"


def test_description_names_the_losses(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    assert "with 0.1 times the load-balancing loss of 6" in opened(tmp_path).description
    without = opened(tmp_path, output_router_logits=False)
    assert "without 0.1 times" in without.description
    assert without(**pack_documents(documents([9])).arguments())[2] is None


# --- the loss of a step ---


def plain_step(model: Any, inputs: Inputs, config: PretrainConfig, ranks: int) -> Tensor:
    """Return the loss of step 0 by micro batches and documents, without our attention, losses and
    batches."""
    samples, total, labels = inputs.schedule.samples, [], 0
    model.config.output_router_logits = True
    for rank in range(ranks):
        sampler = BucketBatchSampler(
            inputs.schedule,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            micro_batch_tokens=config.data.micro_batch_tokens,
        )
        for batch in sampler.micro_batches(0):
            losses, routed, count = [], [], 0
            for sample in batch:
                source, segments = samples.segments(sample)
                for document, begin, length in segments:
                    text = inputs.data.datasets[source].open(0)[document].astype(np.int64)
                    whole = torch.from_numpy(text)
                    tokens, label = whole[begin : begin + length], whole[begin + 1 :][:length]
                    found = model(input_ids=tokens.unsqueeze(0), use_cache=False)
                    routed.append(found.router_logits)
                    logits = found.logits[0, : len(label)]
                    losses.append(F.cross_entropy(logits, label, reduction="sum"))
                    count += len(label)
            balance = balance_of([torch.cat(layer) for layer in zip(*routed, strict=True)], 2)
            total.append(torch.stack(losses).sum() + count * COEFFICIENT * balance)
            labels += count
    assert labels == inputs.schedule.step(0).num_label_tokens
    return torch.stack(total).sum() / labels


def balance_of(layers: Sequence[Tensor], chosen_per_token: int) -> Tensor:
    """Return ``experts * sum over e of f(e) * P(e)`` over the tokens of all layers, where f is the
    share of tokens that chose an expert and P its mean probability."""
    probabilities = torch.cat(list(layers)).softmax(-1)
    num_experts = probabilities.shape[-1]
    choices = F.one_hot(probabilities.topk(chosen_per_token).indices, num_experts).sum(1).float()
    return num_experts * (choices.mean(0) * probabilities.mean(0)).sum()


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("qwen3_moe", [(1, {}), (2, {"zero_stage": 0}), (2, {"zero_stage": 3})]),
        ("mixtral", [(2, {"zero_stage": 2, "activation_checkpointing": True})]),
    ],
)
def test_step_equals_its_definition_for_all_ranks_and_zero_stages(
    new_run: NewRun, tmp_path: Path, name: str, cases: list[Any]
) -> None:
    section = {"preset": None, "pretrained": str(saved(name, tmp_path / "model"))}
    for ranks, engine in cases:
        run = new_run("_".join(map(str, [ranks, *engine.values()])), model=section, engine=engine)
        found = run.worker(ranks, more=["num_steps=2"])
        config = load_config(PretrainConfig, run.config)
        model = opened(tmp_path / "model").model
        model.set_attn_implementation("eager")
        loss = plain_step(model, Inputs(config), config, ranks)
        loss.backward()
        balanced = found["losses"][0] + COEFFICIENT * found["balances"][0]
        assert balanced == pytest.approx(loss.item(), rel=1e-5)
        grads = {key: p.grad for key, p in model.named_parameters()}
        assert sum("gate.weight" in key for key in grads) == 2
        for key, grad in grads.items():
            error = (found["grads"][f"model.{key}"] - grad).norm() / grad.norm().clamp(min=1e-6)
            assert error < 2e-3, f"{ranks} {engine} {key}: {error:.1e}"


def test_slices_balance_the_whole_sample(new_run: NewRun, tmp_path: Path) -> None:
    """Two ranks that share long samples equal one rank that has them whole."""
    section = {"preset": None, "pretrained": str(saved("mixtral", tmp_path / "model"))}
    alone, shared = (
        new_run(
            f"{ranks}",
            num_steps=1,
            model=section,
            data={"micro_batch_tokens": micro},
            engine={"sequence_parallel_size": ranks},
        ).worker(ranks)
        for ranks, micro in ((1, 128), (2, 64))
    )
    assert alone["capacities"] == {128}, "the first step has the longest bucket"
    for name in ("losses", "balances", "norms"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-4), name
    for key, grad in alone["grads"].items():
        assert (shared["grads"][key] - grad).norm() < 2e-3 * grad.norm().clamp(min=1e-6), key


def test_run_logs_the_load_balancing_loss(new_run: NewRun, tmp_path: Path) -> None:
    model = {"preset": None, "pretrained": str(saved("mixtral", tmp_path / "model"))}
    run = new_run(num_steps=6, model=model, optimizer={"lr": 0.01})
    ranks = run.start("optimizer.clip=0", "engine.zero_stage=0")
    ranks.succeed("with 0.1 times the load-balancing loss of 6 experts")
    balances = [line["load_balancing_loss"] for line in run.log]
    assert 2 <= balances[-1] < balances[0] < 6
    assert all(line["grad_norm"] > 0 for line in run.log), "without ZeRO and clipping, too"
    assert run.log[-1]["loss"] < run.log[0]["loss"] < 10
    assert SIZES["vocab_size"] > VOCAB

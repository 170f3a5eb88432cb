"""A mixture of experts is trained with its architecture's own loss, however a step is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from megapack.training.engine.inputs import Inputs, open_inputs
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model
from megapack.training.model.training_model import TrainingModel

from .conftest import VOCAB, Corpus
from .packing_helpers import documents, pack_documents
from .processes import Zygote, read_log, run_worker, start_run

COEFFICIENT = 0.1
SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": COEFFICIENT,
    "output_router_logits": True,
    "pad_token_id": None,
}
ARCHITECTURES = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 6},
}


def saved(name: str, directory: Path) -> Path:
    """A checkpoint whose routers prefer some experts, so that balancing has something to do."""
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
    real=st.integers(1, 12),
    padding=st.integers(0, 5),
    chosen=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_loss_is_as_defined(layers: int, real: int, padding: int, chosen: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = tuple(torch.randn(real + padding, 4, generator=generator) for _ in range(layers))
    order = torch.randperm(real + padding, generator=generator)
    mask = order < real
    balancing = LoadBalancing(num_experts=4, experts_per_token=chosen, coefficient=1.0)
    expected = load_balancing_loss([layer[mask].tolist() for layer in logits], chosen)
    assert float(balancing.loss(logits, mask)) == pytest.approx(expected, rel=1e-5)


def test_a_micro_batch_of_padding_only_is_balanced() -> None:
    logits = (torch.zeros(5, 4, requires_grad=True),)
    balancing = LoadBalancing(num_experts=4, experts_per_token=2, coefficient=1.0)
    loss = balancing.loss(logits, torch.zeros(5, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and not logits[0].grad.any()  # type: ignore[union-attr]


def test_tokens_are_those_of_segments_that_are_no_padding() -> None:
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
    assert theirs.aux_loss.item() > 2.02, "balanced already: the comparison would prove nothing"
    theirs.loss.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.checkpoint_activations()
    ids = torch.tensor([0, 0, 0, -1], dtype=torch.int32)
    loss, losses, balance = model(**padded.arguments(), dataset_ids=ids, scale=1 / count)
    loss.backward()
    assert loss.item() == pytest.approx(float(theirs.loss), rel=1e-6)
    assert balance.item() / count == pytest.approx(float(theirs.aux_loss), rel=1e-6)
    rest = float(theirs.loss) - COEFFICIENT * float(theirs.aux_loss)
    assert losses.sum().item() / count == pytest.approx(rest, rel=1e-5)
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[key], rtol=1e-3, atol=1e-6), key
    with torch.no_grad():
        assert model.eval()(**padded.arguments())[2] is None, "validation is of the labels alone"


def test_a_model_says_what_it_is_trained_with(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    assert "with 0.1 times the load-balancing loss of 6" in opened(tmp_path).description
    without = opened(tmp_path, output_router_logits=False)
    assert "without 0.1 times" in without.description
    assert without(**pack_documents(documents([9])).arguments())[2] is None


# --- the loss of a step ---


def plain_step(model: Any, inputs: Inputs, config: PretrainConfig, ranks: int) -> Tensor:
    """The loss of step 0: micro batch by micro batch, document by document, without any of our
    attention, losses or batches."""
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
                dataset = inputs.data.datasets[source]
                for document, begin, length in segments:
                    at = int(dataset.document_offsets[document])
                    end = int(dataset.document_lengths[document])
                    whole = torch.tensor(dataset.tokens[at : at + end]).long()
                    tokens, label = whole[begin : begin + length], whole[begin + 1 :][:length]
                    found = model(input_ids=tokens.unsqueeze(0), use_cache=False)
                    routed.append(found.router_logits)
                    logits = found.logits[0, : len(label)]
                    losses.append(F.cross_entropy(logits, label, reduction="sum"))
                    count += len(label)
            balance = balance_of([torch.cat(layer) for layer in zip(*routed, strict=True)])
            total.append(torch.stack(losses).sum() + count * COEFFICIENT * balance)
            labels += count
    assert labels == inputs.schedule.step(0).num_label_tokens
    return torch.stack(total).sum() / labels


def balance_of(layers: list[Tensor]) -> Tensor:
    """The definition, with a gradient."""
    logits = torch.cat(layers)
    probabilities = logits.softmax(-1)
    chosen = F.one_hot(probabilities.topk(2).indices, logits.shape[-1]).sum(1).float()
    loss = logits.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum()
    lists = [layer.detach().tolist() for layer in layers]
    assert float(loss.detach()) == pytest.approx(load_balancing_loss(lists, 2), rel=1e-4)
    return loss


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("qwen3_moe", [(1, {}), (2, {"zero_stage": 0}), (2, {"zero_stage": 3})]),
        ("mixtral", [(2, {"zero_stage": 2, "activation_checkpointing": True})]),
    ],
)
def test_a_step_is_that_of_its_definition_on_every_number_of_ranks_and_zero_stage(
    zygote: Zygote, corpus: Corpus, tmp_path: Path, name: str, cases: list[Any]
) -> None:
    directory = saved(name, tmp_path / "model")
    for ranks, engine in cases:
        path = tmp_path / "_".join([str(ranks), *map(str, engine.values())])
        config_path = corpus.config(
            path,
            num_steps=2,
            model={"preset": None, "pretrained": str(directory)},
            engine=engine,
        )
        found = run_worker(zygote, config_path, ranks)
        config = load_config(PretrainConfig, config_path)
        inputs = open_inputs(config)
        model = opened(directory).model
        model.set_attn_implementation("eager")
        loss = plain_step(model, inputs, config, ranks)
        loss.backward()
        assert found["losses"][0] + COEFFICIENT * found["balances"][0] == pytest.approx(
            loss.item(), rel=1e-5
        )
        gates = 0
        for key, parameter in model.named_parameters():
            grad = found["grads"][f"model.{key}"]
            error = (grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6)
            assert error < 2e-3, f"{ranks} {engine} {key}: {error:.1e}"
            gates += "gate.weight" in key
        assert gates == 2


def test_slices_balance_the_whole_sample(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    """Two ranks that share long samples against one that holds them: the same micro batches."""
    directory, found = saved("mixtral", tmp_path / "model"), []
    for ranks, micro in ((1, 128), (2, 64)):
        config = corpus.config(
            tmp_path / f"{ranks}",
            num_steps=1,
            model={"preset": None, "pretrained": str(directory)},
            data={"micro_batch_tokens": micro, "tokens_per_step": 1024},
            engine={"sequence_parallel_size": ranks},
        )
        found.append(run_worker(zygote, config, ranks))
    alone, shared = found
    assert alone["capacities"] == {128}, "the first step has the longest bucket"
    for name in ("losses", "balances", "norms"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-4), name
    for key, grad in alone["grads"].items():
        assert (shared["grads"][key] - grad).norm() < 2e-3 * grad.norm().clamp(min=1e-6), key


def test_run_logs_the_load_balancing_loss(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    model = {"preset": None, "pretrained": str(saved("mixtral", tmp_path / "model"))}
    config = corpus.config(tmp_path / "run", num_steps=6, model=model, optimizer={"lr": 0.01})
    output = start_run(zygote, config, "run", "optimizer.clip=0", "engine.zero_stage=0").succeed()
    assert "with 0.1 times the load-balancing loss of 6 experts" in output
    log = read_log(tmp_path / "run")
    balances = [line["load_balancing_loss"] for line in log]
    assert 2 <= balances[-1] < balances[0] < 6
    assert all(line["grad_norm"] > 0 for line in log), "without ZeRO and without clipping, too"
    assert log[-1]["loss"] < log[0]["loss"] < 10
    assert SIZES["vocab_size"] > VOCAB


# ---- The load-balancing loss of a mixture of experts, token by token


Logits = Sequence[Sequence[float]]


def load_balancing_loss(layers: Sequence[Logits], chosen_per_token: int) -> float:
    """``experts * sum over e of f(e) * P(e)``, over the tokens of all layers.

    Args:
        layers: of every layer, of every token that counts, the router's logits.
        chosen_per_token: experts that a token goes to: those of the largest logits.
    """
    tokens = [logits for layer in layers for logits in layer]
    num_experts = len(tokens[0])
    choices = [0] * num_experts
    probability = [0.0] * num_experts
    for logits in tokens:
        weights = [math.exp(x - max(logits)) for x in logits]
        for expert in range(num_experts):
            probability[expert] += weights[expert] / sum(weights)
        for expert in sorted(range(num_experts), key=lambda e: -logits[e])[:chosen_per_token]:
            choices[expert] += 1
    pairs = zip(choices, probability, strict=True)
    return num_experts * sum(f / len(tokens) * p / len(tokens) for f, p in pairs)

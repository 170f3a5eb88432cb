"""Planned steps in TRL and loops of one's own: losses and gradients of the padded batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from megapack.errors import ConfigError
from megapack.integrations.hosts.planned import (
    IGNORED,
    PlannedGRPOMixin,
    PlannedSFTMixin,
    PlannedSteps,
    accumulate,
)
from tests.integrations.harness import run_ranks

CAP, VOCABULARY = 48, 24


class PlannedSFT(PlannedSFTMixin, SFTTrainer):  # type: ignore[misc]
    pass


class PlannedGRPO(PlannedGRPOMixin, GRPOTrainer):  # type: ignore[misc]
    pass


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    # Of weights that are large tokens and positions make a difference.
    rest = {"max_position_embeddings": 128, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ids, **rest))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")


def documents(count: int = 22) -> list[dict[str, list[int]]]:
    """Prompts without labels, answers with them; two documents have one label, one has none."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(count):
        tokens = rng.integers(2, VOCABULARY, int(rng.integers(2, 40))).tolist()
        prompt = len(tokens) - 1 if number < 2 else len(tokens) // 3
        prompt = len(tokens) if number == 2 else prompt
        found.append({"input_ids": tokens, "labels": [IGNORED] * prompt + tokens[prompt:]})
    return found


def options(folder: str, **more: Any) -> dict[str, Any]:
    """One step of plain gradient descent of size 1: the weights move by the gradient."""
    step = {"max_steps": 1, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    rate = {"learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd"}
    no = dict.fromkeys(("bf16", "gradient_checkpointing", "ddp_find_unused_parameters"), False)
    quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    return {"output_dir": folder, "use_cpu": True, **step, **rate, **no, **quiet, **more}


def outcome(trainer: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses, and how the weights moved."""
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    before = dict(tiny_model().named_parameters())
    moved = {n: (before[n] - p).detach().cpu().numpy() for n, p in model.named_parameters()}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], moved


def assert_same_step(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, gradient in expected[1].items():
        assert np.abs(gradient).max() > 1e-4, name
        np.testing.assert_allclose(found[1][name], gradient, atol=1e-5, rtol=0, err_msg=name)


# ---- Steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_steps_hold_every_document_of_an_epoch_once_under_the_cap(num_ranks: int) -> None:
    read, sizes = documents(), {"documents_per_step": 9, "max_tokens_per_rank": CAP}
    ranks = [
        PlannedSteps(read, rank=rank, num_ranks=num_ranks, **sizes) for rank in range(num_ranks)
    ]
    assert len(ranks[0]) == 3
    orders = []
    for epoch in (0, 1):
        seen = []
        for i in range(3 * epoch, 3 * epoch + 3):
            items = [steps[i] for steps in ranks]
            assert len({len(item) for item in items}) == 1
            rows = [row for item in items for row in item]
            assert max(row["input_ids"].numel() for row in rows) <= CAP
            assert sum(float(row["loss_weights"].sum()) for row in rows) == pytest.approx(1)
            for row in rows:
                bounds = row["cu_seq_lens_q"].tolist()
                seen += [
                    (row["input_ids"][0, a:b].tolist(), row["shift_labels"][0, a:b].tolist())
                    for a, b in itertools.pairwise(bounds)
                    if bounds[-1] > 1 or num_ranks == 1
                ]
                restarts = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
                assert torch.equal(row["position_ids"][0], restarts)
        expected = [(d["input_ids"], [*d["labels"][1:], IGNORED]) for d in read]
        assert sorted(seen) == sorted(expected)
        orders.append(seen)
    assert orders[0] != orders[1], "another order in every epoch"


def test_steps_refuse_a_document_longer_than_a_rank_holds() -> None:
    given = [{"input_ids": [2] * n} for n in (3, 9)]
    with pytest.raises(ConfigError, match="document 1 has 9 tokens, and a rank holds 1 to max_tok"):
        PlannedSteps(given, documents_per_step=2, max_tokens_per_rank=8)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"labels": [5, 6]}, "2 labels"),
        ({"labels": [5, 6, 7, 8]}, "4 labels"),
        ({"completion_mask": [0, 1, 1]}, "completion_mask and no labels"),
    ],
)
def test_steps_refuse_a_document_without_a_label_per_token(more: Any, found: str) -> None:
    document = {"input_ids": [5, 6, 7], **more}
    with pytest.raises(ConfigError, match=f"a document of 3 tokens has {found}: give it one label"):
        PlannedSteps([document], documents_per_step=1, max_tokens_per_rank=8)


# ---- Accelerate ----------------------------------------------------------------------------------


def _accelerate_step(rank: int, world_size: int, loss: str) -> Any:
    accelerator = Accelerator(cpu=True)
    where = {"rank": accelerator.process_index, "num_ranks": accelerator.num_processes}
    sizes = {"documents_per_step": 22, "max_tokens_per_rank": CAP}
    steps = PlannedSteps(documents(), **sizes, **where, loss=loss, balance="step")
    model = accelerator.prepare(tiny_model())
    total = torch.zeros(())
    for inputs in accumulate(accelerator, model, steps[0]):
        weights, labels = inputs.pop("loss_weights"), inputs.pop("shift_labels")
        losses = nn.functional.cross_entropy(
            model(**inputs).logits[0], labels[0], ignore_index=IGNORED, reduction="none"
        )
        part = (losses * weights[0]).sum()
        accelerator.backward(part * accelerator.num_processes)
        total += part.detach()
    found = {n: p.grad.numpy() for n, p in accelerator.unwrap_model(model).named_parameters()}
    return [float(accelerator.reduce(total, "sum"))], found, len(steps[0])


def padded_step(loss: str) -> Any:
    """All documents as one padded batch."""
    model, read = tiny_model(), documents()
    width = max(len(d["input_ids"]) for d in read)
    ids = torch.tensor([d["input_ids"] + [0] * (width - len(d["input_ids"])) for d in read])
    labels = torch.tensor([d["labels"] + [IGNORED] * (width - len(d["labels"])) for d in read])
    logits = model(input_ids=ids, attention_mask=(ids > 0).long()).logits[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    counts = (labels[:, 1:] != IGNORED).sum(1)
    kept = counts > 0
    mean = (losses.sum(1)[kept] / counts[kept]).mean()
    mean = losses.sum() / counts.sum() if loss == "token_mean" else mean
    mean.backward()
    return [float(mean.detach())], {n: p.grad.numpy() for n, p in model.named_parameters()}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("world_size", "loss"), [(1, "sequence_mean"), (2, "token_mean")])
def test_accelerate_has_the_gradients_of_the_padded_batch(
    free_port: int, world_size: int, loss: str
) -> None:
    found = run_ranks(_accelerate_step, world_size, free_port, loss)
    assert len({len_ for *_, len_ in found}) == 1 and found[0][2] > 2
    for of_rank in found:
        assert_same_step(of_rank, padded_step(loss))


# ---- TRL's SFTTrainer ----------------------------------------------------------------------------


def _given(model: Any, **more: Any) -> dict[str, Any]:
    """Return further arguments of TRL's trainers."""
    return {"model": model, "processing_class": tokenizer(), **more}


def _sft(rank: int, world_size: int, folder: str, planned: bool, more: dict[str, Any]) -> Any:
    config = {**options(folder, max_length=64), **more.pop("config", {})}
    resume = config.pop("resume", False)
    common = _given(tiny_model(), train_dataset=Dataset.from_list(documents()))
    if planned:
        sizes = {"documents_per_step": 22, "max_tokens_per_rank": CAP, **more}
        trainer = PlannedSFT(args=SFTConfig(**config), **common, **sizes)
    else:
        config["per_device_train_batch_size"] = 22
        trainer = SFTTrainer(args=SFTConfig(**config), **common)
    if resume:
        trainer.train(resume_from_checkpoint=True)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return outcome(trainer)


@pytest.mark.multiprocess
@pytest.mark.parametrize("loss", ["token_mean", "sequence_mean"])
def test_sft_trainer_has_the_step_of_the_padded_batch(
    tmp_path: Path, free_port: int, loss: str
) -> None:
    more = {"loss": loss, "planning": {"balance": "step"}}
    found = run_ranks(_sft, 2, free_port, str(tmp_path), True, more)
    expected = padded_step(loss)
    if loss == "token_mean":
        [stock] = run_ranks(_sft, 1, free_port, str(tmp_path), False, {})
        assert_same_step(stock, expected)
    for of_rank in found:
        assert_same_step(of_rank, expected)


@pytest.mark.multiprocess
def test_sft_trainer_resumes_with_other_ranks_and_steps_of_few_documents(
    tmp_path: Path, free_port: int
) -> None:
    """Steps of 7, 7, 7 and 1 documents: on two ranks the last leaves one rank without any."""

    def run(world_size: int, folder: str, **config: Any) -> Any:
        config = {"learning_rate": 0.1, "max_steps": 5, **config}
        more = {"documents_per_step": 7, "config": config}
        return run_ranks(_sft, world_size, free_port, str(tmp_path / folder), True, more)[0]

    losses, moved = run(1, "whole")
    assert len(losses) == 5
    of_two, moved_by_two = run(2, "whole by two")
    np.testing.assert_allclose(of_two, losses, rtol=1e-4)
    assert all(np.allclose(moved_by_two[name], moved[name], atol=1e-4) for name in moved)
    saving = {"save_strategy": "steps", "save_steps": 3}
    run(2, "cut", **saving, max_steps=3)
    resumed = run(1, "cut", **saving, resume=True)
    np.testing.assert_allclose(resumed, losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4: the plan decides"),
        ({"packing": True}, "packing is True: the plan packs the documents. Set it to False"),
        ({"loss_type": "dft"}, "loss_type is 'dft': planned steps compute the loss"),
    ],
)
def test_sft_trainer_refuses_options_that_count_twice(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _sft(0, 1, str(tmp_path), True, {"config": config})


# ---- TRL's GRPOTrainer ---------------------------------------------------------------------------


def _length(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 7 + ("w5" in text) for text in completions]


def _grpo(rank: int, world_size: int, folder: str, planned: bool, more: dict[str, Any]) -> Any:
    rng = np.random.default_rng(5)
    words = [rng.integers(2, VOCABULARY, rng.integers(1, 9)) for _ in range(8)]
    prompts = Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in line) for line in words]})
    sizes = {"per_device_train_batch_size": 16 // world_size, "num_generations": 4}
    order = {"max_completion_length": 24, "seed": 11, "shuffle_dataset": False}
    args = GRPOConfig(**{**options(folder), **sizes, **order, **more.get("config", {})})
    model = tiny_model()
    model.config._name_or_path = f"{folder}/reference"
    common = _given(model, args=args, reward_funcs=_length, train_dataset=prompts)
    if not planned:
        return [*outcome(GRPOTrainer(**common)), []]
    trainer = PlannedGRPO(max_tokens_per_rank=CAP, **more.get("options", {}), **common)
    deal, shapes = trainer._assign, []

    def recorded(rows: dict[str, Any]) -> Any:
        micro_batches = deal(rows)
        for micro_batch in micro_batches:
            masks = [micro_batch["prompt_mask"], micro_batch["completion_mask"]]
            real = masks[0].any(1)
            tokens = int(sum(mask.sum() for mask in masks))
            shapes.append((tokens, micro_batch["group"][real].tolist()))
        return micro_batches

    trainer._assign = recorded
    return [*outcome(trainer), shapes]


# bnpo is TRL's mean over each rank's own tokens; planned it is over those of all ranks.
CASES: dict[tuple[str, int], dict[str, Any]] = {  # and ranks
    ("dapo", 2): {},
    ("bnpo", 1): {"config": {"loss_type": "bnpo"}},
    ("grpo and a reference", 2): {"config": {"loss_type": "grpo", "beta": 0.1}},
    ("dr_grpo and groups", 2): {
        "config": {"loss_type": "dr_grpo"},
        "options": {"keep_groups": True, "planning": {"balance": "step"}},
    },
    ("two iterations", 2): {"config": {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.3}},
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("case", "world_size"), CASES)
def test_grpo_trainer_has_the_step_of_the_padded_batch(
    tmp_path: Path, free_port: int, case: str, world_size: int
) -> None:
    more = CASES[case, world_size]
    tiny_model(seed=1).save_pretrained(tmp_path / "reference")  # another one than the policy
    expected = run_ranks(_grpo, world_size, free_port, str(tmp_path), False, more)
    found = run_ranks(_grpo, world_size, free_port, str(tmp_path), True, more)
    for of_rank, wanted in zip(found, expected, strict=True):
        assert_same_step(of_rank, wanted)
    shapes = [shape for *_, of_rank in found for shape in of_rank]
    assert max(tokens for tokens, _ in shapes) <= CAP
    assert len({len(of_rank) for *_, of_rank in found}) == 1
    steps = more.get("config", {}).get("max_steps", 1)
    groups = sorted(group for _, numbers in shapes for group in numbers)
    assert groups == sorted([0, 1, 2, 3] * 4 * steps)
    if "groups" in case:
        held = [{group for _, numbers in of_rank for group in numbers} for *_, of_rank in found]
        assert sorted(group for of_rank in held for group in of_rank) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2: the plan decides"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile is 0.5: it needs all completions"),
    ],
)
def test_grpo_trainer_refuses_options_that_need_a_whole_micro_batch(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _grpo(0, 2, str(tmp_path), True, {"config": config})

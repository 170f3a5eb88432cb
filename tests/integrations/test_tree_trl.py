"""TRL on prefix trees: three steps equal those of the padded batches, with fewer tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from megapack.attention import register
from megapack.errors import ConfigError
from megapack.integrations.hosts.planned import PlannedGRPOMixin
from megapack.integrations.hosts.trees import TreeDPOMixin, TreeForward
from tests.integrations.harness import run_ranks
from tests.integrations.test_planned import IGNORED, VOCABULARY, options, tiny_model, tokenizer

CAP = 64


class TreeGRPO(PlannedGRPOMixin, GRPOTrainer):  # type: ignore[misc]
    pass


class TreeDPO(TreeDPOMixin, DPOTrainer):  # type: ignore[misc]
    pass


def _texts(seed: int, count: int, lengths: tuple[int, int]) -> list[str]:
    rng = np.random.default_rng(seed)
    words = [rng.integers(2, VOCABULARY, rng.integers(*lengths)) for _ in range(count)]
    return [" ".join(f"w{i}" for i in line) for line in words]


def _model(seed: int = 0, trees: bool = True) -> Any:
    model = tiny_model(seed)
    if trees:
        register("sdpa")
        model.set_attn_implementation("megapack")
    return model


def _outcome(trainer: Any) -> tuple[list[float], dict[str, np.ndarray], list[tuple[int, int]]]:
    """Losses, parameters, and (forwarded, sequence) tokens of policy and reference."""
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    forwards: list[TreeForward] = getattr(trainer, "tree_forwards", [])
    return losses, parameters, [(f.forwarded_tokens, f.sequence_tokens) for f in forwards]


def _assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert len(found[0]) == 3
    start = dict(tiny_model().named_parameters())
    for name, value in expected[1].items():
        assert np.abs(value - start[name].detach().numpy()).max() > 1e-4, name
        np.testing.assert_allclose(found[1][name], value, atol=1e-5, rtol=0, err_msg=name)


# ---- GRPO


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 7 + ("w5" in text) for text in completions]


def _grpo(rank: int, world_size: int, folder: str, trees: bool, more: dict[str, Any]) -> Any:
    sizes = {"per_device_train_batch_size": 16 // world_size, "num_generations": 4, "max_steps": 3}
    sizes |= {"max_completion_length": 16, "seed": 11, "shuffle_dataset": False}
    config = {**options(folder), **sizes, "learning_rate": 0.1, **more.get("config", {})}
    model = _model(trees=trees)
    model.config._name_or_path = f"{folder}/reference"
    given = {
        "model": model,
        "args": GRPOConfig(**config),
        "processing_class": tokenizer(),
        "reward_funcs": _reward,
        "train_dataset": Dataset.from_dict({"prompt": _texts(5, 12, (6, 24))}),
    }
    if not trees:
        return _outcome(GRPOTrainer(**given))
    return _outcome(
        TreeGRPO(max_tokens_per_rank=CAP, trees=True, **more.get("options", {}), **given)
    )


GRPO: dict[tuple[str, int], dict[str, Any]] = {  # and ranks
    ("dapo", 1): {},
    ("grpo, a reference, groups", 2): {
        "config": {"loss_type": "grpo", "beta": 0.1},
        "options": {"keep_groups": True, "planning": {"balance": "step"}},
    },
    ("two iterations, checkpointing", 2): {
        "config": {"num_iterations": 2, "gradient_checkpointing": True}
    },
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("case", "world_size"), GRPO)
def test_grpo_has_the_steps_of_the_padded_batches(
    tmp_path: Path, free_port: int, case: str, world_size: int
) -> None:
    tiny_model(seed=1).save_pretrained(tmp_path / "reference")
    more = GRPO[case, world_size]
    expected = run_ranks(_grpo, world_size, free_port, str(tmp_path), False, more)
    found = run_ranks(_grpo, world_size, free_port, str(tmp_path), True, more)
    for of_rank, wanted in zip(found, expected, strict=True):
        _assert_same(of_rank, wanted)
        assert len(of_rank[2]) == 1 + ("reference" in case)
    forwarded, tokens = np.sum([counts for *_, of_rank in found for counts in of_rank], axis=0)
    assert forwarded < 0.8 * tokens


# ---- DPO


def _dpo(rank: int, world_size: int, folder: str, trees: bool, more: dict[str, Any]) -> Any:
    names = ("prompt", "chosen", "rejected")
    texts = {name: _texts(i, 24, (6, 24) if i == 0 else (1, 10)) for i, name in enumerate(names)}
    sizes = {"per_device_train_batch_size": 8 // world_size, "max_steps": 3, "max_length": 64}
    config = {**options(folder), **sizes, "learning_rate": 0.1, "seed": 11, **more}
    reference = None if config.get("precompute_ref_log_probs") else tiny_model(seed=1)
    given = {
        "model": _model(trees=trees),
        "ref_model": reference,
        "args": DPOConfig(**config),
        "processing_class": tokenizer(),
        "train_dataset": Dataset.from_dict(texts),
    }
    return _outcome((TreeDPO if trees else DPOTrainer)(**given))


DPO: dict[tuple[str, int], dict[str, Any]] = {
    ("sigmoid", 1): {},
    ("ipo, accumulation, cut at the start", 2): {
        "loss_type": ["ipo"],
        "gradient_accumulation_steps": 2,
        "truncation_mode": "keep_end",
        "max_length": 20,
    },
    ("precomputed reference, weighting", 1): {
        "precompute_ref_log_probs": True,
        "use_weighting": True,
    },
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("case", "world_size"), DPO)
def test_dpo_has_the_steps_of_the_padded_batches(
    tmp_path: Path, free_port: int, case: str, world_size: int
) -> None:
    more = DPO[case, world_size]
    expected = run_ranks(_dpo, world_size, free_port, str(tmp_path), False, more)
    found = run_ranks(_dpo, world_size, free_port, str(tmp_path), True, more)
    for of_rank, wanted in zip(found, expected, strict=True):
        _assert_same(of_rank, wanted)
        assert len(of_rank[2]) == 2 - ("precomputed" in case)
    forwarded, tokens = np.sum([counts for *_, of_rank in found for counts in of_rank], axis=0)
    assert forwarded < 0.95 * tokens  # prompts cut at the start share little


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padding_free": True}, "padding_free is True: a tree has no padding"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0"),
        ({"disable_dropout": False, "attention_dropout": 0.1}, "the model's dropout is 0.1"),
        ({"attn_implementation": "sdpa"}, "attention 'sdpa' ignores their paths"),
    ],
)
def test_dpo_refuses_what_a_tree_would_train_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    model = _model()
    model.config.attention_dropout = change.pop("attention_dropout", 0.0)
    model.set_attn_implementation(change.pop("attn_implementation", "megapack"))
    monkeypatch.setitem(globals(), "_model", lambda **_: model)
    with pytest.raises(ConfigError, match=message):
        _dpo(0, 1, str(tmp_path), True, change)


def test_grpo_refuses_a_limit_of_documents(tmp_path: Path) -> None:
    tiny_model(seed=1).save_pretrained(tmp_path / "reference")
    more = {"options": {"planning": {"max_documents_per_rank": 4}}}
    with pytest.raises(ConfigError, match="max_documents_per_rank is 4: a tree has a limit of tok"):
        _grpo(0, 1, str(tmp_path), True, more)


# ---- The forward


def test_rows_without_labels_and_images_in_a_forward() -> None:
    model = _model()
    add_fused_lm_head(model)
    forward = TreeForward(model)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [0, 0, 0, 0]])
    rows = {"input_ids": ids, "attention_mask": (ids > 0).long(), "fused_lm_head": True}
    outputs = model(**rows, labels=torch.full_like(ids, IGNORED))
    assert outputs.log_probs.shape == (3, 3) and not outputs.log_probs.any()
    outputs.log_probs.sum().backward()  # zeros, but a rank of several must run the backward pass
    assert model.lm_head.weight.grad is not None
    assert (forward.forwarded_tokens, forward.sequence_tokens) == (6, 8)
    with pytest.raises(ConfigError, match="calls the model with \\['pixel_values'\\]"):
        model(**rows, labels=ids, pixel_values=ids)

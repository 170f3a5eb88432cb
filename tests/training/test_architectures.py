"""Any architecture that is right on packed rows trains; what is not is refused at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import choose_backend
from megapack.errors import ConfigError
from megapack.training.config import ModelConfig
from megapack.training.model.architecture import attention_needs, model_configuration
from megapack.training.model.opening import try_model

from .conftest import Corpus
from .processes import PRETRAIN, Zygote

RIGHT = [
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "qwen3_moe", "mixtral"),
    *("gemma2", "gemma3_text", "deepseek_v3", "gpt_neox", "gpt2", "granite", "cohere"),
]
CPU = torch.device("cpu")


def attempt(configuration: Any) -> None:
    needs = attention_needs(configuration, CPU, torch.float32)
    try_model(configuration, backend=choose_backend(needs).name, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("name", RIGHT)
def test_an_architecture_that_is_right_on_packed_rows_is_taken(name: str, tmp_path: Path) -> None:
    """With the loss that training uses, of which the guard compares value and gradients."""
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    attempt(model_configuration(ModelConfig(pretrained=str(tmp_path)), 1000))


def test_gpt2_with_alibi_is_taken() -> None:
    attempt(model_configuration(ModelConfig(preset="gpt2_124m_alibi"), 1000))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "changes logits before it"),
        ("mpt", "fails on a row"),
        ("jamba", "another document.*JambaMambaMixer"),
        ("llama4_text", "one document alone.*chunked_attention"),
        ("gpt_oss", "sinks"),
        ("phi", "gradients.*the head"),  # which has a bias
    ],
)
def test_an_architecture_that_is_not_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*{reason}"):
        attempt(AutoConfig.for_model(name))


def test_qwen3_trains_and_bloom_is_refused(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, more in (("qwen3", {"num_key_value_heads": 2}), ("bloom", {})):
        configuration = AutoConfig.for_model(name, **small, **more)
        AutoModelForCausalLM.from_config(configuration).save_pretrained(tmp_path / name)
        config = corpus.config(
            tmp_path / f"run_{name}",
            num_steps=2,
            model={"preset": None, "pretrained": str(tmp_path / name)},
        )
        argv = [str(PRETRAIN), "--config", str(config)]
        ranks = zygote.start(argv, 1, tmp_path / name, {0: {"env": {}}})
        if name == "qwen3":
            assert "step 2/2" in ranks.succeed()
        else:
            assert ranks.wait() != [0]
            assert "'bloom'" in ranks.output() and "changes logits before it" in ranks.output()


@pytest.mark.parametrize(
    "fields",
    [
        {"v_head_dim": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4},  # wider than the keys
        {"v_head_dim": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        {"n_routed_experts": 16, "n_group": 8, "topk_group": 5, "num_experts_per_tok": 6},
        {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
        {"first_k_dense_replace": 0, "num_hidden_layers": 1, "q_lora_rank": None},
        {"first_k_dense_replace": 3, "num_hidden_layers": 3, "num_attention_heads": 1},
    ],
    ids=str,
)
def test_a_small_deepseek_v3_is_taken(fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4, "kv_lora_rank": 16}
    values = {"vocab_size": 300, **sizes, **counts, **fields}
    heads = values["num_attention_heads"]
    attempt(AutoConfig.for_model("deepseek_v3", num_key_value_heads=heads, **values))

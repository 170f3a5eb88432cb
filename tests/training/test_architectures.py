"""Architectures that are correct on packed rows train; others are refused at startup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megapack.attention import choose_backend
from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.training.config import ModelConfig, PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.model.architecture import attention_needs, model_configuration
from megapack.training.model.opening import check_packed_rows

from .conftest import Corpus, NewRun

RIGHT = [
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "qwen3_moe", "mixtral"),
    *("gemma2", "gemma3_text", "deepseek_v3", "gpt_neox", "gpt2", "granite", "cohere"),
]
CPU = torch.device("cpu")


def attempt(configuration: Any) -> None:
    needs = attention_needs(configuration, CPU, torch.float32)
    check_packed_rows(
        configuration, backend=choose_backend(needs).name, device=CPU, dtype=torch.float32
    )


@pytest.mark.parametrize("name", RIGHT)
def test_architectures_correct_on_packed_rows_pass(name: str, tmp_path: Path) -> None:
    """The check uses the training loss, and compares its value and gradients."""
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    attempt(model_configuration(ModelConfig(pretrained=str(tmp_path)), 1000))


def test_gpt2_with_alibi_passes() -> None:
    attempt(model_configuration(ModelConfig(preset="gpt2_124m_alibi"), 1000))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "changes earlier logits"),
        ("mpt", "fails on a row"),
        ("jamba", "another document.*JambaMambaMixer"),
        ("llama4_text", "one document alone.*chunked_attention"),
        ("gpt_oss", "sinks"),
        ("phi", "gradients.*the head"),  # the head has a bias
    ],
)
def test_architectures_wrong_on_packed_rows_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*{reason}"):
        attempt(AutoConfig.for_model(name))


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN3 = {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 8}


def test_qwen3_trains_from_keys_and_bloom_is_refused(new_run: NewRun, tmp_path: Path) -> None:
    model = {"preset": None, "config": QWEN3}
    run = new_run(num_steps=2, model=model)
    messages = "step 2/2", "documents of a micro batch are kept apart"
    run.start(launcher=False).succeed(*messages)
    AutoConfig.for_model("bloom", vocab_size=64, **SMALL).save_pretrained(tmp_path / "bloom")
    bloom = new_run("bloom_run", num_steps=2, model={**model, "config": str(tmp_path / "bloom")})
    bloom.start(launcher=False).end_with(2, "'bloom'", "changes earlier logits")


def test_model_config_accepts_keys_file_or_directory(tmp_path: Path) -> None:
    """GPT-2's default configuration has dropout, and token ids of its vocabulary."""
    keys: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "vocab_size": 640}
    AutoConfig.for_model(**keys).save_pretrained(tmp_path)
    sources = [keys, str(tmp_path), str(tmp_path / "config.json")]
    overrides = {"n_layer": 3}
    made = [model_configuration(ModelConfig(config=s, overrides=overrides), 600) for s in sources]
    trees = [{**c.to_dict(), "_name_or_path": "", "architectures": None} for c in made]
    assert trees[0] == trees[1] == trees[2]
    tree = trees[0]
    assert (tree["n_embd"], tree["n_layer"], tree["vocab_size"]) == (32, 3, 640)
    assert tree["attn_pdrop"] == tree["resid_pdrop"] == 0 and tree["eos_token_id"] is None
    asked = {**keys, "resid_pdrop": 0.25}
    assert model_configuration(ModelConfig(config=asked), 600).resid_pdrop == 0.25
    with pytest.raises(ConfigError, match="the vocabulary has 640 tokens, the dataset 700"):
        model_configuration(ModelConfig(config=str(tmp_path)), 700)
    del keys["vocab_size"]
    assert model_configuration(ModelConfig(config=keys), 700).vocab_size == 768, "a multiple of 128"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "lama"}, "no causal language model of model_type 'lama'.*mean 'llama'"),
        ({"model_type": "t5"}, "no causal language model of model_type 't5'"),
        ({**QWEN3, "hiden_size": 8}, r"model\.config\.hiden_size: no field.*mean 'hidden_size'"),
        (
            {**QWEN3, "num_key_value_heads": 3},
            r"model\.config.*num_key_value_heads: .*not a multiple",
        ),
        ({**QWEN3, "attention_dropout": 0.1}, "attention_dropout is set"),
        ({"model_type": "mamba"}, "'mamba' has no num_attention_heads"),
        ({"model_type": "gemma3"}, "'gemma3' has no vocab_size"),
    ],
    ids=str,
)
def test_invalid_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_configuration(ModelConfig(config=keys), 64)


LLAMA = {"model_type": "llama", **SMALL, "vocab_size": 640, "max_position_embeddings": 4096}
PHI = {  # as in the config.json of Phi-3.5-mini
    **{"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "torch_dtype": "bfloat16"},
    **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "attention_bias": False},
    **{"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
    **{"rope_theta": 10000.0, "sliding_window": 262144, "transformers_version": "4.43.3"},
    "vocab_size": 32064,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        (PHI, None),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        (  # transformers gives this advice once per process
            {
                **LLAMA,
                "rope_scaling": {
                    **{"rope_type": "yarn", "factor": 4.0},
                    "original_max_position_embeddings": 2048,
                },
            },
            None,
        ),
        ({**PHI, "rope_scaling": {**PHI["rope_scaling"], "long_factor": [2.0]}}, "long_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor field"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "fu": 1}}, "fu"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "Missing required keys"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yran", "factor": 2.0}}, "yran"),
        ({**LLAMA, "hiden_size": 8}, "no field of a llama configuration"),
    ],
    ids=str,
)
def test_keys_give_the_same_result_inline_and_as_a_file(
    keys: dict[str, Any], refusal: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys), encoding="utf-8")
    for config in (keys, str(file), keys, str(tmp_path)):
        if refusal is None:
            made = model_configuration(ModelConfig(config=config), 600)
            assert made.hidden_size == keys["hidden_size"]
            continue
        with pytest.raises(ConfigError, match=refusal):
            model_configuration(ModelConfig(config=config), 600)


def test_dry_run_counts_parameters_of_a_configuration(corpus: Corpus, tmp_path: Path) -> None:
    """Parameters, work and memory of a mixture of experts, two of which process a token."""
    sizes = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    keys = {**QWEN3, "model_type": "qwen3_moe", **sizes, "tie_word_embeddings": False}
    config = corpus.config(tmp_path / "run", num_steps=1, model={"preset": None, "config": keys})
    plan = dry_run(load_config(PretrainConfig, config))
    layer = 32 * 8 * (4 + 2 + 2 + 4) + 2 * 8 + 2 * 32 + 32 * 8  # attention, norms, router
    total = 2 * 128 * 32 + 32 + 2 * (layer + 8 * 3 * 32 * 16)
    assert f"model: qwen3_moe, {total:,} parameters, without 0.001 times" in plan
    active = 128 * 32 + 2 * (layer - 2 * 8 - 2 * 32 + 2 * 3 * 32 * 16)
    (flop,) = re.findall(r"arithmetic: (\S+) FLOP", plan)
    assert 6 * active * 1024 < float(flop) < 1.5 * 6 * active * 1024, "the difference is attention"
    assert "together" in plan


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
def test_small_deepseek_v3_passes(fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4, "kv_lora_rank": 16}
    values = {"vocab_size": 300, **sizes, **counts, **fields}
    heads = values["num_attention_heads"]
    attempt(AutoConfig.for_model("deepseek_v3", num_key_value_heads=heads, **values))

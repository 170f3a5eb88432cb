"""How long a document may be: learned positions, RoPE and its scalings, ALiBi."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.training.config import ModelConfig
from megapack.training.model.architecture import model_configuration, position_limit

PHI: dict[str, Any] = {
    "vocab_size": 64,
    "initializer_range": 0.3,  # of trained weights, so that positions matter
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


def _limit(preset: str, wanted: int, **overrides: Any) -> tuple[int, str] | None:
    config = ModelConfig(preset=preset, overrides=overrides)
    found = position_limit(model_configuration(config, 64), wanted)
    return None if found is None else (found.tokens, found.remedy)


def test_the_field_that_limits_a_model_is_named_with_what_to_do_about_it() -> None:
    assert _limit("gpt2_tiny", 1000) == (512, "take a model with RoPE or ALiBi")
    assert _limit("gpt2_tiny_alibi", 10**6, n_positions=16) is None
    limit, remedy = _limit("llama_tiny", 131072) or (0, "")
    assert limit == 16384
    assert "model.overrides.max_position_embeddings=131072" in remedy and "rope_theta" in remedy
    assert _limit("llama_tiny", 131072, max_position_embeddings=131072) == (131072, remedy)
    falcon = {"num_hidden_layers": 1, "max_position_embeddings": 64}
    assert position_limit(AutoConfig.for_model("falcon", alibi=True, **falcon), 100) is None
    assert position_limit(AutoConfig.for_model("falcon", **falcon), 100) is not None
    assert position_limit(AutoConfig.for_model("mamba"), 100) is None


def test_rope_that_looks_at_the_whole_micro_batch_is_not_trained_across_its_switch() -> None:
    """Under longrope a document of 8 tokens gives other logits beside one of 20 than alone, so
    documents beyond the switch are refused, although the model has positions for them."""
    configuration = AutoConfig.for_model("phi3", **PHI)
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").eval()
    tokens = torch.arange(8).unsqueeze(0)

    def logits_beside(longest: int) -> torch.Tensor:
        """Of the short document, in one row behind a longer one that it does not see."""
        rows = torch.cat([torch.zeros(1, longest, dtype=torch.int64), tokens], 1)
        positions = torch.cat([torch.arange(longest), torch.arange(8)]).unsqueeze(0)
        mask = torch.full((1, 1, longest + 8, longest + 8), -1e9).triu(1)
        mask[..., longest:, :longest] = -1e9
        with torch.no_grad():
            out = model(rows, position_ids=positions, attention_mask=mask, use_cache=False)
        logits: torch.Tensor = out.logits[0, longest:]
        return logits

    assert torch.allclose(logits_beside(16), logits_beside(10), atol=1e-5)
    assert not torch.allclose(logits_beside(20), logits_beside(10), atol=1e-3)
    limit = position_limit(configuration, 20)
    assert limit is not None and limit.tokens == 16 and "longrope" in limit.source
    within = position_limit(configuration, 16)
    assert within is not None and within.tokens == 64

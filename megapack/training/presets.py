"""Architectures by name, as keys of transformers for ``model.config``.

``llama_*``: Llama 3.1 at the sizes of BucketLLM (section 5), without rescaled RoPE: its factor 8
extends a trained model beyond 8k, but here training starts with 16k.
``qwen3_*``: Qwen/Qwen3-0.6B-Base to 8B-Base and 30B-A3B-Base, as in their config.json (*Qwen3
Technical Report*, arXiv 2505.09388, tables 1 and 2); the last has 128 experts, eight per token, and
a load-balancing loss.
``qwen2.5_*``: Qwen/Qwen2.5-1.5B, as in its config.json.
``gpt2_*_alibi``: GPT-2 with ALiBi instead of position embeddings (atom-size paper, A.4), so that
the number of parameters does not depend on the sequence length.
"""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]


def _decoder(width: int, layers: int, heads: int, key_heads: int, mlp: int, **more: Any) -> Keys:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": mlp,
        **more,
    }


def _llama(*sizes: int) -> Keys:
    return {
        "model_type": "llama",
        **_decoder(*sizes),
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def _qwen3(*sizes: int, tied: bool, **more: Any) -> Keys:
    return {
        "model_type": "qwen3",
        **_decoder(*sizes),
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        **more,
    }


def _gpt2(width: int, layers: int, heads: int, *, alibi: bool, positions: int = 1024) -> Keys:
    return {
        "model_type": "gpt2_alibi" if alibi else "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


_EXPERTS: Keys = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.001,
}
_QWEN2_5: Keys = {
    "model_type": "qwen2",
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_GEMMA2: Keys = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}

# Width, layers, heads, key heads and MLP width; GPT-2 has only the first three.
PRESETS: dict[str, Keys] = {
    "llama_350m": _llama(1024, 16, 16, 8, 3584),
    "llama_1b": _llama(2048, 16, 32, 8, 8192),
    "llama_3b": _llama(3072, 28, 24, 8, 8192),
    "qwen3_0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3_1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3_4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3_8b": _qwen3(4096, 36, 32, 8, 12288, tied=False),
    "qwen3_30b_a3b": _qwen3(2048, 48, 32, 4, 6144, tied=False, **_EXPERTS),
    "qwen2.5_1.5b": _decoder(1536, 28, 12, 2, 8960, **_QWEN2_5),
    "gpt2_124m": _gpt2(768, 12, 12, alibi=False),
    "gpt2_124m_alibi": _gpt2(768, 12, 12, alibi=True),
    "gpt2_xl_1.5b_alibi": _gpt2(1600, 48, 25, alibi=True),
    # For tests and demonstrations on a CPU.
    "llama_tiny": _llama(64, 2, 4, 2, 128),
    "llama_demo": _llama(128, 3, 4, 2, 384),
    "gpt2_tiny": _gpt2(64, 2, 4, alibi=False, positions=512),
    "gpt2_tiny_alibi": _gpt2(64, 2, 4, alibi=True),
    "qwen2_tiny": _decoder(64, 2, 4, 2, 128, model_type="qwen2", max_position_embeddings=4096),
    "gemma2_tiny": _decoder(64, 2, 4, 2, 128, model_type="gemma2", **_GEMMA2),
}

# Vocabulary size by model_type that a plan assumes without data: those of Llama 3.1, Qwen, GPT-2
# and Gemma.
VOCABULARIES = {
    "llama": 128256,
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), 151936),
    **dict.fromkeys(("gpt2", "gpt2_alibi"), 50257),
    "gemma2": 256000,
}

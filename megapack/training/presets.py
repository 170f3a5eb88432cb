"""Architectures by name: what ``model.config`` would say of each, keys of transformers.

``llama_*``: the Llama 3.1 architecture at the sizes of BucketLLM (section 5). RoPE is not rescaled:
its factor 8 extends a finished model beyond 8k, while here 16k is trained from the start.
``qwen3_*``: Qwen/Qwen3-0.6B-Base to 8B-Base and 30B-A3B-Base as their config.json says (*Qwen3
Technical Report*, arXiv 2505.09388, tables 1 and 2); the last has 128 experts, eight for a token,
and trains with its load-balancing loss.
``gpt2_*_alibi``: GPT-2 with ALiBi in place of position embeddings (atom-size paper, A.4), so that
the number of parameters does not depend on the sequence length.
"""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]


def _llama(*, width: int, layers: int, heads: int, key_heads: int, mlp: int) -> Keys:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def _qwen3(*, width: int, layers: int, heads: int, mlp: int, tied: bool) -> Keys:
    return {
        "model_type": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }


_QWEN3_30B_A3B: Keys = {
    **_qwen3(width=2048, layers=48, heads=32, mlp=6144, tied=False),
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.001,
}


def _gpt2(*, width: int, layers: int, heads: int, alibi: bool, positions: int = 1024) -> Keys:
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


PRESETS: dict[str, Keys] = {
    "llama_350m": _llama(width=1024, layers=16, heads=16, key_heads=8, mlp=3584),
    "llama_1b": _llama(width=2048, layers=16, heads=32, key_heads=8, mlp=8192),
    "llama_3b": _llama(width=3072, layers=28, heads=24, key_heads=8, mlp=8192),
    "qwen3_0.6b": _qwen3(width=1024, layers=28, heads=16, mlp=3072, tied=True),
    "qwen3_1.7b": _qwen3(width=2048, layers=28, heads=16, mlp=6144, tied=True),
    "qwen3_4b": _qwen3(width=2560, layers=36, heads=32, mlp=9728, tied=True),
    "qwen3_8b": _qwen3(width=4096, layers=36, heads=32, mlp=12288, tied=False),
    "qwen3_30b_a3b": _QWEN3_30B_A3B,
    "gpt2_124m": _gpt2(width=768, layers=12, heads=12, alibi=False),
    "gpt2_124m_alibi": _gpt2(width=768, layers=12, heads=12, alibi=True),
    "gpt2_xl_1.5b_alibi": _gpt2(width=1600, layers=48, heads=25, alibi=True),
    # For tests and demonstrations on a CPU.
    "llama_tiny": _llama(width=64, layers=2, heads=4, key_heads=2, mlp=128),
    "llama_demo": _llama(width=128, layers=3, heads=4, key_heads=2, mlp=384),
    "gpt2_tiny": _gpt2(width=64, layers=2, heads=4, alibi=False, positions=512),
    "gpt2_tiny_alibi": _gpt2(width=64, layers=2, heads=4, alibi=True),
    "qwen2_tiny": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
    },
    "gemma2_tiny": {
        "model_type": "gemma2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
    },
}

"""Architectures by name: fields of a transformers configuration, and whether ALiBi stands in.

``llama_*``: the Llama 3.1 architecture at the sizes of BucketLLM (section 5). RoPE is not rescaled:
its factor 8 extends a finished model beyond 8k, while here 16k is trained from the start.
``gpt2_*_alibi``: GPT-2 with ALiBi in place of position embeddings (atom-size paper, A.4), so that
the number of parameters does not depend on the sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One architecture; the vocabulary comes from the dataset."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    alibi: bool = False


def _llama(*, width: int, layers: int, heads: int, key_heads: int, mlp: int, **more: Any) -> Preset:
    values = {
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
    return Preset(model_type="llama", fields={**values, **more})


def _gpt2(*, width: int, layers: int, heads: int, alibi: bool, positions: int = 1024) -> Preset:
    values = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    return Preset(model_type="gpt2", fields=values, alibi=alibi)


PRESETS: dict[str, Preset] = {
    "llama_350m": _llama(width=1024, layers=16, heads=16, key_heads=8, mlp=3584),
    "llama_1b": _llama(width=2048, layers=16, heads=32, key_heads=8, mlp=8192),
    "llama_3b": _llama(width=3072, layers=28, heads=24, key_heads=8, mlp=8192),
    "gpt2_124m": _gpt2(width=768, layers=12, heads=12, alibi=False),
    "gpt2_124m_alibi": _gpt2(width=768, layers=12, heads=12, alibi=True),
    "gpt2_xl_1.5b_alibi": _gpt2(width=1600, layers=48, heads=25, alibi=True),
    # For tests and demonstrations on a CPU.
    "llama_tiny": _llama(width=64, layers=2, heads=4, key_heads=2, mlp=128),
    "llama_demo": _llama(width=128, layers=3, heads=4, key_heads=2, mlp=384),
    "gpt2_tiny": _gpt2(width=64, layers=2, heads=4, alibi=False, positions=512),
    "gpt2_tiny_alibi": _gpt2(width=64, layers=2, heads=4, alibi=True),
    "qwen2_tiny": Preset(
        model_type="qwen2",
        fields={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
        },
    ),
    "gemma2_tiny": Preset(
        model_type="gemma2",
        fields={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "query_pre_attn_scalar": 16,
            "sliding_window": 64,
        },
    ),
}

"""GPT-2 with ALiBi in place of position embeddings.

This file needs only torch and transformers, because ``save_pretrained`` copies it next to the
weights: ``AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`` then works
without megapack. A separate model type prevents loading the weights as a stock GPT-2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["GPT2AlibiConfig", "GPT2AlibiLMHeadModel"]


class GPT2AlibiConfig(GPT2Config):  # type: ignore[misc]  # transformers is not typed for mypy
    """A GPT-2 configuration with ``alibi_slopes``, one per head."""

    model_type = "gpt2_alibi"
    alibi_slopes: list[float] | None = None


class _NoPositions(nn.Module):
    """Replacement of the position embeddings: adds 0 and has no parameters."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class GPT2AlibiLMHeadModel(GPT2LMHeadModel):  # type: ignore[misc]
    """GPT-2 that adds ``-slope * (i - j)`` to its attention scores.

    With the attention implementations of transformers (eager, sdpa) the bias is part of the mask;
    megapack's attention adds it from slopes that ``build_model`` sets in every layer.
    """

    config_class = GPT2AlibiConfig
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: GPT2AlibiConfig) -> None:
        super().__init__(config)
        slopes = config.alibi_slopes
        if slopes is None or len(slopes) != config.n_head:
            raise ValueError(f"alibi_slopes must hold one slope for each of {config.n_head} heads")
        self.transformer.wpe = _NoPositions()

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **arguments: Any,
    ) -> Any:
        """Run ``GPT2LMHeadModel.forward``; ``attention_mask`` is ``[B, keys]`` or None."""
        if self.config._attn_implementation != "megapack":
            rows = input_ids if input_ids is not None else inputs_embeds
            assert rows is not None, "one of input_ids and inputs_embeds is given"
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = self._alibi_mask(rows.shape[1], int(past), attention_mask)
        return super().forward(
            input_ids=input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **arguments,
        )

    def _alibi_mask(self, length: int, past: int, attention_mask: Tensor | None) -> Tensor:
        """Return bias plus causal mask, ``[B or 1, heads, length, past + length]``."""
        weight = self.transformer.wte.weight
        slopes = torch.tensor(self.config.alibi_slopes, device=weight.device).view(1, -1, 1, 1)
        rows = torch.arange(past, past + length, device=weight.device).unsqueeze(1)
        distance = rows - torch.arange(past + length, device=weight.device)
        lowest = torch.finfo(weight.dtype).min
        mask = (-slopes * distance).to(weight.dtype).masked_fill(distance < 0, lowest)
        if attention_mask is not None:
            mask = mask.masked_fill(attention_mask[:, None, None, :] == 0, lowest)
        return mask

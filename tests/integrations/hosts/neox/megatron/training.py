"""megatron.training of GPT-NeoX: a micro batch from a loader, and an attention layer's call."""

import torch
from megatron import mpu
from megatron.utils import get_ltor_masks_and_position_ids


def get_batch(neox_args, data_iterator):
    keys = ["text", "label"] if neox_args.train_label_data_paths else ["text"]
    data_b = mpu.broadcast_data(keys, next(data_iterator), torch.int64)
    tokens_ = data_b["text"]
    if "label" in data_b:
        label_mask = (data_b["label"] >= 0)[:, 1:]
        labels = torch.where(data_b["label"] >= 0, data_b["label"], 0)[:, 1:]
    else:
        label_mask = torch.ones_like(tokens_[:, 1:], dtype=torch.bool)
        labels = tokens_[:, 1:]
    tokens = tokens_[:, :-1]
    mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(data=tokens, eod_token=0)
    return tokens, labels, label_mask.float() * loss_mask, mask, position_ids


def flash_attention(q, k, v):
    """ParallelSelfAttention.flash_attention in training; the name is looked up at build time."""
    from flash_attn.flash_attn_interface import flash_attn_func  # noqa: PLC0415

    return flash_attn_func(q, k, v, 0.0, softmax_scale=None, causal=True)

"""megatron.utils of GPT-NeoX: a row is one causal run."""

import torch


def get_ltor_masks_and_position_ids(data, eod_token, eod_mask_loss=False):
    loss_mask = torch.ones(data.size(), dtype=torch.float)
    if eod_mask_loss:
        loss_mask[data == eod_token] = 0.0
    position_ids = torch.arange(data.size(1)).unsqueeze(0).expand_as(data)
    return None, loss_mask, position_ids

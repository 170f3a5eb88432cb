"""megatron.utils of Megatron-DeepSpeed with flash attention: no mask, positions of the row."""

import torch

from megatron import model  # noqa: F401 - with it comes attention, before anything here is replaced


def get_ltor_masks_and_position_ids(
    data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, skip_mask=False
):
    loss_mask = torch.ones(data.size(), dtype=torch.float)
    if eod_mask_loss:
        loss_mask[data == eod_token] = 0.0
    return None, loss_mask, torch.arange(data.size(1)).unsqueeze(0).expand_as(data)

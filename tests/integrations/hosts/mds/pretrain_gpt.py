"""Megatron-DeepSpeed's pretrain_gpt.py: dataset provider and get_batch."""

import torch
from megatron import get_args
from megatron.core import tensor_parallel
from megatron.data.gpt_dataset import build_train_valid_test_datasets
from megatron.utils import get_ltor_masks_and_position_ids


def get_batch(data_iterator):
    data_b = tensor_parallel.broadcast_data(["text"], next(data_iterator), torch.int64)
    tokens_ = data_b["text"]
    labels, tokens = tokens_[:, 1:].contiguous(), tokens_[:, :-1].contiguous()
    mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens, 0, False, False, False, True
    )
    return tokens, labels, loss_mask, mask, position_ids


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    return build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl="mmap",
        splits_string=args.split,
        train_valid_test_num_samples=train_val_test_num_samples,
        seq_length=args.seq_length,
        seed=args.seed,
        skip_warmup=True,
        train_data_prefix=args.train_data_path,
        valid_data_prefix=None,
        test_data_prefix=None,
        data_cache_path=args.data_cache_path,
    )

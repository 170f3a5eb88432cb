"""Megatron-LM 0.16's pretrain() as far as data goes: provider, loader, forward step."""

import argparse
import json
import sys

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", nargs="+", required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--train-samples", type=int, required=True)
    parser.add_argument("--data-cache-path")
    return parser.parse_args(sys.argv[1:])


def pretrain(
    train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, store=None
):
    args = get_args()
    torch.distributed.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    calculator.init_num_microbatches_calculator(
        rank=0,
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
    )
    assert train_valid_test_dataset_provider.is_distributed
    train, _, _ = train_valid_test_dataset_provider([args.train_samples, 0, 0])
    loader = iter(torch.utils.data.DataLoader(train, batch_size=args.micro_batch_size))
    tokens, boundaries = forward_step_func(loader, model_provider())
    report = {
        "dataset": type(train).__name__,
        "rows": len(train),
        "sources": len(getattr(getattr(train, "sources", None), "datasets", [])),
        "tokens": list(tokens.shape),
        "boundaries": boundaries,
    }
    print(json.dumps(report))

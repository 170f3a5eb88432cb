"""OLMo-core's trainer on packed rows: a small Llama.

    torchrun --nproc-per-node 2 examples/olmo_core_packed.py corpus runs/olmo

``corpus`` is a .bin/.idx prefix or a manifest; docs/guides/olmo_core.md.
"""

import argparse

import torch
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import (
    Duration,
    Trainer,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import CheckpointerCallback, EvaluatorCallback
from olmo_core.train.train_module import (
    TransformerDataParallelConfig,
    TransformerTrainModuleConfig,
)

from megapack.integrations.hosts.olmo_core import (
    PackedOlmoCallback,
    PackedOlmoEvaluator,
    PackedOlmoLoader,
)


def build(args: argparse.Namespace) -> Trainer:
    model = TransformerConfig.llama_like(
        d_model=args.width,
        n_layers=args.layers,
        n_heads=4,
        vocab_size=args.vocabulary,
        attn_backend=AttentionBackendName.flash_2,  # "torch" does not support documents
    )
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=args.micro_batch_rows * args.sequence_length,
        max_sequence_length=args.sequence_length,
        optim=AdamWConfig(lr=args.lr),
        dp_config=TransformerDataParallelConfig(name=DataParallelType(args.data_parallel))
        if get_world_size() > 1
        else None,
    ).build(model.build(init_device="meta"))
    loader = PackedOlmoLoader(
        args.data_path,
        sequence_length=args.sequence_length,
        global_batch_size=args.step_rows * args.sequence_length,
        work_dir=args.save_folder,
        dp_process_group=train_module.dp_process_group,
        num_workers=args.num_workers,
    )
    config = TrainerConfig(
        save_folder=args.save_folder,
        max_duration=Duration.steps(args.steps),
        metrics_collect_interval=1,
    )
    config = config.with_callback("packed", PackedOlmoCallback())
    config = config.with_callback("checkpointer", CheckpointerCallback(save_async=False))
    trainer = config.build(train_module, loader)
    if args.evaluate:
        evaluator = PackedOlmoEvaluator(
            args.evaluate,
            name="held out",
            sequence_length=args.sequence_length,
            global_batch_size=args.micro_batch_rows * args.sequence_length * loader.dp_world_size,
            work_dir=args.save_folder,
            dp_process_group=train_module.dp_process_group,
        )
        trainer.add_callback("held out", EvaluatorCallback([evaluator], eval_on_finish=True))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_path")
    parser.add_argument("save_folder")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--step-rows", type=int, default=32)
    parser.add_argument("--micro-batch-rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--evaluate", help="a prefix or manifest, at the end")
    parser.add_argument("--data-parallel", default="fsdp")
    args = parser.parse_args()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    prepare_training_environment(seed=0, backend=backend, shared_filesystem=True)
    build(args).fit()
    teardown_training_environment()


if __name__ == "__main__":
    main()

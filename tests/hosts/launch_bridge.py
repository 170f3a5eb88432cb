"""Megatron-Bridge on a CPU: ``launch_bridge.py RECORDS MANIFEST [pretrain STAGES FAULT]``.

Without ``pretrain``, it runs Bridge's GPTDatasetConfig, dataset provider, get_batch for every stage
of a pipeline of three, and get_packed_seq_params, with a stock loader; the arguments of the model
are recorded as for Megatron-LM (check.py). With ``pretrain``, Bridge's own ``pretrain`` trains a
tiny GPT of megatron-core's local layers, under torchrun. Bridge imports Transformer Engine,
modelopt and NVIDIA's resiliency extension in any case; stand-ins have their names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cpu import on_cpu
from recorder import Recorder

from launch import prepare, watched

ROW, ROWS, STAGES = 128, 24, 3
GLOBAL_BATCH, STEPS = 12, 3
TRANSFORMER_ENGINE = "2.9.0"
ABSENT = ("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext")


class _Named(type):
    """A class whose attributes are never called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Absent(ModuleType):
    __version__ = TRANSFORMER_ENGINE
    __getattr__ = _Named.__getattr__


class _Absence(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def import_bridge() -> None:
    """Import Bridge after megatron-core, which does not need Transformer Engine."""
    importlib.import_module("megatron.core.models.gpt")
    stock = importlib.metadata.distribution

    def distribution(name: str) -> Any:
        if name.replace("_", "-") == "transformer-engine":
            return SimpleNamespace(version=TRANSFORMER_ENGINE)
        return stock(name)

    importlib.metadata.distribution = distribution
    sys.meta_path.insert(0, _Absence())
    importlib.import_module("megatron.bridge.training.gpt_step")


def dataset_config(manifest: str, cache: str, **more: Any) -> Any:
    bridge: Any = importlib.import_module("megatron.bridge.training.config")
    no = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    given = {"seq_length": ROW, "data_path": manifest, "path_to_cache": cache, "random_seed": 1234}
    return bridge.GPTDatasetConfig(**given, split="90,10,0", **no, **more)


def make_rows(manifest: str, cache: str) -> Any:
    """The training rows, as Bridge builds them."""
    utils: Any = importlib.import_module("megatron.bridge.data.utils")
    tokenizer = SimpleNamespace(eod=0, pad=0, vocab_size=1 << 20, unique_identifiers={"name": "0"})
    config = dataset_config(manifest, cache, tokenizer=tokenizer)
    config.finalize()
    train, _, _ = utils.get_dataset_provider(config)([ROWS, ROWS, 0], config)
    return config, train


def main(folder: str, manifest: str) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    import_bridge()
    state = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel()
    counts = importlib.import_module("megatron.core.num_microbatches_calculator")
    counts.init_num_microbatches_calculator(0, None, 12, 1, 1)
    importlib.import_module("megapack.integrations.hosts.megatron").install_bridge()
    config, train = make_rows(manifest, str(Path(folder) / "cache"))
    step: Any = importlib.import_module("megatron.bridge.training.gpt_step")
    packed: Any = importlib.import_module("megatron.bridge.training.utils.packed_seq_utils")
    samplers: Any = importlib.import_module("megatron.bridge.data.samplers")
    cfg = SimpleNamespace(dataset=config, model=SimpleNamespace())
    for stage in range(STAGES):
        recorder = Recorder()
        loader = samplers.build_pretraining_data_loader(
            train, 0, "single", 1, 0, False, data_parallel_rank=0, data_parallel_size=1
        )
        ranks = SimpleNamespace(
            pp=_Stage(stage),
            tp=state.get_tensor_model_parallel_group(),
            cp=state.get_context_parallel_group(),
        )
        batches = iter(loader)
        for row in range(ROWS):
            tokens, labels, mask, _, positions, metadata = step.get_batch(
                batches, cfg, False, pg_collection=ranks
            )
            params = None if metadata is None else packed.get_packed_seq_params(metadata)
            recorder.note_call(
                training=True,
                tokens=tokens,
                position_ids=positions,
                labels=labels,
                loss_mask=mask,
                cu_seqlens=getattr(params, "cu_seqlens_q", None),
                cu_seqlens_padded=getattr(params, "cu_seqlens_q_padded", None),
                max_seqlen=getattr(params, "max_seqlen_q", None),
            )
            read = {"split": "train", "rows": [row], "buckets": [train.bucket_of(row)]}
            recorder.reads.append(read)
        recorder.save(Path(folder), data=0, tensor=0, pipeline=stage, context=0)


class _Stage:
    """The group of a pipeline; only the rank's place and the group's size are used."""

    def __init__(self, stage: int) -> None:
        self._stage = stage

    def rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return STAGES


NOT_HERE = (  # fused kernels, and biases
    *("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("masked_softmax_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"),
    *("persist_layer_norm", "add_bias_linear"),
)


def configuration(manifest: str, cache: str, stages: int) -> Any:
    """Configure a run as docs/guides/megatron_bridge.md does, for a tiny unfused model."""
    bridge: Any = importlib.import_module("megatron.bridge.training.config")
    models: Any = importlib.import_module("megatron.bridge.models.gpt_provider")
    model = models.GPTModelProvider(
        transformer_layer_spec=models.local_layer_spec,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        seq_length=ROW,
        vocab_size=1 << 14,
        position_embedding_type="rope",
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **dict.fromkeys(NOT_HERE, False),
        calculate_per_token_loss=True,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(
            train_iters=STEPS, global_batch_size=GLOBAL_BATCH, micro_batch_size=1
        ),
        validation=bridge.ValidationConfig(eval_interval=2, eval_iters=1),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, clip_grad=0.0, use_distributed_optimizer=False
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=bridge.DistributedDataParallelConfig(use_distributed_optimizer=False),
        dataset=dataset_config(
            manifest,
            cache,
            dataloader_type="single",
            skip_getting_attention_mask_from_dataset=True,
            num_workers=0,
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=(1 << 14) - 1),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        rng=bridge.RNGConfig(seed=1234),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


def pretrain(folder: str, manifest: str, stages: str, fault: str) -> None:
    torch.set_num_threads(1)
    import_bridge()
    importlib.import_module("megapack.integrations.hosts.megatron").install_bridge()
    recorder = watched(None if fault == "none" else fault)
    prepare([])
    for name in ("train", "eval"):  # modelopt's, for a model that is distilled
        loop: Any = importlib.import_module(f"megatron.bridge.training.{name}")
        loop.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    training: Any = importlib.import_module("megatron.bridge.training.pretrain")
    state = importlib.import_module("megatron.core.parallel_state")
    where: dict[str, int] = {}
    stock = training._finish_train

    def finish(*args: Any) -> None:  # it ends the groups that know the place of a rank
        where["data"] = state.get_data_parallel_rank()
        where["pipeline"] = state.get_pipeline_model_parallel_rank()
        stock(*args)

    training._finish_train = finish
    step: Any = importlib.import_module("megatron.bridge.training.gpt_step")
    make_loss = step._create_loss_function

    def loss_of(loss_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if loss_mask is not None:  # on the last stage, whose model does not get it
            recorder.calls[-1]["loss_mask"] = loss_mask.clone()
        return make_loss(loss_mask, *args, **kwargs)

    step._create_loss_function = loss_of
    config = configuration(manifest, str(Path(folder) / "cache"), int(stages))
    training.pretrain(config, step.forward_step)
    recorder.save(Path(folder), **where, tensor=0, context=0, stages=int(stages))


if __name__ == "__main__":
    on_cpu()
    if len(sys.argv) > 3:
        pretrain(sys.argv[1], sys.argv[2], *sys.argv[4:])
    else:
        main(sys.argv[1], sys.argv[2])

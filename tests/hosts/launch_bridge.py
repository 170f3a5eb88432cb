"""Megatron-Bridge's own configuration and batches on a CPU: ``launch_bridge.py RECORDS MANIFEST``.

Its GPTDatasetConfig, its dataset provider, a stock loader, its get_batch for every stage of a
pipeline of three, and its get_packed_seq_params; what the model would be handed is recorded as of
Megatron-LM (check.py). Bridge imports Transformer Engine and modelopt whatever is used of them;
stand-ins have their names.
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

import torch.distributed as dist
from cpu import on_cpu
from recorder import Recorder

ROW, ROWS, STAGES = 128, 24, 3
TRANSFORMER_ENGINE = "2.9.0"
ABSENT = ("transformer_engine", "transformer_engine_torch", "modelopt")


class _Named(type):
    """A class of which no name is ever called."""

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
    """After megatron-core, which does without Transformer Engine where there is none."""
    importlib.import_module("megatron.core.models.gpt")
    stock = importlib.metadata.distribution

    def distribution(name: str) -> Any:
        if name.replace("_", "-") == "transformer-engine":
            return SimpleNamespace(version=TRANSFORMER_ENGINE)
        return stock(name)

    importlib.metadata.distribution = distribution
    sys.meta_path.insert(0, _Absence())
    importlib.import_module("megatron.bridge.training.gpt_step")


def make_rows(manifest: str, cache: str) -> Any:
    """The training rows, as Bridge builds them."""
    config_module: Any = importlib.import_module("megatron.bridge.training.config")
    utils: Any = importlib.import_module("megatron.bridge.data.utils")
    tokenizer = SimpleNamespace(eod=0, pad=0, vocab_size=1 << 20, unique_identifiers={"name": "0"})
    config = config_module.GPTDatasetConfig(
        seq_length=ROW,
        data_path=manifest,
        random_seed=1234,
        split="90,10,0",
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
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
    importlib.import_module("megapack.integrations.megatron").install_bridge()
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
            recorder.reads.append(
                {"split": "train", "rows": [row], "buckets": [train.bucket_of(row)]}
            )
        recorder.save(Path(folder), data=0, tensor=0, pipeline=stage, context=0)


class _Stage:
    """The group of a pipeline, of which only place and size are asked."""

    def __init__(self, stage: int) -> None:
        self._stage = stage

    def rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return STAGES


if __name__ == "__main__":
    on_cpu()
    main(sys.argv[1], sys.argv[2])

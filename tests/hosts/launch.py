"""One rank of a host's run on the CPU: ``launch.py RECORDS script.py [the script's arguments]``.

The script runs as ``python -m megapack.integrations.megatron`` runs it. Every call of its model is
written to ``RECORDS/rank<n>.pt``: what the model was handed, and which rows the rank had read from
its dataset. ranks.py starts all ranks of a run.
"""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from cpu import on_cpu
from helpers import load_helpers
from recorder import Recorder
from stand_ins import AttentionNotRun, take_sequence_parallel


class GPTRecorder(Recorder):
    """Of Megatron-LM, whose model is handed everything."""

    def watch_model(self, model_class: Any) -> None:
        stock = model_class.forward

        def forward(model: Any, input_ids: Any, position_ids: Any, *args: Any, **kw: Any) -> Any:
            params = kw.get("packed_seq_params")
            self.note_call(
                training=model.training,
                tokens=input_ids,
                position_ids=position_ids,
                labels=kw.get("labels"),
                loss_mask=kw.get("loss_mask"),
                cu_seqlens=getattr(params, "cu_seqlens_q", None),
                cu_seqlens_padded=getattr(params, "cu_seqlens_q_padded", None),
                max_seqlen=getattr(params, "max_seqlen_q", None),
            )
            call = self.calls[-1]
            output = stock(model, input_ids, position_ids, *args, **kw)
            if call["labels"] is not None and output.numel() == call["labels"].numel():
                # The last stage: a loss per token. Others of 0.16 get labels as well.
                call["losses"] = output.detach().double().flatten()
            return output

        model_class.forward = forward

    def watch_rows(self, dataset_class: Any) -> None:
        stock = dataset_class.micro_batch

        def read(dataset: Any, numbers: Any) -> Any:
            batch = stock(dataset, numbers)
            names = ("cu_seqlens", "cu_seqlens_padded")
            self.reads.append(
                {
                    "split": dataset.index_split.name,
                    "rows": [int(i) for i in numbers],
                    "buckets": sorted({dataset.bucket_of(i) for i in numbers}),
                    **{name: batch[name].clone() for name in names if name in batch},
                }
            )
            return batch

        dataset_class.micro_batch = read


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def prepare(arguments: list[str]) -> None:
    """What the host would do on a GPU machine and cannot, or must not, do here."""
    # It compiles into its own tree, which is not ours to write to, what only its datasets need.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = _nothing
    with contextlib.suppress(ModuleNotFoundError):  # 0.16 has CUDA sources
        importlib.import_module("megatron.legacy.fused_kernels").load = _nothing
    # It draws from the generator of the weights, as often as a micro batch is large.
    importlib.import_module("megatron.training.initialize")._warmup_jit_function = _nothing
    norm = importlib.import_module("megatron.core.transformer.torch_norm")
    take_sequence_parallel(norm.WrappedTorchNorm)
    # The local attention of a layer takes no boundaries; ours does, but not over several ranks.
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    local = importlib.import_module("megatron.core.transformer.dot_product_attention")
    stock = local.DotProductAttention
    ours = importlib.import_module("megapack.integrations.megatron").PackedCoreAttention
    if "--context-parallel-size" in arguments:
        ours = AttentionNotRun
        importlib.import_module("megatron.core.utils").tex = sys.modules["stand_ins"]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("DotProductAttention") is stock:
            module.DotProductAttention = ours


def run_rank(folder: str, script: str, arguments: list[str], helpers: str | None = None) -> None:
    """Record one rank of a run, in a process where ``on_cpu()`` was called.

    Args:
        helpers: the host's compiled helpers; then it runs with its own datasets.
    """
    torch.set_num_threads(1)
    recorder = GPTRecorder()
    recorder.watch_model(importlib.import_module("megatron.core.models.gpt").GPTModel)
    dataset = importlib.import_module("megapack.integrations.megatron.dataset")
    recorder.watch_rows(dataset.PackedGPTDataset)
    prepare(arguments)
    with contextlib.suppress(SystemExit):  # so --exit-interval ends a run
        if helpers is not None:
            load_helpers(helpers)
            sys.argv = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            launcher = importlib.import_module("megapack.integrations.megatron.__main__")
            launcher.main([script, *arguments])
    state = importlib.import_module("megatron.core.parallel_state")
    recorder.save(
        Path(folder),
        data=state.get_data_parallel_rank(),
        tensor=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_rank(),
    )


if __name__ == "__main__":
    on_cpu()
    run_rank(sys.argv[1], sys.argv[2], sys.argv[3:])

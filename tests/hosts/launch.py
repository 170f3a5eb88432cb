"""One rank of a host's run on the CPU: ``launch.py RECORDS script.py [the script's arguments]``.

The script runs as ``python -m megapack.integrations.hosts.megatron`` runs it. Every call of its
model is written to ``RECORDS/rank<n>.pt``: the inputs of the model, and the rows that the rank had
read from its dataset. ranks.py starts all ranks of a run.
"""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu import on_cpu
from faults import put_in
from helpers import load_helpers
from recorder import SPLITS, Recorder
from stand_ins import AttentionNotRun, take_sequence_parallel


class GPTRecorder(Recorder):
    """Recorder of Megatron-LM, whose model gets everything."""

    def watch_model(self, model_class: Any) -> None:
        stock = model_class.forward

        def forward(model: Any, input_ids: Any, position_ids: Any, *args: Any, **kw: Any) -> Any:
            params = kw.get("packed_seq_params")
            self.note_call(
                virtual=getattr(model, "vp_stage", None) or 0,
                training=model.training,
                tokens=input_ids,
                position_ids=position_ids,
                labels=kw.get("labels"),
                loss_mask=kw.get("loss_mask"),
                cu_seqlens=getattr(params, "cu_seqlens_q", None),
                cu_seqlens_padded=getattr(params, "cu_seqlens_q_padded", None),
                max_seqlen=getattr(params, "max_seqlen_q", None),
                # Transformer Engine takes two objects for padding between segments.
                pads=_pads_between(params),
            )
            call = self.calls[-1]
            output = stock(model, input_ids, position_ids, *args, **kw)
            if call["labels"] is not None and output.numel() == call["labels"].numel():
                # The last stage: a loss per token. In 0.16 other stages get labels, too.
                call["losses"] = output.detach().double().flatten()
            return output

        model_class.forward = forward

    def watch_tokens_ahead(self) -> None:
        """Labels and masks of multi-token prediction: the model rolls them once for every depth."""
        home = importlib.import_module("megatron.core.transformer.multi_token_prediction")
        stock = home.roll_tensor

        def roll(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            made = stock(tensor, *args, **kwargs)
            self.calls[-1].setdefault("ahead", []).append(made[0].detach().clone())
            return made

        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.") and vars(module).get("roll_tensor") is stock:
                module.roll_tensor = roll

    def watch_rows(self, dataset_class: Any) -> None:
        stock = dataset_class.micro_batch

        def read(dataset: Any, numbers: Any) -> Any:
            batch = stock(dataset, numbers)
            names = {"cu_seqlens", "cu_seqlens_padded"} & batch.keys()
            self.reads.append(
                {
                    **{"dataset": id(dataset), "split": dataset.index_split.name},
                    "rows": [int(i) for i in numbers],
                    "buckets": sorted({dataset.bucket_of(i) for i in numbers}),
                    **{name: batch[name].clone() for name in names},
                }
            )
            return batch

        dataset_class.micro_batch = read

    def save(self, folder: Path, **where: int) -> None:
        """Save a separate rank for every virtual stage, which has its own loader."""
        calls, reads, probed = self.calls, self.reads, self.probed
        size = where.pop("stages")
        stages = sorted({call["virtual"] for call in calls})
        for split in SPLITS:  # the first stage reads first
            mine = [read for read in reads if read["split"] == split]
            turns = {each: i for i, each in enumerate(dict.fromkeys(r["dataset"] for r in mine))}
            for read in mine:
                read["virtual"] = turns[read["dataset"]] if len(stages) > 1 else 0
        for stage in stages:
            self.calls, self.reads, self.probed = (
                [one for one in all_of_them if one["virtual"] == stage]
                for all_of_them in (calls, reads, probed)
            )
            pipeline = where["pipeline"] + size * stage
            super().save(folder, **{**where, "pipeline": pipeline})


def _pads_between(params: Any) -> bool:
    """Transformer Engine's rule: padding is between segments if it gets two objects."""
    padded = getattr(params, "cu_seqlens_q_padded", None)
    return padded is not None and padded is not params.cu_seqlens_q


def watched(fault: str | None = None) -> GPTRecorder:
    """Record calls, rows and the probe; inject a fault of faults.py."""
    recorder = GPTRecorder()
    model_class = importlib.import_module("megatron.core.models.gpt").GPTModel
    recorder.watch_model(model_class)
    if fault is not None:
        put_in(fault, model_class)
    dataset = importlib.import_module("megapack.integrations.hosts.megatron.dataset")
    recorder.watch_rows(dataset.PackedGPTDataset)
    recorder.watch_probe(importlib.import_module("megapack.integrations.hosts.megatron.probe"))
    return recorder


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def prepare(arguments: list[str]) -> None:
    """Disable what the host does only on a GPU machine."""
    # It compiles helpers of its own datasets into its tree, which tests must not write to.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = _nothing
    with contextlib.suppress(ModuleNotFoundError):  # 0.16 has CUDA sources
        importlib.import_module("megatron.legacy.fused_kernels").load = _nothing
    # It draws from the generator of the weights, as often as the size of a micro batch requires.
    importlib.import_module("megatron.training.initialize")._warmup_jit_function = _nothing
    norm = importlib.import_module("megatron.core.transformer.torch_norm")
    take_sequence_parallel(norm.WrappedTorchNorm)
    with contextlib.suppress(ModuleNotFoundError):  # main asks for them; without TE they are mocks
        linear = importlib.import_module("megatron.core.tensor_parallel.inference_layers")
        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(vars(linear).get(name, int), type):
                setattr(linear, name, type(name, (), {}))
    # The local attention of a layer takes no boundaries; ours does, but not over several ranks.
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    local = importlib.import_module("megatron.core.transformer.dot_product_attention")
    stock = local.DotProductAttention
    ours = importlib.import_module("megapack.integrations.hosts.megatron").PackedCoreAttention
    if "--context-parallel-size" in arguments:
        ours = AttentionNotRun
        importlib.import_module("megatron.core.utils").tex = sys.modules["stand_ins"]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("DotProductAttention") is stock:
            module.DotProductAttention = ours


def run_rank(
    folder: str,
    script: str,
    arguments: list[str],
    helpers: str | None = None,
    *,
    options: Sequence[str] = (),
    fault: str | None = None,
) -> None:
    """Record one rank of a run, in a process where ``on_cpu()`` was called.

    Args:
        helpers: the host's compiled helpers; with them, it runs with its own datasets.
        options: options of the launcher.
        fault: fault of faults.py, put into the host before it runs.
    """
    torch.set_num_threads(1)
    recorder = watched(fault)
    if "--mtp-num-layers" in arguments:
        recorder.watch_tokens_ahead()
    prepare(arguments)
    with contextlib.suppress(SystemExit):  # so --exit-interval ends a run
        if helpers is not None:
            load_helpers(helpers)
            sys.argv = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            launcher = importlib.import_module("megapack.integrations.hosts.megatron.__main__")
            launcher.main([*options, script, *arguments])
    state = importlib.import_module("megatron.core.parallel_state")
    recorder.save(
        Path(folder),
        data=state.get_data_parallel_rank(),
        tensor=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_rank(),
        stages=state.get_pipeline_model_parallel_world_size(),
    )


if __name__ == "__main__":
    on_cpu()
    run_rank(sys.argv[1], sys.argv[2], sys.argv[3:])

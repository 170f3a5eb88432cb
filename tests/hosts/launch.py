"""One rank of a host's run on the CPU: ``launch.py RECORDS script.py [the script's arguments]``.

Under torchrun. The script runs as ``python -m megapack.integrations.megatron`` runs it. Every call
of its model is written to ``RECORDS/rank<n>.pt``: what the model was handed, and which rows the
rank had read from its dataset.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from cpu import on_cpu
from recorder import Recorder


def watch_model(recorder: Recorder, model_class: Any) -> None:
    stock = model_class.forward

    def forward(model: Any, input_ids: Any, position_ids: Any, *args: Any, **kw: Any) -> Any:
        params = kw.get("packed_seq_params")
        recorder.note_call(
            training=model.training,
            tokens=input_ids,
            position_ids=position_ids,
            labels=kw.get("labels"),
            loss_mask=kw.get("loss_mask"),
            cu_seqlens=getattr(params, "cu_seqlens_q", None),
            max_seqlen=getattr(params, "max_seqlen_q", None),
        )
        return stock(model, input_ids, position_ids, *args, **kw)

    model_class.forward = forward


def watch_rows(recorder: Recorder, row_class: Any) -> None:
    stock = row_class.micro_batch

    def read(rows: Any, numbers: Any) -> Any:
        recorder.note_read(rows, numbers)
        return stock(rows, numbers)

    row_class.micro_batch = read


def prepare() -> None:
    """What the host would do on a GPU machine and cannot, or must not, do here."""
    # It compiles into its own tree, which is not ours to write to, what only its datasets need.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    with contextlib.suppress(ModuleNotFoundError):  # 0.16 has CUDA sources
        importlib.import_module("megatron.legacy.fused_kernels").load = lambda args: None
    # The local attention of a layer takes no boundaries; ours does.
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    local = importlib.import_module("megatron.core.transformer.dot_product_attention")
    stock = local.DotProductAttention
    ours = importlib.import_module("megapack.integrations.megatron").PackedCoreAttention
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("DotProductAttention") is stock:
            module.DotProductAttention = ours


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    on_cpu()
    torch.set_num_threads(1)
    recorder = Recorder()
    watch_model(recorder, importlib.import_module("megatron.core.models.gpt").GPTModel)
    watch_rows(recorder, importlib.import_module("megapack.integrations.rows").RowDataset)
    prepare()
    launcher = importlib.import_module("megapack.integrations.megatron.__main__")
    with contextlib.suppress(SystemExit):  # so --exit-interval ends a run
        launcher.main([script, *arguments])
    state = importlib.import_module("megatron.core.parallel_state")
    recorder.save(
        Path(folder),
        data=state.get_data_parallel_rank(),
        tensor=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
    )


if __name__ == "__main__":
    main()

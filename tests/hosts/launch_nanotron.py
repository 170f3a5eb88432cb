"""nanotron on the CPU: ``torchrun launch_nanotron.py OPTIONS`` is examples/nanotron_packed.py.

CUDA is mapped to the CPU and nccl to gloo (cpu.py). The kernels that nanotron imports of flash-attn
(attention, rotary embedding, norm) are replaced by plain torch; those of experts are not called.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cpu import on_cpu
from flash import _module, flash_attn_varlen_func, put_flash_attn
from recorder import LoaderRecorder, flat_gradient, print_one_by_one
from torch import Tensor, nn

from megapack.integrations.dialects import emit
from megapack.integrations.rows.rank_rows import RankRows

SABOTAGE = os.environ.get("HOST_SABOTAGE", "")


def sum_and_divide() -> None:
    """gloo has no mean, and torch's takes no weights."""
    stock = dist.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return stock(tensor, op=op, group=group, async_op=async_op)
        with torch.no_grad():
            stock(tensor, group=group)
            tensor.div_(dist.get_world_size(group))
        return SimpleNamespace(wait=lambda: None)

    dist.all_reduce = all_reduce


class RotaryEmbedding(nn.Module):
    """flash-attn's, of q ``(b, s, heads, dim)`` and kv ``(b, s, 2, heads, dim)``."""

    def __init__(self, dim: int, base: float = 10000.0, *_: Any, **__: Any) -> None:
        super().__init__()
        self.frequencies = base ** -(torch.arange(0, dim, 2) / dim)

    def forward(
        self, q: Tensor, kv: Tensor, seqlen_offset: int = 0, max_seqlen: int | None = None
    ) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(q.shape[1]) + seqlen_offset, self.frequencies)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

        return turned(q), torch.stack([turned(kv[:, :, 0]), kv[:, :, 1]], dim=2)


def layer_norm_fn(x: Tensor, weight: Tensor, bias: None, eps: float, **_: Any) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def put_kernels(recorder: LoaderRecorder) -> None:
    """Replace modules that nanotron imports."""
    put_flash_attn(recorder.note_attention)

    def kvpacked(q: Tensor, kv: Tensor, cu_q: Tensor, cu_k: Tensor, *args: Any, **kw: Any) -> Any:
        longest = int(cu_q.diff().max())
        assert longest <= min(args[:2]), "nanotron gives the length of a row"
        recorder.note_attention(cu_q, longest)
        assert not kw["return_attn_probs"], "log_attn_probs is off"
        return flash_attn_varlen_func(
            q, kv[:, 0], kv[:, 1], cu_q, cu_k, longest, longest, causal=kw["causal"]
        )

    names: dict[str, dict[str, Any]] = {
        "bert_padding": {},
        "flash_attn_interface": {
            "flash_attn_varlen_kvpacked_func": kvpacked,
            "_flash_attn_varlen_forward": None,
            "_flash_attn_varlen_backward": None,
            "flash_attn_with_kvcache": None,
            **vars(sys.modules["flash_attn.flash_attn_interface"]),
        },
        "modules.mha": {"flash_attn_varlen_kvpacked_func": kvpacked},
        "layers.rotary": {"RotaryEmbedding": RotaryEmbedding, "apply_rotary_emb": None},
        "ops.triton.layer_norm": {"layer_norm_fn": layer_norm_fn},
    }
    for name, contents in names.items():
        above = name.split(".")[:-1]
        for k in range(len(above)):
            _module(".".join(["flash_attn", *above[: k + 1]]), {"__path__": []})
        made = _module(f"flash_attn.{name}", contents)
        if not above:
            setattr(sys.modules["flash_attn"], name, made)
    _module("grouped_gemm", {"__path__": [], "ops": _module("grouped_gemm.ops", {})})


def watch_model(recorder: LoaderRecorder) -> None:
    model: Any = importlib.import_module("nanotron.models.qwen").Qwen2ForTraining
    stock = model.forward

    def forward(
        self: Any, input_ids: Tensor, position_ids: Tensor, label_ids: Tensor, label_mask: Tensor
    ) -> Any:
        recorder.note_call(training=self.training, tokens=input_ids, position_ids=position_ids)
        if not recorder.paused:
            recorder.note_loss(label_ids, label_mask.float())
        return stock(self, input_ids, position_ids, label_ids, label_mask)

    model.forward = forward


def keep_gradient(trainer: Any, folder: Path) -> None:
    """Save the optimizer's gradient of the first step: gradient.pt."""
    stock = trainer.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not (folder / "gradient.pt").exists():
            torch.save(flat_gradient(trainer.unwrapped_model), folder / "gradient.pt")
        return stock(*args, **kwargs)

    trainer.optimizer.step = step


def sabotage(ours: Any) -> None:
    """Inject a fault between the loader and the model, like a user's wrong change."""
    qwen: Any = importlib.import_module("nanotron.models.qwen")
    attention, model = qwen.Qwen2Attention.forward, qwen.Qwen2ForTraining
    forward, iterate = model.forward, ours.PackedBatches.__iter__

    def attend(self: Any, hidden_states: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Any:
        row = position_ids.shape[1]
        if SABOTAGE == "no boundary":
            bounds = torch.arange(0, position_ids.numel() + 1, row, dtype=torch.int32)
        else:
            bounds, lengths = cu_seqlens.clone(), cu_seqlens.diff()
            bounds[1:-1] += (lengths[:-1] < row) & (lengths[1:] > 1)
        return attention(self, hidden_states, position_ids, bounds)

    def moved(batches: Any) -> Any:
        for told in iterate(batches):
            yield {**told, "label_ids": told["label_ids"].roll(1, dims=1)}

    def shifted(self: Any, label_mask: Tensor, **told: Tensor) -> Any:
        return forward(self, label_mask=label_mask.roll(1, dims=1), **told)

    if "boundary" in SABOTAGE:
        qwen.Qwen2Attention.forward = attend
    elif SABOTAGE == "loader":
        ours.PackedBatches.__iter__ = moved
    elif SABOTAGE == "mask":
        model.forward = shifted
    elif SABOTAGE == "mean of means":
        mean = qwen.masked_mean
        ours.PackedBatches.masked_mean = lambda _, *args, **kwargs: mean(*args, **kwargs)
        ours.PackedBatches.probe_at_first = lambda *_: None


def one_by_one(trainer: Any, batches: Any) -> None:
    model, ranks = trainer.unwrapped_model, batches.ranks
    told = emit(ranks.rows.micro_batch([ranks._block_of_short_documents(0)]), ranks.dialect)
    begins = (told["position_ids"][0] == 0).nonzero().flatten().tolist()
    batches.labels = float(told["label_mask"].sum())
    bounds = [*begins, told["position_ids"].shape[1]]
    print_one_by_one(model, told, bounds, lambda **piece: model(**piece)["loss"])


def main() -> None:
    torch.set_num_threads(1)
    on_cpu()
    torch.cuda.Event.elapsed_time = lambda *_: 1.0  # nanotron divides by it
    sum_and_divide()
    recorder = LoaderRecorder()
    put_kernels(recorder)
    trainer_module: Any = importlib.import_module("nanotron.trainer")
    trainer_module.state_dict_to_device = lambda *_: None  # it asserts that they are on a GPU then
    trainer_class = trainer_module.DistributedTrainer
    recorder.watch_rank_rows(RankRows)
    watch_model(recorder)
    train = trainer_class.train

    folder = Path(os.environ["HOST_RECORDS"])
    sabotage(importlib.import_module("megapack.integrations.hosts.nanotron"))

    def trained(trainer: Any, dataloaders: Any) -> None:
        if os.environ.get("HOST_GRADIENT"):
            keep_gradient(trainer, folder)
        train(trainer, dataloaders)
        context = trainer.parallel_context
        data, tensor = dist.get_rank(context.dp_pg), dist.get_rank(context.tp_pg)
        recorder.save(folder, data=data, tensor=tensor, pipeline=0)
        if os.environ.get("HOST_ONE_BY_ONE"):
            recorder.paused = True
            (batches,) = dataloaders.values()
            one_by_one(trainer, batches)

    trainer_class.train = trained
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("nanotron_packed").main()


if __name__ == "__main__":
    main()

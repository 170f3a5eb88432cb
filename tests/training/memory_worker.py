"""Peak memory of a step of DeepSpeed's engines on the CPU, by torch's memory tracker.

argv: a JSON list of [configuration file, ranks], output. One process with a fake process group
(its collectives do nothing) represents one of the ranks. Started by test_memory.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from megapack.config import load_config
from megapack.training.config import PretrainConfig
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.engine import start_engine
from megapack.training.model import loss, training_model
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model, compute_dtype


class Visible(torch.autograd.Function):
    """Compute megapack's loss without its custom operation: the tracker sees its tensors."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, how: Any) -> Any:
        without = {"alpha": 0.0, "temperature": 1.0, "gradients": True}
        total, losses, _, *gradients = loss._linear_cross_entropy._init_fn(
            hidden, weight, labels, None, [], **how, **without
        )
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return *(saved * grad.to(saved.dtype) for saved in ctx.saved_tensors), None, None


def visible_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    label_weights: None,
    teacher: None,
    **how: Any,
) -> Any:
    compute = weight.dtype
    if torch.is_autocast_enabled("cpu"):
        compute = torch.get_autocast_dtype("cpu")
    return *Visible.apply(hidden.to(compute), weight.to(compute), labels, how), None


def peak_of_a_step(path: str, ranks: int) -> int:
    """Return the bytes of the second step; the first creates the optimizer's state."""
    config = load_config(PretrainConfig, path)
    architecture = model_configuration(config.model, 300)
    here: Any = SimpleNamespace(size=ranks, rank=0, device=torch.device("cpu"))
    tokens = config.data.micro_batch_tokens
    micro_steps = config.data.tokens_per_step // (tokens * ranks)
    tracker = MemTracker()
    with tracker:
        zero_3 = zero_3_configuration(config, ranks)
        how: Any = {"chunk_tokens": config.engine.loss_chunk_tokens, "zero_3": zero_3}
        model = build_model(config.model, architecture, backend="sdpa", seed=0, **how)
        if zero_3 is not None:
            model.cast(compute_dtype(config.engine))
        engine = start_engine(model, config, here)
        row = torch.zeros(1, tokens, dtype=torch.int64)
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
        for _ in range(2):
            tracker._peak_mem, tracker._peak_mem_snap = {}, {}
            for micro_step in range(micro_steps):
                engine.set_gradient_accumulation_boundary(micro_step == micro_steps - 1)
                tracker.reset_mod_stats()
                scaled = engine(row, row, row, cu_seqlens, max_seqlen=tokens)[0]
                engine.backward(scaled.clone(), scale_wrt_gas=False)
                del scaled
            engine.step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def main() -> None:
    training_model.linear_cross_entropy = visible_loss  # type: ignore[assignment]
    peaks = []
    for path, ranks in json.loads(sys.argv[1]):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        peaks.append(peak_of_a_step(path, ranks))
        break_up()
    Path(sys.argv[2]).write_text(json.dumps(peaks))


def break_up() -> None:
    dist.destroy_process_group()
    from deepspeed import comm  # noqa: PLC0415
    from deepspeed.utils import groups  # noqa: PLC0415

    comm.comm.cdb = None
    groups._WORLD_GROUP = None


main()

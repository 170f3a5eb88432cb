"""torchtitan on the CPU: ``torchrun launch_torchtitan.py OPTIONS`` is its own train.py.

torch reports the CPU as the accelerator, so torchtitan itself asks for gloo and for tensors there.
FlexAttention is torch's own, computed densely; only a check in torch refuses its backward pass on a
CPU, and this check is left out. The kernel of varlen attention is replaced. A time limit for
groups, which torchtitan's main needs and torch 2.13 lacks, does nothing.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flash import flash_attn_varlen_func
from recorder import LoaderRecorder, print_validated
from torch import Tensor
from torch.nn.functional import cross_entropy

from megapack.integrations.dialects import emit

SABOTAGE = os.environ.get("HOST_SABOTAGE", "")


def accelerate_on_cpu() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    sharded: Any = importlib.import_module("torch.distributed.fsdp").FSDPModule
    divide = sharded.set_gradient_divide_factor

    def divide_by_sum(module: Any, factor: float) -> None:  # gloo cannot scale while it sums
        module.set_force_sum_reduction_for_comms(True)
        divide(module, factor)

    sharded.set_gradient_divide_factor = divide_by_sum
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    flex._validate_device = lambda *_: None


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **_: Any
) -> Tensor:
    return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)


def tiny_model(registry: Any, vocabulary: int) -> None:
    """Cut every model of a registry to two layers, with an id for every token of the corpus."""
    stock = registry.model_registry

    def model_registry(flavor: str, **options: Any) -> Any:
        spec = stock(flavor, attn_backend=os.environ["HOST_ATTENTION"], **options)
        model = spec.model
        model.vocab_size = model.tok_embeddings.num_embeddings = vocabulary
        model.lm_head.out_features = vocabulary
        model.layers = model.layers[:2]
        return spec

    registry.model_registry = model_registry


def watch_model(recorder: LoaderRecorder) -> None:
    decoder = importlib.import_module("torchtitan.models.common.decoder").Decoder
    stock = decoder.forward

    def forward(model: Any, tokens: Tensor, positions: Any = None, attention_masks: Any = None):  # type: ignore[no-untyped-def]
        recorder.note_call(training=model.training, tokens=tokens, position_ids=positions)
        return stock(model, tokens, positions, attention_masks)

    decoder.forward = forward
    attention = importlib.import_module("torchtitan.models.common.attention")
    for kind in (attention.FlexAttention, attention.VarlenAttention):
        kind.forward = noted(kind.forward, recorder)
    loss = importlib.import_module("torchtitan.components.loss").ChunkedLossWrapper
    call = loss.__call__

    def called(self: Any, pred: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.note_labels(labels)
        return call(self, pred, labels, *args, **kwargs)

    loss.__call__ = called


def noted(stock: Any, recorder: LoaderRecorder) -> Any:
    @functools.wraps(stock)  # torchtitan reads its signature
    def forward(layer: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.note_attention(*bounds_of(kwargs["attention_masks"]))
        return stock(layer, q, k, v, *args, **kwargs)

    return forward


def bounds_of(masks: Any) -> tuple[Tensor, int] | tuple[None, None]:
    """The documents that an attention mask keeps apart; none, where it says anything else."""
    if hasattr(masks, "cu_seq_q"):
        return masks.cu_seq_q, masks.max_q
    rows, _, length, _ = masks.shape
    at = torch.arange(length)
    bounds = [0]
    for row in range(rows):
        inside = masks.mask_mod(torch.tensor(row), torch.tensor(0), at[:, None], at[None])
        begins = [i for i in range(length) if i == 0 or not inside[i, i - 1]] + [length]
        of = torch.bucketize(at, torch.tensor(begins), right=True)
        if not torch.equal(inside, (of[:, None] == of) & (at[:, None] >= at)):
            return None, None
        bounds += [row * length + end for end in begins[1:]]
    lengths = [b - a for a, b in pairwise(bounds)]
    return torch.tensor(bounds, dtype=torch.int32), max(lengths)


def states_of(trainer: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the model's states of a row ``(tokens,)``, in which documents begin at positions 0;
    torchtitan's chunked loss computes logits from them."""
    model = trainer.model_parts[0].eval()
    if not trainer.dataloader.ranks.dialect.flat:
        tokens, positions = tokens[None], positions[None]
    masks = model.get_attention_masks(positions=positions)
    with torch.no_grad(), trainer.train_context():
        made: Tensor = model(tokens, positions=positions, attention_masks=masks)
    return made.reshape(tokens.numel(), -1)


def one_by_one(trainer: Any) -> float:
    """Return the distance of a row's states from those of its single documents."""
    ranks = trainer.dataloader.ranks
    told = emit(ranks.micro_batch(ranks._block_of_short_documents(0)), ranks.dialect)
    tokens, positions = (told[name].reshape(-1) for name in ("input", "positions"))
    whole = states_of(trainer, tokens, positions)
    ends = (positions == 0).nonzero().flatten().tolist() + [len(tokens)]
    assert len(ends) > 3, "a row of several documents was expected"
    parts = [states_of(trainer, tokens[a:b], positions[a:b]) for a, b in pairwise(ends)]
    return float((torch.cat(parts) - whole).abs().max())


def losses_of(trainer: Any, text: Tensor) -> Tensor:
    """Return the losses of a single document."""
    states = states_of(trainer, text, torch.arange(len(text)))
    logits = trainer.loss_fn.lm_head(states[:-1])
    return cross_entropy(logits, text[1:], reduction="none")


def sabotage(ours: Any) -> None:
    """Inject a fault between the loader and the model, like a user's wrong change."""
    decoder = importlib.import_module("torchtitan.models.common.decoder").Decoder
    masks, process = decoder.get_attention_masks, ours.PackedTitanTrainer.post_dataloading_process
    iterate = ours.PackedDataLoader.__iter__

    def processed(trainer: Any, told: Any, labels: Any) -> Any:
        return process(trainer, told, labels.roll(1, dims=-1))

    def iterated(loader: Any) -> Any:
        return ((told, labels.roll(1, dims=-1)) for told, labels in iterate(loader))

    def masked(model: Any, positions: Tensor) -> Any:
        if SABOTAGE == "boundary":  # every boundary wrong by one
            moved = positions.roll(1, dims=-1).clone().index_fill_(-1, torch.tensor([0]), 0)
        else:
            moved = torch.arange(positions.shape[-1]).expand_as(positions)
        return masks(model, moved)

    if "boundary" in SABOTAGE:
        decoder.get_attention_masks = masked
    elif SABOTAGE == "labels":
        ours.PackedTitanTrainer.post_dataloading_process = processed
    elif SABOTAGE == "loader":
        ours.PackedDataLoader.__iter__ = iterated


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    torch.set_num_threads(1)
    accelerate_on_cpu()
    attention = importlib.import_module("torchtitan.models.common.attention")
    attention.varlen_attn = varlen_attn
    registry = importlib.import_module("torchtitan.models.llama3.config_registry")
    tiny_model(registry, int(os.environ["HOST_VOCABULARY"]))
    ours: Any = importlib.import_module("megapack.integrations.hosts.torchtitan")
    recorder = LoaderRecorder()
    recorder.watch_rank_rows(ours.RankRows)
    sabotage(ours)
    watch_model(recorder)
    stock = ours.PackedTitanTrainer.train

    def train(trainer: Any) -> None:
        validated: list[float] = []
        log = trainer.metrics_processor.log_validation
        trainer.metrics_processor.log_validation = lambda loss, step, *more: (
            validated.append(loss),
            log(loss, step, *more),
        )
        stock(trainer)
        meshes = [trainer.parallel_dims.get_optional_mesh(name) for name in ("batch", "tp")]
        data, tensor = (0 if mesh is None else mesh.get_local_rank() for mesh in meshes)
        recorder.save(Path(os.environ["HOST_RECORDS"]), data=data, tensor=tensor, pipeline=0)
        recorder.paused = True
        if os.environ.get("HOST_ONE_BY_ONE"):
            print(f"one by one: {one_by_one(trainer):.2e}")
        if prefix := os.environ.get("HOST_VALIDATED"):
            print_validated(validated[-1], prefix, functools.partial(losses_of, trainer))

    ours.PackedTitanTrainer.train = train
    importlib.import_module("torchtitan.train").main()


if __name__ == "__main__":
    main()

"""How much memory a rank will need, counted before it is taken.

A forward and its backward run on fake tensors, which have shapes and no numbers, and every storage
is counted while it lives: activations, what autocast and a recomputed layer make, gradients on
their way. What an operation of ours holds while it runs is counted from its shapes. What DeepSpeed
0.19 holds beside them is known by stage:

    stage     parameters  gradients  master weights  optimizer  buckets
    0, fp32   4P          4P                         8P         the reduction's copy, 4P
    0, bf16   4P          4P                         8P         the same
    1, bf16   2P          4P         4P/N            8P/N       the same
    1, fp32   4P          4P         4P/N            8P/N       of reduce_bucket_size, 4 bytes each
    2         2P or 4P    4P/N       4P/N            8P/N       of reduce_bucket_size, 2 or 4 each
    3         the same/N  4P/N       4P/N            8P/N       the same, and gathered parameters

for P parameters on N ranks, in bytes. ``tests/training/test_memory.py`` holds it against
DeepSpeed's own engines under torch's memory tracker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megapack.training.config import PretrainConfig
from megapack.training.model.flops import num_experts
from megapack.training.model.training_model import TrainingModel

_GATHERED = 10**9  # stage3_max_live_parameters


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, when it needs most.

    Attributes:
        parts: of its device, by what they hold.
        on_host: page-locked ones of its host, where inputs of layers are offloaded.
    """

    parts: dict[str, int]
    on_host: int

    @property
    def total(self) -> int:
        """Bytes on the device, all parts together."""
        return sum(self.parts.values())


def estimate_memory(
    model: TrainingModel,
    config: PretrainConfig,
    world_size: int,
    *,
    longest: int,
    zero: dict[str, Any],
) -> MemoryEstimate:
    """The most memory a rank needs: in the loss, in the backward, or at the end of a step.

    Args:
        model: on the meta device; it becomes fake, and checkpoints its activations if asked to.
        world_size: ranks, over which ZeRO divides.
        longest: tokens of the largest bucket.
        zero: DeepSpeed's ``zero_optimization``, as ``deepspeed_configuration`` makes it.
    """
    engine, stage = config.engine, config.engine.stage
    count = model.num_parameters
    low = engine.precision == "bf16" and stage > 0
    over = {at: world_size if stage >= at else 1 for at in (1, 2, 3)}
    bucket = int(zero.get("reduce_bucket_size", 5 * 10**8))
    width = 2 if low else 4
    in_loss, in_backward, on_host = _activations(model, config, longest)
    # In bfloat16, stage 1 is an optimizer of its own, with gradients of its own.
    own = low and stage == 1
    each = 1 if own or stage == 0 else world_size
    micro_steps = config.data.tokens_per_step // (config.data.micro_batch_tokens * world_size)
    muon = model.hidden_matrices if config.optimizer.kind == "muon" else []
    momentum_alone = sum(p.numel() for p in muon)
    held = {
        "parameters": count * width // over[3],
        "master weights": count * 4 // over[1] if stage else 0,
        "optimizer state": (count * 8 - momentum_alone * 4) // over[1],
        "average of weights": count * 4 // over[1] if config.optimizer.ema_decay else 0,
    }
    gathered = min(count, int(zero.get("stage3_max_live_parameters", _GATHERED))) * width
    buckets = 0
    if stage == 3:
        held["gathered parameters"] = gathered
        buckets = bucket * width
    elif stage and not own:
        buckets = bucket * width * (2 if zero.get("overlap_comm") else 1)
    # They wait for the next micro step (in stage 1 undivided), or in buffers that stay.
    waiting = count * 4 // (each if stage > 1 else 1)
    waiting = waiting if own or stage == 3 or micro_steps > 1 else 0
    held["gradients"] = waiting
    loss = {**held, "activations": in_loss[0], "loss": in_loss[1]}
    if stage == 3:  # whose bucket stays
        loss["reduce buckets"] = buckets
    backward = {**held, "reduce buckets": buckets, "activations": in_backward}
    copied = 4 * min(count, 5 * 10**8) if world_size > 1 and (own or not stage) else 0
    end = {
        **held,
        "gradients": count * 4 // each * (2 if stage in (1, 2) and not own else 1),
        "reduce buckets": copied,
    }
    most = max(loss, backward, end, key=lambda parts: sum(parts.values()))
    return MemoryEstimate(parts={k: v for k, v in most.items() if v}, on_host=on_host)


def _activations(
    model: TrainingModel, config: PretrainConfig, longest: int
) -> tuple[tuple[int, int], int, int]:
    """Bytes beside parameters: when the loss is computed (activations, and what it holds), at most
    in forward and backward, and on the host."""
    engine, num_tokens = config.engine, config.data.micro_batch_tokens
    # torch has no grouped product of fake float32 tensors: experts are counted in half of it.
    in_half = engine.precision != "bf16" and num_experts(model.configuration) is not None
    dtype = torch.bfloat16 if engine.precision == "bf16" or in_half else None
    if dtype is not None and (engine.stage > 0 or in_half):
        model.cast(dtype)
    offloaded = _Offloaded()
    if engine.activation_checkpointing:
        model.checkpoint_activations(offloaded.hooks if engine.offload_activations else None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.train()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        autocast = dtype is not None and engine.stage == 0 and not in_half
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
        cu_seqlens = torch.zeros(2, dtype=torch.int32)
        live = _Live()
        with live:
            with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
                loss, losses, _ = model(tokens, tokens, tokens, cu_seqlens, max_seqlen=longest)
            head = model.model.get_output_embeddings().weight  # type: ignore[operator]
            chunk = min(engine.loss_chunk_tokens, num_tokens)
            half = dtype is not None and not in_half
            in_loss = live.now, loss_temporaries(chunk, *head.shape, half=half)
            loss.backward()
            del loss, losses
    times = 2 if in_half else 1
    return (times * in_loss[0], in_loss[1]), times * live.peak, times * offloaded.num_bytes


def loss_temporaries(chunk_tokens: int, vocab_size: int, width: int, *, half: bool) -> int:
    """Bytes that ``linear_cross_entropy`` holds at most beside what it takes and gives.

    In float32 the logits of a chunk and the copy that their logsumexp makes; the product that is
    added to the gradient of the weight, and where that is half precision, its float32 sum.

    Args:
        chunk_tokens, vocab_size: of the logits.
        width: of the hidden states.
        half: it computes in bfloat16.
    """
    return chunk_tokens * vocab_size * 8 + vocab_size * width * (6 if half else 4)


def _forget(parameter: Tensor) -> None:
    """DeepSpeed takes a gradient as soon as it is there."""
    parameter.grad = None


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations made meanwhile and that live: now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        taken = {id(x.untyped_storage()) for x in tree_iter((args, kwargs)) if _is_tensor(x)}
        for tensor in filter(_is_tensor, tree_iter(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known and id(storage) not in taken:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def ends(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, ends)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


class _Offloaded:
    """Counts inputs kept for recomputation as host memory."""

    num_bytes = 0

    def hooks(self) -> saved_tensors_hooks:
        """The innermost alone are called: what those inside of these get is not counted here."""
        return saved_tensors_hooks(self._pack, lambda unpack: unpack())

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        size = tensor.nbytes
        self.num_bytes += 1 << (size - 1).bit_length()  # torch takes it in powers of two
        shape, dtype = tensor.shape, tensor.dtype
        return lambda: torch.empty(shape, dtype=dtype)

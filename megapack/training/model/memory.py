"""Estimate of the memory that a rank needs, without a device.

A forward and a backward pass run on fake tensors (shapes without values), and every storage counts
while it is alive; temporaries of our own operations are computed from their shapes. In addition,
DeepSpeed 0.19 allocates, for P parameters on N ranks, in bytes:

    stage     parameters  gradients  master weights  optimizer  buckets
    0, fp32   4P          4P                         8P         the reduction's copy, 4P
    0, bf16   4P          4P                         8P         the same
    1, bf16   2P          4P         4P/N            8P/N       the same
    1, fp32   4P          4P         4P/N            8P/N       reduce_bucket_size x 4 bytes
    2         2P or 4P    4P/N       4P/N            8P/N       reduce_bucket_size x 2 or 4 bytes
    3         the same/N  4P/N       4P/N            8P/N       the same, and gathered parameters

``tests/training/test_memory.py`` compares the estimate with DeepSpeed's engines.
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
    """Peak memory of one rank, in bytes.

    Attributes:
        parts: memory of the device, by content.
        on_host: page-locked memory of the host, if inputs of layers are offloaded.
    """

    parts: dict[str, int]
    on_host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


def estimate_memory(
    model: TrainingModel,
    config: PretrainConfig,
    world_size: int,
    *,
    longest: int,
    zero: dict[str, Any],
) -> MemoryEstimate:
    """Return the peak memory of a rank: in the loss, in the backward pass, or at the end of a step.

    Args:
        model: model on the meta device; its tensors become fake.
        longest: tokens of the largest bucket.
        zero: ``zero_optimization`` of ``deepspeed_configuration``.
    """
    engine, stage = config.engine, config.engine.stage
    count = model.num_parameters
    low = engine.precision == "bf16" and stage > 0
    # Stage -> number of ranks among which it divides its state.
    shares = {at: world_size if stage >= at else 1 for at in (1, 2, 3)}
    bucket = int(zero.get("reduce_bucket_size", 5 * 10**8))
    width = 2 if low else 4
    in_loss, in_backward, on_host = _activations(model, config, longest)
    # BF16_Optimizer has undivided float32 gradients.
    is_bf16_optimizer = low and stage == 1
    gradient_shares = 1 if is_bf16_optimizer or stage == 0 else world_size
    micro_steps = config.data.tokens_per_step // (config.data.micro_batch_tokens * world_size)
    muon = model.hidden_matrices if config.optimizer.kind == "muon" else []
    without_variance = sum(p.numel() for p in muon)  # Muon stores only momentum
    held = {
        "parameters": count * width // shares[3],
        "master weights": count * 4 // shares[1] if stage else 0,
        "optimizer state": (count * 8 - without_variance * 4) // shares[1],
        "average of weights": count * 4 // shares[1] if config.optimizer.ema_decay else 0,
    }
    gathered = min(count, int(zero.get("stage3_max_live_parameters", _GATHERED))) * width
    buckets = 0
    if stage == 3:
        held["gathered parameters"] = gathered
        buckets = bucket * width
    elif stage and not is_bf16_optimizer:
        buckets = bucket * width * (2 if zero.get("overlap_comm") else 1)
    # Gradients are kept between micro steps (undivided in stage 1), or in permanent buffers.
    kept = count * 4 // (gradient_shares if stage > 1 else 1)
    held["gradients"] = kept if is_bf16_optimizer or stage == 3 or micro_steps > 1 else 0
    loss = {**held, "activations": in_loss[0], "loss": in_loss[1]}
    if stage == 3:  # its bucket is permanent
        loss["reduce buckets"] = buckets
    backward = {**held, "reduce buckets": buckets, "activations": in_backward}
    copied = 4 * min(count, 5 * 10**8) if world_size > 1 and (is_bf16_optimizer or not stage) else 0
    doubled = 2 if stage in (1, 2) and not is_bf16_optimizer else 1
    gradients = count * 4 // gradient_shares * doubled
    end = {**held, "gradients": gradients, "reduce buckets": copied}
    most = max(loss, backward, end, key=lambda parts: sum(parts.values()))
    return MemoryEstimate(parts={k: v for k, v in most.items() if v}, on_host=on_host)


def _activations(
    model: TrainingModel, config: PretrainConfig, longest: int
) -> tuple[tuple[int, int], int, int]:
    """Return bytes without parameters: at the loss (activations, temporaries), at the peak of
    the forward and backward passes, and on the host."""
    engine, num_tokens = config.engine, config.data.micro_batch_tokens
    # torch has no grouped matmul for fake float32 tensors: count in bfloat16, and double it.
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
                loss, losses, *_ = model(tokens, tokens, tokens, cu_seqlens, max_seqlen=longest)
            head = model.model.get_output_embeddings().weight  # type: ignore[operator]
            chunk = min(engine.loss_chunk_tokens, num_tokens)
            half = dtype is not None and not in_half
            in_loss = live.now, loss_temporaries(chunk, *head.shape, half=half)
            loss.backward()
            del loss, losses
    times = 2 if in_half else 1
    return (times * in_loss[0], in_loss[1]), times * live.peak, times * offloaded.num_bytes


def loss_temporaries(chunk_tokens: int, vocab_size: int, width: int, *, half: bool) -> int:
    """Return the peak bytes of temporaries of ``linear_cross_entropy``; ``half``: in bfloat16."""
    # The logits of a chunk and their copy in logsumexp, float32; the product that is added to the
    # gradient of the weight, and in half precision its float32 sum.
    return chunk_tokens * vocab_size * 8 + vocab_size * width * (6 if half else 4)


def _forget(parameter: Tensor) -> None:
    # DeepSpeed moves a gradient to its own buffers as soon as it is computed.
    parameter.grad = None


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of storages that operations create: alive now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        inputs = {id(x.untyped_storage()) for x in tree_iter((args, kwargs)) if _is_tensor(x)}
        for tensor in filter(_is_tensor, tree_iter(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known and id(storage) not in inputs:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


class _Offloaded:
    """Counter of host memory for offloaded inputs of layers."""

    num_bytes = 0

    def hooks(self) -> saved_tensors_hooks:
        """Return hooks that count saved bytes; torch calls the innermost hooks only."""
        return saved_tensors_hooks(self._pack, lambda unpack: unpack())

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        size = tensor.nbytes
        self.num_bytes += 1 << (size - 1).bit_length()  # torch allocates powers of two
        shape, dtype = tensor.shape, tensor.dtype
        return lambda: torch.empty(shape, dtype=dtype)

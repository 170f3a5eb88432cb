"""CUDA mapped to the CPU and nccl to gloo, so that a host's own script runs without a GPU.

Code that asks for a CUDA device gets the CPU; streams, events and synchronization do nothing. The
host is unchanged: only the answers of torch are different.
"""

from __future__ import annotations

import contextlib
import importlib
import typing
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def on_cpu() -> None:
    """Map everything, for the rest of this process."""
    if not hasattr(typing, "override"):  # Python 3.12 has it, and Megatron asks for it
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    _map_cuda()
    _map_groups()
    _Devices().__enter__()


def without_shared_memory() -> None:
    """Disable a kernel of DeepSpeed that it would compile first, under a lock in the user's cache
    that a killed run leaves behind."""
    importlib.import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False


class _Devices(TorchFunctionMode):
    """Calls every tensor function with the CPU if its caller named CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            return _mapped(func(*args, **(kwargs or {})))
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], CPU, *args[2:])
        kwargs = {name: _mapped(value) for name, value in kwargs.items()}
        return func(*(_mapped(value) for value in args), **kwargs)


def _mapped(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and value.startswith("cuda") else value


class _Stream:
    """A stream, event or timer of the device: all work is done when a call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0


def _map_cuda() -> None:
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        major=9, minor=0, name="CPU", total_memory=1 << 34, multi_processor_count=1
    )
    zero = (
        "current_device utilization memory_allocated max_memory_allocated memory_reserved "
        "max_memory_reserved is_current_stream_capturing"
    )
    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(zero.split(), 0),
        **{"device_count": 8, "memory_stats": {}, "mem_get_info": (1 << 33, 1 << 34)},
        **{"get_device_capability": (9, 0), "get_device_name": "CPU"},
        "get_device_properties": properties,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    nothing = (
        "set_device synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all "
        "set_stream check_error init _lazy_init _lazy_call reset_max_memory_allocated "
        "set_per_process_memory_fraction"
    )
    for name in nothing.split():
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.Stream = cuda.Event = _Stream
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: _Stream())
    for name in ("stream", "device", "device_of"):
        setattr(cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    # torch.random.fork_rng asks the module of the device, which is the CPU's here.
    for module in (cuda, cuda.random, torch.cpu):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,) * 8
    for kind in ("Float", "Double", "Long", "Int", "Byte", "Bool", "Half", "BFloat16"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def _map_groups() -> None:
    init, new_group, isend = dist.init_process_group, dist.new_group, dist.isend

    def init_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return init("gloo", *args, **kwargs)

    def new_gloo(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return new_group(ranks, timeout, "gloo", *args, **kwargs)

    def isend_kept(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron gives what pipelines send other memory at once; streams would see to that."""
        return isend(tensor.detach(), *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_gloo  # type: ignore[assignment]
        module.new_group = new_gloo  # type: ignore[assignment]
        module.isend = isend_kept  # type: ignore[assignment]

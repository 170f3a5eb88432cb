"""verl's SFT trainer on the CPU: ``torchrun launch_verl.py FAULT key=value ...``.

A custom platform gives verl its device; the rest is its main(). Inputs and outputs of every forward
pass go to HOST_RECORDS, one file per rank. FAULT is injected: ``shifted`` makes the loss mask
refer to predictors, ``joined`` makes positions continue over documents; ``none``: no fault.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch


class Device(types.ModuleType):
    """torch.cpu for the functions that it has; others that verl calls do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("get_rng_state", "set_rng_state", "manual_seed"):
            return getattr(torch, name)
        given = {"current_device": "cpu", "get_device_name": "CPU", "mem_get_info": (1, 1)}
        if name in given or not hasattr(torch.cpu, name):
            return lambda *_, **__: given.get(name, 0)
        return getattr(torch.cpu, name)


def use_cpu() -> None:
    platform: Any = importlib.import_module("verl.plugin.platform")
    answers: dict[str, Any] = {
        **{"is_available": True, "is_platform_available": True, "is_ipc_supported": False},
        **{"current_device": "cpu", "device_count": 1, "get_device_capability": (None, None)},
        **{"communication_backend_name": "gloo", "visible_devices_envvar": "NO_DEVICES"},
        **{"ray_resource_name": "CPU", "ray_noset_envvars": []},
        "nvtx_range": contextlib.nullcontext(),
    }
    names: dict[str, Any] = {
        name: lambda *_, _name=name, **__: answers.get(_name)
        for name in platform.PlatformBase.__abstractmethods__ | answers.keys()
    }
    names |= {"device_name": "cpu", "vendor_name": "cpu", "device_module": Device("device")}
    platform.set_platform(type("CPU", (platform.PlatformBase,), names)())
    # verl names a backend for the CPU and one for its device; torch wants each device once.
    stock = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, **options: stock("gloo")


def put_in(fault: str) -> None:
    ours: Any = importlib.import_module("megapack.integrations.hosts.verl")
    if fault == "shifted":
        ours.VERL_SFT = replace(ours.VERL_SFT, mask_of_target=False)
    if fault == "joined":
        emit = ours.emit

        def joined(batch: Any, dialect: Any) -> Any:
            told = emit(batch, dialect)
            going_on = torch.arange(told["input_ids"].shape[1])
            return told | {"position_ids": going_on.expand_as(told["input_ids"])}

        ours.emit = joined


def note_forwards() -> list[dict[str, Any]]:
    """Make the engine record training forward passes: their rows, and the loss of each."""
    noted: list[dict[str, Any]] = []
    engine: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    stock = engine.FSDPEngineWithLMHead.forward_step

    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        made = stock(self, micro_batch, loss_function, forward_only)
        if not forward_only:
            names = ("input_ids", "position_ids", "loss_mask")
            rows = {name: torch.stack(micro_batch[name].unbind()) for name in names}
            noted.append(rows | {"loss": float(made[1]["loss"])})
        return made

    engine.FSDPEngineWithLMHead.forward_step = forward_step
    return noted


def main() -> None:
    torch.set_num_threads(1)
    fault = sys.argv.pop(1)
    use_cpu()
    put_in(fault)
    trainer: Any = importlib.import_module("verl.trainer.sft_trainer")
    noted = note_forwards()
    trainer.main()
    torch.save(noted, Path(os.environ["HOST_RECORDS"]) / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()

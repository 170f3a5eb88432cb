"""Put megapack's dataset where Megatron-LM's scripts look for theirs.

Scripts name their classes (``GPTDataset``, ``SFTDataset``, ``BlendedMegatronDatasetBuilder``); no
flag chooses them, in any release. ``install()`` rebinds the names before the script imports them,
and on the releases whose own varlen path is broken it gives the script our ``get_batch`` as well.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

from megatron.core import __version__ as release
from megatron.core import parallel_state

from megapack.errors import ConfigError
from megapack.integrations.megatron import batch
from megapack.integrations.megatron.builder import PackedDatasetBuilder
from megapack.integrations.megatron.dataset import PackedGPTDataset
from megapack.integrations.rebinding import Rebinding

__all__ = ["install", "needs_own_get_batch", "uninstall"]

OwnGetBatch = Literal["auto", "yes", "no"]

# (module, class name): where the scripts of 0.16 to main import the dataset classes from.
DATASET_NAMES = (
    ("megatron.core.datasets.gpt_dataset", "GPTDataset"),
    ("megatron.training.datasets.sft_dataset", "SFTDataset"),
)
# Subclasses of the stock dataset must be defined before its name is rebound.
SUBCLASSING_MODULES = ("megatron.training.datasets.fim_dataset",)

_rebinding = Rebinding()


def needs_own_get_batch(version: str = release) -> bool:
    """Whether this megatron-core's own varlen path is broken (0.16 and 0.17)."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) < (0, 18)


def install(*, own_get_batch: OwnGetBatch = "auto") -> None:
    """Rebind Megatron's dataset names to megapack's. Calling it again changes nothing.

    Args:
        own_get_batch: replace the script's ``get_batch`` by ours: ``auto`` does so where
            ``needs_own_get_batch()``; ``yes`` and ``no`` overrule it.

    Raises:
        ConfigError: own_get_batch is none of the three.
    """
    if own_get_batch not in ("auto", "yes", "no"):
        raise ConfigError(f"own_get_batch is {own_get_batch!r}; it must be auto, yes or no")
    if _rebinding:
        return
    for name in SUBCLASSING_MODULES:
        _import_if_present(name)
    for module_name, class_name in DATASET_NAMES:
        module = _import_if_present(module_name)
        if module is not None:
            _rebinding.replace(module, class_name, PackedGPTDataset)
    builder = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    _rebinding.replace(builder, "BlendedMegatronDatasetBuilder", PackedDatasetBuilder)
    if own_get_batch == "yes" or (own_get_batch == "auto" and needs_own_get_batch()):
        training = _import_if_present("megatron.training")
        if training is not None:
            _rebinding.replace(training, "pretrain", _with_own_get_batch(training.pretrain))


def uninstall() -> None:
    """Give Megatron its own names back."""
    _rebinding.undo()


def _import_if_present(name: str) -> ModuleType | None:
    """The module, or None where this installation has no such module (megatron-core alone)."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _with_own_get_batch(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``pretrain`` whose script reads batches with ``megapack.integrations.megatron.get_batch``.

    The functions of the script see each other through its globals; two names change there.
    """

    @functools.wraps(stock)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        scripts = [
            value.__globals__
            for value in (*args, *kwargs.values())
            if getattr(value, "__globals__", {}).get("get_batch") is not None
        ]
        if not scripts:
            raise ConfigError(
                f"megatron-core {release} needs megapack's get_batch, but the script passes "
                "pretrain() no function of a module with a get_batch; import "
                "megapack.integrations.megatron.get_batch in it and run with --own-get-batch no"
            )
        for names in scripts:
            names["get_batch"] = batch.get_batch
            if "is_dataset_built_on_rank" in names:
                names["is_dataset_built_on_rank"] = _is_dataset_built_on_rank
        return stock(*args, **kwargs)

    return pretrain


def _is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """All pipeline stages read boundaries, so all build the dataset (a memory-mapped index)."""
    del vp_stage
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

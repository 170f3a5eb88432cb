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
from typing import Any, Literal, cast

from megatron.core import parallel_state

from megapack.errors import ConfigError
from megapack.integrations.dialects import MEGATRON_BRIDGE
from megapack.integrations.host import Rebinding
from megapack.integrations.hosts.megatron.dataset import PackedDatasetBuilder, PackedGPTDataset
from megapack.integrations.hosts.megatron.host import HOST, script_arguments, version
from megapack.integrations.hosts.megatron.probe import probing

OwnGetBatch = Literal["auto", "yes", "no"]

# (module, class name): where the scripts of 0.16 to main import the dataset classes from.
DATASET_NAMES = (
    ("megatron.core.datasets.gpt_dataset", "GPTDataset"),
    ("megatron.training.datasets.sft_dataset", "SFTDataset"),
)
# Subclasses of the stock dataset must be defined before its name is rebound.
SUBCLASSING_MODULES = ("megatron.training.datasets.fim_dataset",)
# Megatron-LM's own code, which is no part of the megatron-core package.
TRAINING = "megatron.training"

_rebinding = Rebinding(HOST)


def needs_own_get_batch(release: tuple[int, int]) -> bool:
    """Whether this megatron-core's own varlen path is broken (0.16 and 0.17)."""
    return release < (0, 18)


def install(*, own_get_batch: OwnGetBatch = "auto", probe: bool = True) -> None:
    """Rebind Megatron's dataset names to megapack's. Calling it again changes nothing.

    Args:
        own_get_batch: replace the script's ``get_batch`` by ours: ``auto`` does so where
            ``needs_own_get_batch()``, and elsewhere asks for the flag by which Megatron's reads
            boundaries; ``no`` leaves the script as it is, whatever it does with them.
        probe: whether the model is tried on its first micro batch before it trains on it
            (``megapack.integrations.hosts.megatron.probe``): six forwards, and the log says their
            seconds.

    Raises:
        ConfigError: own_get_batch is none of the three, or not for this release; or this release
            lacks a name that is to be replaced.
    """
    if own_get_batch not in ("auto", "yes", "no"):
        raise ConfigError(f"own_get_batch is {own_get_batch!r}; it must be auto, yes or no")
    broken = needs_own_get_batch(version())
    if own_get_batch == "yes" and not broken:
        raise ConfigError(
            f"own_get_batch is 'yes', but the scripts of {HOST} unpack another tuple than those of "
            "0.16 and 0.17, for which megapack's get_batch is made; leave it at 'auto'"
        )
    if _rebinding:
        return
    for name in SUBCLASSING_MODULES:
        _import_if_present(name)
    for module_name, class_name in DATASET_NAMES:
        module = _import_if_present(module_name)
        if module is not None:
            _rebinding.replace(module, class_name, PackedGPTDataset)
        elif module_name.startswith(TRAINING) and _import_if_present(TRAINING) is not None:
            _rebinding.undo()
            raise ConfigError(
                f"{HOST} has no module {module_name}, from where its scripts imported {class_name} "
                "until now: megapack does not know this release"
            )
    loop = _import_if_present(f"{TRAINING}.training")
    if loop is not None:
        get_schedule = _adds_up(loop.get_forward_backward_func)
        if probe:
            get_schedule = probing(get_schedule)
        _rebinding.replace(loop, "get_forward_backward_func", get_schedule)
        _rebinding.replace(loop, "evaluate", _restores_sft(loop.evaluate))
    builder = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    _rebinding.replace(builder, "BlendedMegatronDatasetBuilder", PackedDatasetBuilder)
    if own_get_batch == "no":
        return
    if not broken:
        _rebinding.replace(PackedDatasetBuilder, "needs_boundary_flag", True)
    elif (training := _import_if_present(TRAINING)) is not None:
        _rebinding.replace(training, "pretrain", _with_own_get_batch(training.pretrain))


def install_bridge(*, probe: bool = True) -> None:
    """The same for Megatron-Bridge's recipes: before ``pretrain(config, forward_step)``.

    A ``GPTDatasetConfig`` whose data path is a prefix or a manifest then gives packed rows, told in
    Bridge's own names (cu_seqlens_q, max_seqlen_q) on every pipeline stage.

    Args:
        probe: as of ``install``.

    Raises:
        ConfigError: Megatron-Bridge is not installed.
    """
    data = _import_if_present("megatron.bridge.data.utils")  # with its subclasses of the dataset
    if data is None:
        raise ConfigError("there is no megatron.bridge: install Megatron-Bridge, or call install()")
    if _rebinding:
        return
    install(own_get_batch="no", probe=False)
    _rebinding.replace(data, "GPTDataset", PackedGPTDataset)
    _rebinding.replace(data, "BlendedMegatronDatasetBuilder", PackedDatasetBuilder)
    _rebinding.replace(PackedGPTDataset, "dialect", MEGATRON_BRIDGE)
    if probe:
        loop = importlib.import_module("megatron.bridge.training.train")
        get_schedule = probing(loop.get_forward_backward_func)
        _rebinding.replace(loop, "get_forward_backward_func", get_schedule)


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
    """``pretrain`` whose script reads batches with ``get_batch`` of this package.

    The functions of the script see each other through its globals; two names change there.
    """
    get_batch = importlib.import_module("megapack.integrations.hosts.megatron.batch").get_batch

    @functools.wraps(stock)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        scripts = [
            value.__globals__
            for value in (*args, *kwargs.values())
            if getattr(value, "__globals__", {}).get("get_batch") is not None
        ]
        if not scripts:
            raise ConfigError(
                f"{HOST} needs megapack's get_batch, but the script passes "
                "pretrain() no function of a module with a get_batch; import "
                "megapack.integrations.hosts.megatron.get_batch in it and run with "
                "--own-get-batch no"
            )
        for names in scripts:
            if "MambaModel" in names:
                _take_hybrid_script()
                continue
            names["get_batch"] = get_batch
            if "is_dataset_built_on_rank" in names:
                names["is_dataset_built_on_rank"] = _is_dataset_built_on_rank
        return stock(*args, **kwargs)

    return pretrain


# With --sft evaluate() takes the mean of every micro batch and of these the mean, and those at the
# end of a finite set have no label; without it losses and labels are added up. The flag is read
# after each step: there it is off in a full validation.


def _restores_sft(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``evaluate`` that leaves the flag as it was."""

    @functools.wraps(stock)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        script: Any = script_arguments()
        sft = getattr(script, "sft", False)
        try:
            return stock(*args, **kwargs)
        finally:
            if sft:
                script.sft = sft

    return evaluate


def _adds_up(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``get_forward_backward_func`` whose steps see the flag, and whose caller does not."""

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        run, script = stock(*args, **kwargs), cast(Any, script_arguments())
        if not (getattr(script, "sft", False) and getattr(script, "full_validation", False)):
            return run

        def forward_backward(*args: Any, forward_only: bool = False, **kwargs: Any) -> Any:
            script.sft = True
            losses = run(*args, forward_only=forward_only, **kwargs)
            script.sft = not forward_only
            return losses

        return forward_backward

    return get_forward_backward_func


def _take_hybrid_script() -> None:
    """pretrain_mamba.py: another tuple than ours, and layers that need to know segments."""
    if version() < (0, 17):
        raise ConfigError(
            f"Mamba layers of {HOST} have no seq_idx: their state would run on from document to "
            "document in a packed row. Train hybrid models with 0.17 or later"
        )
    # Its own get_batch works in 0.17, with --sft and one row per micro batch.
    _rebinding.replace(PackedDatasetBuilder, "needs_boundary_flag", True)


def _is_dataset_built_on_rank(*args: Any, **kwargs: Any) -> bool:
    """All pipeline stages read boundaries, so all build the dataset (a memory-mapped index).

    Whatever a release calls it with (vp_stage, from 0.17 on is_packed_sequence) changes nothing.
    """
    del args, kwargs
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

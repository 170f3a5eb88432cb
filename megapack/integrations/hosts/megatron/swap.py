"""Replacement of the dataset classes of Megatron-LM's scripts with megapack's.

Scripts name their classes (``GPTDataset``, ``SFTDataset``, ``BlendedMegatronDatasetBuilder``); no
release has a flag that chooses them. ``install()`` replaces the names before the script imports
them, and in releases with a broken varlen path also the script's ``get_batch``.
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

# (module, class name) from which the scripts of 0.16 to main import dataset classes.
DATASET_NAMES = (
    ("megatron.core.datasets.gpt_dataset", "GPTDataset"),
    ("megatron.training.datasets.sft_dataset", "SFTDataset"),
)
# Modules with subclasses of the stock dataset: import them before its name is replaced.
SUBCLASSING_MODULES = ("megatron.training.datasets.fim_dataset",)
# Megatron-LM's own code; the megatron-core package does not contain it.
TRAINING = "megatron.training"

_rebinding = Rebinding(HOST)


def needs_own_get_batch(release: tuple[int, int]) -> bool:
    """Return whether the varlen path of a megatron-core release is broken (0.16 and 0.17)."""
    return release < (0, 18)


def install(*, own_get_batch: OwnGetBatch = "auto", probe: bool = True) -> None:
    """Replace Megatron's dataset classes with megapack's. A second call changes nothing. Raises
    ConfigError if own_get_batch does not suit this release, or if the release lacks a name.

    Args:
        own_get_batch: ``auto`` replaces the script's ``get_batch`` if its varlen path is broken
            (0.16 and 0.17); otherwise it requires the flag with which Megatron's own ``get_batch``
            reads boundaries. ``yes`` is ``auto``, but raises ConfigError for releases that do not
            need it. ``no`` keeps the script's ``get_batch``.
        probe: probe the model on its first micro batch before training
            (``megapack.integrations.hosts.megatron.probe``), with six forward passes.
    """
    if own_get_batch not in ("auto", "yes", "no"):
        raise ConfigError(f"own_get_batch is {own_get_batch!r}; it must be auto, yes or no")
    broken = needs_own_get_batch(version())
    if own_get_batch == "yes" and not broken:
        raise ConfigError(
            f"own_get_batch is 'yes', but the scripts of {HOST} unpack another tuple than those of "
            "0.16 and 0.17, which megapack's get_batch supports; leave it at 'auto'"
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
                f"{HOST} has no module {module_name}, from which earlier scripts import "
                f"{class_name}: megapack does not know this release"
            )
    loop = _import_if_present(f"{TRAINING}.training")
    if loop is not None:
        get_schedule = _sums_up_losses(loop.get_forward_backward_func)
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
    """Do the same for Megatron-Bridge's recipes; call it before ``pretrain(config, forward_step)``.
    A ``GPTDatasetConfig`` whose data path is a prefix or a manifest then yields packed rows with
    Bridge's names (cu_seqlens_q, max_seqlen_q) on every pipeline stage. Raises ConfigError if
    Megatron-Bridge is missing."""
    data = _import_if_present("megatron.bridge.data.utils")  # also imports subclasses of datasets
    if data is None:
        raise ConfigError("megatron.bridge is missing: install Megatron-Bridge, or call install()")
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
    """Restore Megatron's names."""
    _rebinding.undo()


def _import_if_present(name: str) -> ModuleType | None:
    """Import a module; None if this installation lacks it (megatron-core alone)."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _with_own_get_batch(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``pretrain``: its script reads batches with megapack's ``get_batch``."""
    get_batch = importlib.import_module("megapack.integrations.hosts.megatron.batch").get_batch

    @functools.wraps(stock)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        # The functions of a script share its globals: replace the names there.
        scripts = [
            value.__globals__
            for value in (*args, *kwargs.values())
            if getattr(value, "__globals__", {}).get("get_batch") is not None
        ]
        if not scripts:
            raise ConfigError(
                f"{HOST} needs megapack's get_batch, but the script passes pretrain() no function "
                "of a module with a get_batch; import get_batch of "
                "megapack.integrations.hosts.megatron in it, and run with --own-get-batch no"
            )
        for names in scripts:
            if "MambaModel" in names:  # pretrain_mamba.py unpacks a different tuple
                if version() < (0, 17):
                    raise ConfigError(
                        f"Mamba layers of {HOST} have no seq_idx: their state would carry over "
                        "to the next document of a row. Train hybrid models with 0.17 or later"
                    )
                # The script's own get_batch works in 0.17, with --sft and one row per micro batch.
                _rebinding.replace(PackedDatasetBuilder, "needs_boundary_flag", True)
                continue
            names["get_batch"] = get_batch
            if "is_dataset_built_on_rank" in names:
                names["is_dataset_built_on_rank"] = _is_dataset_built_on_rank
        return stock(*args, **kwargs)

    return pretrain


# With --sft, evaluate() averages the means of micro batches, but the last micro batches of a finite
# set have no label. Without --sft, it adds up losses and labels. It reads the flag after each step.
# So a full validation switches the flag on within a step and off after it.


def _restores_sft(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``evaluate``: restore ``--sft`` at its end."""

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


def _sums_up_losses(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_forward_backward_func``: ``--sft`` is on within a step, but not after it."""

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


def _is_dataset_built_on_rank(*args: Any, **kwargs: Any) -> bool:
    """Return True on rank 0 of tensor parallelism: every pipeline stage reads boundaries."""
    del args, kwargs  # vp_stage, and from 0.17 on is_packed_sequence
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

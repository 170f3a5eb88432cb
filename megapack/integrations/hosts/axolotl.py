"""axolotl: a plugin that trains on packed rows; sizes are options of axolotl.

    plugins: [megapack.integrations.hosts.axolotl.PackedPlugin]
    datasets: [{path: chats.yaml}]       # a manifest, a shard manifest or a prefix
    test_datasets: [{path: held_out}]    # the same, each document once
    sequence_len: 8192
    micro_batch_size: 2                  # a micro batch of 16,384 tokens
    gradient_accumulation_steps: 4       # on 8 ranks: steps of 524,288 tokens

axolotl's trainer, model loader and adapters are unchanged; its preparation of datasets does not
run. By default axolotl counts labels per rank and averages the mean losses of micro batches; with
the plugin, the loss of a step is the mean over all its labels.
docs/guides/finetuning.md lists the limitations.
"""

from __future__ import annotations

import inspect
from typing import Any

from axolotl.common.datasets import TrainDatasetMeta
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from megapack.errors import ConfigError
from megapack.integrations.host import bare_model, check_options
from megapack.integrations.hosts.transformers import MicroBatches, PackedTrainerMixin
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_data_path

__all__ = ["PackedAxolotlTrainer", "PackedPlugin", "PackedPluginArguments"]

# Options that the user must leave out, with the reason.
REFUSED = {
    "sample_packing": "rows are packed already",
    "batch_flattening": "rows are packed already",
    "pretraining_dataset": "axolotl would read it; name the documents under datasets",
    "streaming": "axolotl would read the data; name the documents under datasets",
    "val_set_size": "packed rows are not split; name evaluation data under test_datasets",
    "curriculum_sampling": "the manifest decides the order",
    "group_by_length": "the manifest decides the order",
    "rl": "it needs pairs or prompts, but packed rows contain documents",
    "reward_model": "it needs pairs, and rows contain documents",
    "process_reward_model": "it needs steps with rewards, and rows contain documents",
    "lora_qkv_kernel": "it replaces the model's class, so the model cannot be checked",
    "lora_o_kernel": "it replaces the model's class, so the model cannot be checked",
}


class PackedPluginArguments(BaseModel):
    """Options that the plugin adds to axolotl's configuration."""

    megapack_probe: bool = True
    """Probe the model on an early micro batch before training (``PackedTrainerMixin.probe``)."""


class PackedAxolotlTrainer(PackedTrainerMixin, AxolotlTrainer):  # type: ignore[misc]  # no stubs
    """axolotl's trainer on packed micro batches; see ``PackedTrainerMixin``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # axolotl looks for a parameter num_items_in_batch; models take it in their **kwargs.
        model = bare_model(self.accelerator.unwrap_model(self.model))
        parameters = inspect.signature(model.forward).parameters.values()
        self.model_accepts_loss_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            raise ConfigError(
                f"{type(model).__name__} takes no num_items_in_batch, so all micro batches would "
                "count equally, although they have different numbers of labels: train a model "
                "whose forward takes **kwargs"
            )


class PackedPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin for axolotl's ``plugins``."""

    def get_input_args(self) -> str:
        """Return the import path of the options, as axolotl requires."""
        return f"{__name__}.{PackedPluginArguments.__name__}"

    def register(self, cfg: Any) -> None:
        """Switch off the kernels of ``REFUSED``, which axolotl switches on by default."""
        for name in ("lora_qkv_kernel", "lora_o_kernel"):
            if cfg.get(name) is None:
                cfg[name] = False

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:
        """Return packed micro batches of ``datasets`` and ``test_datasets``. Raises ConfigError for
        options of ``REFUSED``, for a key without exactly one dataset, and as ``open_rows``."""
        check_options({name: (cfg[name], None, reason) for name, reason in REFUSED.items()})
        if preprocess:
            raise ConfigError("packed rows are ready: there is nothing to preprocess; run train")
        train = _micro_batches(cfg, "datasets")
        num_epochs = float(cfg.num_epochs or 1)
        if not cfg.max_steps and not num_epochs.is_integer():
            raise ConfigError(f"num_epochs is {num_epochs}: give a whole number, or max_steps")
        steps = cfg.max_steps or train.schedule.num_steps(int(num_epochs))
        evaluated = _micro_batches(cfg, "test_datasets") if cfg.test_datasets else None
        return TrainDatasetMeta(train, evaluated, total_num_steps=steps)

    def get_trainer_cls(self, cfg: Any) -> type[PackedAxolotlTrainer]:
        """Return axolotl's causal trainer, on packed micro batches."""
        return type("Trainer", (PackedAxolotlTrainer,), {"probe": cfg.megapack_probe})

    def get_training_args(self, cfg: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return options that count labels over all ranks."""
        return {"average_tokens_across_devices": True}


def _micro_batches(cfg: Any, key: str) -> MicroBatches:
    """Return the micro batches of ``datasets`` or ``test_datasets``; the trainer sets the rank."""
    if len(cfg[key]) != 1:
        raise ConfigError(
            f"{key} has {len(cfg[key])} entries; give one, perhaps a manifest of several sources"
        )
    finite = key != "datasets"
    options = RowOptions(
        sequence_length=cfg.sequence_len,
        rows_per_block=cfg.micro_batch_size * cfg.gradient_accumulation_steps * cfg.world_size,
        seed=42 if cfg.seed is None else cfg.seed,  # axolotl's default
    )
    rows = open_data_path(cfg[key][0]["path"], options, finite=finite)
    return MicroBatches(
        rows.packed,
        rows.schedule,
        micro_batch_tokens=cfg.micro_batch_size * cfg.sequence_len,
        pad_last=finite,
    )

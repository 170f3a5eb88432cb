"""State of a run of transformers' Trainer in trainer_state.json, compared when the run resumes.

- ``ScheduleOfRun``: the callback that saves and compares it.
- ``model_record``, ``_optimizer_record``: what determines a run, equal for all implementations.

    {"saved": {"step": 3, "seed": 0, ...}, "saved_record": {"args.learning_rate": 0.001, ...}}
    # resumed with 0.002: ResumeError names args.learning_rate and both values

Implementations may change between launches: fused optimizers, wrappers, numbers of ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import transformers
import xxhash
from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]
from torch import Tensor
from transformers.trainer_callback import ExportableState

from megapack.data import Schedule, resume
from megapack.integrations.host import bare_model

logger = logging.getLogger("megapack")

# Prefixes of arguments that do not change a run's steps: outputs, logs, evaluation, loading, the
# division among ranks, and implementations (which change rounding). A resume compares all others.
_NO_EFFECT = (
    *("output_dir", "overwrite_", "do_", "run_name", "report_to", "project", "trackio", "hub_"),
    *("push_to_hub", "logging_", "log_", "disable_tqdm", "save_", "restore_", "resume_", "load_"),
    *("metric_", "greater_", "eval_", "prediction_", "include_", "batch_eval_", "dataloader_"),
    *("per_device_", "per_gpu_", "gradient_accumulation", "gradient_checkpointing", "max_steps"),
    *("num_train_epochs", "ddp_", "fsdp", "deepspeed", "accelerator_config", "parallelism_config"),
    *("local_rank", "use_cpu", "no_cuda", "torch_empty_cache", "skip_memory", "auto_find_batch"),
    *("ignore_data_skip", "remove_unused", "length_column", "group_by_length", "train_sampling"),
    *("past_index", "dataset_", "packing", "max_length", "jit_mode", "use_legacy", "tpu_", "debug"),
    *("torch_compile", "torchdynamo", "bf16_full_eval", "fp16_full_eval", "activation_"),
    *("use_liger", "liger_", "use_cache", "enable_jit", "full_determinism", "data_seed"),
    *("label_names", "shuffle_dataset", "padding_free", "pad_to_multiple_of", "truncation_mode"),
    *("model_init_kwargs", "trust_remote_code"),
)
# Arguments of optimizers that select an implementation, and values that change nothing.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_NO_CHANGE = {"amsgrad": False, "maximize": False, "bias_correction": True, "nesterov": False}
_NO_CHANGE["decoupled_weight_decay"] = False
_ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_COMPILED = "_orig_mod"
# Names of wrapped submodules within names of parameters: torch.compile, FSDP, checkpointing.
_WRAPPED = (_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class ScheduleOfRun(transformers.TrainerCallback, ExportableState):  # type: ignore[misc]  # no stubs
    """Save the settings and data of a run in trainer_state.json, and compare them when it resumes.

    Raises ResumeError if the samples of earlier steps, the configuration of the model with its
    attention, dtype, adapters and trained parameters, the tokenizer, the bytes of the data, the
    optimizer or the training arguments differ. Logs a warning if the learning rate differs.
    """

    schedule: Schedule | None = None
    record: dict[str, Any] | None = None
    step = 0
    saved: dict[str, Any] | None = None
    saved_record: dict[str, Any] | None = None
    rates: tuple[float, ...] = ()  # of the step after the next one
    saved_rates: tuple[float, ...] = ()

    def state(self) -> dict[str, Any]:
        """Return the state for trainer_state.json; Trainer restores its attributes."""
        saved = None if self.schedule is None else self.schedule.state_dict(self.step)
        attributes = {"saved": saved, "saved_record": self.record, "saved_rates": self.rates}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        del control
        batches = getattr(run.get("train_dataloader"), "dataset", None)
        self.schedule, self.step = getattr(batches, "schedule", None), state.global_step
        if self.schedule is not None and batches is not None:
            values = {name: v for name, v in args.to_dict().items() if _matters(name)}
            record = resume.flatten(values, "args.") | _optimizer_record(run.get("optimizer"))
            record |= {f"data.{name}": value for name, value in batches.dataset._options.items()}
            record["data.content"] = resume.content_digests(batches.dataset)
            self.record = json.loads(json.dumps(record | batches.settings, default=str))
        # A checkpoint of another trainer lacks our state: add it, so that the next one has it.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"]
        if self.schedule is None or not self.step:
            return
        if not kept["saved"]:
            logger.warning("trainer_state.json has no state of PackedTrainer: nothing was compared")
            return
        with resume.refuse_damage("the state of ScheduleOfRun in trainer_state.json"):
            self._compare(kept, run, getattr(batches, "allow_change", ()))

    def _compare(
        self, kept: Mapping[str, Any], run: Mapping[str, Any], allowed: tuple[str, ...]
    ) -> None:
        """Compare the run with the state that a checkpoint kept."""
        assert self.schedule is not None
        allowed_order = [name for name in allowed if name in resume.ORDER_FIELDS]
        changes = self.schedule.check_state(kept["saved"], allowed_order)
        if self.record is not None:
            saved, option = kept.get("saved_record"), "PackedTrainer.allow_change"
            changes += resume.check_record(self.record, saved, allowed, option=option)
        for change in changes:
            logger.warning("the run has changed: %s", change)
        # Trainer takes the next step with the checkpoint's rate: compare the rates after that.
        self.rates = _rates_after_next(run.get("lr_scheduler"))
        for now, before in zip(self.rates, kept.get("saved_rates", ()), strict=False):
            for change in resume.rate_change(self.step + 1, now, before):
                logger.warning("%s", change)

    def on_step_end(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        del args, control
        self.step, self.rates = state.global_step, _rates_after_next(run.get("lr_scheduler"))


def _rates_after_next(scheduler: Any) -> tuple[float, ...]:
    """Return the learning rates of the step after the next one; empty if the scheduler has no
    function of the step."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    rules = getattr(scheduler, "lr_lambdas", ())
    pairs = zip(getattr(scheduler, "base_lrs", ()), rules, strict=False)
    return tuple(float(rate * rule(scheduler.last_epoch + 1)) for rate, rule in pairs)


def _matters(argument: str) -> bool:
    """Return whether a training argument changes a run's steps; ``_optimizer_record`` replaces
    ``optim``, which also names implementations."""
    return argument != "optim" and not argument.startswith(_NO_EFFECT)


def _optimizer_record(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's update rule and settings, equal for all its implementations."""
    while hasattr(optimizer, "optimizer"):  # wrappers of accelerate and DeepSpeed
        optimizer = optimizer.optimizer
    # Loading a checkpoint does not change the class and the defaults, only the groups.
    settings = {
        name: float(f"{value:.6g}") if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in getattr(optimizer, "defaults", {}).items()
        if name not in _IMPLEMENTATION and (name, value) not in _NO_CHANGE.items()
    }
    rule = type(optimizer).__name__
    if rule in _ADAMS:
        is_decoupled = getattr(optimizer, "adam_w_mode", rule == "AdamW")
        rule = "AdamW" if settings.pop("decoupled_weight_decay", is_decoupled) else "Adam"
    # bits per value of the state, of bitsandbytes
    settings["optim_bits"] = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    return {"optimizer.class": rule, **resume.flatten(settings, "optimizer.")}


def model_record(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the configuration of a model, its attention, dtype, adapters and trained parameters,
    and a digest of the tokenizer. Call it before wrappers, which may change dtypes."""
    # Trainer cannot load a compiled model's checkpoint into another model: names differ.
    is_compiled = any(_COMPILED in name.split(".") for name, _ in model.named_parameters())
    record: dict[str, Any] = {"model.is_compiled": is_compiled}
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    bare = bare_model(model)
    if isinstance(bare, transformers.PreTrainedModel):
        text = bare.config.get_text_config(decoder=True)
        record |= resume.model_record(bare.config)
        record["model.attention"] = text._attn_implementation
        record["model.dtype"] = str(bare.dtype)
    for name, adapter in getattr(model, "peft_config", {}).items():
        record |= resume.model_record(adapter, f"adapter.{name}.")
    names = [name.split(".") for name, p in bare.named_parameters() if p.requires_grad]
    trained = [".".join(part for part in name if part not in _WRAPPED) for name in names]
    record["model.trained"] = [len(trained), xxhash.xxh3_128_hexdigest("\n".join(trained).encode())]
    if hasattr(tokenizer, "get_vocab"):
        record["model.tokenizer"] = resume.tokenizer_digest(tokenizer)
    return record

"""Resume of PackedTrainer: what trainer_state.json keeps of a run, and its comparison.

``ScheduleOfRun`` is the callback. Its state is the schedule's ``state_dict`` and a record of model,
tokenizer, data and training arguments (``megapack.data.resume``):

    {"saved": {"step": 3, "seed": 0, ...}, "saved_record": {"args.learning_rate": 0.001, ...}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.trainer_callback import ExportableState

from megapack.data import PackedDataset, Schedule
from megapack.data.resume import (
    ORDER_FIELDS,
    check_record,
    content_digests,
    flatten,
    model_record,
    tokenizer_digest,
)

logger = logging.getLogger("megapack")

# Prefixes of TrainingArguments that do not change a run's steps: outputs, logs, evaluation,
# loading, and the division among ranks. A resume compares all others.
_NO_EFFECT = (
    *("output_dir", "overwrite_", "do_", "run_name", "report_to", "project", "trackio", "hub_"),
    *("push_to_hub", "logging_", "log_", "disable_tqdm", "save_", "restore_", "resume_", "load_"),
    *("metric_", "greater_", "eval_", "prediction_", "include_", "batch_eval_", "dataloader_"),
    *("per_device_", "per_gpu_", "gradient_accumulation", "gradient_checkpointing", "max_steps"),
    *("num_train_epochs", "ddp_", "fsdp", "deepspeed", "accelerator_config", "parallelism_config"),
    *("local_rank", "use_cpu", "no_cuda", "torch_empty_cache", "skip_memory", "auto_find_batch"),
    *("ignore_data_skip", "remove_unused", "length_column", "group_by_length", "train_sampling"),
    *("past_index", "dataset_", "packing", "max_length", "jit_mode", "use_legacy", "tpu_", "debug"),
)


class ScheduleOfRun(transformers.TrainerCallback, ExportableState):  # type: ignore[misc]  # no stubs
    """Save in checkpoints (trainer_state.json) what determines a run, and compare it at a resume.

    Compares the samples of earlier steps, the configuration of the model with its attention and
    dtype, the tokenizer, the bytes of the data, and the training arguments (ResumeError).
    """

    schedule: Schedule | None = None
    record: dict[str, Any] | None = None
    allow_change: tuple[str, ...] = ()
    step = 0
    saved: dict[str, Any] | None = None
    saved_record: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state for trainer_state.json; Trainer restores its attributes."""
        saved = None if self.schedule is None else self.schedule.state_dict(self.step)
        return {"args": {}, "attributes": {"saved": saved, "saved_record": self.record}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **run: Any
    ) -> None:
        del control
        batches = getattr(train_dataloader, "dataset", None)
        self.schedule, self.step = getattr(batches, "schedule", None), state.global_step
        if self.schedule is not None and batches is not None:
            self.record = _record(args, batches.dataset, run)
        # A checkpoint of another trainer lacks our state: add it, so that the next one has it.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"]
        if self.schedule is None or not kept["saved"] or not self.step:
            return
        allowed_order = [name for name in self.allow_change if name in ORDER_FIELDS]
        changes = self.schedule.check_state(kept["saved"], allowed_order)
        if self.record is not None:
            option = "PackedTrainer.allow_change"
            saved, allowed = kept.get("saved_record"), self.allow_change
            changes += check_record(self.record, saved, allowed, option=option)
        for change in changes:
            logger.warning("the run is changed: %s", change)

    def on_step_end(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        del args, control, run
        self.step = state.global_step


def _record(args: Any, dataset: PackedDataset, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that determines a run, except the order of its samples, as JSON. ``run``
    are the ``model`` and ``processing_class`` of a callback."""
    model = bare_model(getattr(run["model"], "_orig_mod", run["model"]))
    values = {name: v for name, v in args.to_dict().items() if not name.startswith(_NO_EFFECT)}
    record = flatten(values, "args.")
    if isinstance(model, transformers.PreTrainedModel):
        text = model.config.get_text_config(decoder=True)
        record |= model_record(model.config)
        record["model.attention"] = text._attn_implementation
        record["model.dtype"] = str(model.dtype)
    tokenizer = run.get("processing_class")
    if hasattr(tokenizer, "get_vocab"):
        record["model.tokenizer"] = tokenizer_digest(tokenizer)
    record |= {f"data.{name}": value for name, value in dataset._options.items()}
    record["data.content"] = content_digests(dataset)
    resolved: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return resolved


def bare_model(model: Any) -> Any:
    """Return the model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

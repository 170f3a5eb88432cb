"""transformers' Trainer, TRL's SFTTrainer, Accelerate and plain loops on transformers models.

    dataset = PackedDataset("corpus", "corpus.samples")
    schedule = Schedule(dataset, tokens_per_step=524288)
    trainer = PackedTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attention_2"),
        args=TrainingArguments(..., gradient_accumulation_steps=8, max_steps=schedule.num_steps()),
        train_dataset=MicroBatches(dataset, schedule, micro_batch_tokens=8192),
    )
    trainer.train()

A micro batch is one row of segments with the names that transformers' attention reads
(``cu_seq_lens_q``, ...), so no mask is built and no attention crosses a document.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from megapack.data import PackedDataset
from megapack.errors import ConfigError
from megapack.integrations.micro_batches import MicroBatches, model_inputs
from megapack.integrations.model_check import check_model

__all__ = [
    "MicroBatches",
    "PackedTrainer",
    "PackedTrainerMixin",
    "check_model",
    "model_inputs",
    "sft_trainer",
]


class PackedTrainerMixin:
    """For ``Trainer`` and its subclasses: trains on ``MicroBatches``.

    The loader is this rank's own, so nothing is sharded twice. A resume skips as many micro batches
    as the checkpoint's step has seen, without gathering them, and may use another number of ranks:
    ``gradient_accumulation_steps`` then changes with it, and the steps hold the same samples.
    """

    args: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    _checked: tuple[int, ...] = ()

    def check_model(self, dataset: PackedDataset) -> None:
        """Called before the first batch of a dataset; see ``check_model``."""
        half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        check_model(self.model, dataset, device=self.args.device, dtype=half)

    def get_train_dataloader(self) -> Any:
        """A loader of this rank's micro batches.

        Raises:
            ConfigError: max_steps is not set, or gradient_accumulation_steps does not fit.
        """
        if not isinstance(self.train_dataset, MicroBatches):
            return super().get_train_dataloader()  # type: ignore[misc]
        if self.args.max_steps <= 0:
            raise ConfigError(
                "max_steps is not set; the schedule counts steps over epochs: "
                f"max_steps={self.train_dataset.schedule.num_steps()} is one epoch "
                "(schedule.num_steps(num_epochs))"
            )
        batches = self._of_this_rank(self.train_dataset, self.args.max_steps)
        if self.args.gradient_accumulation_steps != batches.num_micro_steps:
            raise ConfigError(
                f"gradient_accumulation_steps is {self.args.gradient_accumulation_steps}; "
                f"{batches.schedule.config.tokens_per_step} tokens per step on "
                f"{self.args.world_size} ranks of {batches.layout.micro_batch_tokens} tokens take "
                f"{batches.num_micro_steps}"
            )
        return self._loader(batches)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """One epoch of ``MicroBatches``, or what Trainer makes of any other dataset.

        Trainer averages the losses of micro batches; all hold the same number of tokens, but not
        quite of labels.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if not isinstance(chosen, MicroBatches):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        return self._loader(self._of_this_rank(chosen, None))

    def _of_this_rank(self, batches: MicroBatches, num_steps: int | None) -> MicroBatches:
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"one process drives {self.args.n_gpu} GPUs (DataParallel), which would cut rows; "
                "start one process per GPU with torchrun or accelerate launch"
            )
        sizes = [getattr(self, f"get_{kind}_size", lambda: 1)() for kind in ("tp", "cp", "sp")]
        if sizes != [1, 1, 1]:
            raise ConfigError(
                f"tensor, context and sequence parallel sizes are {sizes}; the micro batches are "
                "dealt to data-parallel ranks only"
            )
        for name in ("dispatch_batches", "split_batches"):
            if getattr(self.args.accelerator_config, name, None):
                raise ConfigError(
                    f"accelerator_config has {name}, which would have rank 0 read for all or cut "
                    f"micro batches; every rank reads its own here: leave {name} out"
                )
        if id(batches.dataset) not in self._checked:
            self.check_model(batches.dataset)
            self._checked = (*self._checked, id(batches.dataset))
        return batches.of_rank(self.args.process_index, self.args.world_size, num_steps)

    def _loader(self, batches: MicroBatches) -> DataLoader[dict[str, Any]]:
        # batch_size 1 and not None: Trainer resumes by skipping through the batch sampler.
        workers = self.args.dataloader_num_workers
        return DataLoader(
            batches,
            batch_size=1,
            collate_fn=_only,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            persistent_workers=bool(self.args.dataloader_persistent_workers and workers),
        )


def _only(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A micro batch is a batch already."""
    (item,) = items
    return item


class PackedTrainer(PackedTrainerMixin, transformers.Trainer):  # type: ignore[misc]  # no stubs
    """``transformers.Trainer`` on packed micro batches; see ``PackedTrainerMixin``."""


def sft_trainer(*, train_dataset: MicroBatches, args: Any, **options: Any) -> Any:
    """TRL's SFTTrainer on packed micro batches.

    SFTTrainer packs text itself and insists on a ``datasets.Dataset``; here it is given the packed
    micro batches after its construction, with preparation switched off.

    Args:
        train_dataset: the micro batches.
        args: an SFTConfig with ``packing=False``.
        options: further arguments of SFTTrainer (model, eval_dataset, ...).

    Raises:
        ConfigError: args would pack a second time.
    """
    import datasets  # type: ignore[import-untyped] # noqa: PLC0415
    from trl import SFTTrainer  # noqa: PLC0415

    if args.packing:
        raise ConfigError("SFTConfig(packing=True) would pack packed rows again; set it to False")
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}

    class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):  # type: ignore[misc]  # no stubs
        """SFTTrainer on packed micro batches."""

    stand_in = datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    trainer = PackedSFTTrainer(args=args, train_dataset=stand_in, **options)
    trainer.train_dataset = train_dataset
    return trainer

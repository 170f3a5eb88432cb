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

import copy
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations import deepspeed

from megapack.attention import ATTENTION_NAME, check_architecture
from megapack.attention.experts import LoadBalancing
from megapack.attention.probe import probe
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.data import Batch, PackedDataset, check_token_ids
from megapack.data.report import check_labels
from megapack.errors import ConfigError, MegapackWarning
from megapack.integrations.dialects import IGNORED
from megapack.integrations.hosts.transformers_resume import ScheduleOfRun, bare_model
from megapack.integrations.options import check_options
from megapack.integrations.rows.micro_batches import MicroBatches, model_inputs

__all__ = ["MicroBatches", "PackedTrainer", "PackedTrainerMixin", "check_model", "model_inputs"]
__all__ += ["sft_trainer"]

logger = logging.getLogger("megapack")

PROBED_LOGITS = 256  # of every token: enough to see whether it changed
LOOKED_AT = 32  # steps among which a micro batch of short documents is chosen to probe the model on

# ---- Whether a transformers model keeps the documents of a row apart: tried before it is trained


def check_model(
    model: Any,
    dataset: PackedDataset | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    longest: int | None = None,
) -> None:
    """Refuse a model that packed rows would train wrongly, or that lacks ids of the documents.

    A tiny model of its architecture is tried with its attention; see ``check_architecture``. Takes
    a second, moves no random state, and every rank may call it.

    Args:
        model: of transformers, plain or adapted by PEFT. Any other is not tried: a warning says so.
        dataset: what it shall be trained on.
        device, dtype: of the run; None: the model's.
        longest: most positions of a document or of padding, tokens (``check_architecture``); None:
            those of the dataset, or any.

    Raises:
        ConfigError: naming the architecture, the layer and the difference, or the ids; or there
            are attention windows, and the model's attention makes its mask of positions.
    """
    bare = bare_model(getattr(model, "_orig_mod", model))
    if not isinstance(bare, transformers.PreTrainedModel):
        warnings.warn(
            f"{type(bare).__name__} is no transformers model: whether it keeps the documents of a "
            "row apart was not tried",
            MegapackWarning,
            stacklevel=2,
        )
        return
    add_segment_numbers(bare)
    text = bare.config.get_text_config(decoder=True)
    if dataset is not None:
        # Within the wrappers that PEFT puts round it.
        embeddings = bare.get_input_embeddings().modules()
        size = next(one.num_embeddings for one in embeddings if hasattr(one, "num_embeddings"))
        check_token_ids(dataset, size)
        _check_windows(text._attn_implementation, dataset)
        if longest is None:
            longest = dataset.longest_position()

    def build(configuration: Any, implementation: str) -> Any:
        options = {"attn_implementation": implementation, "dtype": torch.float32}
        if text is bare.config:
            return type(bare)._from_config(configuration, **options)
        return transformers.AutoModelForCausalLM.from_config(configuration, **options)

    with _built_whole():
        check_architecture(
            text,
            attention=text._attn_implementation,
            build=build,
            device=bare.device if device is None else device,
            dtype=bare.dtype if dtype is None else dtype,
            longest=longest,
        )


@contextmanager
def _built_whole() -> Iterator[None]:
    """Under ZeRO 3 transformers splits every new model over the ranks; here it does not."""
    configuration = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: None)
    run = configuration() if configuration is not None else None
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if run is not None:
            deepspeed.set_hf_deepspeed_config(run)


def parallel_sizes(trainer: Any, reason: str) -> dict[str, tuple[Any, Any, str]]:
    """Tensor, context and sequence parallel size, which must be 1, for ``check_options``."""
    kinds = {"tensor": "tp", "context": "cp", "sequence": "sp"}
    return {
        f"the {kind} parallel size": (getattr(trainer, f"get_{short}_size", lambda: 1)(), 1, reason)
        for kind, short in kinds.items()
    }


def _check_windows(implementation: str, dataset: PackedDataset) -> None:
    windows = dataset.samples.windows
    if windows and implementation != ATTENTION_NAME and "flash" not in implementation:
        raise ConfigError(
            f"the run has attention windows {windows}, and attention {implementation!r} makes its "
            "mask of positions, which do not show them: load the model with attn_implementation="
            f"{ATTENTION_NAME!r} or 'flash_attention_2', or leave attention_window out"
        )


class PackedTrainerMixin:
    """For ``Trainer`` and its subclasses: trains on ``MicroBatches``.

    The loader is this rank's own, so nothing is sharded twice. A resume skips as many micro batches
    as the checkpoint's step has seen, without gathering them, and may use another number of ranks:
    ``gradient_accumulation_steps`` then changes with it, and the steps hold the same samples; a
    corpus or schedule that has others at the steps before is a ResumeError, and so is another
    model, tokenizer, content of the data or training argument.

    Attributes:
        probe: check the model on two early micro batches before it trains: seven forwards
            (``megapack.attention.probe``; the log has their seconds), and one of its loss, which
            must use the labels of the batch.
        allow_change: keys that may differ at a resume, as the error names them.
    """

    probe: bool = True
    allow_change: tuple[str, ...] = ()
    args: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    _checked: tuple[PackedDataset, ...] = ()
    _to_probe: MicroBatches | None = None
    _lengths: Tensor | None = None  # of the document of every token

    def check_model(self, dataset: PackedDataset, longest: int | None = None) -> None:
        """Called before the first batch of a dataset; see ``check_model``."""
        half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        check_model(self.model, dataset, device=self.args.device, dtype=half, longest=longest)

    def get_train_dataloader(self) -> Any:
        """A loader of this rank's micro batches.

        Raises:
            ConfigError: max_steps is not set, gradient_accumulation_steps does not fit, or
                ignore_data_skip.
        """
        if not isinstance(self.train_dataset, MicroBatches):
            return super().get_train_dataloader()  # type: ignore[misc]
        if self.args.max_steps <= 0:
            raise ConfigError(
                "max_steps is not set; the schedule counts steps over epochs: "
                f"max_steps={self.train_dataset.schedule.num_steps()} is one epoch "
                "(schedule.num_steps(num_epochs))"
            )
        _check_ignored(self.args)
        batches = self._of_this_rank(self.train_dataset, self.args.max_steps)
        check_labels(batches.schedule, self.args.max_steps)
        self._scale_noise(batches)
        if self.args.gradient_accumulation_steps != batches.num_micro_steps:
            raise ConfigError(
                f"gradient_accumulation_steps is {self.args.gradient_accumulation_steps}; "
                f"{batches.schedule.config.tokens_per_step} tokens per step on "
                f"{self.args.world_size} ranks of {batches.layout.micro_batch_tokens} tokens take "
                f"{batches.num_micro_steps}"
            )
        self._to_probe = batches if self.probe else None
        callbacks: list[Any] = self.callback_handler.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(one, ScheduleOfRun) for one in callbacks):
            self.add_callback(ScheduleOfRun())  # type: ignore[attr-defined]
        for one in callbacks:
            if isinstance(one, ScheduleOfRun):
                one.allow_change = tuple(self.allow_change)
        return self._loader(batches)

    def _try(self, model: Any, batch: Batch, longest: Batch) -> None:
        """Probe a model on a micro batch of short documents, and on one of the longest."""

        def forward(asked: Mapping[str, Any]) -> torch.Tensor:
            inputs = self._inputs(asked)
            del inputs["labels"], inputs["shift_labels"]
            logits: torch.Tensor = model(**inputs).logits
            return logits[..., :PROBED_LOGITS]

        model.eval()
        try:
            seconds = probe(
                forward, batch, host=type(self.model).__name__, longest=longest, any_length=True
            )
            self._check_loss(model, batch)
        finally:
            model.train()
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)

    def _scale_noise(self, batches: MicroBatches) -> None:
        """Scale the noise of NEFTune by the length of each document; Trainer takes the row's.

        ``alpha / sqrt(length * width)`` times a uniform number of -1 to 1 (Jain et al., *NEFTune*,
        2023). Trainer removes the hook by the handle that is replaced here.
        """
        if self.neftune_noise_alpha is None:  # type: ignore[attr-defined]
            return
        if batches.dataset.samples.windows:
            raise ConfigError(
                "neftune_noise_alpha is set, and the run has attention windows, which do not show "
                "how long a document is: leave one of them out"
            )
        self.neftune_hook_handle.remove()  # type: ignore[has-type]

        def add_noise(module: Any, given: Any, embedded: Tensor) -> Tensor:
            del given
            if not module.training or self._lengths is None:
                return embedded
            scale = module.neftune_noise_alpha / (self._lengths * embedded.shape[-1]).sqrt()
            noise = torch.empty_like(embedded).uniform_(-1, 1)
            noisy: Tensor = embedded + noise * scale.view(1, -1, 1).to(embedded.dtype)
            return noisy

        embeddings = bare_model(self.model).get_input_embeddings()
        self.neftune_hook_handle = embeddings.register_forward_hook(add_noise)

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``model_inputs`` on the device of the run."""
        return {
            name: value.to(self.args.device) if isinstance(value, torch.Tensor) else value
            for name, value in model_inputs(batch).items()
        }

    def _check_loss(self, model: Any, batch: Batch) -> None:
        """Whether the loss of a micro batch is that of its labels.

        The gradient of a loss by the logits of a token, all 0 here, is below 0 at the label that it
        took, and 0 where it took none: at a model's own, one that is sure of a label has none, or
        another's. A loss that makes no logits (fused with the head) is not seen.
        """
        found: list[torch.Tensor] = []

        def keep(head: Any, given: Any, logits: torch.Tensor) -> torch.Tensor:
            del head, given
            found.append(torch.zeros_like(logits, requires_grad=True))
            return found[-1]

        inputs = self._inputs(batch)
        told = copy.deepcopy(getattr(self, "_metrics", None))  # what TRL counts for its log
        head = self.model.get_output_embeddings()
        hook = None if head is None else head.register_forward_hook(keep)
        try:
            loss = super().compute_loss(  # type: ignore[misc]
                model, inputs, num_items_in_batch=self._labels_alone(inputs)
            )
        finally:
            if hook is not None:
                hook.remove()
        if told is not None:
            self._metrics = told
        if len(found) != 1 or not loss.requires_grad or found[0].dim() != 3:
            logger.info("the loss makes no logits of every token: its labels were not tried")
            return
        labels = batch["labels"].flatten()
        scaled = loss * (labels >= 0).sum().to(loss.device)  # or half precision loses it
        (gradient,) = torch.autograd.grad(scaled, found)
        lowest, taken = gradient.flatten(0, 1).min(dim=-1)
        taken = torch.where(lowest < 0, taken, IGNORED).cpu()
        wrong = (taken != labels).nonzero()[:, 0]
        if len(wrong):
            i = int(wrong[0])
            raise ConfigError(
                f"the loss of {type(self.model).__name__} has label {int(taken[i])} for token {i}, "
                f"and the batch has {int(labels[i])} ({IGNORED}: none), one of {len(wrong)} of "
                f"{len(labels)}: is the mask, or are the labels, shifted once too often? Look at "
                "compute_loss, compute_loss_func and the model's loss_function"
            )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Every sample of ``MicroBatches`` once, or what Trainer makes of any other dataset."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if not isinstance(chosen, MicroBatches):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        return self._loader(self._of_this_rank(chosen, None, evaluated=True))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for ``predict``."""
        if not isinstance(test_dataset, MicroBatches):
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self.get_eval_dataloader(test_dataset)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Trainer's, which then takes the mean of the losses of micro batches: of ``MicroBatches``
        each is weighted by its labels, so that it is the mean over all labels."""
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        loader: Any = self.callback_handler.eval_dataloader  # type: ignore[attr-defined]
        if loss is not None and isinstance(loader.dataset, MicroBatches):
            weight = (inputs["shift_labels"] >= 0).sum().to(loss) / loader.dataset.mean_labels
            loss = torch.where(weight > 0, loss * weight, 0)  # NaN without a label
        return (loss, *rest)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Trainer's loss, but that the load-balancing loss of a mixture of experts counts as often
        as its micro batch has labels (``megapack.attention.experts``): Trainer would add it whole
        for every micro batch and rank, and count padding."""
        if self._to_probe is not None and model.training:
            batches, self._to_probe = self._to_probe, None
            soon = min(LOOKED_AT, len(batches) // batches.num_micro_steps)
            step = batches.schedule.shortest_step(0, max(1, soon))
            short = batches.batch(step * batches.num_micro_steps)
            self._try(model, short, batches.batch(0))
        if "cu_seq_lens_q" in inputs:
            lengths = inputs["cu_seq_lens_q"].diff().long()
            self._lengths = lengths.repeat_interleave(lengths)
        if not model.training and "shift_labels" in inputs:
            num_items_in_batch = self._labels_alone(inputs)  # prediction_step weights the mean
        mask, weights = inputs.pop("token_mask", None), inputs.pop("loss_weights", None)
        if mask is not None and getattr(self, "aux_loss_enabled", False) and weights is None:
            weights = self._plain_weights(inputs, num_items_in_batch)
        if weights is not None:
            loss, outputs = self._weighted_loss(model, inputs, weights, mask)
            scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
            if model.training and not scaled:
                loss = loss * self.args.gradient_accumulation_steps  # by which Trainer divides
            return (loss, outputs) if return_outputs else loss
        options = {"num_items_in_batch": num_items_in_batch}
        if mask is None:
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, **options
            )
        num_labels = (inputs["shift_labels"] >= 0).sum()
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, **options
        )
        balancing = LoadBalancing.of(self.model)
        assert balancing is not None  # only then are there masks
        of_step, ranks = 1.0, 1
        if num_items_in_batch is not None:
            of_step = num_labels / num_items_in_batch
            ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        ours = balancing.loss(outputs["router_logits"], mask) * of_step
        # A smoothed loss has none.
        theirs = 0 if outputs.get("loss") is None else outputs["aux_loss"]
        loss = loss + ranks * balancing.coefficient * (ours - theirs)
        return (loss, outputs) if return_outputs else loss

    def _plain_weights(self, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Of every label the same: for TRL, whose own forward keeps no logits of routers."""
        labels = inputs["shift_labels"] >= 0
        if num_items_in_batch is None or not self.args.average_tokens_across_devices:
            alone = labels.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            num_items_in_batch = alone * self.args.world_size
        return torch.div(labels, num_items_in_batch)

    def _labels_alone(self, inputs: dict[str, Any]) -> Tensor | None:
        """The labels of one micro batch, as a ``compute_loss_func`` divides by them: its mean.
        Trainer multiplies by the ranks where it counts over all. None: without such a function."""
        if self.compute_loss_func is None:  # type: ignore[attr-defined]
            return None
        ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        return torch.mul((inputs["labels"][:, 1:] >= 0).sum().clamp(min=1), ranks)

    def _weighted_loss(
        self, model: Any, inputs: dict[str, Any], weights: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """The sum of losses times weights, of the model's logits: Trainer counts labels. A mixture
        of experts adds its load-balancing loss in the share of the step's weight that is here."""
        if self.compute_loss_func or getattr(self.args, "loss_type", "nll") != "nll":  # type: ignore[attr-defined]
            raise ConfigError(
                "the run has loss weights, or SFTTrainer balances experts, and compute_loss_func "
                "and loss_type='dft' are told neither: leave them out"
            )
        labels = inputs.pop("shift_labels").flatten()
        inputs.pop("labels")
        outputs = model(**inputs)
        losses = nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1).float(),
            labels,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=self.args.label_smoothing_factor,
        )
        loss = (losses * weights.flatten()).sum()
        if mask is not None:
            balancing = LoadBalancing.of(self.model)
            assert balancing is not None  # only then are there masks
            balance = balancing.loss(outputs.router_logits, mask)
            loss = loss + balancing.coefficient * weights.sum() * balance
        return loss * self.args.world_size, outputs  # of gradients ranks take the mean

    def _of_this_rank(
        self, batches: MicroBatches, num_steps: int | None, *, evaluated: bool = False
    ) -> MicroBatches:
        loader, reason = self.args.accelerator_config, "every rank reads its own micro batches"
        check_options({
            "the number of GPUs of this process": (
                max(1, self.args.n_gpu), 1, "DataParallel would split rows: run torchrun",
            ),
            **parallel_sizes(self, "micro batches go to data-parallel ranks only"),
            "accelerator_config.dispatch_batches": (loader.dispatch_batches, None, reason),
            "accelerator_config.split_batches": (loader.split_batches, None, reason),
        })  # fmt: skip
        if not any(one is batches.dataset for one in self._checked):
            reach = batches.dataset.longest_position(batches.layout.row_tokens)
            self.check_model(batches.dataset, reach)
            self._checked = (*self._checked, batches.dataset)
        rank = (self.args.process_index, self.args.world_size)
        mine = batches.of_rank(*rank, num_steps, evaluated=evaluated)
        balanced = getattr(self.model.config, "output_router_logits", False)
        mine.with_token_mask = balanced and LoadBalancing.of(self.model) is not None
        mine.with_loss_weights = True
        own = (self.compute_loss_func, self.label_smoother)  # type: ignore[attr-defined]
        mine.for_own_shift = own != (None, None) and not evaluated
        return mine

    def _loader(self, batches: MicroBatches) -> DataLoader[dict[str, Any]]:
        # Accelerate's, which deals nothing by itself, says the last batch to batch_eval_metrics.
        kind = DataLoaderShard if batches.schedule.finite else DataLoader
        # batch_size 1 and not None: Trainer resumes by skipping through the batch sampler.
        return own_loader(batches, self.args, kind, batch_size=1)


def _check_ignored(args: Any) -> None:
    """Raise ConfigError for options of Trainer that the micro batches would ignore."""
    order, size = "the schedule orders the samples", "micro_batch_tokens is the size of a forward"
    skipping = "a resumed run would train its first steps again; skipping them reads no data"
    strategy = getattr(args, "train_sampling_strategy", "random")
    grouped = None if strategy in ("random", "sequential") else strategy
    check_options({
        "ignore_data_skip": (args.ignore_data_skip, None, skipping),
        "train_sampling_strategy": (grouped, None, order),
        "auto_find_batch_size": (args.auto_find_batch_size, None, size),
        "group_by_length": (getattr(args, "group_by_length", None), None, order),
    })  # fmt: skip


def own_loader(
    dataset: Any, args: Any, kind: type[DataLoader[Any]] = DataLoader, **batches: Any
) -> DataLoader[Any]:
    """Of what one rank takes at once, with the options of a run; Trainer does not deal it again."""
    workers = args.dataloader_num_workers
    return kind(
        dataset,
        collate_fn=operator.itemgetter(0),
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        persistent_workers=bool(args.dataloader_persistent_workers and workers),
        **batches,
    )


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
        ConfigError: args would pack a second time, or name a mask that rows cannot have.
    """
    import datasets  # type: ignore[import-untyped] # noqa: PLC0415
    from trl import SFTTrainer  # noqa: PLC0415

    labels = "<prefix>.labels marks the tokens with loss (megapack-build tokenize --messages-key)"
    check_options({
        "SFTConfig.packing": (args.packing, False, "rows are packed already"),
        "SFTConfig.completion_only_loss": (args.completion_only_loss, None, labels),
        "SFTConfig.assistant_only_loss": (args.assistant_only_loss, None, labels),
    })  # fmt: skip
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}

    class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):  # type: ignore[misc]  # no stubs
        """SFTTrainer on packed micro batches."""

    stand_in = datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    trainer = PackedSFTTrainer(args=args, train_dataset=stand_in, **options)
    trainer.train_dataset = train_dataset
    return trainer

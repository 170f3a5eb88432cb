"""transformers' Trainer, TRL's SFTTrainer, Accelerate and plain loops on transformers models.

    dataset = PackedDataset("corpus", "corpus.samples")
    schedule = Schedule(dataset, tokens_per_step=524288)
    trainer = PackedTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attention_2"),
        args=TrainingArguments(..., gradient_accumulation_steps=8, max_steps=schedule.num_steps()),
        train_dataset=MicroBatches(dataset, schedule, micro_batch_tokens=8192),
    )
    trainer.train()

A micro batch is one row of segments under the argument names of transformers' attention
(``cu_seq_lens_q``, ...), so no mask is built and attention does not cross documents.
"""

from __future__ import annotations

import copy
import inspect
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
from megapack.attention.routes import COLUMN, check_replay, replay_routes, routes_shape
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.data import Batch, PackedDataset, check_token_ids
from megapack.data.batch import MTP_TARGETS
from megapack.data.report import check_labels
from megapack.errors import ConfigError, MegapackWarning
from megapack.integrations.dialects import IGNORED, refuse_windows
from megapack.integrations.host import bare_model, check_options
from megapack.integrations.hosts.transformers_resume import ScheduleOfRun, model_record
from megapack.integrations.rows.rank_rows import MicroBatches, model_inputs
from megapack.probe import check_rows

__all__ = ["MicroBatches", "PackedTrainer", "PackedTrainerMixin", "check_model", "model_inputs"]
__all__ += ["sft_trainer"]

logger = logging.getLogger("megapack")

PROBED_LOGITS = 256  # logits per token that the probe compares
LOOKED_AT = 32  # the probe uses the one of these first steps with the shortest documents

# ---- Check of a transformers model before training


def check_model(
    model: Any,
    dataset: PackedDataset | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    longest: int | None = None,
    trees: bool = False,
) -> None:
    """Raise ConfigError if packed rows would train a model wrongly, or token ids are unknown.

    Checks a tiny model with the same architecture and attention (``check_architecture``), which
    takes a second and does not change the random state. Any rank may call it. The error names the
    architecture, the layer and the difference, or the ids. Attention windows are an error, too, if
    the model's attention builds its mask from positions.

    Args:
        model: model of transformers, plain or adapted by PEFT; for others it only warns.
        device, dtype: device and dtype of the run; None: those of the model.
        longest: largest number of positions of a document or of padding (``check_architecture``);
            None: that of the dataset, unknown without one.
        trees: also check packed prefix trees, which recurrent layers cannot compute.
    """
    bare = bare_model(getattr(model, "_orig_mod", model))
    if not isinstance(bare, transformers.PreTrainedModel):
        warnings.warn(
            f"{type(bare).__name__} is not a transformers model: megapack did not check whether it "
            "keeps the documents of a row apart",
            MegapackWarning,
            stacklevel=2,
        )
        return
    add_segment_numbers(bare)
    text = bare.config.get_text_config(decoder=True)
    attention = text._attn_implementation
    if dataset is not None:
        # PEFT may wrap the embedding.
        embeddings = bare.get_input_embeddings().modules()
        size = next(e.num_embeddings for e in embeddings if hasattr(e, "num_embeddings"))
        check_token_ids(dataset, size)
        if attention != ATTENTION_NAME and "flash" not in attention:
            refuse_windows(
                dataset.samples.windows,
                f"attention {attention!r} builds its mask from positions, which do not show them",
                remedy=f"load the model with attn_implementation={ATTENTION_NAME!r} or "
                "'flash_attention_2'",
            )
        trees |= dataset.samples.attention == "tree"
        if longest is None:
            longest = dataset.longest_position()
    if trees and attention != ATTENTION_NAME:
        raise ConfigError(
            f"the run has prefix trees, and attention {attention!r} ignores their paths: register "
            "it (megapack.attention.register), and load the model with "
            f"attn_implementation={ATTENTION_NAME!r}"
        )

    with _without_zero3():
        check_architecture(
            text,
            attention=attention,
            build=_builder(bare),
            device=bare.device if device is None else device,
            dtype=bare.dtype if dtype is None else dtype,
            longest=longest,
            trees=trees,
        )


def _builder(bare: Any) -> Any:
    """Return a function that builds models of a model's text decoder (``check_architecture``)."""
    whole = bare.config.get_text_config(decoder=True) is bare.config
    kind = type(bare)._from_config if whole else transformers.AutoModelForCausalLM.from_config

    def build(configuration: Any, implementation: str) -> Any:
        return kind(configuration, attn_implementation=implementation, dtype=torch.float32)

    return build


@contextmanager
def _without_zero3() -> Iterator[None]:
    """Switch off ZeRO 3, under which transformers splits every new model over the ranks."""
    configuration = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: None)
    run = configuration() if configuration is not None else None
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if run is not None:
            deepspeed.set_hf_deepspeed_config(run)


def parallel_sizes(trainer: Any, reason: str) -> dict[str, tuple[Any, Any, str]]:
    """Return options for ``check_options``: tensor, context and sequence parallel size are 1."""
    kinds = {"tensor": "tp", "context": "cp", "sequence": "sp"}
    return {
        f"the {kind} parallel size": (getattr(trainer, f"get_{short}_size", lambda: 1)(), 1, reason)
        for kind, short in kinds.items()
    }


class PackedTrainerMixin:
    """Mixin for ``Trainer`` and its subclasses: trains on ``MicroBatches``.

    Every rank has its own loader. A resume skips the micro batches of earlier steps without
    gathering them. It may use a different number of ranks: change ``gradient_accumulation_steps``
    accordingly, and steps keep their samples. It raises ResumeError if the samples of earlier steps
    changed (corpus or schedule), or model, tokenizer, data content, optimizer, loss function or a
    training argument.

    Attributes:
        probe: before training, check the model on two early micro batches (seven forward passes,
            whose duration is logged; see ``megapack.probe.rows``), then check once that the
            loss uses the labels.
        replay_routes: every token uses the experts that the column ``routes`` of the training
            dataset records for it (``megapack.attention.routes``).
        allow_change: keys that may differ on resume; the error names them.
    """

    probe: bool = True
    replay_routes: bool = False
    allow_change: tuple[str, ...] = ()
    args: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    _checked: tuple[PackedDataset, ...] = ()
    _to_probe: MicroBatches | None = None
    _lengths: Tensor | None = None  # for every token, the length of its document

    def _check_dataset(self, dataset: PackedDataset, longest: int | None = None) -> None:
        half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        check_model(self.model, dataset, device=self.args.device, dtype=half, longest=longest)

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's micro batches. Raises ConfigError if max_steps is not set,
        gradient_accumulation_steps does not fit, or the micro batches would ignore an option."""
        if not isinstance(self.train_dataset, MicroBatches):
            return super().get_train_dataloader()  # type: ignore[misc]
        if self.args.max_steps <= 0:
            raise ConfigError(
                "max_steps is not set; the schedule determines the number of steps: "
                f"max_steps={self.train_dataset.schedule.num_steps()} is one epoch "
                "(for several, schedule.num_steps(num_epochs))"
            )
        order = "the schedule orders the samples"
        size = "micro_batch_tokens is the size of a forward"
        skipping = "a resumed run would train its first steps again; skipping them reads no data"
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        grouped = None if strategy in ("random", "sequential") else strategy
        check_options({
            "ignore_data_skip": (self.args.ignore_data_skip, None, skipping),
            "train_sampling_strategy": (grouped, None, order),
            "auto_find_batch_size": (self.args.auto_find_batch_size, None, size),
            "group_by_length": (getattr(self.args, "group_by_length", None), None, order),
        })  # fmt: skip
        batches = self._batches_of_rank(self.train_dataset, self.args.max_steps)
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
        if not any(isinstance(callback, ScheduleOfRun) for callback in callbacks):
            self.add_callback(ScheduleOfRun())  # type: ignore[attr-defined]
        # Not in the callback, which Trainer may replace by one from the checkpoint.
        loss = getattr(self.compute_loss_func, "__qualname__", None)  # type: ignore[attr-defined]
        tokenizer = getattr(self, "processing_class", None)
        batches.settings = model_record(self.model, tokenizer) | {
            "replay_routes": self.replay_routes, "compute_loss_func": loss,
        }  # fmt: skip
        batches.allow_change = tuple(self.allow_change)
        return self._loader(batches)

    def _probe_model(self, model: Any, batch: Batch, longest: Batch) -> None:
        """Probe a model on a micro batch of short documents, and on one of the longest."""

        def forward(changed: Mapping[str, Any]) -> torch.Tensor:
            inputs = self._inputs(changed)
            for name in ("labels", "shift_labels", "predecessors"):
                inputs.pop(name, None)
            logits: torch.Tensor = model(**inputs).logits
            return logits[..., :PROBED_LOGITS]

        model.eval()
        try:
            seconds = check_rows(
                forward, batch, host=type(self.model).__name__, longest=longest, any_length=True
            )
            if "kv_index" not in batch:  # the loss of trees is ``_weighted_loss``
                self._check_loss(model, batch)
        finally:
            model.train()
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)

    def _scale_noise(self, batches: MicroBatches) -> None:
        """Scale the noise of NEFTune by the length of each document instead of the row's: ``alpha /
        sqrt(length * width)`` times a uniform number in [-1, 1] (Jain et al., 2023)."""
        if self.neftune_noise_alpha is None:  # type: ignore[attr-defined]
            return
        if batches.dataset.samples.windows:
            raise ConfigError(
                "neftune_noise_alpha is set, and the run has attention windows, which hide the "
                "lengths of documents: leave one of the two out"
            )
        self.neftune_hook_handle.remove()  # type: ignore[has-type]

        def add_noise(module: Any, inputs: Any, embedded: Tensor) -> Tensor:
            del inputs
            if not module.training or self._lengths is None:
                return embedded
            scale = module.neftune_noise_alpha / (self._lengths * embedded.shape[-1]).sqrt()
            noise = torch.empty_like(embedded).uniform_(-1, 1)
            noisy: Tensor = embedded + noise * scale.view(1, -1, 1).to(embedded.dtype)
            return noisy

        embeddings = bare_model(self.model).get_input_embeddings()
        # Trainer removes the hook of this name after training.
        self.neftune_hook_handle = embeddings.register_forward_hook(add_noise)

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {
            name: value.to(self.args.device) if isinstance(value, torch.Tensor) else value
            for name, value in model_inputs(batch).items()
        }
        return self._without_columns(inputs)

    def _without_columns(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs without the columns and targets of multi-token prediction that the model
        does not accept: a ``compute_loss`` that uses them is called before this one."""
        carried = {name for dataset in self._checked for name in dataset.columns}
        carried.update(name for name in MTP_TARGETS if name in inputs)
        known = inspect.signature(bare_model(self.model).forward).parameters if carried else ()
        return {k: value for k, value in inputs.items() if k not in carried or k in known}

    def _check_loss(self, model: Any, batch: Batch) -> None:
        """Raise ConfigError if the loss of a micro batch does not use the labels of the batch.

        Replaces all logits with 0. Then the gradient of the loss with respect to the logits of a
        token is negative only for the label that the loss uses, and 0 if it uses none. (With the
        model's own logits, it vanishes where the model is certain.) Fused losses are not checked.
        """
        zeros: list[torch.Tensor] = []

        def replace(head: Any, hidden: Any, logits: torch.Tensor) -> torch.Tensor:
            del head, hidden
            zeros.append(torch.zeros_like(logits, requires_grad=True))
            return zeros[-1]

        inputs = self._inputs(batch)
        metrics = copy.deepcopy(getattr(self, "_metrics", None))  # TRL's log; restored below
        head = self.model.get_output_embeddings()
        hook = None if head is None else head.register_forward_hook(replace)
        try:
            loss = super().compute_loss(  # type: ignore[misc]
                model, inputs, num_items_in_batch=self._micro_batch_divisor(inputs)
            )
        finally:
            if hook is not None:
                hook.remove()
        if metrics is not None:
            self._metrics = metrics
        if len(zeros) != 1 or not loss.requires_grad or zeros[0].dim() != 3:
            logger.info("the loss has no logits of every token: its labels were not checked")
            return
        labels = batch["labels"].flatten()
        # Without the factor, half precision may round the gradient to 0.
        scaled = loss * (labels >= 0).sum().to(loss.device)
        (gradient,) = torch.autograd.grad(scaled, zeros)
        lowest, used = gradient.flatten(0, 1).min(dim=-1)
        used = torch.where(lowest < 0, used, IGNORED).cpu()
        wrong = (used != labels).nonzero()[:, 0]
        if len(wrong):
            i = int(wrong[0])
            raise ConfigError(
                f"the loss of {type(self.model).__name__} uses label {int(used[i])} for token {i}, "
                f"but the batch has {int(labels[i])} ({IGNORED}: none); {len(wrong)} of "
                f"{len(labels)} labels differ: the mask or the labels may be shifted twice. Check "
                "compute_loss, compute_loss_func and the model's loss_function"
            )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of every sample of ``MicroBatches``; for other data, Trainer's loader."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if not isinstance(chosen, MicroBatches):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        return self._loader(self._batches_of_rank(chosen, None, evaluated=True))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if not isinstance(test_dataset, MicroBatches):
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self.get_eval_dataloader(test_dataset)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Weight losses by labels, so that Trainer's average is the mean over all labels."""
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        loader: Any = self.callback_handler.eval_dataloader  # type: ignore[attr-defined]
        if loss is not None and isinstance(loader.dataset, MicroBatches):
            weight = (inputs["shift_labels"] >= 0).sum().to(loss) / loader.dataset.mean_labels
            loss = torch.where(weight > 0, loss * weight, 0)  # loss is NaN if weight is 0
        return (loss, *rest)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute Trainer's loss, but weight the load-balancing loss of a mixture of experts by the
        number of labels in the micro batch (``megapack.attention.experts``): Trainer would add it
        in full for every micro batch and rank, and include padding."""
        if self._to_probe is not None and model.training:
            batches, self._to_probe = self._to_probe, None
            steps = min(LOOKED_AT, len(batches) // batches.num_micro_steps)
            step = batches.schedule.shortest_step(0, max(1, steps))
            short = batches.batch(step * batches.num_micro_steps)
            self._probe_model(model, short, batches.batch(0))
        if self.replay_routes and model.training and COLUMN in inputs:
            tokens = {key: value for key, value in inputs.items() if key != COLUMN}
            with replay_routes(self.model, inputs[COLUMN]):
                return self.compute_loss(model, tokens, return_outputs, num_items_in_batch)
        if "cu_seq_lens_q" in inputs:
            lengths = inputs["cu_seq_lens_q"].diff().long()
            self._lengths = lengths.repeat_interleave(lengths)
        if not model.training and "shift_labels" in inputs:
            num_items_in_batch = self._micro_batch_divisor(inputs)  # prediction_step weights it
        inputs = self._without_columns(inputs)
        mask, weights = inputs.pop("token_mask", None), inputs.pop("loss_weights", None)
        if mask is not None and getattr(self, "aux_loss_enabled", False) and weights is None:
            weights = self._equal_weights(inputs, num_items_in_batch)
        if weights is not None:
            loss, outputs = self._weighted_loss(model, inputs, weights, mask)
            scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
            if model.training and not scaled:
                loss = loss * self.args.gradient_accumulation_steps  # Trainer divides by it
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
        assert balancing is not None, "only such models get a token mask"
        share, ranks = 1.0, 1
        if num_items_in_batch is not None:
            share = num_labels / num_items_in_batch
            ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        weighted = balancing.loss(outputs["router_logits"], mask) * share
        # With label smoothing, Trainer's loss does not include the load-balancing loss.
        included = 0 if outputs.get("loss") is None else outputs["aux_loss"]
        loss = loss + ranks * balancing.coefficient * (weighted - included)
        return (loss, outputs) if return_outputs else loss

    def _equal_weights(self, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Return equal loss weights of all labels, for TRL, whose forward drops router logits."""
        labels = inputs["shift_labels"] >= 0
        if num_items_in_batch is None or not self.args.average_tokens_across_devices:
            count = labels.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            num_items_in_batch = count * self.args.world_size
        return torch.div(labels, num_items_in_batch)

    def _micro_batch_divisor(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return the divisor that makes the result of ``compute_loss_func``, if any, a mean."""
        if self.compute_loss_func is None:  # type: ignore[attr-defined]
            return None
        # With average_tokens_across_devices Trainer multiplies losses by the world size.
        ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        return torch.mul((inputs["labels"][:, 1:] >= 0).sum().clamp(min=1), ranks)

    def _weighted_loss(
        self, model: Any, inputs: dict[str, Any], weights: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """Return the sum of losses times weights. A mixture of experts adds its load-balancing loss
        times the weight of this micro batch."""
        if self.compute_loss_func or getattr(self.args, "loss_type", "nll") != "nll":  # type: ignore[attr-defined]
            raise ConfigError(
                "the run has loss weights, or SFTTrainer balances experts, and compute_loss_func "
                "and loss_type='dft' support neither: leave them out"
            )
        labels = inputs.pop("shift_labels").flatten()
        inputs.pop("labels", None)
        predecessors = inputs.pop("predecessors", None)
        outputs = model(**inputs)
        logits = outputs.logits.flatten(0, 1).float()
        losses = nn.functional.cross_entropy(
            logits if predecessors is None else logits[predecessors.clamp(min=0)],
            labels,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=self.args.label_smoothing_factor,
        )
        loss = (losses * weights.flatten()).sum()
        if mask is not None:
            balancing = LoadBalancing.of(self.model)
            assert balancing is not None, "only such models get a token mask"
            balance = balancing.loss(outputs.router_logits, mask)
            loss = loss + balancing.coefficient * weights.sum() * balance
        return loss * self.args.world_size, outputs  # ranks average their gradients

    def _batches_of_rank(
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
        if not any(dataset is batches.dataset for dataset in self._checked):
            longest = batches.dataset.longest_position(batches.layout.row_tokens)
            self._check_dataset(batches.dataset, longest)
            self._checked = (*self._checked, batches.dataset)
        rank = (self.args.process_index, self.args.world_size)
        of_rank = batches.of_rank(*rank, num_steps, evaluated=evaluated)
        balanced = getattr(self.model.config, "output_router_logits", False)
        of_rank.with_token_mask = balanced and LoadBalancing.of(self.model) is not None
        of_rank.with_loss_weights = True
        if batches.dataset.samples.attention == "tree":
            self._check_trees(evaluated=evaluated, balanced=balanced)
        if self.replay_routes and not evaluated:
            self._check_routes(batches.dataset)
        custom = (self.compute_loss_func, self.label_smoother)  # type: ignore[attr-defined]
        of_rank.for_own_shift = custom != (None, None) and not evaluated
        return of_rank

    def _check_trees(self, *, evaluated: bool, balanced: bool) -> None:
        noise = self.neftune_noise_alpha  # type: ignore[attr-defined]
        check_options({
            "eval_dataset": (
                "prefix trees" if evaluated else None, None,
                "Trainer's evaluation has one label per position; pack the held-out documents with "
                "another strategy",
            ),
            "output_router_logits": (balanced, False, "the loss would count shared tokens once"),
            "neftune_noise_alpha": (noise, None, "a shared token has documents of several lengths"),
        })  # fmt: skip

    def _check_routes(self, dataset: PackedDataset) -> None:
        column, model = dataset.columns.get(COLUMN), bare_model(self.model)
        if column is None or column.of != "token" or column.shape != routes_shape(model):
            raise ConfigError(
                f"replay_routes is True, and the dataset has {COLUMN!r} as {column}: open it with "
                f"columns=[{COLUMN!r}], recorded with shape {list(routes_shape(model))} of token"
            )
        with _without_zero3():
            check_replay(model.config.get_text_config(decoder=True), _builder(model))

    def _loader(self, batches: MicroBatches) -> DataLoader[dict[str, Any]]:
        # Accelerate's loader marks the last batch, which batch_eval_metrics needs.
        kind = DataLoaderShard if batches.schedule.finite else DataLoader
        # batch_size 1, not None: Trainer resumes by skipping in the batch sampler.
        return rank_loader(batches, self.args, kind, batch_size=1)


def rank_loader(
    dataset: Any, args: Any, kind: type[DataLoader[Any]] = DataLoader, **batches: Any
) -> DataLoader[Any]:
    """Return a loader of one rank's items, with the loader options of ``args``."""
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
    """Return TRL's SFTTrainer on packed micro batches; ``args`` is an SFTConfig, ``options`` are
    further arguments of SFTTrainer. Raises ConfigError if ``args`` would pack again, or use a mask
    that rows lack."""
    import datasets  # type: ignore[import-untyped] # noqa: PLC0415
    from trl import SFTTrainer  # noqa: PLC0415

    labels = "column labels marks the tokens with loss (megapack-build tokenize --messages-key)"
    check_options({
        "SFTConfig.packing": (args.packing, False, "rows are packed already"),
        "SFTConfig.completion_only_loss": (args.completion_only_loss, None, labels),
        "SFTConfig.assistant_only_loss": (args.assistant_only_loss, None, labels),
    })  # fmt: skip
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}

    kind: Any = type("PackedSFTTrainer", (PackedTrainerMixin, SFTTrainer), {})
    # SFTTrainer's constructor only takes a datasets.Dataset.
    placeholder = datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    trainer = kind(args=args, train_dataset=placeholder, **options)
    trainer.train_dataset = train_dataset
    return trainer

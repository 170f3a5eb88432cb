"""Steps planned by ``plan_step`` for Accelerate and for TRL's SFT and GRPO trainers.

    PlannedSteps        the micro batches of one rank, step by step: packed rows with exact weights
    accumulate          a loop over them with Accelerate: gradients are reduced once, at the end
    PlannedSFTMixin     TRL's SFTTrainer on planned steps
    PlannedGRPOMixin    TRL's GRPOTrainer: assigns completions to ranks under a cap on tokens

Six documents of 9, 3, 7, 2, 5 and 6 tokens form one step of two ranks with at most 10 tokens each:

    documents = [{"input_ids": list(range(n))} for n in (9, 3, 7, 2, 5, 6)]
    steps = PlannedSteps(
        documents, documents_per_step=6, max_tokens_per_rank=10, num_ranks=2, shuffle=False
    )
    [row["cu_seq_lens_q"].diff().tolist() for row in steps[0]]  # rank 0
    # -> [[9], [2, 5]]       rank 1 has [[3, 7], [6]]
    float(steps[0][0]["loss_weights"][0, 0])  # weight of each of the step's 26 label tokens
    # -> 0.0384615...

All ranks have the same number of micro batches. The loss of a step is the sum of weight times loss
over all their tokens. DistributedDataParallel averages gradients over ranks, so a training loop
multiplies the loss by the number of ranks. A plan is a pure function of lengths, so every rank
computes it alone; with GRPO, ranks exchange completions first.

Tested with TRL 1.16 and Accelerate 1.15; see docs/guides/planned_steps.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from megapack.attention import varlen_arguments
from megapack.calls import checked_call
from megapack.errors import ConfigError
from megapack.integrations.dialects import IGNORED
from megapack.integrations.host import check_options
from megapack.integrations.hosts.transformers import check_model, parallel_sizes, rank_loader
from megapack.integrations.hosts.trees import TreeForward, generating, install_trees, sequences_of
from megapack.planning import StepPlan, plan_step, plan_trees

Integers = NDArray[np.int64]
Item = TypeVar("Item")


# ---- Steps of documents


class PlannedSteps(Dataset[list[dict[str, Any]]]):
    """Steps of whole documents: item i contains the micro batches of one rank in step i.

    A step has the next `documents_per_step` documents in the order of the epoch, on any number of
    ranks. ``len`` is the steps of one epoch; items after that belong to later epochs. An item is a
    pure function of its number. Raises ConfigError if there are no documents, or if one has no
    tokens, too many for a rank, a wrong number of labels, or a mask of TRL without labels.

    Args:
        documents: sequence of mappings with ``input_ids`` and optional ``labels`` (the token itself
            or -100, as in datasets of TRL), such as a ``datasets.Dataset``. Read once at start.
        documents_per_step: documents of all ranks in a step; the last of an epoch may have fewer.
        max_tokens_per_rank: maximum tokens of a micro batch of one rank.
        loss: meaning of the weights, see ``StepPlan.loss_weights``.
        shuffle: use a different order in every epoch, from `seed`; False: keep the given order.
        balance .. max_documents_per_rank: see ``plan_step``; balance ``step`` if gradients are
            reduced once per step.
    """

    @checked_call
    def __init__(
        self,
        documents: Any,
        *,
        documents_per_step: int,
        max_tokens_per_rank: int,
        rank: int = 0,
        num_ranks: int = 1,
        loss: Literal["token_mean", "sequence_mean"] = "token_mean",
        shuffle: bool = True,
        seed: int = 0,
        balance: Literal["micro_batches", "step"] = "micro_batches",
        linear_cost_tokens: float = 0,
        max_documents_per_rank: int | None = None,
    ) -> None:
        self.documents, self.documents_per_step = documents, documents_per_step
        self.rank, self.loss, self.shuffle, self.seed = rank, loss, shuffle, seed
        self._planning: dict[str, Any] = {
            "num_ranks": num_ranks,
            "max_tokens_per_rank": max_tokens_per_rank,
            "balance": balance,
            "linear_cost_tokens": linear_cost_tokens,
            "max_documents_per_rank": max_documents_per_rank,
        }
        if len(documents) == 0 or documents_per_step < 1:
            raise ConfigError(
                f"{len(documents)} documents in steps of {documents_per_step}; give at least one"
            )
        pairs = (_tokens_and_labels(document) for document in documents)
        sizes = [(len(tokens), int((labels != IGNORED).sum())) for tokens, labels in pairs]
        self.lengths, self.num_labels = np.array(sizes, np.int64).T
        for i in np.flatnonzero((self.lengths < 1) | (self.lengths > max_tokens_per_rank))[:1]:
            raise ConfigError(
                f"document {i} has {self.lengths[i]} tokens, and a rank holds 1 to "
                f"max_tokens_per_rank={max_tokens_per_rank}: truncate it, or raise the limit"
            )

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.documents_per_step)

    def plan(self, i: int) -> tuple[Integers, StepPlan]:
        """Return the indices of a step's documents, and its plan; the same on all ranks."""
        epoch, step = divmod(i, len(self))
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        chosen = order[step * self.documents_per_step :][: self.documents_per_step]
        return chosen, plan_step(self.lengths[chosen], **self._planning)

    def __getitem__(self, i: int) -> list[dict[str, Any]]:
        """Return micro batches: input_ids, position_ids and shift_labels (the label of every
        position) int64 (1, tokens), loss_weights float32 (1, tokens), ``varlen_arguments``."""
        chosen, plan = self.plan(i)
        weights = plan.loss_weights(self.num_labels[chosen], self.loss)
        rows = []
        for indices in plan.of_rank(self.rank):
            pairs = [_tokens_and_labels(self.documents[int(n)]) for n in chosen[indices]]
            if not pairs:  # this rank has fewer micro batches: forward one token without a label
                tokens, _ = _tokens_and_labels(self.documents[int(chosen[0])])
                pairs, indices = [(tokens[:1], np.array([IGNORED]))], np.array([0])  # noqa: PLW2901
            lengths = np.array([len(tokens) for tokens, _ in pairs])
            tokens, labels = (np.concatenate(parts)[None] for parts in zip(*pairs, strict=True))
            loss_weights = np.where(labels == IGNORED, 0, weights[indices].repeat(lengths))
            positions = np.concatenate([np.arange(n) for n in lengths])[None]
            bounds = torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))
            rows.append(
                {
                    "input_ids": torch.from_numpy(tokens),
                    "position_ids": torch.from_numpy(positions),
                    "shift_labels": torch.from_numpy(labels),
                    "loss_weights": torch.from_numpy(loss_weights.astype(np.float32)),
                    **varlen_arguments(bounds, int(lengths.max())),
                }
            )
        return rows


def _tokens_and_labels(document: Mapping[str, Any]) -> tuple[Integers, Integers]:
    """Return the tokens, and for every position the next token of the document, or IGNORED."""
    tokens = np.asarray(document["input_ids"], np.int64)
    labels = np.asarray(document.get("labels", tokens), np.int64)
    masks = sorted({"completion_mask", "assistant_masks"} & document.keys())
    if len(labels) != len(tokens) or (masks and "labels" not in document):
        labeling = f"{len(labels)} labels" if "labels" in document else f"{masks[0]} and no labels"
        raise ConfigError(
            f"a document of {len(tokens)} tokens has {labeling}: give it one label per token, "
            f"{IGNORED} where the token has no loss"
        )
    return tokens, np.append(labels[1:], IGNORED)[: len(tokens)]


def accumulate(accelerator: Any, model: Any, micro_batches: Sequence[Item]) -> Iterator[Item]:
    """Yield the micro batches of a step (the same number on all ranks); ranks reduce gradients only
    in the last backward pass. (Accelerate's own ``accumulate`` needs a fixed number.)"""
    for number, inputs in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed's engine reads it
        with nullcontext() if last else accelerator.no_sync(model):
            yield inputs


# ---- TRL's SFTTrainer


class PlannedSFTMixin:
    """Mixin for ``class Mine(PlannedSFTMixin, SFTTrainer)``: assigns documents by plan.

    SFTTrainer prepares its datasets as usual (templates, truncation, completion only). Trainer then
    reads one item per optimizer step, and this class runs the item's micro batches, so their number
    may differ between steps. Evaluation is unchanged.

    Raises ConfigError if an option would pack documents, count micro batches or weight losses
    twice, or if the model does not keep the documents of a row apart (``check_model``).

    Args:
        documents_per_step, max_tokens_per_rank, loss: see ``PlannedSteps``.
        planning: further options of ``plan_step``.
        host: arguments of SFTTrainer, by name.
    """

    args: Any
    model: Any
    accelerator: Any
    train_dataset: Any

    def __init__(
        self,
        *,
        documents_per_step: int,
        max_tokens_per_rank: int,
        loss: Literal["token_mean", "sequence_mean"] = "token_mean",
        planning: Mapping[str, Any] | None = None,
        **host: Any,
    ) -> None:
        super().__init__(**host)
        self._steps_options: dict[str, Any] = {
            "documents_per_step": documents_per_step,
            "max_tokens_per_rank": max_tokens_per_rank,
            "loss": loss,
            **(planning or {}),
        }
        _check_trainer(
            self,
            max_tokens_per_rank,
            {
                "packing": (self.args.packing, False, "the plan packs the documents"),
                "loss_type": (self.args.loss_type, "nll", _OWN_LOSS),
                "label_smoothing_factor": (self.args.label_smoothing_factor, 0.0, _OWN_LOSS),
                "compute_loss_func": (getattr(self, "compute_loss_func", None), None, _OWN_LOSS),
            },
        )

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's ``PlannedSteps``."""
        if not hasattr(self.train_dataset, "__len__"):
            raise ConfigError("train_dataset has no length; a plan needs documents by number")
        steps = PlannedSteps(
            self.train_dataset,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
            seed=self.args.seed,
            **self._steps_options,
        )
        return rank_loader(steps, self.args, batch_sampler=_EpochSampler(len(steps)))

    def training_step(
        self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None
    ) -> Any:
        """Run all micro batches of a step; return this rank's part of the loss."""
        del num_items_in_batch  # loss_weights are divided by it already
        total = torch.zeros((), device=self.accelerator.device)
        for micro_batch in accumulate(self.accelerator, model, inputs):
            total += super().training_step(model, micro_batch)  # type: ignore[misc]
        return total

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute SFTTrainer's loss and metrics with a weight for every label."""
        weights = inputs.pop("loss_weights", None)
        if weights is None:  # evaluation
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if not self.args.average_tokens_across_devices:  # then SFTTrainer averages over ranks
            weights = weights * self.accelerator.num_processes

        def weighted(**arguments: Any) -> Any:
            outputs = model(**arguments)
            outputs.log_probs = outputs.log_probs * weights
            return outputs

        return super().compute_loss(  # type: ignore[misc]
            weighted,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=torch.ones((), device=weights.device),
        )


class _EpochSampler:
    """Sampler of ``PlannedSteps``; Trainer sets the epoch of ``sampler.batch_sampler``."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.epoch = num_steps, 0

    @property
    def batch_sampler(self) -> _EpochSampler:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * self.num_steps
        return ([i] for i in range(first, first + self.num_steps))


_OWN_LOSS = "planned steps compute the loss (docs/guides/planned_steps.md)"
_WHOLE = "it needs all completions of a step in one micro batch (docs/guides/planned_steps.md)"


def _check_trainer(
    trainer: Any, max_tokens: int, options: Mapping[str, tuple[Any, Any, str]]
) -> None:
    """Raise ConfigError for options and models that planned steps do not support."""
    steps = trainer.args.gradient_accumulation_steps
    experts = getattr(trainer, "aux_loss_enabled", False)
    check_options({
        "gradient_accumulation_steps": (steps, 1, "the plan decides the number of micro batches"),
        **parallel_sizes(trainer, "the plan assigns documents to data-parallel ranks only"),
        "the load-balancing loss of experts": (experts, False, _OWN_LOSS),
        "neftune_noise_alpha": (trainer.args.neftune_noise_alpha, None, "it scales by the row"),
        **options,
    })  # fmt: skip
    check_model(trainer.model, longest=max_tokens)


# ---- TRL's GRPOTrainer

# Divisor of a micro batch's loss in TRL: the completions or tokens of the micro batch, or already
# the tokens of the step. It determines the share of the micro batch in the loss of the step.
GRPO_DENOMINATORS = {
    **dict.fromkeys(("grpo", "dr_grpo", "sapo", "luspo"), "completions"),
    **dict.fromkeys(("bnpo",), "tokens"),
    **dict.fromkeys(("dapo", "cispo", "vespo"), "step"),
}


class PlannedGRPOMixin:
    """Mixin for ``class Mine(PlannedGRPOMixin, GRPOTrainer)``: assigns completions to ranks.

    ``per_device_train_batch_size`` is the number of completions that a rank generates for an
    optimizer step. Ranks exchange them (ids, masks, advantages). A plan assigns them to ranks and
    to micro batches under a cap on tokens, without padding. Losses, masks and clipping stay those
    of GRPOTrainer; metrics are means over micro batches.

    Raises ConfigError for options that need all completions of a step at once (entropy bonus and
    quantile), the balancing loss of experts, images, and models that mix documents of a row.

    Args:
        max_tokens_per_rank: maximum tokens (prompts and completions) of a micro batch.
        trees: compute a prompt once for all of its completions in a micro batch, as a packed prefix
            tree; then max_tokens_per_rank limits the tokens of the tree. The model has megapack's
            attention, and generates with sdpa (``megapack.integrations.hosts.trees``).
        keep_groups: assign all completions of a prompt to one rank, and to one micro batch if they
            fit. With steps_per_generation above 1 GRPOTrainer shuffles completions over steps; then
            groups stay together within each step.
        planning: further options of ``plan_step``, see ``PlannedSteps``.
        host: arguments of GRPOTrainer, by name.
    """

    args: Any
    model: Any
    accelerator: Any
    loss_type: str
    _step: int
    _metrics: Any

    def __init__(
        self,
        *,
        max_tokens_per_rank: int,
        trees: bool = False,
        keep_groups: bool = False,
        planning: Mapping[str, Any] | None = None,
        **host: Any,
    ) -> None:
        super().__init__(**host)
        self.max_tokens_per_rank, self.keep_groups = max_tokens_per_rank, keep_groups
        self._planning = dict(planning or {})
        _check_trainer(
            self,
            max_tokens_per_rank,
            {
                "top_entropy_quantile": (getattr(self, "top_entropy_quantile", 1.0), 1.0, _WHOLE),
                "an entropy bonus": (getattr(self, "_entropy_bonus_enabled", False), False, _WHOLE),
            },
        )
        if self.loss_type not in GRPO_DENOMINATORS:
            raise ConfigError(
                f"loss_type is {self.loss_type!r}; planned steps support "
                f"{sorted(GRPO_DENOMINATORS)}"
            )
        limit = self._planning.get("max_documents_per_rank")
        self.tree_forwards: list[TreeForward] = []
        if trees:
            option = (limit, None, "a tree has a limit of tokens only")
            options = {"max_documents_per_rank": option}
            self.tree_forwards = install_trees(self, max_tokens_per_rank, options)

    def _generate(self, prompts: list[Any]) -> Any:
        with generating(self.model) if self.tree_forwards else nullcontext():
            return super()._generate(prompts)  # type: ignore[misc]

    def _plan(
        self, ids: Tensor, mask: Tensor, num_ranks: int, **options: Any
    ) -> list[list[Integers]]:
        """Return the numbers of the padded rows by rank and micro batch."""
        mask = mask > 0
        mask[:, 0] |= ~mask.any(1)  # a row without tokens counts as one
        options |= {"num_ranks": num_ranks, "max_tokens_per_rank": self.max_tokens_per_rank}
        if self.tree_forwards:
            trees = plan_trees(sequences_of(ids, mask), **options).trees
            return [[tree.sequences for tree in of_rank] for of_rank in trees]
        return plan_step(mask.sum(1).cpu().numpy(), **options).index_lists()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Add the number of each completion's group to GRPOTrainer's result."""
        rows = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        training = self.model.training
        size = self.num_generations if training else self.num_generations_eval  # type: ignore[attr-defined]
        first = self.accelerator.process_index * len(inputs)
        rows["group"] = (first + torch.arange(len(inputs), device=self.accelerator.device)) // size
        return rows  # type: ignore[no-any-return]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, Mapping) and "loss_share" in generation_batch:
            return generation_batch  # a micro batch of training_step
        return super()._prepare_inputs(generation_batch)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run all micro batches of a step; return this rank's part of the loss."""
        begin = time.perf_counter()
        model.train()
        micro_batches = self._assign(self._prepare_inputs(inputs))
        total = torch.zeros((), device=self.accelerator.device)
        for micro_batch in accumulate(self.accelerator, model, micro_batches):
            # GRPOTrainer's training_step would count micro batches to decide when to generate.
            total += transformers.Trainer.training_step(
                self, model, micro_batch, num_items_in_batch
            )
        self._step += 1
        self._metrics["train"]["step_time"].append(time.perf_counter() - begin)
        return total

    def compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        """Multiply GRPOTrainer's loss of a micro batch by its share of the step."""
        loss = super().compute_loss(model, inputs, **options)  # type: ignore[misc]
        return loss * inputs.get("loss_share", 1.0)

    def _assign(self, rows: dict[str, Any]) -> list[dict[str, Any]]:
        """Return this rank's micro batches of the step's completions. GRPOTrainer gathers
        metrics per completion, so rows of zeros make their number equal on all ranks."""
        gathered = self._gather_ranks(rows)
        masks = gathered["completion_mask"] * gathered.get("tool_mask", 1)
        num_labels = masks.sum(1).cpu().numpy()
        ranks = self.accelerator.num_processes
        ids, mask = (
            torch.cat([gathered[f"prompt_{of}"], gathered[f"completion_{of}"]], 1)
            for of in ("ids", "mask")
        )
        groups = gathered["group"].cpu().numpy() if self.keep_groups else None
        lists = self._plan(ids, mask, ranks, groups=groups, **self._planning)
        micro_batches = []
        for number, indices in enumerate(lists[self.accelerator.process_index]):
            num_rows = max(len(rank_lists[number]) for rank_lists in lists)
            share = {
                "completions": num_rows / len(num_labels),
                "tokens": num_labels[indices].sum() / max(1, num_labels.sum()),
                "step": 1 / ranks,
            }[GRPO_DENOMINATORS[self.loss_type]]
            filled = np.append(indices, np.zeros(num_rows - len(indices), np.int64))
            chosen = torch.as_tensor(filled)
            micro_batch = {name: value[chosen.to(value.device)] for name, value in gathered.items()}
            for value in micro_batch.values():
                value[len(indices) :] = 0
            scalars = {name: value for name, value in rows.items() if name not in gathered}
            micro_batches.append({**scalars, **micro_batch, "loss_share": float(share * ranks)})
        return micro_batches

    def _gather_ranks(self, rows: dict[str, Any]) -> dict[str, Tensor]:
        """Gather the tensors that have a row per completion from all ranks, in rank order."""
        gathered = {}
        for name, value in rows.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                if value.ndim > 1:  # prompts are padded on the left, completions on the right
                    value = self.accelerator.pad_across_processes(  # noqa: PLW2901
                        value, dim=1, pad_first=name.startswith("prompt")
                    )
                gathered[name] = self.accelerator.gather(value)
        return gathered

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return ``(completions, logits_to_keep)`` log-probabilities and entropies, from rows
        without padding. With gradients, all completions are one micro batch. Without them
        (reference or old policy), completions are split under the cap; all ranks run the same
        number of forward passes."""
        del batch_size, compute_aux_loss
        if any(value is not None for value in images.values()):
            raise ConfigError("planned steps do not support images; use GRPOTrainer itself")
        chunks, order = [np.arange(len(input_ids))], np.arange(len(input_ids))
        if not torch.is_grad_enabled():
            chunks = self._plan(input_ids, attention_mask, 1)[0]
            count = torch.tensor([len(chunks)], device=self.accelerator.device)
            missing = int(self.accelerator.gather(count).max()) - len(chunks)
            chunks = [*chunks, *[order[:0]] * missing]
            order = np.argsort(np.concatenate(chunks))
        score = _score_tree if self.tree_forwards else _score
        results = []
        for chunk in chunks:
            rows = torch.as_tensor(chunk if chunk.size else order[:1]).to(input_ids.device)
            with self.accelerator.autocast():
                scores = score(model, input_ids[rows], attention_mask[rows], logits_to_keep)
            results.append([values[: len(chunk)] for values in scores])
        places = torch.as_tensor(order).to(input_ids.device)
        logps, entropies = (torch.cat(parts)[places] for parts in zip(*results, strict=True))
        return logps, entropies if compute_entropy else None, None


def _score(model: Any, ids: Tensor, attention_mask: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of the last `keep` tokens of padded rows, packed."""
    mask = attention_mask.bool()
    if not mask.any():  # only rows of zeros: run one token, because every rank must run the model
        mask = mask.index_fill(1, torch.zeros(1, dtype=torch.int64, device=mask.device), True)
    lengths = mask.sum(1)
    bounds = F.pad(lengths[lengths > 0].cumsum(0), (1, 0)).to(torch.int32)
    labels = torch.where(attention_mask.bool(), ids, IGNORED)
    labels[:, :-keep] = IGNORED
    flat = labels[mask]
    flat[bounds[:-1].long()] = IGNORED  # no token predicts the first one of a document
    outputs = model(
        input_ids=ids[mask][None],
        position_ids=(mask.cumsum(1) - 1)[mask][None],
        shift_labels=F.pad(flat[1:], (0, 1), value=IGNORED)[None],
        fused_lm_head=True,
        **varlen_arguments(bounds, int(lengths.max())),
    )

    def padded(row: Tensor) -> Tensor:
        target_values = F.pad(row[0, :-1], (1, 0))  # the output at a position is for the next token
        return row.new_zeros(mask.shape).masked_scatter(mask, target_values)[:, -keep:]

    return padded(outputs.log_probs), padded(_entropy(outputs))


def _score_tree(
    model: Any, ids: Tensor, attention_mask: Tensor, keep: int
) -> tuple[Tensor, Tensor]:
    """Return the same as ``_score``, from a model with ``TreeForward``."""
    labels = torch.where(attention_mask.bool(), ids, IGNORED)
    labels[:, :-keep] = IGNORED
    rows = {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}
    outputs = model(**rows, fused_lm_head=True)
    return outputs.log_probs[:, -keep:], _entropy(outputs)[:, -keep:]


def _entropy(outputs: Any) -> Tensor:
    """Return the entropy; a reference has none, and GRPOTrainer does not read it there."""
    values: Tensor = outputs.log_probs if outputs.entropy is None else outputs.entropy
    return values.detach()

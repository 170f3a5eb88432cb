"""``plan_step`` where others deal a fixed number of documents: Accelerate, TRL's SFT and GRPO.

What is here:

    PlannedSteps        the micro batches of one rank, step by step: packed rows with exact weights
    accumulate          runs them with Accelerate: gradients meet once, in the last backward
    PlannedSFTMixin     TRL's SFTTrainer on planned steps
    PlannedGRPOMixin    TRL's GRPOTrainer: completions dealt over ranks under a cap on tokens

Six documents of 9, 3, 7, 2, 5 and 6 tokens are one step of two ranks that hold 10 tokens each:

    documents = [{"input_ids": list(range(n))} for n in (9, 3, 7, 2, 5, 6)]
    steps = PlannedSteps(
        documents, documents_per_step=6, max_tokens_per_rank=10, num_ranks=2, shuffle=False
    )
    [row["cu_seq_lens_q"].diff().tolist() for row in steps[0]]  # of rank 0
    # -> [[9], [2, 5]]       rank 1 has [[3, 7], [6]]
    float(steps[0][0]["loss_weights"][0, 0])  # of each of the step's 26 label tokens
    # -> 0.0384615...

All ranks have the same number of micro batches, and the sum of weight times loss over all of them
is the step's loss: DistributedDataParallel averages over ranks, so a loop multiplies by their
number. A plan is a pure function of lengths: every rank makes it by itself, but in GRPO, where it
first has to hear of the others' completions.

Run with TRL 1.16 and Accelerate 1.15; docs/guides/planned_steps.md.
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
from megapack.errors import ConfigError
from megapack.integrations.dialects import IGNORED
from megapack.integrations.hosts.transformers import check_model, own_loader, parallel_sizes
from megapack.integrations.options import check_options
from megapack.planning import StepPlan, plan_step

Integers = NDArray[np.int64]
Item = TypeVar("Item")


# ---- Steps of documents --------------------------------------------------------------------------


class PlannedSteps(Dataset[list[dict[str, Any]]]):
    """Steps of whole documents: item i is what one rank forwards in the i-th step.

    A step has the next `documents_per_step` documents of the epoch's order, on any number of ranks.
    Items go on over epochs (``len`` is one epoch); one is a pure function of its number.

    Args:
        documents: by number, mappings with ``input_ids`` and perhaps ``labels`` (the token itself
            or -100, as in datasets of TRL): a ``datasets.Dataset``, a list. Read once at first.
        documents_per_step: of all ranks together; the last step of an epoch may have fewer.
        max_tokens_per_rank: tokens of a micro batch of one rank, never exceeded.
        rank, num_ranks: of data parallelism.
        loss: what the weights make of the step, as in ``StepPlan.loss_weights``.
        shuffle: another order in every epoch, by `seed`; False: as they stand.
        planning: more of ``plan_step``: balance (``step`` where gradients meet once, else
            ``micro_batches``), linear_cost_tokens, max_documents_per_rank.

    Raises:
        ConfigError: there are no documents, or one has no tokens or more than a rank holds, other
            than one label per token, or a mask of TRL's in place of labels.
    """

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
        **planning: Any,
    ) -> None:
        self.documents, self.documents_per_step = documents, documents_per_step
        self.rank, self.loss, self.shuffle, self.seed = rank, loss, shuffle, seed
        self._planning = {
            **planning,
            "num_ranks": num_ranks,
            "max_tokens_per_rank": max_tokens_per_rank,
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
        """The documents of a step by number, and who forwards which: the same on all ranks."""
        epoch, step = divmod(i, len(self))
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        chosen = order[step * self.documents_per_step :][: self.documents_per_step]
        return chosen, plan_step(self.lengths[chosen], **self._planning)

    def __getitem__(self, i: int) -> list[dict[str, Any]]:
        """Micro batches: input_ids, position_ids and shift_labels (the label of every position)
        int64 (1, tokens), loss_weights float32 (1, tokens), ``varlen_arguments``. One that is left
        without documents is a token without a label."""
        chosen, plan = self.plan(i)
        weights = plan.loss_weights(self.num_labels[chosen], self.loss)
        rows = []
        for mine in plan.of_rank(self.rank):
            read = [_tokens_and_labels(self.documents[int(n)]) for n in chosen[mine]]
            if not read:
                tokens, _ = _tokens_and_labels(self.documents[int(chosen[0])])
                read, mine = [(tokens[:1], np.array([IGNORED]))], np.array([0])  # noqa: PLW2901
            lengths = np.array([len(tokens) for tokens, _ in read])
            tokens, labels = (np.concatenate(parts)[None] for parts in zip(*read, strict=True))
            loss_weights = np.where(labels == IGNORED, 0, weights[mine].repeat(lengths))
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
    """Tokens, and the label of every position: the next token of the document, or IGNORED."""
    tokens = np.asarray(document["input_ids"], np.int64)
    labels = np.asarray(document.get("labels", tokens), np.int64)
    masks = sorted({"completion_mask", "assistant_masks"} & document.keys())
    if len(labels) != len(tokens) or (masks and "labels" not in document):
        found = f"{len(labels)} labels" if "labels" in document else f"{masks[0]} and no labels"
        raise ConfigError(
            f"a document of {len(tokens)} tokens has {found}: give it one label per token, "
            f"{IGNORED} where the token has no loss"
        )
    return tokens, np.append(labels[1:], IGNORED)[: len(tokens)]


def accumulate(accelerator: Any, model: Any, micro_batches: Sequence[Item]) -> Iterator[Item]:
    """The micro batches of a step, one after the other: gradients meet in the last backward.

    Args:
        accelerator: Accelerate's; ``accelerator.accumulate`` counts to a fixed number instead.
        model: as ``accelerator.prepare`` gave it.
        micro_batches: as many on all ranks.
    """
    for number, inputs in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        accelerator.gradient_state._set_sync_gradients(last)  # what DeepSpeed's engine goes by
        with nullcontext() if last else accelerator.no_sync(model):
            yield inputs


# ---- TRL's SFTTrainer ---------------------------------------------------------------------------


class PlannedSFTMixin:
    """For ``class Mine(PlannedSFTMixin, SFTTrainer)``: a step's documents are dealt by a plan.

    SFTTrainer prepares its datasets as ever (templates, truncation, completion only). Trainer then
    takes one item per optimizer step, whose micro batches are run here, so that their number may
    differ from step to step. Evaluation is SFTTrainer's own.

    Args:
        documents_per_step, max_tokens_per_rank, loss: of ``PlannedSteps``.
        planning: more of ``plan_step``.
        host: arguments of SFTTrainer, by name.

    Raises:
        ConfigError: an option that would pack, count or weigh a second time, or a model that does
            not keep the documents of a row apart (``check_model``).
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
        """A loader of ``PlannedSteps`` of this rank, which Trainer does not shard again."""
        if not hasattr(self.train_dataset, "__len__"):
            raise ConfigError("train_dataset has no length; a plan needs documents by number")
        steps = PlannedSteps(
            self.train_dataset,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
            seed=self.args.seed,
            **self._steps_options,
        )
        return own_loader(steps, self.args, batch_sampler=_EpochSampler(len(steps)))

    def training_step(
        self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None
    ) -> Any:
        """All micro batches of a step; the loss of this rank's part."""
        del num_items_in_batch  # the weights know
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
        """SFTTrainer's loss and metrics, every label token with its weight."""
        weights = inputs.pop("loss_weights", None)
        if weights is None:  # evaluation
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if not self.args.average_tokens_across_devices:  # then SFTTrainer leaves ranks averaged
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
    """Numbers of ``PlannedSteps`` items; Trainer tells the epoch to what batch_sampler names."""

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
    """Raise ConfigError for options of TRL's trainers that planned steps cannot serve, those of
    both trainers first, and for models that planned steps cannot train."""
    steps = trainer.args.gradient_accumulation_steps
    experts = getattr(trainer, "aux_loss_enabled", False)
    check_options({
        "gradient_accumulation_steps": (steps, 1, "the plan decides the number of micro batches"),
        **parallel_sizes(trainer, "the plan deals to data-parallel ranks only"),
        "the load-balancing loss of experts": (experts, False, _OWN_LOSS),
        "neftune_noise_alpha": (trainer.args.neftune_noise_alpha, None, "it scales by the row"),
        **options,
    })  # fmt: skip
    check_model(trainer.model, longest=max_tokens)


# ---- TRL's GRPOTrainer --------------------------------------------------------------------------

# How a micro batch's loss counts in the step's, by what TRL divides it by: its completions, its
# tokens, or already the step's tokens.
GRPO_DENOMINATORS = {
    **dict.fromkeys(("grpo", "dr_grpo", "sapo", "luspo"), "completions"),
    **dict.fromkeys(("bnpo",), "tokens"),
    **dict.fromkeys(("dapo", "cispo", "vespo"), "step"),
}


class PlannedGRPOMixin:
    """For ``class Mine(PlannedGRPOMixin, GRPOTrainer)``: completions dealt under a cap on tokens.

    ``per_device_train_batch_size`` says how many completions a rank generates for an optimizer
    step; how many are forwarded at once, and by which rank, is planned: ranks exchange them (ids,
    masks, advantages), and each forwards its part without padding. Losses, masks and clipping are
    GRPOTrainer's own; metrics are means over micro batches.

    Args:
        max_tokens_per_rank: tokens (prompts and completions) of a micro batch, never exceeded.
        keep_groups: completions of one prompt go to one rank, and into one micro batch if it holds
            them. GRPOTrainer shuffles what was generated for several steps (steps_per_generation),
            so that a group is then kept within each.
        planning: more of ``plan_step``: balance, linear_cost_tokens, max_documents_per_rank.
        host: arguments of GRPOTrainer, by name.

    Raises:
        ConfigError: an option that looks at a micro batch as a whole (entropy bonus and quantile,
            experts), images, or a model that does not keep the documents of a row apart.
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
        keep_groups: bool = False,
        planning: Mapping[str, Any] | None = None,
        **host: Any,
    ) -> None:
        super().__init__(**host)
        self.max_tokens_per_rank, self.keep_groups = max_tokens_per_rank, keep_groups
        self._planning = {**(planning or {}), "max_tokens_per_rank": max_tokens_per_rank}
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
                f"loss_type is {self.loss_type!r}; planned steps know the denominators of "
                f"{sorted(GRPO_DENOMINATORS)}"
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """GRPOTrainer's, and the number of each completion's group."""
        rows = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        training = self.model.training
        size = self.num_generations if training else self.num_generations_eval  # type: ignore[attr-defined]
        first = self.accelerator.process_index * len(inputs)
        rows["group"] = (first + torch.arange(len(inputs), device=self.accelerator.device)) // size
        return rows  # type: ignore[no-any-return]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, Mapping) and "loss_share" in generation_batch:
            return generation_batch  # a micro batch
        return super()._prepare_inputs(generation_batch)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """All micro batches of a step; the loss of this rank's part."""
        begin = time.perf_counter()
        model.train()
        micro_batches = self._deal(self._prepare_inputs(inputs))
        total = torch.zeros((), device=self.accelerator.device)
        for inputs_of_one in accumulate(self.accelerator, model, micro_batches):
            # Not GRPOTrainer's, which counts micro batches to know when to generate.
            step = transformers.Trainer.training_step
            total += step(self, model, inputs_of_one, num_items_in_batch)
        self._step += 1
        self._metrics["train"]["step_time"].append(time.perf_counter() - begin)
        return total

    def compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        """GRPOTrainer's loss of a micro batch by its share of the step."""
        loss = super().compute_loss(model, inputs, **options)  # type: ignore[misc]
        return loss * inputs.get("loss_share", 1.0)

    def _deal(self, rows: dict[str, Any]) -> list[dict[str, Any]]:
        """This rank's micro batches of the step's completions.

        GRPOTrainer gathers per-completion metrics, so a micro batch has as many rows on all ranks:
        what is missing are rows of zeros without tokens.
        """
        gathered = self._of_all_ranks(rows)
        masks = gathered["completion_mask"] * gathered.get("tool_mask", 1)
        num_labels = masks.sum(1).cpu().numpy()
        lengths = gathered["prompt_mask"].sum(1) + gathered["completion_mask"].sum(1)
        ranks = self.accelerator.num_processes
        plan = plan_step(
            lengths.clamp(min=1).cpu().numpy(),
            num_ranks=ranks,
            groups=gathered["group"].cpu().numpy() if self.keep_groups else None,
            **self._planning,
        )
        lists = plan.index_lists()
        micro_batches = []
        for number, mine in enumerate(lists[self.accelerator.process_index]):
            num_rows = max(len(of_rank[number]) for of_rank in lists)
            share = {
                "completions": num_rows / len(num_labels),
                "tokens": num_labels[mine].sum() / max(1, num_labels.sum()),
                "step": 1 / ranks,
            }[GRPO_DENOMINATORS[self.loss_type]]
            chosen = torch.as_tensor(np.append(mine, np.zeros(num_rows - len(mine), np.int64)))
            micro_batch = {name: value[chosen.to(value.device)] for name, value in gathered.items()}
            for value in micro_batch.values():
                value[len(mine) :] = 0
            scalars = {name: value for name, value in rows.items() if name not in gathered}
            micro_batches.append({**scalars, **micro_batch, "loss_share": float(share * ranks)})
        return micro_batches

    def _of_all_ranks(self, rows: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors with a row for each completion, one rank after the other."""
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
        """GRPOTrainer's ``(completions, logits_to_keep)`` log-probabilities and entropies, from
        rows without padding: a micro batch is one, more completions (of a reference or an older
        policy) are as many as the cap wants, as many on all ranks."""
        del batch_size, compute_aux_loss
        if any(value is not None for value in images.values()):
            raise ConfigError("completions with images are not planned; use GRPOTrainer itself")
        chunks, order = [np.arange(len(input_ids))], np.arange(len(input_ids))
        if not torch.is_grad_enabled():
            lengths = attention_mask.sum(1).clamp(min=1).cpu().numpy()
            plan = plan_step(lengths, num_ranks=1, max_tokens_per_rank=self.max_tokens_per_rank)
            count = torch.tensor([plan.num_micro_batches], device=self.accelerator.device)
            missing = int(self.accelerator.gather(count).max()) - plan.num_micro_batches
            chunks = [*plan.of_rank(0), *[order[:0]] * missing]
            order = plan.inverse_permutation
        found = []
        for chunk in chunks:
            rows = torch.as_tensor(chunk if chunk.size else order[:1]).to(input_ids.device)
            with self.accelerator.autocast():
                both = _scored(model, input_ids[rows], attention_mask[rows], logits_to_keep)
            found.append([values[: len(chunk)] for values in both])
        places = torch.as_tensor(order).to(input_ids.device)
        logps, entropies = (torch.cat(parts)[places] for parts in zip(*found, strict=True))
        return logps, entropies if compute_entropy else None, None


def _scored(model: Any, ids: Tensor, attention_mask: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the last `keep` tokens of padded rows, from one packed row."""
    mask = attention_mask.bool()
    if not mask.any():  # rows of zeros alone: every rank forwards something
        mask = mask.index_fill(1, torch.zeros(1, dtype=torch.int64, device=mask.device), True)
    lengths = mask.sum(1)
    bounds = F.pad(lengths[lengths > 0].cumsum(0), (1, 0)).to(torch.int32)
    labels = torch.where(attention_mask.bool(), ids, IGNORED)
    labels[:, :-keep] = IGNORED
    flat = labels[mask]
    flat[bounds[:-1].long()] = IGNORED  # a first token has nothing before it
    outputs = model(
        input_ids=ids[mask][None],
        position_ids=(mask.cumsum(1) - 1)[mask][None],
        shift_labels=F.pad(flat[1:], (0, 1), value=IGNORED)[None],
        fused_lm_head=True,
        **varlen_arguments(bounds, int(lengths.max())),
    )

    def padded(row: Tensor) -> Tensor:
        of_token = F.pad(row[0, :-1], (1, 0))  # what stands at a position speaks of the next token
        return row.new_zeros(mask.shape).masked_scatter(mask, of_token)[:, -keep:]

    entropy = outputs.log_probs if outputs.entropy is None else outputs.entropy  # of a reference
    return padded(outputs.log_probs), padded(entropy.detach())

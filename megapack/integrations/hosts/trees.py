"""TRL's trainers on packed prefix trees: a prompt is computed once for all of its completions.

    TreeForward         computes padded rows of TRL on one packed prefix tree, with equal results
    TreeDPOMixin        TRL's DPOTrainer: chosen and rejected share their prompt
    check_tree_model    refuses models that trees would train wrongly

GRPO has the option ``trees`` of ``PlannedGRPOMixin``. Three padded rows of four tokens, and what
the model forwards instead of 12 tokens:

    input_ids 5 6 7 8 | 5 6 9 0 | 5 6 7 4       labels -100 -100 7 8 | -100 -100 9 -100 | ...
    forward = TreeForward(model)  # model.forward is replaced
    outputs = model(input_ids=input_ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    outputs.log_probs.shape       # (3, 3), as without trees
    forward.forwarded_tokens      # 6: 5 6 7 4 8 9
    forward.sequence_tokens       # 11

TRL's fused head scores one label per hidden state, and branches share the state before them. So a
hook of the backbone repeats this state: the head sees one state per label.

Tested with TRL 1.16; see docs/guides/trees.md.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megapack.attention import ATTENTION_NAME, TreeSegments, tree_arguments
from megapack.data import TreeBatch, tree_batch
from megapack.errors import ConfigError
from megapack.integrations.dialects import IGNORED
from megapack.integrations.host import bare_model, check_options
from megapack.integrations.hosts.transformers import check_model, parallel_sizes
from megapack.planning import plan_trees

_KEPT = "predecessors"  # argument of a model's forward that the hook of its backbone reads


def check_tree_model(model: Any, *, longest: int | None = None) -> None:
    """Raise ConfigError if a model of transformers would train prefix trees wrongly: it has another
    attention than megapack's, dropout (a shared token has one draw for all its sequences), or
    layers that carry a state from row to row (``check_model``).

    Args:
        longest: largest number of positions of a sequence, see ``check_model``.
    """
    bare = bare_model(model)
    text = bare.config.get_text_config(decoder=True)
    drawn = "sequences would share the draws of their prefix"
    dropout = max((m.p for m in model.modules() if isinstance(m, nn.Dropout)), default=0.0)
    dropout = max(dropout, getattr(text, "attention_dropout", 0.0) or 0.0)
    check_options({"the model's dropout": (dropout, 0.0, drawn)})
    check_model(model, longest=longest, trees=True)


def sequences_of(ids: Tensor, mask: Tensor) -> list[NDArray[np.int64]]:
    """Return the tokens of padded rows, (rows, length), where `mask` is True, on the CPU."""
    pairs = zip(ids.cpu().numpy(), mask.cpu().numpy(), strict=True)
    return [row[kept] for row, kept in pairs]


def one_tree(sequences: list[NDArray[np.int64]]) -> TreeBatch:
    """Return a batch of all sequences as one packed prefix tree, on the CPU."""
    total = sum(map(len, sequences))
    plan = plan_trees(sequences, num_ranks=1, max_tokens_per_rank=total)
    return tree_batch(plan.trees[0][0], sequences)


def rows_in_order(batch: TreeBatch) -> Tensor:
    """Return the row of the tree of every position of every sequence, (P,) int64, in the order of
    the sequences' numbers (``token_index`` is in the order of their content)."""
    parts = batch["token_index"].split(batch["token_offsets"].diff().tolist())
    return torch.cat([parts[i] for i in batch["sequences"].argsort().tolist()])


def keep_predecessors(backbone: nn.Module) -> Any:
    """Make a backbone of transformers return the hidden states of the rows that its argument
    ``predecessors``, (U,) int64, names, (1, U, hidden size); return the handle of the hook."""

    def select(_: nn.Module, __: Any, arguments: dict[str, Any], output: Any) -> Any:
        rows = arguments.get(_KEPT)
        if rows is not None:
            output.last_hidden_state = output.last_hidden_state.index_select(1, rows)
        return output

    return backbone.register_forward_hook(select, with_kwargs=True)


class TreeForward:
    """Replaces the forward of a model with TRL's fused head: padded rows are computed as one tree.

    Its inputs and outputs do not change: ``input_ids``, ``attention_mask``, ``labels`` (rows,
    length), and per-token results (rows, length - 1). Only ``loss`` is None. Other calls, such as
    those of generation, are unchanged.

    Args:
        model: model of transformers, plain or adapted by PEFT, after ``add_fused_lm_head``.

    Attributes:
        forwarded_tokens: tokens that the model computed so far.
        sequence_tokens: tokens of the sequences so far, without padding.
    """

    def __init__(self, model: Any) -> None:
        self.forwarded_tokens = self.sequence_tokens = 0
        bare = bare_model(model)
        self._stock = bare.forward
        keep_predecessors(bare.base_model)

        @functools.wraps(type(bare).forward)  # generate() reads the signature
        def forward(_: Any, *rows: Any, fused_lm_head: bool = False, **arguments: Any) -> Any:
            if not fused_lm_head:
                return self._stock(*rows, **arguments)
            return self._of_rows(*rows, **arguments)

        bare.forward = types.MethodType(forward, bare)

    def _of_rows(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        **others: Any,
    ) -> Any:
        given = sorted(name for name, value in others.items() if value is not None)
        if input_ids is None or attention_mask is None or labels is None or given or use_cache:
            raise ConfigError(
                f"the trainer calls the model with {given or 'no padded rows'}: prefix trees take "
                "input_ids, attention_mask and labels of text; train without trees"
            )
        mask = attention_mask > 0
        mask[:, 0] |= ~mask.any(1)  # an empty row counts as one token, which nothing predicts
        wanted = (labels != IGNORED) & mask
        # No token predicts the first one of a row.
        wanted &= mask.cumsum(1) > 1
        batch = one_tree(sequences_of(input_ids, mask)).to(input_ids.device)
        self.forwarded_tokens += batch["tokens"].numel()
        self.sequence_tokens += len(batch["token_index"])
        labelled = rows_in_order(batch)[wanted[mask]]
        scored, places = labelled.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        targets = batch["tokens"][:, scored]
        if not len(scored):  # run the head anyway: ranks must use the same parameters
            scored, targets = scored.new_zeros(1), targets.new_full((1, 1), IGNORED)
        outputs = self._stock(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            shift_labels=targets,
            fused_lm_head=True,
            **{_KEPT: batch["predecessors"][scored].clamp(min=0)},
            **tree_arguments(TreeSegments.of(batch)),
        )
        for field in fields(outputs):
            row = getattr(outputs, field.name)
            if isinstance(row, Tensor) and row.ndim == 2:
                padded = row.new_zeros(mask.shape).masked_scatter(wanted, row[0][places])
                setattr(outputs, field.name, padded[:, 1:])
        outputs.loss = None  # it would count a shared token once
        return outputs


@contextmanager
def generating(model: Any) -> Iterator[None]:
    """Let a model with megapack's attention generate with sdpa, since generation uses a cache."""
    bare = bare_model(model)
    bare.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        bare.set_attn_implementation(ATTENTION_NAME)


def install_trees(
    trainer: Any, longest: int | None, options: dict[str, tuple[Any, Any, str]]
) -> list[TreeForward]:
    """Check a trainer of TRL, its `options` (``check_options``) and its models, and replace the
    forwards of policy and reference. Return them. Raises ConfigError.

    Args:
        longest: tokens of the longest sequence, see ``check_model``.
    """
    args = trainer.args
    check_options({
        **parallel_sizes(trainer, "every rank computes whole trees"),
        "the load-balancing loss of experts": (
            getattr(trainer, "aux_loss_enabled", False), False, "it would count shared tokens once"
        ),
        "neftune_noise_alpha": (args.neftune_noise_alpha, None, "it scales by the row"),
        **options,
    })  # fmt: skip
    reference = getattr(trainer, "ref_model", None)
    models = [trainer.model] if reference is None else [trainer.model, reference]
    unwrapped = [trainer.accelerator.unwrap_model(model) for model in models]
    for model in unwrapped:
        if model is not unwrapped[0]:  # TRL loads the reference with another attention
            bare_model(model).set_attn_implementation(ATTENTION_NAME)
        check_tree_model(model, longest=longest)
    return [TreeForward(model) for model in unwrapped]


class TreeDPOMixin:
    """Mixin for ``class Mine(TreeDPOMixin, DPOTrainer)``: a pair's prompt is computed once.

    All pairs of a micro batch (``per_device_train_batch_size``) are one packed prefix tree, for the
    policy and for the reference. Losses, metrics, precomputed reference log-probabilities and
    evaluation stay those of DPOTrainer. Larger micro batches share more, such as system prompts.

    Raises ConfigError for options and models that prefix trees do not support
    (``check_tree_model``): dropout, images, sequence parallelism, ``padding_free``,
    ``compute_metrics``.

    Attributes:
        tree_forwards: the ``TreeForward`` of the policy and, if there is one, of the reference.
    """

    args: Any
    _metrics: Any

    def __init__(self, *args: Any, **host: Any) -> None:
        self.tree_forwards: list[TreeForward] = []
        super().__init__(*args, **host)
        self._install_trees()

    def _install_trees(self) -> None:
        if not self.tree_forwards:
            metrics = getattr(self, "compute_metrics", None)
            vision = getattr(self, "_is_vision_dataset", False)
            self.tree_forwards = install_trees(self, self.args.max_length, {
                "padding_free": (self.args.padding_free, False, "a tree has no padding"),
                "compute_metrics": (metrics, None, "it needs logits of padded rows"),
                "images in the dataset": (vision, False, "trees hold text"),
            })  # fmt: skip

    def _precompute_ref_logps(self, *args: Any) -> Any:
        self._install_trees()  # DPOTrainer precomputes while it is constructed
        return super()._precompute_ref_logps(*args)  # type: ignore[misc]

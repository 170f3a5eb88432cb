"""``plan_step``: assign the documents of a step to ranks and micro batches.

* ``plan_step(lengths, num_ranks=, max_tokens_per_rank=, ...)`` returns a ``StepPlan``.
* ``StepPlan``: ``first_rank``, ``degree`` and ``micro_batch`` of every document, ``index_lists``,
  ``permutation`` and its inverse, ``loss_weights``; ``tokens``, ``cost`` and ``critical_path``.
* ``CriticalPath``: length of the step compared with the ideal.

```
lengths = [7000, 300, 5200, 4100, 900, 2500, 6100, 1900]
plan = plan_step(lengths, num_ranks=2, max_tokens_per_rank=8192, linear_cost_tokens=12 * 4096)
[[documents.tolist() for documents in rank] for rank in plan.index_lists()]
                                          # -> [[[2, 4, 7], [6]], [[0, 1], [3, 5]]]
plan.tokens.tolist()                      # -> [[8000.0, 7300.0], [6100.0, 6600.0]]
plan.critical_path(12 * 4096)             # -> per_micro_batch=1.02, per_step=1.00
plan.permutation.tolist()                 # -> [2, 4, 7, 6, 0, 1, 3, 5]
results = [1.02, 1.04, 1.07, 1.06, 1.00, 1.01, 1.03, 1.05]            # rank after rank
np.array(results)[plan.inverse_permutation]                # -> 1.00, 1.01, 1.02, ..., 1.07
```

In each micro batch, ranks form groups of 2^k consecutive ranks (context parallel size 2^k; the
first rank is a multiple of 2^k). A group shares all of its documents evenly, so a rank has one
degree per micro batch, as process groups and Megatron's ``local_cp_size`` require. With
``max_context_parallel_size=1`` each group is one rank: plain data parallelism, as in SFT and RL.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.units import checked_integer, counted

__all__ = ["CriticalPath", "StepPlan", "plan_step"]

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """Length of a step divided by the ideal, in which all ranks do the same work.

    Attributes:
        per_micro_batch: if ranks synchronize after every micro batch (ZeRO-3, FSDP, pipelines): sum
            over micro batches of the busiest rank.
        per_step: if ranks synchronize once, at the optimizer step: the busiest rank of the step. A
            lower bound if groups change between micro batches, as their ranks wait for each other.
    """

    per_micro_batch: float
    per_step: float

    @classmethod
    def of_costs(cls, cost: NDArray[np.float64]) -> CriticalPath:
        """Return the path of a step with these costs, (micro batches, ranks)."""
        ideal = cost.sum() / cost.shape[1]
        if ideal == 0:
            return cls(per_micro_batch=1.0, per_step=1.0)
        return cls(
            per_micro_batch=float(cost.max(axis=1).sum() / ideal),
            per_step=float(cost.sum(axis=0).max() / ideal),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """Assignment of the documents of a step.

    Attributes:
        num_ranks: data-parallel (times context-parallel) ranks.
        num_micro_batches: micro batches of every rank.
        lengths: (documents,) int64, tokens.
        first_rank: (documents,) int64, first of the ranks that share the document.
        degree: (documents,) int64, number of these ranks: a power of two that divides `first_rank`.
        micro_batch: (documents,) int64.
    """

    num_ranks: int
    num_micro_batches: int
    lengths: Integers
    first_rank: Integers
    degree: Integers
    micro_batch: Integers

    def __repr__(self) -> str:
        return (
            f"StepPlan({counted(len(self.lengths), 'document')}, "
            f"{counted(int(self.lengths.sum()), 'token')}, {counted(self.num_ranks, 'rank')}, "
            f"{counted(self.num_micro_batches, 'micro step')})"
        )

    def of_rank(self, rank: int) -> list[Integers]:
        """Return a rank's documents (whole or shared) by micro batch. Raises ValueError."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; the plan is for {self.num_ranks} ranks")
        is_on_rank = (self.first_rank <= rank) & (rank < self.first_rank + self.degree)
        documents = np.flatnonzero(is_on_rank)
        order = np.argsort(self.micro_batch[documents], kind="stable")
        ends = np.cumsum(np.bincount(self.micro_batch[documents], minlength=self.num_micro_batches))
        return np.split(documents[order], ends[:-1]) if self.num_micro_batches else []

    def index_lists(self) -> list[list[Integers]]:
        """Return ``[rank][micro batch]``, ascending int64 document numbers."""
        return [self.of_rank(rank) for rank in range(self.num_ranks)]

    @cached_property
    def permutation(self) -> Integers:
        """(documents,) int64: documents ordered by (first) rank, micro batch, number."""
        return np.lexsort((self.micro_batch, self.first_rank)).astype(np.int64)

    @cached_property
    def inverse_permutation(self) -> Integers:
        """(documents,) int64: position of each document in `permutation`.
        ``results[inverse_permutation]`` restores the caller's order of results, rank after rank."""
        inverse = np.empty_like(self.permutation)
        inverse[self.permutation] = np.arange(len(inverse))
        return inverse

    def loss_weights(
        self,
        num_labels: ArrayLike,
        loss: Literal["token_mean", "sequence_mean", "group_mean"] = "token_mean",
        groups: ArrayLike | None = None,
    ) -> NDArray[np.float64]:
        """Return the weight of each document's label tokens: (documents,) float64.

        The loss of the step is the sum of weight times loss over all label tokens of all ranks and
        micro batches. If the trainer averages gradients over ranks, multiply the loss by the number
        of ranks; if it divides by the number of micro batches, also by that number. Documents (or
        groups) without label tokens have weight 0 and do not count in the mean.

        Args:
            num_labels: (documents,) integers >= 0, label tokens of each document.
            loss: what gets equal weight: label tokens of the step (``token_mean``), documents
                (``sequence_mean``) or groups of documents (``group_mean``).
            groups: (documents,) integers, only for ``group_mean``.

        Raises:
            ValueError: an array does not have one integer per document, a number is negative, the
                loss is unknown, or groups are missing or unused.
        """
        labels = np.asarray(num_labels)
        if labels.shape != self.lengths.shape or (labels.size and labels.dtype.kind not in "iu"):
            raise ValueError(
                f"num_labels has shape {labels.shape} and dtype {labels.dtype}; the plan has "
                f"{len(self.lengths)} documents: give an integer for each"
            )
        if (labels < 0).any():
            i = int(np.flatnonzero(labels < 0)[0])
            raise ValueError(f"num_labels of document {i} is {labels[i]}; it must be at least 0")
        if loss not in ("token_mean", "sequence_mean", "group_mean"):
            raise ValueError(f"loss is {loss!r}; choose token_mean, sequence_mean or group_mean")
        if (loss == "group_mean") != (groups is not None):
            raise ValueError(
                f"loss is {loss!r} and groups are {'missing' if groups is None else 'given'}; "
                "group_mean needs groups, and no other loss uses them"
            )
        numbers = np.zeros(len(labels), np.int64) if groups is None else np.asarray(groups)
        if numbers.shape != labels.shape or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError(
                f"groups has shape {numbers.shape} and dtype {numbers.dtype}; the plan has "
                f"{len(labels)} documents: give an integer for each"
            )
        if loss == "sequence_mean":
            numbers = np.arange(len(labels))
        inverse = np.unique(numbers, return_inverse=True)[1]
        sums = np.bincount(inverse, weights=labels)[inverse] if labels.size else labels
        num_means = len(np.unique(inverse[labels > 0]))
        denominators = sums.astype(np.float64) * max(num_means, 1)
        return np.divide(1.0, denominators, out=np.zeros(len(labels)), where=np.asarray(labels > 0))

    @cached_property
    def tokens(self) -> NDArray[np.float64]:
        """(micro batches, ranks): tokens of a rank; each of d ranks has 1/d of its group's tokens.
        Even if a trainer rounds them up to integers, they do not exceed the budget."""
        return self._per_rank(self.lengths)

    @cached_property
    def attention(self) -> NDArray[np.float64]:
        """(micro batches, ranks): squared document lengths, divided by the degree."""
        return self._per_rank(self.lengths**2)

    def cost(self, linear_cost_tokens: float) -> NDArray[np.float64]:
        """Return the predicted cost of each rank, (micro batches, ranks).

        Args:
            linear_cost_tokens: tokens, the document length at which attention costs as much as the
                rest of the model: n tokens cost n^2 + linear_cost_tokens x n. 12 x hidden size is
                a good guess (``megapack.compare.cost.Model``); 0 counts only attention.
        """
        return self.attention + linear_cost_tokens * self.tokens

    def critical_path(self, linear_cost_tokens: float) -> CriticalPath:
        """Return the step's length compared with the ideal, with costs as in ``cost``."""
        return CriticalPath.of_costs(self.cost(linear_cost_tokens))

    def _per_rank(self, amounts: Integers) -> NDArray[np.float64]:
        """Sum documents' amounts by rank; ranks of a group share them evenly."""
        shape = (self.num_micro_batches, self.num_ranks + 1)
        changes = np.zeros(shape)  # difference to the previous rank
        shares = amounts / self.degree  # exact: the degree is a power of two
        np.add.at(changes, (self.micro_batch, self.first_rank), shares)
        np.subtract.at(changes, (self.micro_batch, self.first_rank + self.degree), shares)
        sums: NDArray[np.float64] = changes.cumsum(axis=1)[:, :-1]
        return sums


def cost_numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return costs as float64. Raises ValueError for text, times and complex numbers."""
    array = np.asarray(values)
    if array.dtype.kind not in "biufO":
        raise ValueError(f"{name} has dtype {array.dtype}; it must be real numbers")
    return array.astype(np.float64)


@checked_call
def plan_step(
    lengths: ArrayLike,
    *,
    num_ranks: int,
    max_tokens_per_rank: int,
    max_context_parallel_size: int = 1,
    max_documents_per_rank: int | None = None,
    linear_cost_tokens: float = 0,
    costs: ArrayLike | None = None,
    max_costs_per_rank: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    balance: Literal["micro_batches", "step", "pipeline"] = "micro_batches",
    micro_batch_multiple: int = 1,
) -> StepPlan:
    """Assign documents so that ranks have equal work, in as few micro batches as possible.

    A rank's work in a micro batch is the sum of its documents' costs. `balance` names the path to
    minimize; with several kinds of cost, it is the path of the kind furthest above its lower bound.
    First, documents are assigned, most expensive first, to the rank with the least work; bins with
    similar work form one micro batch. Then documents are exchanged between the busiest rank and
    others while that helps, up to a fixed number of attempts. Eight documents of 9,216, 32,512,
    13,312, 17,408, 8,448, 3,072, 5,120 and 17,664 tokens on two ranks of 32,768 tokens: two micro
    batches, 1.006 of the ideal per step, which is the optimum.

    With `max_context_parallel_size` above 1, the fewest ranks that can hold a document share it.
    More ranks share a document if it would cause more than half of a rank's attention, unless the
    linear layers (`linear_cost_tokens`) cost so much that sharing makes no difference.

    The number of micro batches is ``ceil(tokens / (num_ranks x max_tokens_per_rank))`` if such an
    assignment is found, if necessary by sharing documents among more ranks. It is larger if
    documents do not fit together (five of 5,000 tokens on four ranks of 8,192 need two) or another
    limit requires it; from 16 micro batches on, the search adds a sixteenth at a time.

    Args:
        lengths: (documents,) integers, tokens of each document, with padding if the trainer pads.
        num_ranks: ranks to assign documents to.
        max_tokens_per_rank: limit of tokens of a rank in a micro batch.
        max_context_parallel_size: ranks that may share a document: a power of two, <= `num_ranks`.
        max_documents_per_rank: limit of documents of a rank in a micro batch; None: no limit.
        linear_cost_tokens: tokens, as in ``StepPlan.cost``; 0: only attention counts.
        costs: (documents,) or (documents, kinds) numbers >= 0 in any unit, at most 64 kinds; None:
            ``StepPlan.cost``. Ranks get equal shares of each kind (for example the costs of a
            vision encoder and of the language model).
        max_costs_per_rank: a number or (kinds,) numbers: limit of the cost of a rank's documents in
            a micro batch, in the units of `costs`; None: no limit.
        groups: (documents,) integers: documents with the same number stay on one rank, and in one
            micro batch if they fit (rollouts of a prompt, preference pairs). With
            `max_context_parallel_size` above 1 the same ranks share all of a group, in one micro
            batch. None: no groups.
        balance: what to minimize; choose it by when ranks synchronize. ``micro_batches`` (after
            each micro batch: ZeRO-3, FSDP) minimizes the sum over micro batches of the busiest
            rank. ``step`` (once per step) minimizes the busiest rank of the step. ``pipeline``
            minimizes the largest micro batch of any rank; among equals, the busiest rank of the
            step.
        micro_batch_multiple: the number of micro batches is a multiple of this, for virtual
            pipeline stages; some may be empty.

    Returns:
        The plan, the same on every rank and machine. Without documents it has no micro batches. A
        rank is empty in a micro batch only if no other rank has several documents of which one
        would fit.

    Raises:
        ValueError: a document is empty, `max_context_parallel_size` ranks cannot hold it (or, if
            above 1, its group), a cost is negative or not finite, ranks times micro batches exceed
            2^24, or an argument is out of range.
    """
    tokens = integers("lengths", lengths)
    if max_documents_per_rank is None:
        max_documents_per_rank = max(1, tokens.size)
    counts: dict[str, Any] = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens_per_rank,
        "max_documents_per_rank": max_documents_per_rank,
        "max_context_parallel_size": max_context_parallel_size,
        "micro_batch_multiple": micro_batch_multiple,
    }
    for name, value in counts.items():
        checked_integer(name, value, -(1 << 62), 1 << 62)  # the core knows the limits
    if not abs(linear_cost_tokens) < 1 << 62:
        raise ValueError(f"linear_cost_tokens is {linear_cost_tokens}; give a number of tokens")
    cost_array = np.zeros(0) if costs is None else cost_numbers("costs", costs)
    group_ids = np.zeros(0, np.int64) if groups is None else np.asarray(groups)
    limits = np.zeros(0)
    if max_costs_per_rank is not None:
        limits = np.ravel(cost_numbers("max_costs_per_rank", max_costs_per_rank))
    for name, argument, array, max_dims in (
        ("costs", costs, cost_array, 2),
        ("groups", groups, group_ids, 1),
    ):
        fits = 0 < array.ndim <= max_dims and len(array) == len(tokens) <= array.size
        if argument is not None and not fits:
            raise ValueError(
                f"{name} has shape {array.shape}; give one row for each of {len(tokens)} documents"
            )
    num_micro_batches, first_rank, degree, micro_batch = _core.plan_step(
        tokens,
        np.ascontiguousarray(cost_array).ravel(),
        np.ascontiguousarray(limits),
        integers("groups", group_ids),
        balance=balance,
        linear_cost_tokens=round(linear_cost_tokens),
        **counts,
    )
    return StepPlan(
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        lengths=tokens,
        first_rank=first_rank,
        degree=degree,
        micro_batch=micro_batch,
    )


def integers(
    name: str, values: ArrayLike, kept: Collection[type[np.integer[Any]]] = ()
) -> NDArray[Any]:
    """Return one list of integers as a contiguous int64 array, or in a dtype of ``kept``. Raises
    ValueError for other shapes and dtypes, and for numbers of 2^63 and above."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; it must be a list of integers"
        )
    if array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has the number {array.max()}; it must be below 2^63")
    dtype = array.dtype.newbyteorder("=").type
    return np.ascontiguousarray(array, dtype if dtype in kept else np.int64)

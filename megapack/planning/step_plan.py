"""``plan_step``: which rank holds which document of a step, in which micro batch.

* ``plan_step(lengths, num_ranks=, max_tokens_per_rank=, ...)``: the plan, a ``StepPlan``.
* ``StepPlan``: ``first_rank``, ``degree`` and ``micro_batch`` of every document, ``index_lists``,
  ``permutation`` and its inverse, ``loss_weights``; ``tokens``, ``cost`` and ``critical_path``.
* ``CriticalPath``: how long the step takes over the ideal.

```
lengths = [7000, 300, 5200, 4100, 900, 2500, 6100, 1900]
plan = plan_step(lengths, num_ranks=2, max_tokens_per_rank=8192, linear_cost_tokens=12 * 4096)
[[of.tolist() for of in rank] for rank in plan.index_lists()]
                                          # -> [[[2, 4, 7], [6]], [[0, 1], [3, 5]]]
plan.tokens.tolist()                      # -> [[8000.0, 7300.0], [6100.0, 6600.0]]
plan.critical_path(12 * 4096)             # -> per_micro_batch=1.02, per_step=1.00
plan.permutation.tolist()                 # -> [2, 4, 7, 6, 0, 1, 3, 5]
results = [1.02, 1.04, 1.07, 1.06, 1.00, 1.01, 1.03, 1.05]            # as ranks computed them
np.array(results)[plan.inverse_permutation]                # -> 1.00, 1.01, 1.02, ..., 1.07
```

The ranks of a micro batch form groups of 2^k consecutive ranks (context parallelism of degree 2^k;
the first rank is a multiple of 2^k). A group shares all of its documents evenly, so that a rank has
one degree in a micro batch, as process groups and Megatron's ``local_cp_size`` want it. With
``max_context_parallel_size=1`` a group is a rank: plain data parallelism, as in SFT and RL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.units import checked_integer

__all__ = ["CriticalPath", "StepPlan", "plan_step"]

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """How long a step takes over the ideal, in which all ranks do the same work; 1.0 is perfect.

    Attributes:
        per_micro_batch: ranks meet after every micro batch (ZeRO-3, FSDP, pipelines): the sum of
            each micro batch's busiest rank.
        per_step: ranks meet once, at the optimizer step (gradients accumulated without
            synchronization): the busiest rank of the step. A lower bound where groups change from
            one micro batch to the next, as their ranks wait for each other.
    """

    per_micro_batch: float
    per_step: float


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """Where every document of a step goes.

    Attributes:
        num_ranks: data-parallel (times context-parallel) ranks.
        num_micro_batches: of every rank.
        lengths: (documents,) int64, tokens.
        first_rank: (documents,) int64, the first of the ranks that share the document.
        degree: (documents,) int64, how many they are: a power of two that divides `first_rank`.
        micro_batch: (documents,) int64.
    """

    num_ranks: int
    num_micro_batches: int
    lengths: Integers
    first_rank: Integers
    degree: Integers
    micro_batch: Integers

    def of_rank(self, rank: int) -> list[Integers]:
        """Documents of a rank (whole or a share), one array of numbers per micro batch.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; the plan is for {self.num_ranks} ranks")
        mine = np.flatnonzero((self.first_rank <= rank) & (rank < self.first_rank + self.degree))
        order = np.argsort(self.micro_batch[mine], kind="stable")
        ends = np.cumsum(np.bincount(self.micro_batch[mine], minlength=self.num_micro_batches))
        return np.split(mine[order], ends[:-1]) if self.num_micro_batches else []

    def index_lists(self) -> list[list[Integers]]:
        """``of_rank`` of every rank: ``[rank][micro batch]``, int64 document numbers, rising."""
        return [self.of_rank(rank) for rank in range(self.num_ranks)]

    @cached_property
    def permutation(self) -> Integers:
        """(documents,) int64: all documents in the order rank, micro batch, number; a document
        that ranks share stands at the first of them."""
        return np.lexsort((self.micro_batch, self.first_rank)).astype(np.int64)

    @cached_property
    def inverse_permutation(self) -> Integers:
        """(documents,) int64: where in `permutation` a document stands. What ranks computed, one
        after the other, is put back into the caller's order by ``results[inverse_permutation]``.
        """
        inverse = np.empty_like(self.permutation)
        inverse[self.permutation] = np.arange(len(inverse))
        return inverse

    def loss_weights(
        self,
        num_labels: ArrayLike,
        loss: Literal["token_mean", "sequence_mean", "group_mean"] = "token_mean",
        groups: ArrayLike | None = None,
    ) -> NDArray[np.float64]:
        """Weight of a document's label tokens: the loss of the step is the plain sum, over all
        ranks, micro batches and label tokens, of weight times loss.

        It does not depend on ranks or micro batches, so the sum is exact at any number of them. A
        trainer that averages gradients over ranks multiplies its loss by the number of ranks, and
        one that divides by the number of micro batches by that, too. Documents without label
        tokens (groups of such documents) have weight 0 and are not counted.

        Args:
            num_labels: (documents,) integers from 0 on, label tokens of each document.
            loss: ``token_mean``: every label token of the step weighs as much. ``sequence_mean``:
                every document, its label tokens alike. ``group_mean``: every group, the label
                tokens of all of its documents alike.
            groups: (documents,) integers, for ``group_mean`` alone.

        Returns:
            (documents,) float64; 0 everywhere if there is no label token.

        Raises:
            ValueError: an array is not one number for each document, a number of labels is
                negative, the loss is unknown, or groups are missing or given without use.
        """
        labels = np.asarray(num_labels)
        if labels.shape != self.lengths.shape or (labels.size and labels.dtype.kind not in "iu"):
            raise ValueError(
                f"num_labels has shape {labels.shape} and dtype {labels.dtype}; the plan has "
                f"{len(self.lengths)} documents: give a whole number for each"
            )
        if (labels < 0).any():
            i = int(np.flatnonzero(labels < 0)[0])
            raise ValueError(f"num_labels of document {i} is {labels[i]}; at least 0 is needed")
        if loss not in ("token_mean", "sequence_mean", "group_mean"):
            raise ValueError(
                f"loss is {loss!r}; it must be token_mean, sequence_mean or group_mean"
            )
        if (loss == "group_mean") != (groups is not None):
            raise ValueError(
                f"loss is {loss!r} and groups are {'missing' if groups is None else 'given'}; "
                "group_mean needs them, no other loss has a use for them"
            )
        numbers = np.zeros(len(labels), np.int64) if groups is None else np.asarray(groups)
        if numbers.shape != labels.shape or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError(
                f"groups has shape {numbers.shape} and dtype {numbers.dtype}; the plan has "
                f"{len(labels)} documents: give a whole number for each"
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
        """(micro batches, ranks) tokens of a rank; a group of d has d-th parts of its sum, which
        hosts round up: the budget holds rounded up, too."""
        return self._per_rank(self.lengths)

    @cached_property
    def attention(self) -> NDArray[np.float64]:
        """(micro batches, ranks) attention of a rank: squared lengths over the degree."""
        return self._per_rank(self.lengths**2)

    def cost(self, linear_cost_tokens: float) -> NDArray[np.float64]:
        """(micro batches, ranks) predicted cost of a rank, in tokens attended to.

        Args:
            linear_cost_tokens: tokens, the document length at which attention costs as much as all
                else: a document of n tokens costs n^2 + linear_cost_tokens x n. 12 x hidden size is
                a good guess (``megapack.compare.cost.Model``); 0 counts attention alone.
        """
        return self.attention + linear_cost_tokens * self.tokens

    def critical_path(self, linear_cost_tokens: float) -> CriticalPath:
        """The step's length over the ideal, for a model as in ``cost``."""
        cost = self.cost(linear_cost_tokens)
        ideal = cost.sum() / self.num_ranks
        if ideal == 0:
            return CriticalPath(per_micro_batch=1.0, per_step=1.0)
        return CriticalPath(
            per_micro_batch=float(cost.max(axis=1).sum() / ideal),
            per_step=float(cost.sum(axis=0).max() / ideal),
        )

    def _per_rank(self, amounts: Integers) -> NDArray[np.float64]:
        """Sum over documents, each group's divided among its ranks."""
        shape = (self.num_micro_batches, self.num_ranks + 1)
        changes = np.zeros(shape)  # from one rank to the next
        shares = amounts / self.degree  # exact: a power of two
        np.add.at(changes, (self.micro_batch, self.first_rank), shares)
        np.subtract.at(changes, (self.micro_batch, self.first_rank + self.degree), shares)
        sums: NDArray[np.float64] = changes.cumsum(axis=1)[:, :-1]
        return sums


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
    """Plan a step: equal work on all ranks of a micro batch, in as few micro batches as possible.

    The work of a rank in a micro batch is the sum of its documents' costs. What is made small is
    the path (`balance`); of several kinds of cost the longest, each over the shortest that it could
    be. First documents are dealt, the dearest to the rank that then has least work; bins of like
    work become one micro batch, in which the dearest goes to the rank with least work so far; then
    documents are exchanged between the busiest and others as long as that pays, a fixed number of
    exchanges being looked at. Eight documents of 9,216, 32,512, 13,312, 17,408, 8,448, 3,072, 5,120
    and 17,664 tokens on two ranks of 32,768 tokens: two micro batches, in the step 1.006 of the
    ideal, which is the least there is.

    With `max_context_parallel_size` above 1, the fewest ranks that can hold a document share it.
    More ranks share it where it would be over half of their attention, unless the linear layers
    of the model (`linear_cost_tokens`) cost so much more that it makes no difference.

    The number of micro batches is what the tokens need, ``ceil(tokens / (num_ranks x
    max_tokens_per_rank))``, wherever an arrangement is found; to find one, documents are shared
    by more ranks if they may be. It is more where documents do not fit beside each other (five of
    5,000 tokens on four ranks of 8,192 need two) or another cap wants it; from 16 on, a sixteenth
    more at a time is tried.

    Args:
        lengths: (documents,) integers, tokens of each document. A host that pads documents gives
            padded lengths.
        num_ranks: ranks to assign documents to.
        max_tokens_per_rank: tokens that a rank holds in a micro batch, never exceeded.
        max_context_parallel_size: ranks that may share a document: a power of two, at most
            `num_ranks`.
        max_documents_per_rank: documents that a rank holds in a micro batch; None: any number.
        linear_cost_tokens: tokens, as in ``StepPlan.cost``; 0: attention is all that counts.
        costs: (documents,) or (documents, kinds) numbers from 0 on, in any unit, at most 64 kinds;
            None: what ``StepPlan.cost`` says. Of several kinds (a vision encoder's cost and the
            language model's) ranks get equal shares of each.
        max_costs_per_rank: a number or (kinds,) numbers: what the documents of a rank cost at most
            in a micro batch, in the units of `costs`, never exceeded; None: anything.
        groups: (documents,) integers: documents of one number stay on one rank, and in one micro
            batch where one holds them all (rollouts of a prompt, pairs of a preference). With
            `max_context_parallel_size` above 1 the same ranks share all of a group, in one micro
            batch. None: no groups.
        balance: when ranks meet, which says what is made small. ``micro_batches``: after each
            (ZeRO-3, FSDP): the sum over micro batches of the busiest rank. ``step``: once: the
            busiest rank of the step. ``pipeline``: micro batches follow each other: the largest.
            Then, that being as small, the busiest rank of the step.
        micro_batch_multiple: their number is a multiple of this, as virtual pipelines want it; some
            may then be empty.

    Returns:
        The plan, the same on every rank and machine. Without documents it has no micro batches. No
        rank holds nothing in a micro batch while another holds several documents of which one would
        fit.

    Raises:
        ValueError: a document is empty, `max_context_parallel_size` ranks cannot hold it (or, if
            that is above 1, its group), a cost is negative or not finite, ranks times micro batches
            are above 2^24, or an argument has no meaning.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths has shape {given.shape} and dtype {given.dtype}; it must be one list of "
            "integers"
        )
    tokens = np.ascontiguousarray(given, dtype=np.int64)
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
        raise ValueError(
            f"linear_cost_tokens is {linear_cost_tokens}; it must be a number of tokens"
        )
    priced = np.zeros(0) if costs is None else np.asarray(costs, np.float64)
    grouped = np.zeros(0, np.int64) if groups is None else np.asarray(groups)
    caps = np.zeros(0) if max_costs_per_rank is None else np.ravel(max_costs_per_rank)
    for name, asked, array, most in (("costs", costs, priced, 2), ("groups", groups, grouped, 1)):
        shaped = 0 < array.ndim <= most and len(array) == len(tokens) <= array.size
        if asked is not None and not shaped:
            raise ValueError(
                f"{name} has shape {array.shape}; there are {len(tokens)} documents: give one row "
                "for each"
            )
    if grouped.size and grouped.dtype.kind not in "iu":
        raise ValueError(f"groups has dtype {grouped.dtype}; numbers of groups are integers")
    for name, array in (("lengths", given), ("groups", grouped)):
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise ValueError(f"{name} has the number {array.max()}; it must be below 2^63")
    num_micro_batches, first_rank, degree, micro_batch = _core.plan_step(
        tokens,
        np.ascontiguousarray(priced).ravel(),
        np.ascontiguousarray(caps, np.float64),
        np.ascontiguousarray(grouped, np.int64),
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

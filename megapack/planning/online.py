"""``StepPlanner``: plan a stream of documents; return each micro batch once it is full.

* ``StepPlanner(num_ranks=, max_tokens_per_rank=, window=, ...)``: the options of ``plan_step``.
* ``add(document_id, length, cost=, group=)``: add one document or many; return full micro batches.
* ``finish()``: return the remaining documents. Every document is returned exactly once.
* ``state_dict()``, ``load_state_dict(state)``: the waiting documents, as JSON values.
* ``PlannedMicroBatch``: documents of every rank.

```
planner = StepPlanner(num_ranks=2, max_tokens_per_rank=10, window=5)
planner.add([0, 1, 2, 3], [6, 4, 8, 1])             # -> []: four documents are waiting
[micro_batch] = planner.add(4, 5)
[ids.tolist() for ids in micro_batch.documents]     # -> [[2, 3], [0, 1]]: 9 and 10 tokens
[micro_batch] = planner.finish()
[ids.tolist() for ids in micro_batch.documents]     # -> [[4], []]
```

As soon as `window` documents are waiting, ``plan_step`` assigns the oldest ones that fill whole
micro batches; the others wait. The result depends only on the documents and their order, not on how
calls of ``add`` divide them, nor on a restart.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.calls import checked_call
from megapack.errors import ResumeError
from megapack.planning.step_plan import Integers, StepPlan, cost_numbers, plan_step

__all__ = ["PlannedMicroBatch", "StepPlanner"]

# Shares of the ranks' capacity to fill, tried in this order until a plan fits.
FILL_SHARES = (0.99, 0.98, 0.96, 0.93)
MAX_SQUARES = 1 << 56  # limit: sum of squared lengths in a plan (csrc/core/planning/step_plan.cpp)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMicroBatch:
    """One micro batch of all ranks.

    Attributes:
        documents: [rank] int64 ids of the rank's documents, in the order of ``add``.
        degree: (ranks,) int64, number of ranks that share the rank's documents, as in ``StepPlan``;
            1 for a rank without documents.
        lengths: [rank] int64, tokens of `documents`.
    """

    documents: list[Integers]
    degree: Integers
    lengths: list[Integers]


class StepPlanner:
    """Plans a stream of documents, with a lookahead of `window` documents.

    Documents of a group must be consecutive; they stay together as in ``plan_step``. If a group
    number returns after another one, it starts a new group.

    Args:
        window: number of waiting documents at which planning starts; a larger window fills and
            balances micro batches better. If the window is smaller than a micro batch, documents
            wait until a micro batch is full.
        num_ranks .. balance: as in ``plan_step``.
        micro_batch_multiple: ``add`` returns a multiple of this number of micro batches.

    Raises:
        ValueError: an argument is out of range.
    """

    @checked_call
    def __init__(
        self,
        *,
        num_ranks: int,
        max_tokens_per_rank: int,
        window: int,
        max_context_parallel_size: int = 1,
        max_documents_per_rank: int | None = None,
        max_costs_per_rank: ArrayLike | None = None,
        linear_cost_tokens: float = 0,
        balance: Literal["micro_batches", "step", "pipeline"] = "micro_batches",
        micro_batch_multiple: int = 1,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1:
            raise ValueError(f"window is {window!r}; it must be an integer of at least 1")
        cost_limits = None if max_costs_per_rank is None else np.ravel(max_costs_per_rank).tolist()
        options: dict[str, Any] = {
            "num_ranks": num_ranks,
            "max_tokens_per_rank": max_tokens_per_rank,
            "max_context_parallel_size": max_context_parallel_size,
            "max_documents_per_rank": max_documents_per_rank,
            "max_costs_per_rank": cost_limits,
            "linear_cost_tokens": linear_cost_tokens,
            "balance": balance,
            "micro_batch_multiple": micro_batch_multiple,
        }
        costs = None if cost_limits is None else np.zeros((1, len(cost_limits)))
        plan_step([1], costs=costs, **options)  # checks the options
        # JSON cannot hold numpy scalars.
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
        self._options, self._window = plain, int(window)
        # Limits of one rank in a micro batch, by unit.
        limits = {"tokens": max_tokens_per_rank, "documents": max_documents_per_rank}
        limits |= {f"of cost (kind {k})": limit for k, limit in enumerate(cost_limits or ())}
        self._limits = {unit: float(limit) for unit, limit in limits.items() if limit is not None}
        self._clear()

    def _clear(self) -> None:
        """Remove all waiting documents."""
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._costs: list[list[float]] = []  # empty: costs follow from lengths
        self._groups: list[int] = []  # renumbered, ascending; empty: no groups
        self._last_group: int | None = None  # the caller's number of the last group
        self._amounts = np.zeros((0, len(self._limits)))  # of each document, by unit
        self._num_complete = 0  # documents whose group is complete

    def add(
        self,
        document_id: ArrayLike,
        length: ArrayLike,
        cost: ArrayLike | None = None,
        group: ArrayLike | None = None,
    ) -> list[PlannedMicroBatch]:
        """Add one document or many; return the micro batches that are now full.

        Args:
            document_id: () or (documents,) int64, ids of the caller's choice.
            length: () or (documents,) integers, tokens.
            cost: () or (documents,) or (documents, kinds) numbers, as in ``plan_step``; for all
                documents of a stream or for none.
            group: () or (documents,) integers; for all documents of a stream or for none.

        Raises:
            ValueError: a document exceeds a limit, or the arrays do not match. Nothing is added.
        """
        ids, lengths, costs, groups = self._check(document_id, length, cost, group)
        before = self.__dict__.copy()
        lists = ("_ids", "_lengths", "_costs", "_groups")
        self.__dict__.update({name: list(before[name]) for name in lists})
        try:
            return self._append(ids, lengths, costs, groups)
        except BaseException:
            self.__dict__.update(before)
            raise

    def _append(
        self,
        ids: Integers,
        lengths: Integers,
        costs: NDArray[np.float64] | None,
        groups: Integers | None,
    ) -> list[PlannedMicroBatch]:
        """Append checked documents; return the micro batches that are full."""
        self._amounts = np.concatenate([self._amounts, self._amounts_of(lengths, costs)])
        squares = sum(length**2 for length in self._lengths)
        micro_batches: list[PlannedMicroBatch] = []
        for i in range(len(ids)):
            # A document without group is complete at once, a group when the next one begins.
            if groups is not None and groups[i] != self._last_group:
                self._last_group = int(groups[i])
                micro_batches += self._plan_complete()
                self._groups.append(self._groups[-1] + 1 if self._groups else 0)
            elif groups is not None:
                self._groups.append(self._groups[-1])
            squares += int(lengths[i]) ** 2
            if squares > MAX_SQUARES:  # count again, without the documents planned meanwhile
                squares = sum(length**2 for length in self._lengths) + int(lengths[i]) ** 2
            if squares > MAX_SQUARES:
                raise ValueError(
                    f"with document {ids[i]} the squared lengths of the waiting documents sum to "
                    f"{squares}; one plan allows 2^56: lower the window"
                )
            self._ids.append(int(ids[i]))
            self._lengths.append(int(lengths[i]))
            if costs is not None:
                self._costs.append(costs[i].tolist())
            if groups is None:
                micro_batches += self._plan_complete()
        return micro_batches

    def finish(self) -> list[PlannedMicroBatch]:
        """Return all waiting documents, in as few micro batches as possible."""
        plan, ids = self._plan(np.arange(len(self._ids))), np.array(self._ids, np.int64)
        self._clear()
        return _micro_batches(plan, ids)

    def state_dict(self) -> dict[str, Any]:
        """Return the options and the waiting documents as JSON values."""
        return {
            "options": {"window": self._window, **self._options},
            "ids": list(self._ids),
            "lengths": list(self._lengths),
            "costs": [list(costs) for costs in self._costs],
            "groups": list(self._groups),
            "last_group": self._last_group,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``; waiting documents of this planner are lost. Raises ResumeError
        for the state of a planner with other options."""
        for name, value in {"window": self._window, **self._options}.items():
            saved = state["options"].get(name)
            if saved != value:
                raise ResumeError(
                    f"the state is from a planner with {name}={saved!r}, this one has {value!r}; "
                    "the assignment of documents would change: use the same options"
                )
        self._clear()
        self._ids, self._lengths = list(state["ids"]), list(state["lengths"])
        self._costs = [list(costs) for costs in state["costs"]]
        self._groups, self._last_group = list(state["groups"]), state["last_group"]
        costs = np.array(self._costs) if self._costs else None
        self._amounts = self._amounts_of(np.array(self._lengths, np.int64), costs)
        self._num_complete = len(self._ids) - self._num_open()

    # ---- checks ---------------------------------------------------------------------------------

    def _check(
        self,
        document_id: ArrayLike,
        length: ArrayLike,
        cost: ArrayLike | None,
        group: ArrayLike | None,
    ) -> tuple[Integers, Integers, NDArray[np.float64] | None, Integers | None]:
        ids, lengths = np.atleast_1d(np.asarray(document_id)), np.atleast_1d(np.asarray(length))
        groups = None if group is None else np.atleast_1d(np.asarray(group))
        for name, array in (("document_id", ids), ("length", lengths), ("group", groups)):
            if array is not None and (
                array.shape != (len(ids),) or (array.size and array.dtype.kind not in "iu")
            ):
                raise ValueError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}; there are {len(ids)} "
                    "documents: give an integer for each"
                )
        if (ids.astype(np.int64) != ids).any():
            raise ValueError(f"document_id is {ids.max()}; the largest is 2^63 - 1")
        costs, cost_limits = None, self._options["max_costs_per_rank"]
        if cost is not None:
            costs = cost_numbers("cost", cost)
            if costs.ndim > 2 or costs.size % max(len(ids), 1) or costs.size < len(ids):
                raise ValueError(f"cost has shape {costs.shape}; there are {len(ids)} documents")
            costs = costs.reshape(len(ids), costs.size // max(len(ids), 1))
        elif cost_limits is not None:
            # Multiply as integers like ``plan_step``: floats would round differently.
            whole = lengths.astype(np.int64)
            products = whole * (round(self._options["linear_cost_tokens"]) + whole)
            costs = products.astype(np.float64)[:, None]
        if not len(ids):
            return ids, lengths, None, groups
        kinds = 0 if costs is None else costs.shape[1]
        if cost_limits is not None and len(cost_limits) != kinds:
            raise ValueError(
                f"max_costs_per_rank has {len(cost_limits)} numbers, but a document has {kinds} "
                "costs; give one limit for each kind"
            )
        waiting_kinds = len(self._costs[0]) if self._costs else 0
        if self._ids and (kinds != waiting_kinds or bool(self._groups) != (groups is not None)):
            raise ValueError(
                f"the new documents have {kinds} kinds of cost and "
                f"{'no' if groups is None else 'a'} group, the waiting documents {waiting_kinds} "
                f"and {'a' if self._groups else 'no'} group; give the same for all documents"
            )
        self._check_amounts(ids, lengths, costs)
        self._check_limits(ids, self._amounts_of(lengths, costs), groups)
        return ids, lengths, costs, groups

    def _check_amounts(
        self, ids: Integers, lengths: Integers, costs: NDArray[np.float64] | None
    ) -> None:
        """Check that a plan accepts every length and cost. Raises ValueError."""
        amounts = {"length": lengths} if costs is None else {"length": lengths, "cost": costs}
        for name, array in amounts.items():
            valid = np.isfinite(array) & (array >= (1 if name == "length" else 0))
            if not valid.all():
                i = int(np.argwhere(~valid)[0, 0])
                raise ValueError(
                    f"document {ids[i]} has the {name} {array[i].tolist()}; lengths are at least "
                    "1, costs at least 0 and finite: leave the document out"
                )
        if (lengths >= 1 << 28).any():
            i = int(np.argmax(lengths >= 1 << 28))
            raise ValueError(
                f"document {ids[i]} has {lengths[i]} tokens; lengths must be below 2^28: cut it"
            )
        if costs is not None:  # ``plan_step`` checks the number of kinds
            plan_step([1], costs=np.zeros((1, costs.shape[1])), num_ranks=1, max_tokens_per_rank=1)

    def _check_limits(
        self, ids: Integers, amounts: NDArray[np.float64], groups: Integers | None
    ) -> None:
        """Check documents against the limits; and whole groups, if ranks share them."""
        degree, kind, names = self._options["max_context_parallel_size"], "document", ids
        if groups is not None and degree > 1:
            if groups[0] == self._last_group and (num_open := self._num_open()):
                groups = np.concatenate([np.full(num_open, groups[0]), groups])
                amounts = np.concatenate([self._amounts[-num_open:], amounts])
            begins = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
            # Add in the order of ``plan_step``: another order rounds differently.
            with np.errstate(over="ignore"):  # infinity is above every limit
                sums = [part.cumsum(axis=0)[-1] for part in np.split(amounts, begins[1:])]
            kind, names, amounts = "group", groups[begins], np.stack(sums)
        for k, (unit, rank_limit) in enumerate(self._limits.items()):
            limit = rank_limit * (1 if unit == "documents" else degree)
            if (amounts[:, k] > limit).any():
                i = int(np.flatnonzero(amounts[:, k] > limit)[0])
                raise ValueError(
                    f"{kind} {names[i]} has {amounts[i, k]:.15g} {unit}; {degree} ranks "
                    f"(max_context_parallel_size) hold {limit:.15g} in a micro batch: raise a "
                    "limit, or leave it out"
                )

    def _amounts_of(self, lengths: Integers, costs: NDArray[np.float64] | None) -> Any:
        """Return each document's amount by unit of ``_limits``, (documents, units)."""
        columns = [np.asarray(lengths, np.float64)]
        if "documents" in self._limits:
            columns.append(np.ones(len(lengths)))
        if self._options["max_costs_per_rank"] is not None and costs is not None:
            columns += list(costs.T)
        return np.stack(columns, axis=1) if len(lengths) else np.zeros((0, len(self._limits)))

    # ---- planning -------------------------------------------------------------------------------

    def _num_open(self) -> int:
        """Count the documents of the last group, which may grow."""
        if not self._groups:
            return 0
        return len(self._groups) - bisect.bisect_left(self._groups, self._groups[-1])

    def _plan_complete(self) -> list[PlannedMicroBatch]:
        """Mark all waiting documents as complete; return the micro batches that they fill."""
        self._num_complete = len(self._ids)
        if self._num_complete < self._window:
            return []
        multiple = self._options["micro_batch_multiple"]
        num_micro_batches = int(self._filled()[-1]) // multiple * multiple
        return self._plan_oldest(num_micro_batches) if num_micro_batches else []

    def _filled(self) -> NDArray[np.float64]:
        """Return how many micro batches the first 1, 2, ... complete documents fill."""
        limits = np.array(list(self._limits.values()))
        # A limit of 0 admits nothing, and an infinite one never fills: ignore both.
        counted = (limits > 0) & (limits < np.inf)
        # Scale by powers of two, which is exact, so that no sum of costs overflows.
        mantissas, exponents = np.frexp(np.where(counted, limits, 1.0))
        amounts = np.ldexp(self._amounts[: self._num_complete] * counted, -exponents)
        capacity = self._options["num_ranks"] * mantissas
        filled: NDArray[np.float64] = (amounts.cumsum(axis=0) / capacity).max(axis=1)
        return filled

    def _plan_oldest(self, num_micro_batches: int) -> list[PlannedMicroBatch]:
        """Return micro batches of the oldest documents, which fill this number of them."""
        filled = self._filled()
        for share in FILL_SHARES:
            count = int(np.searchsorted(filled, share * num_micro_batches, side="right"))
            if self._groups and count < len(self._groups):  # whole groups
                count = bisect.bisect_left(self._groups, self._groups[count])
            if count == 0:
                break
            plan = self._plan(np.arange(count))
            if plan.num_micro_batches <= num_micro_batches:
                return self._remove(plan, np.arange(count))
        # The documents fit together poorly: plan all, and let those of the emptiest micro batches
        # wait.
        plan = self._plan(np.arange(len(self._ids)))
        multiple = self._options["micro_batch_multiple"]
        kept = np.zeros(len(self._ids), bool)
        if plan.num_micro_batches > multiple:
            tokens = plan.tokens.sum(axis=1)
            tokens[plan.micro_batch[0]] = np.inf  # the oldest document must not wait forever
            emptiest = np.argsort(tokens, kind="stable")[:multiple]
            kept = np.isin(plan.micro_batch, emptiest)
            if self._groups:
                groups = np.array(self._groups)
                kept = np.isin(groups, groups[kept]) & (groups != groups[0])
        planned = np.flatnonzero(~kept)
        return self._remove(self._plan(planned), planned)

    def _plan(self, documents: Integers) -> StepPlan:
        return plan_step(
            np.array(self._lengths, np.int64)[documents],
            costs=np.array(self._costs)[documents] if self._costs else None,
            groups=np.array(self._groups)[documents] if self._groups else None,
            **self._options,
        )

    def _remove(self, plan: StepPlan, documents: Integers) -> list[PlannedMicroBatch]:
        """Remove planned documents from the waiting ones; return their micro batches."""
        micro_batches = _micro_batches(plan, np.array(self._ids, np.int64)[documents])
        remaining = np.delete(np.arange(len(self._ids)), documents).tolist()
        self._amounts = np.delete(self._amounts, documents, axis=0)
        self._ids = [self._ids[i] for i in remaining]
        self._lengths = [self._lengths[i] for i in remaining]
        self._costs = [self._costs[i] for i in remaining] if self._costs else []
        self._groups = [self._groups[i] for i in remaining] if self._groups else []
        self._num_complete = len(remaining)
        return micro_batches


def _micro_batches(plan: StepPlan, ids: Integers) -> list[PlannedMicroBatch]:
    """Return the micro batches of a plan whose document i has the id ``ids[i]``."""
    micro_batches = []
    for documents_of_rank in zip(*plan.index_lists(), strict=True):
        degree = [int(plan.degree[docs[0]]) if docs.size else 1 for docs in documents_of_rank]
        micro_batches.append(
            PlannedMicroBatch(
                documents=[ids[docs] for docs in documents_of_rank],
                degree=np.array(degree, np.int64),
                lengths=[plan.lengths[docs] for docs in documents_of_rank],
            )
        )
    return micro_batches

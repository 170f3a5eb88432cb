"""``StepPlanner``: documents as they come, micro batches for all ranks as soon as they are full.

* ``StepPlanner(num_ranks=, max_tokens_per_rank=, window=, ...)``: the options of ``plan_step``.
* ``add(document_id, length, cost=, group=)``: one document or many; returns the micro batches that
  are full.
* ``finish()``: the rest. Every document is given exactly once.
* ``state_dict()``, ``load_state_dict(state)``: the documents that wait, as JSON holds them.
* ``PlannedMicroBatch``: what every rank holds in one of them.

```
planner = StepPlanner(num_ranks=2, max_tokens_per_rank=10, window=5)
planner.add([0, 1, 2, 3], [6, 4, 8, 1])             # -> []: four documents wait
[micro_batch] = planner.add(4, 5)
[ids.tolist() for ids in micro_batch.documents]     # -> [[2, 3], [0, 1]]: 9 and 10 tokens
[micro_batch] = planner.finish()
[ids.tolist() for ids in micro_batch.documents]     # -> [[4], []]
```

As soon as `window` documents wait, the oldest of them that fill whole micro batches are planned by
``plan_step`` and given; what would fill a micro batch only in part waits for the documents to come.
What is given depends on the documents and their order alone: not on how they were parted into calls
of ``add``, and not on a restart in between.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.errors import ResumeError
from megapack.planning.step_plan import Integers, StepPlan, plan_step

__all__ = ["PlannedMicroBatch", "StepPlanner"]

# Shares of what ranks hold to which micro batches are filled: the first that is arranged is taken.
FILLED = (0.99, 0.98, 0.96, 0.93)
MOST_SQUARES = 1 << 56  # sum of squared lengths of one plan (csrc/core/planning/step_plan.cpp)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMicroBatch:
    """One micro batch of all ranks.

    Attributes:
        documents: [rank] int64 ids of the documents that the rank holds, in the order in which they
            came.
        degree: (ranks,) int64, how many ranks share the rank's documents, itself counted: aligned
            groups as in ``StepPlan``. 1 for a rank without documents.
        lengths: [rank] int64, tokens of `documents`.
    """

    documents: list[Integers]
    degree: Integers
    lengths: list[Integers]


class StepPlanner:
    """Plans a stream of documents, with a look-ahead of `window` of them.

    Documents of one group come one after the other, and stay together as ``plan_step`` keeps them;
    a group that comes back after another one is a new group.

    Args:
        window: documents to wait for before micro batches are planned: the more, the better they
            are filled and balanced. Where so many do not fill a micro batch, as many as fill one
            are waited for.
        num_ranks .. balance: as in ``plan_step``.
        micro_batch_multiple: micro batches are given in multiples of it.

    Raises:
        ValueError: an argument has no meaning.
    """

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
            raise ValueError(f"window is {window!r}; a whole number of documents, at least 1")
        caps = None if max_costs_per_rank is None else np.ravel(max_costs_per_rank).tolist()
        options: dict[str, Any] = {
            "num_ranks": num_ranks,
            "max_tokens_per_rank": max_tokens_per_rank,
            "max_context_parallel_size": max_context_parallel_size,
            "max_documents_per_rank": max_documents_per_rank,
            "max_costs_per_rank": caps,
            "linear_cost_tokens": linear_cost_tokens,
            "balance": balance,
            "micro_batch_multiple": micro_batch_multiple,
        }
        one = None if caps is None else np.zeros((1, len(caps)))
        plan_step([1], costs=one, **options)  # refuses what has no meaning
        # Numbers of Python, which JSON can hold.
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
        self._options, self._window = plain, int(window)
        # Kinds of room in a micro batch, and how much of each a rank has.
        rooms = {"tokens": max_tokens_per_rank, "documents": max_documents_per_rank}
        rooms |= {f"of cost (kind {k})": cap for k, cap in enumerate(caps or ())}
        self._rooms = {name: float(room) for name, room in rooms.items() if room is not None}
        self._forget()

    def _forget(self) -> None:
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._costs: list[list[float]] = []  # empty: costs are those of lengths
        self._groups: list[int] = []  # numbers of ours, rising; empty: no groups
        self._last_group: int | None = None  # the caller's number of the last one
        self._amounts = np.zeros((0, len(self._rooms)))  # of room, by each document
        self._num_complete = 0  # documents whose group is complete

    def add(
        self,
        document_id: ArrayLike,
        length: ArrayLike,
        cost: ArrayLike | None = None,
        group: ArrayLike | None = None,
    ) -> list[PlannedMicroBatch]:
        """Adds a document, or many.

        Args:
            document_id: () or (documents,) int64, whatever the caller knows documents by.
            length: as many integers, tokens.
            cost: as many numbers, or (documents, kinds), as in ``plan_step``; of all documents of
                a stream or of none.
            group: as many integers; of all documents of a stream or of none.

        Returns:
            The micro batches that are full, of documents of this and earlier calls.

        Raises:
            ValueError: a document cannot be held, or arrays do not fit together; nothing is added.
        """
        ids, lengths, costs, groups = self._checked(document_id, length, cost, group)
        before = self.__dict__.copy()
        lists = ("_ids", "_lengths", "_costs", "_groups")
        self.__dict__.update({name: list(before[name]) for name in lists})
        try:
            return self._added(ids, lengths, costs, groups)
        except BaseException:
            self.__dict__.update(before)
            raise

    def _added(
        self,
        ids: Integers,
        lengths: Integers,
        costs: NDArray[np.float64] | None,
        groups: Integers | None,
    ) -> list[PlannedMicroBatch]:
        """Add documents that were checked; return the micro batches that are full."""
        self._amounts = np.concatenate([self._amounts, self._amounts_of(lengths, costs)])
        squares = sum(waiting**2 for waiting in self._lengths)
        given: list[PlannedMicroBatch] = []
        for i in range(len(ids)):
            # A document by itself is complete at once, a group when the next one begins.
            if groups is not None and groups[i] != self._last_group:
                self._last_group = int(groups[i])
                given += self._complete()
                self._groups.append(self._groups[-1] + 1 if self._groups else 0)
            elif groups is not None:
                self._groups.append(self._groups[-1])
            squares += int(lengths[i]) ** 2
            if squares > MOST_SQUARES:  # the limit of one plan; given documents no longer count
                squares = sum(waiting**2 for waiting in self._lengths) + int(lengths[i]) ** 2
            if squares > MOST_SQUARES:
                raise ValueError(
                    f"with document {ids[i]} the squared lengths of the documents that wait sum to "
                    f"{squares}; at most 2^56 are planned at a time: lower the window"
                )
            self._ids.append(int(ids[i]))
            self._lengths.append(int(lengths[i]))
            if costs is not None:
                self._costs.append(costs[i].tolist())
            if groups is None:
                given += self._complete()
        return given

    def finish(self) -> list[PlannedMicroBatch]:
        """The documents that wait, in as few micro batches as are found for them."""
        plan, ids = self._plan(len(self._ids)), np.array(self._ids, np.int64)
        self._forget()
        return _micro_batches(plan, ids)

    def state_dict(self) -> dict[str, Any]:
        """The options and the documents that wait: numbers, strings and lists, as JSON has them."""
        return {
            "options": {"window": self._window, **self._options},
            "ids": list(self._ids),
            "lengths": list(self._lengths),
            "costs": [list(costs) for costs in self._costs],
            "groups": list(self._groups),
            "last_group": self._last_group,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state_dict`` was called; what waited here is forgotten.

        Raises:
            ResumeError: the state is of a planner with other options.
        """
        mine = {"window": self._window, **self._options}
        for name, value in mine.items():
            if state["options"].get(name) != value:
                raise ResumeError(
                    f"the state is of a planner with {name}={state['options'].get(name)!r}, this "
                    f"one has {value!r}; documents would be dealt otherwise than before"
                )
        self._forget()
        self._ids, self._lengths = list(state["ids"]), list(state["lengths"])
        self._costs = [list(costs) for costs in state["costs"]]
        self._groups, self._last_group = list(state["groups"]), state["last_group"]
        costs = np.array(self._costs) if self._costs else None
        self._amounts = self._amounts_of(np.array(self._lengths, np.int64), costs)
        self._num_complete = len(self._ids) - self._num_open()

    # ---- what comes -----------------------------------------------------------------------------

    def _checked(
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
        costs, capped = None, self._options["max_costs_per_rank"]
        if cost is not None:
            costs = np.asarray(cost, np.float64)
            if costs.ndim > 2 or costs.size % max(len(ids), 1) or costs.size < len(ids):
                raise ValueError(f"cost has shape {costs.shape}; there are {len(ids)} documents")
            costs = costs.reshape(len(ids), costs.size // max(len(ids), 1))
        elif capped is not None:
            # Whole numbers first, as ``plan_step`` computes them: floats would round otherwise.
            whole = lengths.astype(np.int64)
            products = whole * (round(self._options["linear_cost_tokens"]) + whole)
            costs = products.astype(np.float64)[:, None]
        if not len(ids):
            return ids, lengths, None, groups
        kinds = 0 if costs is None else costs.shape[1]
        if capped is not None and len(capped) != kinds:
            raise ValueError(
                f"max_costs_per_rank has {len(capped)} numbers, a document {kinds} costs; give one "
                "of each kind"
            )
        waiting = len(self._costs[0]) if self._costs else 0
        if self._ids and (kinds != waiting or bool(self._groups) != (groups is not None)):
            raise ValueError(
                f"documents come with {kinds} kinds of cost and {'no' if groups is None else 'a'} "
                f"group; those that wait have {waiting} and {'a' if self._groups else 'no'} group"
            )
        self._check_amounts(ids, lengths, costs)
        self._check_room(ids, self._amounts_of(lengths, costs), groups)
        return ids, lengths, costs, groups

    def _check_amounts(
        self, ids: Integers, lengths: Integers, costs: NDArray[np.float64] | None
    ) -> None:
        """Check that every length and cost is one that a plan takes. Raises ValueError."""
        amounts = {"length": lengths} if costs is None else {"length": lengths, "cost": costs}
        for what, array in amounts.items():
            sound = np.isfinite(array) & (array >= (1 if what == "length" else 0))
            if not sound.all():
                i = int(np.argwhere(~sound)[0, 0])
                raise ValueError(
                    f"document {ids[i]} has the {what} {array[i].tolist()}; leave it out, or give "
                    "tokens from 1 and costs from 0 on"
                )
        if (lengths >= 1 << 28).any():
            i = int(np.argmax(lengths >= 1 << 28))
            raise ValueError(
                f"document {ids[i]} has {lengths[i]} tokens; a plan takes documents below 2^28: "
                "cut it"
            )
        if costs is not None:  # what ``plan_step`` refuses of their shape
            one = np.zeros((1, costs.shape[1]))
            plan_step([1], costs=one, num_ranks=1, max_tokens_per_rank=1)

    def _check_room(
        self, ids: Integers, amounts: NDArray[np.float64], groups: Integers | None
    ) -> None:
        """Each document can be held; and each group, where ranks share groups as a whole."""
        degree, name, names = self._options["max_context_parallel_size"], "document", ids
        if groups is not None and degree > 1:
            if groups[0] == self._last_group and (num_open := self._num_open()):
                groups = np.concatenate([np.full(num_open, groups[0]), groups])
                amounts = np.concatenate([self._amounts[-num_open:], amounts])
            begins = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
            # One after the other, as ``plan_step`` adds them: another order rounds otherwise.
            with np.errstate(over="ignore"):  # infinitely much is more than any limit
                sums = [part.cumsum(axis=0)[-1] for part in np.split(amounts, begins[1:])]
            name, names, amounts = "group", groups[begins], np.stack(sums)
        for k, (unit, room) in enumerate(self._rooms.items()):
            limit = room * (1 if unit == "documents" else degree)
            if (amounts[:, k] > limit).any():
                i = int(np.flatnonzero(amounts[:, k] > limit)[0])
                raise ValueError(
                    f"{name} {names[i]} has {amounts[i, k]:.15g} {unit}; {degree} ranks "
                    f"(max_context_parallel_size) hold {limit:.15g} in a micro batch: raise a "
                    "limit, or leave it out"
                )

    def _amounts_of(self, lengths: Integers, costs: NDArray[np.float64] | None) -> Any:
        """(documents, kinds of room) float64."""
        columns = [np.asarray(lengths, np.float64)]
        if "documents" in self._rooms:
            columns.append(np.ones(len(lengths)))
        if self._options["max_costs_per_rank"] is not None and costs is not None:
            columns += list(costs.T)
        return np.stack(columns, axis=1) if len(lengths) else np.zeros((0, len(self._rooms)))

    # ---- what waits -----------------------------------------------------------------------------

    def _num_open(self) -> int:
        """Documents of the last group, to which others may come."""
        if not self._groups:
            return 0
        return len(self._groups) - bisect.bisect_left(self._groups, self._groups[-1])

    def _complete(self) -> list[PlannedMicroBatch]:
        """All documents that wait are complete: micro batches, if they fill some."""
        self._num_complete = len(self._ids)
        if self._num_complete < self._window:
            return []
        multiple = self._options["micro_batch_multiple"]
        num_micro_batches = int(self._filled()[-1]) // multiple * multiple
        return self._give(num_micro_batches) if num_micro_batches else []

    def _filled(self) -> NDArray[np.float64]:
        """(complete documents,): how many micro batches the first so many of them fill."""
        # Scaled by powers of two, which is exact, so that no sum of costs overflows.
        given = np.array(list(self._rooms.values()))
        limited = (given > 0) & (
            given < np.inf
        )  # of 0 nothing is held, an infinite one never fills
        rooms, exponents = np.frexp(np.where(limited, given, 1.0))
        amounts = np.ldexp(self._amounts[: self._num_complete] * limited, -exponents)
        each = self._options["num_ranks"] * rooms
        filled: NDArray[np.float64] = (amounts.cumsum(axis=0) / each).max(axis=1)
        return filled

    def _give(self, num_micro_batches: int) -> list[PlannedMicroBatch]:
        """The oldest documents that fill so many micro batches."""
        filled = self._filled()
        for share in FILLED:
            count = int(np.searchsorted(filled, share * num_micro_batches, side="right"))
            if self._groups and count < len(self._groups):  # whole groups
                count = bisect.bisect_left(self._groups, self._groups[count])
            if count == 0:
                break
            plan = self._plan(count)
            if plan.num_micro_batches <= num_micro_batches:
                return self._take(plan, np.arange(count))
        # Documents do not fit beside each other so well. All, but for the emptiest micro batches.
        plan = self._plan(len(self._ids))
        multiple = self._options["micro_batch_multiple"]
        kept = np.zeros(len(self._ids), bool)
        if plan.num_micro_batches > multiple:
            tokens = plan.tokens.sum(axis=1)
            tokens[plan.micro_batch[0]] = np.inf  # the oldest document does not wait for ever
            emptiest = np.argsort(tokens, kind="stable")[:multiple]
            kept = np.isin(plan.micro_batch, emptiest)
            if self._groups:
                groups = np.array(self._groups)
                kept = np.isin(groups, groups[kept]) & (groups != groups[0])
        given = np.flatnonzero(~kept)
        return self._take(self._plan_of(given), given)

    def _plan(self, count: int) -> StepPlan:
        return self._plan_of(np.arange(count))

    def _plan_of(self, documents: Integers) -> StepPlan:
        return plan_step(
            np.array(self._lengths, np.int64)[documents],
            costs=np.array(self._costs)[documents] if self._costs else None,
            groups=np.array(self._groups)[documents] if self._groups else None,
            **self._options,
        )

    def _take(self, plan: StepPlan, documents: Integers) -> list[PlannedMicroBatch]:
        """A plan of some that wait, which then wait no more."""
        given = _micro_batches(plan, np.array(self._ids, np.int64)[documents])
        left = np.delete(np.arange(len(self._ids)), documents).tolist()
        self._amounts = np.delete(self._amounts, documents, axis=0)
        self._ids = [self._ids[i] for i in left]
        self._lengths = [self._lengths[i] for i in left]
        self._costs = [self._costs[i] for i in left] if self._costs else []
        self._groups = [self._groups[i] for i in left] if self._groups else []
        self._num_complete = len(left)
        return given


def _micro_batches(plan: StepPlan, ids: Integers) -> list[PlannedMicroBatch]:
    """Ids of the documents that every rank holds in each micro batch of a plan."""
    held = plan.index_lists()
    given = []
    for m in range(plan.num_micro_batches):
        mine = [held[rank][m] for rank in range(plan.num_ranks)]
        degree = [int(plan.degree[of[0]]) if of.size else 1 for of in mine]
        given.append(
            PlannedMicroBatch(
                documents=[ids[of] for of in mine],
                degree=np.array(degree, np.int64),
                lengths=[plan.lengths[of] for of in mine],
            )
        )
    return given

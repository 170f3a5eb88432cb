"""Content of the steps of a program: the definition, one sample after the other.

A program is stages, each a first step, tokens per step and weights of the sources (0: not drawn).
Every bucket of every source is a queue, of which a draw takes the first sample; an empty queue is
filled with the next epoch, the n samples of the source in the bucket in the order of that epoch's
shuffle. Stages share no other state.

A skip of k steps at step s is an edit of a run: before step s the edited run equals the former run
(``Run.former``), and at step s it continues with the queues of the former run after step s + k - 1.

A cost window reorders the first samples of the queues when its first draw begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from math import ceil, floor

from reference.blends import Pair, locate, tree
from reference.random import fold_key, random_bits, unit

SHARES = 1 << 62


@dataclass(frozen=True)
class Stage:
    begin: int
    tokens_per_step: int
    weights: tuple[float, ...]
    skip_steps: int = 0


# capacity -> samples, of every source
Sources = list[dict[int, int]]
# capacity, [(source, epoch of its bucket, number among its samples of that capacity)]
StepContent = tuple[int, list[tuple[int, int, int]]]
# (source, capacity, number among its samples) -> cost
Cost = Callable[[int, int, int], int]


class Queue:
    """Next samples of a bucket of a source: (epoch, number)."""

    def __init__(self, size: int, seed: int, capacity: int, source: int) -> None:
        self.size, self.names = size, (seed, 1, capacity, source)
        self.coming: list[tuple[int, int]] = []
        self.epochs = 0

    def fill(self, count: int) -> None:
        """Fill the queue with at least ``count`` samples."""
        while len(self.coming) < count:
            order = permuted(self.size, fold_key(*self.names, self.epochs))
            self.coming += [(self.epochs, number) for number in order]
            self.epochs += 1

    def take(self) -> tuple[int, int]:
        self.fill(1)
        return self.coming.pop(0)


@dataclass
class Run:
    """A run: its samples, its stages, and the run that it edits, if it skips steps."""

    sources: Sources
    stages: list[Stage]
    seed: int
    cost_window: int = 1
    cost: Cost = lambda *_: 0
    former: Run | None = None
    begin: int = 0
    """The step at which steps of ``former`` are skipped."""
    skip_steps: int = 0

    def play(self, until: int) -> State:
        """Run the first ``until`` steps."""
        if self.former is None:
            sizes = [
                (s, c, size)
                for s, of_source in enumerate(self.sources)
                for c, size in of_source.items()
            ]
            state = State({(s, c): Queue(size, self.seed, c, s) for s, c, size in sizes})
            return self._draw(state, 0, until)
        if until <= self.begin:
            return self.former.play(until)
        state = self.former.play(self.begin + self.skip_steps)
        state.steps = state.steps[: self.begin]
        return self._draw(state, self.begin, until)

    def skipped(self) -> list[StepContent]:
        """Return the steps of the former run that are skipped."""
        return self.former.play(self.begin + self.skip_steps).steps[self.begin :]

    def edited(self, begin: int, skip_steps: int, stages: list[Stage] | None = None) -> Run:
        """Return the run that skips steps of this one, with its later skips applied again."""
        edited_run = replace(
            self, former=self, begin=begin, skip_steps=skip_steps, stages=stages or self.stages
        )
        later: list[Run] = []
        run, first = self, self.begin
        while run.former is not None:
            # A newer edit has skipped this one, too, or applied it again.
            first = min(first, run.begin)
            if run.begin >= begin + skip_steps and run.skip_steps and run.begin == first:
                later.insert(0, run)
            run = run.former
        for skip in sorted(later, key=lambda run: run.begin):
            edited_run = edited_run.edited(skip.begin, skip.skip_steps)
        return edited_run

    def reweighted(self, begin: int, stages: list[Stage]) -> Run:
        """Return the run with other stages from a step on, after its skip there."""
        if self.former is not None and self.begin == begin:
            return replace(self, stages=stages)
        if self.former is not None and self.begin > begin:
            return self.former.reweighted(begin, stages).edited(self.begin, self.skip_steps)
        return self.edited(begin, 0, stages)

    def _draw(self, state: State, begin: int, end: int) -> State:
        for step in range(begin, end):
            *before, stage = [stage for stage in self.stages if stage.begin <= step]
            drawn_alike = (stage.tokens_per_step, shares(stage.weights))
            if drawn_alike != state.drawn_alike:
                if stage.begin < step:
                    before.append(stage)
                earlier = max([self._largest(stage) for stage in before], default=0)
                state.drawn_alike = drawn_alike
                state.draws = stage_draws(
                    self.sources,
                    replace(stage, begin=step),
                    self.seed,
                    state.queues,
                    self.cost_window,
                    self.cost,
                    swap=self._largest(stage) > earlier,
                )
            state.steps.append(next(state.draws))
        return state

    def _largest(self, stage: Stage) -> int:
        """Return the largest capacity that a stage draws."""
        pairs = zip(self.sources, stage.weights, strict=True)
        return max(capacity for source, weight in pairs if weight for capacity in source)


@dataclass
class State:
    """State of a run: the queues, the running draws, and the content of every step."""

    queues: dict[tuple[int, int], Queue]
    draws: Iterator[StepContent] = field(default_factory=lambda: iter(()))
    drawn_alike: tuple[int, list[Fraction]] | None = None
    steps: list[StepContent] = field(default_factory=list)


def with_weights(stages: list[Stage], decided: dict[int, tuple[float, ...]]) -> list[Stage]:
    """Return stages with decided weights, each until the next stage or decision."""
    result: list[Stage] = []
    for begin in sorted({stage.begin for stage in stages} | set(decided)):
        last = [stage for stage in stages if stage.begin <= begin][-1]
        if last.begin < begin:
            last = replace(result[-1], begin=begin)
        result.append(replace(last, weights=decided.get(begin, last.weights)))
    return result


def program(
    sources: Sources,
    stages: list[Stage],
    seed: int,
    cost_window: int = 1,
    cost: Cost = lambda *_: 0,
) -> Run:
    """Return the run of some stages and their skips, applied one after the other."""
    run = Run(sources, stages, seed, cost_window, cost)
    for stage in stages:
        if stage.skip_steps:
            run = run.edited(stage.begin, stage.skip_steps)
    return run


def shares(weights: tuple[float, ...]) -> list[Fraction]:
    """Return weights as proportions."""
    return [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]


def stage_draws(
    sources: Sources,
    stage: Stage,
    seed: int,
    queues: dict[tuple[int, int], Queue],
    cost_window: int,
    cost: Cost,
    *,
    swap: bool,
) -> Iterator[StepContent]:
    """Yield the draws of one stage; takes from the queues."""
    drawn = [s for s, weight in enumerate(stage.weights) if weight]
    tokens = [sum(c * n for c, n in source.items()) for source in sources]
    total = sum(Fraction(w) for w in stage.weights)
    epoch_tokens = sum(tokens[s] for s in drawn)
    capacities = sorted({c for s in drawn for c in sources[s]})
    members, epochs = [], []
    blends: list[Pair | int] = []
    for capacity in capacities:
        those = [s for s in drawn if capacity in sources[s]]
        held = [Fraction(capacity * sources[s][capacity], tokens[s]) for s in those]
        parts = [Fraction(stage.weights[s]) / total * n for s, n in zip(those, held, strict=True)]
        members.append(those)
        blends.append(tree(whole_shares(parts)))
        epochs.append(max(1, floor(sum(parts) * epoch_tokens / capacity + Fraction(1, 2))))
    per_draw = [stage.tokens_per_step // capacity for capacity in capacities]
    positions = [0] * len(capacities)
    key = fold_key(seed, 4, stage.begin) if stage.begin else seed
    for bucket in draw_order(epochs, per_draw, key, swap=swap):
        capacity, count = capacities[bucket], per_draw[bucket]
        own_queues = {which: queues[s, capacity] for which, s in enumerate(members[bucket])}
        window, in_window = divmod(positions[bucket], cost_window * count)
        if cost_window > 1 and in_window == 0:
            ranks = permuted(cost_window, fold_key(key, 3, capacity, window))
            draw_of: dict[int, list[int]] = {which: [] for which in own_queues}
            for place in range(cost_window * count):
                which, _ = locate(blends[bucket], positions[bucket] + place)
                draw_of[which].append(place // count)
            for which, queue in own_queues.items():
                s = members[bucket][which]
                order_by_cost(queue, draw_of[which], ranks, partial(cost, s, capacity))
        content = []
        for _ in range(count):
            which, _ = locate(blends[bucket], positions[bucket])
            positions[bucket] += 1
            content.append((members[bucket][which], *own_queues[which].take()))
        yield capacity, content


def order_by_cost(
    queue: Queue, draw_of: list[int], ranks: list[int], cost: Callable[[int], int]
) -> None:
    """Sort the first samples of a queue as a cost window takes them.

    ``draw_of[i]`` is the draw of the window that takes the i-th of them. Samples of one epoch swap:
    a draw of lower rank gets samples of lower cost.
    """
    queue.fill(len(draw_of))
    begin = 0
    for _, group in groupby(queue.coming[: len(draw_of)], key=lambda sample: sample[0]):
        samples = list(group)
        places = range(begin, begin + len(samples))
        by_cost = sorted(samples, key=lambda sample: cost(sample[1]))
        by_rank = sorted(places, key=lambda place: ranks[draw_of[place]])
        for place, sample in zip(by_rank, by_cost, strict=True):
            queue.coming[place] = sample
        begin += len(samples)


def draw_order(epochs: list[int], per_draw: list[int], key: int, *, swap: bool) -> Iterator[int]:
    """Yield buckets, cycle after cycle: each as often as its samples need, spread evenly."""
    cycle = 0
    while True:
        times = []
        for b, (samples, count) in enumerate(zip(epochs, per_draw, strict=True)):
            first, last = (ceil(Fraction(c * samples, count)) for c in (cycle, cycle + 1))
            bucket_key = fold_key(key, 2, cycle, b)
            for turn in range(last - first):
                times.append(((turn + unit(bucket_key, turn)) / (last - first), b))
        order = [b for _, b in sorted(times)]
        if cycle == 0 and swap:
            at = order.index(max(order))
            order[0], order[at] = order[at], order[0]
        yield from order
        cycle += 1


def whole_shares(parts: list[Fraction]) -> list[int]:
    """Return shares of 2^62 by largest remainders."""
    exact = [part / sum(parts) * SHARES for part in parts]
    shares = [floor(share) for share in exact]
    lacking = sorted(range(len(parts)), key=lambda i: shares[i] - exact[i])
    for i in lacking[: SHARES - sum(shares)]:
        shares[i] += 1
    return shares


def permuted(size: int, key: int) -> list[int]:
    """Shuffle by Fisher and Yates; up to 1024 elements."""
    order = list(range(size))
    for i in range(size, 1, -1):
        j = random_bits(key, i) % i
        order[i - 1], order[j] = order[j], order[i - 1]
    return order


def weights_within_epochs(
    stages: list[tuple[int, int, tuple[float | None, ...]]],
    limits: list[float | None],
    tokens: list[int],
    run_tokens: int,
) -> list[list[Fraction]]:
    """Return the shares of every source in every stage (first step, tokens per step, weights).

    A stage is planned up to the end of the run: the remaining tokens of the run are split by
    weight; a source that would get more than it has left gets what it has, and the others share the
    rest.
    """
    result = []
    remaining = Fraction(run_tokens)
    room = [
        None if limit is None else Fraction(floor(Fraction(limit) * n))
        for limit, n in zip(limits, tokens, strict=True)
    ]
    for i, (begin, per_step, given) in enumerate(stages):
        weights = [Fraction(n if w is None else w) for w, n in zip(given, tokens, strict=True)]
        if remaining <= 0:
            result.append([w / sum(weights) for w in weights])
            continue
        dealt = {d: Fraction(0) for d, w in enumerate(weights) if not w}
        while True:
            open_ = [d for d in range(len(weights)) if d not in dealt]
            undealt = remaining - sum(dealt.values())
            wanted = {d: undealt * weights[d] / sum(weights[e] for e in open_) for d in open_}
            over = [d for d in open_ if room[d] is not None and room[d] < wanted[d]]
            if not over:
                dealt |= wanted
                break
            dealt |= {d: room[d] for d in over}
        amounts = [dealt[d] for d in range(len(weights))]
        if not sum(amounts):
            amounts = weights  # all sources are used up
        shares = [amount / sum(amounts) for amount in amounts]
        same = i and stages[i - 1][2] == given
        result.append(result[-1] if same else shares)
        end = stages[i + 1][0] if i + 1 < len(stages) else begin + remaining
        taken = min(remaining, (end - begin) * per_step)
        remaining -= taken
        room = [
            None if tokens_left is None else Fraction(max(0, floor(tokens_left - share * taken)))
            for tokens_left, share in zip(room, result[-1], strict=True)
        ]
    return result

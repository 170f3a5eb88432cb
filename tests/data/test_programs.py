"""Programs of runs: stages change the draws, and no cursor is lost or set back.

MEGAPACK_PROGRAMS=1000 tests that many random programs instead of 100.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import programs

from megapack.data import (
    BucketBatchSampler,
    Ramp,
    Schedule,
    Scores,
    Stage,
    plan_exclusions,
    plan_run,
    unseen_documents,
)
from megapack.data.blend import Mixture
from megapack.data.fim import FimConfig, Sentinels
from megapack.data.sources import SampleSource
from megapack.errors import ConfigError, ResumeError
from megapack.packing import SampleIndex
from tests.data.corpora import index_of, of_rank

TOKENS = (32, 48, 96, 144)
PROGRAMS = int(os.environ.get("MEGAPACK_PROGRAMS", "100"))
NAMES = [f"s{number}" for number in range(6)]
POOL_COUNTS = [{4: 9, 8: 30, 16: 3}, {8: 11}, {4: 2, 16: 25}, {16: 1}, {4: 40, 8: 5}, {4: 1, 8: 1}]
LENGTHS = np.random.default_rng(0).integers(1, 5, 200)  # in quarters of a capacity


def samples_of(counts: dict[int, int]) -> SampleIndex:
    """Return samples of one document each, between a quarter and all of the capacity."""
    buckets: dict[int, list[list[tuple[int, int, int]]]] = {}
    lengths: list[int] = []
    for capacity, count in sorted(counts.items()):
        new_lengths = (LENGTHS[len(lengths) :][:count] * capacity // 4).tolist()
        buckets[capacity] = [
            [(len(lengths) + i, 0, length)] for i, length in enumerate(new_lengths)
        ]
        lengths += new_lengths
    return index_of(buckets, lengths)


POOL = [samples_of(counts) for counts in POOL_COUNTS]
# A sample is one document here, so the score of a document is that of its sample.
SCORES = [np.random.default_rng(s).integers(0, 4, i.num_documents) for s, i in enumerate(POOL)]
FOLDER = tempfile.TemporaryDirectory()  # exclusion lists; deleted when the tests end


@st.composite
def written_programs(draw: st.DrawFn) -> dict[str, Any]:
    num_sources = draw(st.integers(1, 4))
    weights = st.sampled_from([0.0, 0.1, 1.0, 3.0])
    blends = st.lists(weights, min_size=num_sources, max_size=num_sources).filter(any)
    stages = [programs.Stage(0, draw(st.sampled_from(TOKENS)), tuple(draw(blends)))]
    for begin in sorted(draw(st.sets(st.integers(1, 40), max_size=4))):
        tokens = draw(st.sampled_from([stages[-1].tokens_per_step, *TOKENS]))
        weights = draw(st.sampled_from([stages[-1].weights, tuple(draw(blends))]))
        skip_steps = draw(st.sampled_from([0, 0, 1, 5]))
        stages.append(programs.Stage(begin, tokens, weights, skip_steps))
    used = [s for s in range(num_sources) if any(stage.weights[s] for stage in stages)]
    return {
        "used": used,
        "stages": [replace(s, weights=tuple(s.weights[u] for u in used)) for s in stages],
        "seed": draw(st.integers(0, 2**63)),
        "cost_window": draw(st.sampled_from([1, 2, 3, 8])),
    }


def cost_of(source: int, capacity: int, number: int) -> int:
    """Return the token pairs of a sample of ``POOL``: of its document and of its padding."""
    before = sum(n for c, n in POOL_COUNTS[source].items() if c < capacity)
    length = int(LENGTHS[before + number]) * capacity // 4
    return length**2 + (capacity - length) ** 2


@settings(max_examples=max(PROGRAMS, settings.default.max_examples))
@given(program=written_programs())
def test_steps_equal_the_definition(program: dict[str, Any]) -> None:
    """Compare any step, and the epochs of its samples, with tests/reference/programs.py, which
    draws one sample after the other."""
    used, (first, *later) = program["used"], program["stages"]
    names = [NAMES[s] for s in used]
    stages = []
    for stage in later:
        weights = {n: w for n, w in zip(names, stage.weights, strict=True) if w}
        changes = {"tokens_per_step": stage.tokens_per_step, "skip_steps": stage.skip_steps}
        stages.append(Stage(from_step=stage.begin, weights=weights, **changes))
    fim = FimConfig(sentinels=Sentinels(prefix=7, suffix=8, middle=9))
    rates = [0.25 * (1 + s) for s in range(len(used))]
    how = {"weights": first.weights, "stages": stages, "fim": fim, "fim_rates": rates}
    mixture = Mixture(names=names, **how)
    samples = SampleSource([POOL[s] for s in used], mixture)
    options = {"seed": program["seed"], "cost_window": program["cost_window"]}
    schedule = Schedule(samples, tokens_per_step=first.tokens_per_step, **options)
    defined = programs.program(
        [POOL_COUNTS[s] for s in used],
        program["stages"],
        cost=lambda source, capacity, number: cost_of(used[source], capacity, number),
        **options,
    )
    expected = defined.play(50).steps
    for i in (49, *range(50)):  # in any order
        step = schedule.step(i)
        drawn = own_numbers(schedule, step.sample_ids)
        assert step.view.fim_rates.tolist() == [rates[source] for source, _ in drawn]
        passes = zip(step.view.epochs.tolist(), drawn, strict=True)
        content = [(source, epoch, number) for epoch, (source, number) in passes]
        assert (step.capacity, content) == expected[i]


@st.composite
def decided_stages(draw: st.DrawFn) -> list[tuple[int, int, tuple[float, float] | None]]:
    """Draw decisions of a run of two sources: (first step, steps to skip, weights), in order. A
    skip goes back; weights are for later steps."""
    made: list[tuple[int, int, tuple[float, float] | None]] = []
    step = 1
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            step += draw(st.integers(0, 8))
            made.append((step, 0, draw(st.sampled_from([(1.0, 3.0), (3.0, 1.0), (1.0, 0.0)]))))
        else:
            step = max(1, step + draw(st.integers(-6, 8)))
            made.append((step, draw(st.sampled_from([1, 3, 5, 12])), None))
    return made


@settings(max_examples=max(PROGRAMS, settings.default.max_examples))
@given(
    written=st.sets(st.integers(1, 30), max_size=3).map(sorted),
    decided=decided_stages(),
    cost_window=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_decided_skips_skip_the_draws_of_the_run_at_the_decision(
    written: list[int],
    decided: list[tuple[int, int, tuple[float, float] | None]],
    cost_window: int,
    data: st.DataObject,
) -> None:
    """Cover several skips at one step, skips over stages, and skips over decided weights, which are
    discarded if the run goes back to an earlier step."""
    pool = [0, 4]
    names = [NAMES[s] for s in pool]
    blends = st.sampled_from([(1.0, 1.0), (0.0, 1.0), (2.0, 1.0)])
    stages = [programs.Stage(0, 96, (1.0, 1.0))]
    stages += [
        programs.Stage(begin, data.draw(st.sampled_from([48, 96])), data.draw(blends))
        for begin in written
    ]
    options: dict[str, Any] = {"seed": 3, "cost_window": cost_window}
    run = programs.Run(
        [POOL_COUNTS[s] for s in pool],
        stages,
        cost=lambda s, *sample: cost_of(pool[s], *sample),
        **options,
    )
    made: dict[int, tuple[float, float]] = {}
    for begin, skip_steps, weights in decided:
        if weights:
            made[begin] = weights
            run = run.reweighted(begin, programs.with_weights(stages, made))
        if skip_steps:
            made = {first: kept for first, kept in made.items() if first <= begin}
            run = run.edited(begin, skip_steps, programs.with_weights(stages, made))
    mixture = Mixture(
        names=names,
        weights=(1.0, 1.0),
        stages=[stage_of(stage, names) for stage in stages[1:]],
        decided=[stage_of(programs.Stage(b, 0, w or (), k), names) for b, k, w in decided],
    )
    samples = SampleSource([POOL[s] for s in pool], mixture)
    schedule = Schedule(samples, tokens_per_step=96, **options)
    expected = run.play(45).steps
    for i in (44, *range(45)):
        step = schedule.step(i)
        content = [(s, number) for s, _, number in expected[i][1]]
        assert (step.capacity, own_numbers(schedule, step.sample_ids)) == (expected[i][0], content)
    state = json.loads(json.dumps(schedule.state_dict(45)))
    assert schedule.resume_step(state) == 45


def stage_of(stage: programs.Stage, names: list[str]) -> Stage:
    weights = {n: w for n, w in zip(names, stage.weights, strict=False) if w} or None
    tokens = stage.tokens_per_step or None
    return Stage(
        from_step=stage.begin, weights=weights, tokens_per_step=tokens, skip_steps=stage.skip_steps
    )


def own_numbers(schedule: Schedule, ids: np.ndarray) -> list[tuple[int, int]]:
    """Return (source, number among its samples of the capacity) of global ids."""
    result = []
    for source, local in np.stack(schedule.samples.locate(ids), axis=1).tolist():
        offsets = schedule.samples.indices[source].bucket_sample_offsets
        result.append((source, local - max(o for o in offsets.tolist() if o <= local)))
    return result


def scores_of(source: int) -> Scores:
    path = Path(FOLDER.name) / f"scores-{source}.npy"
    if not path.exists():
        np.save(path, SCORES[source])
    return Scores(path=str(path), order="descending" if source % 2 else "ascending")


class Run:
    """A run of random length, edited while it runs, that records the content of every step."""

    def __init__(self, number: int) -> None:
        self.random = np.random.default_rng(number)
        order = self.random.permutation(len(POOL))
        self.sources = order[: self.random.integers(1, 4)].tolist()
        self.unused = order[len(self.sources) :].tolist()
        self.weights: list[float | None] = [self.weight() for _ in self.sources]
        if self.random.random() < 0.3:
            self.weights = [None] * len(self.sources)
        self.tokens = int(self.random.choice(TOKENS))
        self.orders = ["proportional", "uniform"]
        if self.random.random() < 0.5:  # every piece of a ramp would restart a curriculum
            self.orders.append("grow-p2")
        self.order = str(self.random.choice(self.orders))
        self.scored = {source for source in order.tolist() if self.random.random() < 0.2}
        self.cost_window = int(self.random.choice([1, 2, 5]))
        self.stages: list[Stage] = []
        self.step = 0
        self.seen: list[list[int]] = []

    def weight(self) -> float:
        return float(self.random.choice([0.05, 1, 1, 4]))

    def schedule(self, stages: list[Stage] | None = None) -> Schedule:
        mixture = Mixture(
            weights=self.weights,
            names=[NAMES[s] for s in self.sources],
            stages=self.stages if stages is None else stages,
            scores=[scores_of(s) if s in self.scored else None for s in self.sources],
        )
        samples = SampleSource([POOL[s] for s in self.sources], mixture)
        options = {"order": self.order, "cost_window": self.cost_window, "seed": 7}
        return Schedule(samples, tokens_per_step=self.tokens, **options)

    def edit(self) -> None:
        """Add a random stage from the present step on, or somewhat later."""
        if self.random.random() < 0.5:  # drop stages that are not reached yet
            self.stages = [stage for stage in self.stages if stage.from_step < self.step]
            named = {name for stage in self.stages for name in stage.weights or ()}
            while self.weights[-1] == 0 and NAMES[self.sources[-1]] not in named:
                self.weights.pop()
                self.unused.append(self.sources.pop())
        begin = self.step + int(self.random.integers(0, 8))
        if begin <= max((stage.from_step for stage in self.stages), default=0):
            return
        # A stage inside the steps that an earlier one skips would change what was skipped.
        if any(begin < stage.from_step + (stage.skip_steps or 0) for stage in self.stages):
            return
        kinds = "reweight add remove tokens skip order exclude loss window"
        kind = self.random.choice(kinds.split())
        change: dict[str, Any] = {}
        drawn = [NAMES[s] for s, w in zip(self.sources, self.weights, strict=True) if w != 0]
        for stage in self.stages:
            drawn = list(stage.weights or drawn)
        if kind == "add" and self.unused:
            drawn.append(NAMES[self.unused[0]])
            self.sources.append(self.unused.pop(0))
            self.weights.append(0.0)
        if kind == "remove" and len(drawn) > 1:
            drawn.remove(str(self.random.choice(drawn)))
        if kind in ("reweight", "add", "remove"):
            change["weights"] = {name: self.weight() for name in drawn}
            weighted = any(stage.weights for stage in self.stages) or None not in self.weights
            if weighted and "grow-p2" not in self.orders and self.random.random() < 0.5:
                until, pieces = begin + self.random.integers(1, 20), self.random.integers(1, 6)
                shape: Any = str(self.random.choice(["linear", "cosine"]))
                change["ramp"] = Ramp(until_step=int(until), shape=shape, pieces=int(pieces))
        if kind == "tokens":
            change["tokens_per_step"] = int(self.random.choice(TOKENS))
        if kind == "order":
            change["order"] = str(self.random.choice(self.orders))
        if kind == "skip":
            change["skip_steps"] = int(self.random.integers(1, 9))
        if kind == "loss":
            change["loss_weights"] = {str(self.random.choice(drawn)): self.weight()}
        if kind == "window":
            change["attention_window"] = int(self.random.choice([3, 8, 16]))
        if kind == "exclude":
            change["exclude"] = self.lists()
        self.stages = [*self.stages, Stage(from_step=begin, **change)]

    def lists(self) -> dict[str, str]:
        """Draw files of documents of some sources, as .npy or as text."""
        result = {}
        for source in self.random.choice(self.sources, self.random.integers(1, 3)).tolist():
            some = int(self.random.integers(0, POOL[source].num_documents + 1))
            documents = self.random.choice(POOL[source].num_documents, some)
            path = Path(FOLDER.name) / f"{self.random.integers(1 << 62)}"
            if self.random.random() < 0.5:
                path = path.with_suffix(".npy")
                np.save(path, documents)
            else:
                path.write_text("".join(f"{document}\n" for document in documents))
            result[NAMES[source]] = str(path)
        return result

    def advance(self, schedule: Schedule, num_steps: int) -> None:
        for _ in range(num_steps):
            self.seen.append(schedule.step(self.step).sample_ids.tolist())
            self.step += 1


def edited_run(number: int, num_edits: int = 4) -> Run:
    """Draw a run that took some steps before each edit."""
    run = Run(number)
    for _ in range(num_edits):
        run.step += int(run.random.integers(0, 15))
        run.edit()
    return run


def test_edited_runs_keep_every_law() -> None:
    """Chain random edits (weights, sources, sizes, orders, skips), stops and resumes. The laws: a
    step once taken never changes, whether the run resumes or is computed again; no sample is
    repeated or missed within an epoch of its source's bucket; shares are within their bound; ranks
    have one bucket at a time, and together the samples of the step."""
    kinds: set[str] = set()
    for number in range(PROGRAMS):
        run = Run(number)
        schedule = run.schedule()
        for _ in range(int(run.random.integers(1, 5))):
            run.advance(schedule, int(run.random.integers(0, 12)))
            state = json.loads(json.dumps(schedule.state_dict(run.step)))
            run.edit()
            schedule = run.schedule()
            assert schedule.resume_step(state) == run.step, number
        run.advance(schedule, 8)
        scratch = run.schedule()
        assert [scratch.step(i).sample_ids.tolist() for i in range(run.step)] == run.seen, number
        check_epochs_of_sources(scratch, run)
        check_shares(scratch, run.seen)
        check_masks(scratch, run)
        check_ranks(scratch, int(run.random.integers(0, run.step)))
        kinds |= {name for stage in run.stages for name in vars(stage) if vars(stage)[name]}
    changes = {"weights", "tokens_per_step", "order", "skip_steps", "exclude", "ramp"}
    assert kinds == {"from_step", *changes, "loss_weights", "attention_window"}


def check_masks(schedule: Schedule, run: Run) -> None:
    """Check that samples show all segments except those of documents that a stage excludes."""
    gone: set[tuple[int, int]] = set()
    waiting = [stage for stage in run.stages if stage.exclude]
    assert max(max(ids) for ids in run.seen) < schedule.samples.num_samples
    for i, ids in enumerate(run.seen if waiting else ()):
        while waiting and waiting[0].from_step <= i:
            for name, path in waiting.pop(0).exclude.items():
                listed = np.load(path) if path.endswith(".npy") else Path(path).read_text().split()
                gone |= {(schedule.samples.names.index(name), int(d)) for d in listed}
        view = schedule.step(i).view
        for sample in ids:
            source, shown = schedule.samples.segments(sample, view)
            _, local = schedule.samples.locate(np.array([sample]))
            _, segments = schedule.samples.indices[source].sample(int(local[0]))
            assert shown == [s for s in segments if (source, s[0]) not in gone]
        kept = [schedule.samples.segments(sample, view)[1] for sample in ids]
        labels = sum(length - 1 for segments in kept for _, _, length in segments)  # whole ones
        assert schedule.step(i).num_label_tokens == labels


def check_epochs_of_sources(schedule: Schedule, run: Run) -> None:
    """Check that the samples of each bucket of a source, in the order drawn or skipped, form whole
    epochs, sorted by score if the source has scores and no cost window moves them."""
    streams: dict[tuple[int, int], list[int]] = defaultdict(list)
    passed = skipped(schedule)
    for i, ids in enumerate(run.seen):
        for ahead in passed.get(i, ()):
            follow(schedule, streams, np.concatenate([draw.sample_ids for draw in ahead]))
        follow(schedule, streams, np.array(ids))
    for (source, capacity), numbers in streams.items():
        number = NAMES.index(schedule.samples.names[source])
        size = POOL_COUNTS[number][capacity]
        for begin in range(0, len(numbers), size):
            epoch = numbers[begin : begin + size]
            assert len(set(epoch)) == len(epoch)
            if number in run.scored and run.cost_window == 1:
                rising = np.diff(SCORES[number][epoch]) * (-1 if number % 2 else 1)
                assert (rising >= 0).all()


def skipped(schedule: Schedule) -> dict[int, list[Any]]:
    """Return step -> the steps that a stage skips there."""
    return {stage.begin: list(stage.skipped_steps()) for stage in schedule.stages}


def follow(schedule: Schedule, streams: dict[tuple[int, int], list[int]], ids: np.ndarray) -> None:
    capacity = schedule.samples.capacity_of(int(ids[0]))
    source, local = schedule.samples.locate(ids)
    for s, sample in zip(source.tolist(), local.tolist(), strict=True):
        streams[s, capacity].append(sample)


def check_shares(schedule: Schedule, seen: list[list[int]]) -> None:
    """Check every step of k stages: |samples given - samples x weight| < 1.69 k in every bucket."""
    samples = schedule.samples
    num_sources, tokens = len(samples.indices), samples.tokens_per_epoch
    taken = np.zeros(num_sources)
    off: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(num_sources))  # realised - requested
    for stage, end in schedule.spans(len(seen)):
        own_off: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(num_sources))
        # A stage after skipped steps is bounded at both ends.
        skipping = stage is not schedule.stages[0] and stage.draw_of(stage.begin) > 0
        given = zip(stage.settings.weights, tokens, strict=True)
        weights = np.array([t if w is None else w for w, t in given], float)
        for i in range(stage.begin, end):
            ids = np.array(seen[i])
            capacity = samples.capacity_of(int(ids[0]))
            names = [NAMES.index(name) for name in samples.names]
            available = [POOL_COUNTS[number].get(capacity, 0) for number in names]
            share = weights * available / tokens
            drawn_counts = np.bincount(samples.locate(ids)[0], minlength=num_sources)
            own_off[capacity] += drawn_counts - share / share.sum() * len(ids)
            taken += drawn_counts * capacity
            assert np.abs(own_off[capacity]).max() < (2 * 1.69 if skipping else 1.69)
        for capacity, amount in own_off.items():
            off[capacity] += amount
    plan = plan_run(schedule, len(seen))
    assert [dataset.tokens for dataset in plan.datasets] == taken.tolist()
    assert all(np.abs(amount).max() < 2 * 1.69 * len(schedule.stages) for amount in off.values())


def check_ranks(schedule: Schedule, step: int) -> None:
    """Check that ranks have one bucket at a time, and together the samples of the step."""
    options = {"pad_last": True, "num_steps": step + 1, "weighted_loss": True}
    for size, micro in ((1, 16), (3, 16)):
        arguments = [of_rank(rank, size, micro, **options) for rank in range(size)]
        ranks = [BucketBatchSampler(schedule, **one).micro_batches(step) for one in arguments]
        for row in zip(*ranks, strict=True):
            assert len({(b.bucket, b.capacity, b.num_step_label_tokens) for b in row}) == 1
            assert len({(b.view.window, b.step_label_weight) for b in row}) == 1
        dealt = sorted(i for batches in ranks for batch in batches for i in batch)
        assert dealt == sorted(schedule.step(step).sample_ids.tolist())


def rewritten(run: Run, k: int, how: str) -> list[Stage]:
    """Return the stages of a run with the k-th one rewritten: as another stage, or equivalently."""
    stages, stage = list(run.stages), run.stages[k]
    number = int(run.random.integers(0, 3))
    weights = {name: 2 * weight for name, weight in (stage.weights or {}).items()}
    changed = {
        "drop": [],
        "move": [replace(stage, from_step=stage.from_step + number - 1)],
        "skip": [replace(stage, skip_steps=number)],
        "order": [replace(stage, order="uniform", num_cycles=1)],
        "tokens": [replace(stage, tokens_per_step=TOKENS[number])],
        "window": [replace(stage, attention_window=8 * number, window_steps=0)],
        "weights twice as large": [replace(stage, weights=weights or None)],
        "a stage that changes nothing": [
            stage,
            replace(stage, from_step=stage.from_step + 1, skip_steps=0, ramp=None),
        ],
    }
    stages[k : k + 1] = changed[how]
    return stages


def test_equivalent_settings_of_taken_steps_are_accepted() -> None:
    """An accepted change alters no taken step; equivalent settings are accepted."""
    ways = ("drop", "move", "skip", "order", "tokens", "window")
    words = ("weights twice as large", "a stage that changes nothing")
    allowed: Counter[tuple[str, bool]] = Counter()
    for number in range(max(24, PROGRAMS // 4)):
        run = edited_run(number, 6)
        past = [k for k, stage in enumerate(run.stages) if stage.from_step < run.step]
        schedule = run.schedule()
        state = json.loads(json.dumps(schedule.state_dict(run.step)))
        taken = [held(schedule, i) for i in range(run.step)]
        for k in past[:3]:
            for how in (str(run.random.choice(ways)), *words):
                if how in words and run.stages[k].ramp is not None:
                    continue  # shares of its pieces are rounded differently
                try:
                    edited = run.schedule(rewritten(run, k, how))
                except ConfigError:
                    continue
                try:
                    edited.check_state(state)
                except ResumeError:
                    assert how not in words or how == words[1], (number, how)
                    allowed[how, False] += 1
                    continue
                allowed[how, True] += 1
                for i, then in enumerate(taken):
                    assert held(edited, i) == then, (number, how, i)
    assert {name for name, _ in allowed} == {*ways, *words}
    assert all(allowed[how, True] for how in words)


def held(schedule: Schedule, i: int) -> tuple[Any, ...]:
    """Return the content of a step and its loss weights."""
    step, settings = schedule.step(i), schedule.settings_at(i)
    ids = step.sample_ids.tolist()
    shown = [schedule.samples.segments(sample, step.view) for sample in ids]
    return ids, shown, settings.window_at(i), settings.loss_weights


def test_queries_equal_counting_step_by_step() -> None:
    """Steps of a sample, unseen documents and effects of exclusion lists equal those counted step
    by step."""
    for number in range(24):
        run = edited_run(number, num_edits=4 + number % 3)
        schedule, until = run.schedule(), run.step + 10
        check_steps_of(schedule, until)
        check_plan_of_exclusions(schedule, until + 30)
        for steps in (0, run.step, run.step + 9):
            for source in range(len(schedule.samples.indices)):
                unseen, passes = unseen_documents(schedule, source, steps)
                seen = times_seen(schedule, source, steps)
                assert passes == min(seen.values())
                masked = {d: schedule.masked_from(source, d) for d in seen}
                gone = {d for d, begin in masked.items() if begin is not None and begin <= steps}
                least = {d for d in seen if seen[d] == passes}
                assert unseen.tolist() == sorted(least - gone)


def check_steps_of(schedule: Schedule, num_steps: int) -> None:
    """Check that ``steps_of`` returns the steps that hold a sample, for every sample."""
    held: dict[int, list[int]] = defaultdict(list)
    for step in range(num_steps):
        source, local = schedule.samples.locate(schedule.step(step).sample_ids)
        for sample in (schedule.samples.bases[source] + local).tolist():
            held[sample].append(step)
    for sample in range(schedule.samples.num_samples):
        assert schedule.steps_of(sample, num_steps) == held[sample]


def times_seen(schedule: Schedule, source: int, steps: int) -> Counter[int]:
    """Count how often every document in a sample was seen, from the steps and the skipped steps."""
    index = schedule.samples.indices[source]
    drawn: Counter[int] = Counter()
    for step in range(steps + 1):
        content = [] if step == steps else [schedule.step(step).sample_ids]
        for draws in skipped(schedule).get(step, ()):
            content += [draw.sample_ids for draw in draws]
        for ids in content:
            which, local = schedule.samples.locate(ids)
            drawn.update(local[which == source].tolist())
    seen: dict[int, int] = {}
    for sample in range(index.num_samples):
        for document, _, _ in index.sample(sample)[1]:
            seen[document] = min(seen.get(document, 1 << 60), drawn[sample])
    return Counter(seen)


def check_plan_of_exclusions(schedule: Schedule, until: int) -> None:
    samples = schedule.samples
    for plan in plan_exclusions(schedule, until):
        source = samples.names.index(plan.source)
        number_of_list = schedule.stage_at(plan.from_step).view.num_lists
        is_of_list = samples.exclusions.first_lists[source] == number_of_list
        documents = samples.exclusions.documents[source][is_of_list]
        holding = samples.samples_of(source, documents)
        steps = [step for sample in holding for step in schedule.steps_of(sample, until)]
        before = [step for step in steps if step < plan.from_step]
        assert (plan.num_documents, plan.num_samples) == (len(documents), len(holding))
        assert (plan.draws_before, plan.draws_since) == (len(before), len(steps) - len(before))
        assert (plan.last_seen, plan.shown_since) == (max(before, default=None), 0)

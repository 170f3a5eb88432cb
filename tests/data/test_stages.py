"""Stages: their begins, invalid stages, and the changes that a resume accepts."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import BucketBatchSampler, Ramp, Schedule, Stage, load_blend, open_blend
from megapack.data.blend import Mixture
from megapack.data.fim import FimConfig, Sentinels
from megapack.data.program import resolve
from megapack.data.steps import ScheduleConfig
from megapack.errors import ConfigError, ResumeError
from megapack.packing import pack
from tests.data.corpora import (
    of_rank,
    packed_documents,
    packed_index,
    packed_lengths,
    random_documents,
)
from tests.data.test_programs import NAMES, POOL, POOL_COUNTS


def schedule_of(*stages: Stage, sources: int = 2, **options: Any) -> Schedule:
    arguments = {"tokens_per_step": 96, "weights": [1.0, 3.0, 0.0][:sources], "seed": 1, **options}
    return Schedule(POOL[:sources], names=NAMES[:sources], stages=stages, **arguments)


def ids(schedule: Schedule, steps: range) -> list[list[int]]:
    return [schedule.step(i).sample_ids.tolist() for i in steps]


def test_a_program_of_one_stage_is_a_plain_schedule() -> None:
    """A stage that changes nothing is dropped, also from the identity."""
    plain = schedule_of()
    same = schedule_of(
        Stage(from_step=5, tokens_per_step=96, weights={"s0": 1, "s1": 3}),
        Stage(from_step=9, order="proportional", mix="step", skip_steps=0),
    )
    assert len(same.stages) == 1
    assert same.identity() == plain.identity() and "stages" not in plain.identity()


def test_a_stage_may_begin_at_a_number_of_tokens() -> None:
    by_tokens = schedule_of(
        Stage(from_tokens=96 * 10, tokens_per_step=144),
        Stage(from_tokens=96 * 10 + 1, tokens_per_step=48),  # the first step at or after it
        Stage(from_tokens=96 * 10 + 144 + 48 * 3 - 1, weights={"s0": 1}),
    )
    assert [stage.begin for stage in by_tokens.stages] == [0, 10, 11, 14]
    assert [by_tokens.tokens_before(n) for n in (0, 10, 11, 14, 15)] == [0, 960, 1104, 1248, 1296]
    assert by_tokens.program[-1].weights == (1.0, 0.0)


def test_hundreds_of_stages_may_end_inside_a_cost_window() -> None:
    """Each continues with the moves of the stage before; the last one is queried first."""
    stages = [Stage(from_step=i, weights={"s0": i, "s1": 500}) for i in range(1, 700)]
    schedule = schedule_of(*stages, cost_window=5)
    steps = {i: schedule.step(i) for i in (720, *range(720))}
    drawn: dict[tuple[int, int], list[int]] = {}
    for i in range(721):
        for sample in steps[i].sample_ids.tolist():
            source = int(sample >= schedule.samples.bases[1])
            drawn.setdefault((source, steps[i].capacity), []).append(sample)
    for (source, capacity), samples in drawn.items():
        size = POOL_COUNTS[source][capacity]
        assert len(samples) >= size
        for epoch in range(len(samples) // size):
            assert len(set(samples[epoch * size : (epoch + 1) * size])) == size


def test_num_steps_of_an_epoch_is_the_smallest() -> None:
    """In any stage, also if tokens of an epoch are not a multiple of a step."""
    rounded = False
    for begin in range(1, 12):
        schedule = schedule_of(
            Stage(from_step=begin, tokens_per_step=144), Stage(from_step=30, tokens_per_step=96)
        )
        for epochs in (1, 2, 5):
            end = schedule.num_steps(epochs)
            assert schedule.epochs(end - 1) < epochs - 1e-9 < schedule.epochs(end)
            rounded |= schedule.epochs(end) > epochs + 1e-9
    assert rounded


def test_another_order_has_its_default_cycles() -> None:
    changed = schedule_of(Stage(from_step=5, order="proportional"), order="grow-p2", num_cycles=3)
    assert [stage.num_cycles for stage in changed.stages] == [3, schedule_of().stages[0].num_cycles]


def test_a_sampler_counts_the_micro_steps_of_every_stage() -> None:
    schedule = schedule_of(
        Stage(from_step=4, tokens_per_step=144), Stage(from_step=6, tokens_per_step=48)
    )
    sampler = BucketBatchSampler(schedule, **of_rank(1, 3, 16, start_step=3, num_steps=5))
    batches = list(sampler)
    assert [sampler.num_micro_steps(i) for i in range(3, 8)] == [2, 3, 3, 1, 1]
    assert len(sampler) == len(batches) == 2 + 3 + 3 + 1 + 1
    assert [b.micro_step for b in batches if b.step == 4] == [0, 1, 2]
    with pytest.raises(
        ConfigError, match=r"^the stage from step 4: micro_batch_tokens 32 does not divide"
    ):
        BucketBatchSampler(schedule, **of_rank(micro=32))


def test_a_new_largest_bucket_comes_first() -> None:
    """It is drawn first when it joins, to run out of memory at once; not after other changes."""
    stages = [
        Stage(from_step=20, weights={"short": 1000, "long": 1}),
        Stage(from_step=30, weights={"short": 1001, "long": 1}),
    ]
    how = {"names": ["short", "long"], "weights": [1, 0], "stages": stages}
    schedule = Schedule([POOL[4], POOL[2]], tokens_per_step=96, **how)
    assert schedule.capacities == [4, 8, 16]
    assert schedule.step(20).capacity == 16
    assert schedule.step(30).capacity < 16


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(from_step=0)], "begins at step 0, and the one before it at 0: list stages in"),
        ([Stage(from_step=5, skip_steps=1), Stage(from_step=5)], "begins at step 5, and the one"),
        (
            [Stage(from_step=5, weights={"s9": 1})],
            "step 5 gives a weight to 's9', an unknown or ambiguous source; sources are s0",
        ),
        ([Stage(from_step=5, weights={"s0": 0})], "step 5: weight of 's0' is 0; it must be above"),
        ([Stage(from_tokens=2**70)], "tokens reaches step 12297829382473034411, and a run has"),
        ([Stage(from_step=2**63)], "from step 9223372036854775808 reaches step 92233720368547"),
        ([Stage(from_step=5, skip_steps=2**60)], "from step 5 reaches step 1152921504606846981"),
        (
            [Stage(from_step=5, weights={"s0": 1}, ramp=Ramp(until_tokens=2**64))],
            "from step 5 reaches step 192153584101141163, and a run has at most 2^53 tokens",
        ),
        ([Stage(from_step=5, order="grow-p3")], "from step 5: order is 'grow-p3'; it must be one"),
        ([Stage(from_step=5, order="sequential")], "cannot be both sequential and shuffled"),
        ([Stage(from_tokens=500, tokens_per_step=90)], "from step 6: a draw of 90 tokens cannot"),
        ([Stage(from_step=5, mix="micro_step")], "step 5: mix='micro_step' and micro_step_tokens"),
        (
            [Stage(from_step=2, loss_weights={"x": 1})],
            "step 2 gives a loss weight to 'x', an unknown or ambiguous source; sources",
        ),
        (
            [Stage(from_step=2, loss_weights={"s0": 0})],
            "step 2: loss weight of 's0' is 0.0; it must",
        ),
        (
            [Stage(from_step=2, loss_weights={"s0": inf})],
            "loss weight of 's0' is inf; it must be a",
        ),
        (
            [Stage(from_step=2, attention_window=8, window_steps=7)],
            "no earlier window to grow from",
        ),
    ],
)
def test_invalid_stages_are_refused_by_name(stages: list[Stage], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schedule_of(*stages)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"from_tokens": 96}, "at from_step or at from_tokens: give one of them"),
        ({"skip_steps": -1}, "the stage from step 5: skip_steps is -1; it must be at least 0"),
        ({"skip_steps": True}, "skip_steps is True; it must be an integer"),
        ({"attention_window": -1}, "attention_window is -1; it must be at least 0"),
        ({"attention_window": 8, "window_steps": -1}, "window_steps is -1; it must be at least"),
        ({"window_steps": 4}, "window_steps 4 and attention_window None; give the window"),
        ({"weights": {}}, "the stage from step 5 has empty weights; name at least one"),
        ({"exclude": {}}, "the stage from step 5 has an empty exclude; name a source and its"),
    ],
)
def test_invalid_stage_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Stage(from_step=5, **fields)
    assert message in str(refused.value)


REWEIGHT = Stage(from_step=20, weights={"s0": 1, "s1": 1})


@pytest.mark.parametrize(
    ("now", "refusal"),
    [
        ({"weights": [2.0, 3.0]}, r"weights was \[1.0, 3.0\] and is \[2.0, 3.0\]"),
        ({"stages": [replace(REWEIGHT, from_step=19)]}, "first difference is at 19"),
        ({"stages": [replace(REWEIGHT, weights={"s0": 2, "s1": 1})]}, "first difference is at 20"),
        ({"stages": []}, r"stages before step 25 \(the first difference is at 20\)"),
        ({"stages": [Stage(from_step=9, skip_steps=1), REWEIGHT]}, "first difference is at 9"),
        ({"stages": [REWEIGHT, Stage(from_step=24, tokens_per_step=48)]}, "difference is at 24"),
        ({"stages": [REWEIGHT, Stage(from_step=25, tokens_per_step=48)]}, None),
        ({"stages": [REWEIGHT, Stage(from_step=40, order="uniform")]}, None),
        ({"stages": [REWEIGHT, Stage(from_step=30, weights={"s2": 1})], "sources": 3}, None),
    ],
)
def test_the_past_is_never_rewritten(now: dict[str, Any], refusal: str | None) -> None:
    state = json.loads(json.dumps(schedule_of(REWEIGHT).state_dict(25)))
    stages = now.pop("stages", [REWEIGHT])
    changed = schedule_of(*stages, **now)
    if refusal:
        with pytest.raises(ResumeError, match=refusal):
            changed.resume_step(state)
        return
    assert changed.resume_step(state) == 25
    [text] = changed.check_state(state)
    assert text.startswith(f"from step {stages[-1].from_step} on ")
    assert ids(changed, range(25)) == ids(schedule_of(REWEIGHT), range(25))


def test_change_of_the_whole_run_suggests_a_stage() -> None:
    state = schedule_of().state_dict(12)
    with pytest.raises(ResumeError, match="configuration, make the change a stage from step 12 on"):
        schedule_of(tokens_per_step=48).check_state(state)
    edited = schedule_of(Stage(from_step=12, tokens_per_step=48))
    assert edited.check_state(state) == ["from step 12 on tokens_per_step was 96 and is 48"]
    with pytest.raises(ResumeError, match="the first difference is at 12"):
        schedule_of().check_state(edited.state_dict(13))
    [change] = schedule_of().check_state(edited.state_dict(12))
    assert change == "from step 12 on tokens_per_step was 48 and is 96"


def test_only_drawn_sources_are_compared() -> None:
    """Sources drawn later may be replaced or removed; drawn ones may not."""

    def of(sources: list[int], *weights: float, past: dict[str, float] | None = None) -> Schedule:
        pool, names = [POOL[i] for i in sources], NAMES[: len(sources)]
        stages = [Stage(from_step=50, weights=dict.fromkeys(names, 1))]
        if past is not None:
            stages.insert(0, Stage(from_step=4, weights=past))
        return Schedule(pool, names=names, weights=weights, stages=stages, tokens_per_step=96)

    state = of([0, 1, 2], 1, 2, 0).state_dict(9)
    for other in (of([0, 1, 3], 1, 2, 0), of([0, 1], 1, 2), of([0, 1, 2, 3], 1, 2, 0, 0)):
        assert other.resume_step(state) == 9
    for differing in (of([0, 1, 2], 1, 3, 0), of([0, 1, 2], 1, 2, 1)):
        with pytest.raises(ResumeError, match="weights was"):
            differing.check_state(state)
    with pytest.raises(ResumeError, match="indices was"):
        of([0, 3, 2], 1, 2, 0).check_state(state)
    drawn = {"s0": 1.0, "s2": 1.0}
    with pytest.raises(ResumeError, match="indices was"):
        of([0, 1, 3], 1, 2, 0, past=drawn).check_state(
            of([0, 1, 2], 1, 2, 0, past=drawn).state_dict(9)
        )


def test_a_source_may_join_a_run_that_takes_its_sources_by_size() -> None:
    state = Schedule(POOL[:2], tokens_per_step=96).state_dict(9)
    stages = [Stage(from_step=9, weights={"s0": 1, "s1": 1, "s2": 1})]
    how = {"names": NAMES[:3], "weights": [None, None, 0], "stages": stages}
    joined = Schedule(POOL[:3], tokens_per_step=96, **how)
    assert joined.resume_step(state) == 9
    assert ids(joined, range(9)) == ids(Schedule(POOL[:2], tokens_per_step=96), range(9))
    with pytest.raises(ResumeError, match="weights was"):  # it would be drawn from step 0
        Schedule(POOL[:3], tokens_per_step=96).check_state(state)
    with pytest.raises(ConfigError, match="'s0' has no weight, but others do: give all or none"):
        Schedule(POOL[:2], names=NAMES[:2], weights=[None, 1], tokens_per_step=96)


def test_a_manifest_lists_stages_beside_sources(tmp_path: Path) -> None:
    for number in range(2):
        documents = random_documents(packed_lengths(60, 16, number))
        packed_documents(tmp_path / f"d{number}", documents, [8, 16])
    text = """
    sources:
      - {name: web, prefix: d0, index: d0.samples, weight: 1}
      - {name: code, prefix: d1, index: d1.samples, weight: 0}
    attention_window: 4
    stages:
      - {from_tokens: 320, weights: {web: 1, code: 2.5}, attention_window: 16, window_steps: 3}
      - {from_step: 15, tokens_per_step: 64, order: grow-p2, num_cycles: 2}
    """
    path = tmp_path / "run.yaml"
    path.write_text(text)
    packed = open_blend(load_blend(path))
    for data in (packed, pickle.loads(pickle.dumps(packed))):
        schedule = Schedule(data, tokens_per_step=32)
        assert [stage.begin for stage in schedule.stages] == [0, 10, 15]
        assert [stage.weights for stage in schedule.program] == [(1, 0), (1, 2.5), (1, 2.5)]
        assert schedule.stages[2].num_cycles == 2
        windows = [schedule.settings_at(i).window_at(i) for i in (0, 9, 10, 11, 12, 13, 15)]
        assert windows == [4, 4, 4, 8, 12, 16, 16]
        assert (schedule.step(9).sample_ids < packed.samples.bases[1]).all()
    path.write_text(text + "\n    rows_per_block: 8\n    strategy: concat\n")  # a key of hosts
    again = Schedule(open_blend(load_blend(path)), tokens_per_step=32)
    assert again.identity() == Schedule(packed, tokens_per_step=32).identity()
    path.write_text(text.replace("from_step", "form_step"))
    with pytest.raises(ConfigError, match=r"stages\[1\]: unknown key 'form_step'; did you mean"):
        load_blend(path)


def test_loss_weights_are_kept_where_a_stage_does_not_name_them_and_change_no_sample() -> None:
    plain = schedule_of()
    weighed = schedule_of(
        Stage(from_step=2, loss_weights={"s1": 0.5}),
        Stage(from_step=4, loss_weights={"s0": 3}),
        Stage(from_step=5, loss_weights={"s0": 3}),  # no effect
        Stage(from_step=6, loss_weights={"s0": 1, "s1": 1}),
    )
    weights_of_stages = [(stage.begin, stage.loss_weights) for stage in weighed.program]
    assert weights_of_stages == [(0, None), (2, (1.0, 0.5)), (4, (3.0, 0.5)), (6, None)]
    assert ids(weighed, range(12)) == ids(plain, range(12))


def test_fim_rates_are_kept_where_a_stage_does_not_name_them() -> None:
    fim = FimConfig(sentinels=Sentinels(prefix=7, suffix=8, middle=9), rate=0.5)
    stages = [
        Stage(from_step=2, fim_rates={"s1": 0.25}),
        Stage(from_step=4, fim_rates={"s0": 0.75}),
        Stage(from_step=6, fim_rates={"s0": 0.0, "s1": 0.0}),
    ]
    mixture = Mixture(weights=[1.0, 3.0], stages=stages, fim=fim).of(NAMES[:2])
    rates = [stage.fim_rates for stage in resolve(ScheduleConfig(tokens_per_step=96), mixture)]
    assert rates == [(0.5, 0.5), (0.5, 0.25), (0.75, 0.25), None]


def test_label_weights_of_a_step_add_up_over_ranks() -> None:
    schedule = schedule_of(Stage(from_step=1, loss_weights={"s1": 0.25}))
    sampler_arguments = [of_rank(rank, 3, 32, weighted_loss=True) for rank in range(3)]
    ranks = [BucketBatchSampler(schedule, **arguments) for arguments in sampler_arguments]
    plain, weighed = ([b for rank in ranks for b in rank.micro_batches(step)] for step in (0, 1))
    assert not any("step_label_weight" in batch.about() for batch in plain)
    total, samples = 0.0, schedule.samples
    for batch in weighed:
        assert batch.source.tolist() == samples.locate(batch.sample_ids)[0].tolist()
        assert batch.view.loss_weight.tolist() == [[1, 0.25][s] for s in batch.source]
        total += float(samples.count_labels(batch.sample_ids) @ batch.view.loss_weight)
    assert total == pytest.approx(batch.step_label_weight)
    assert 0 < total < batch.num_step_label_tokens


@pytest.mark.parametrize(
    ("field", "values", "change"),
    [
        ("loss_weights", [{"s1": w} for w in (2, 4, 2.5)], "was [1.0, 2.0] and is [1.0, 4.0]"),
        ("attention_window", [16, 0, 8], "was [16, 0, 0, 0] and is None"),
    ],
)
def test_training_settings_are_part_of_the_identity(
    field: str, values: list[Any], change: str
) -> None:
    """It may change from now on, but not for steps already taken."""

    def of(*stages: tuple[int, Any]) -> Schedule:
        return schedule_of(*(Stage(from_step=begin, **{field: value}) for begin, value in stages))

    first, later, other = values
    assert field not in of().identity() and "stages" not in of().identity()
    state = json.loads(json.dumps(of((3, first)).state_dict(5)))
    assert of((3, first)).check_state(state) == []
    assert of((3, first), (5, later)).check_state(state) == [f"from step 5 on {field} {change}"]
    for rewritten in (of(), of((3, other)), of((4, first))):
        with pytest.raises(ResumeError, match=rf"train differently on the samples.*{field} was"):
            rewritten.check_state(state)
    assert "the same samples are drawn" in of().check_state(state, allow_change=[field])[0]
    assert ids(of((3, first)), range(9)) == ids(schedule_of(), range(9))


def test_a_source_joins_with_its_loss_weight() -> None:
    """Also in a run without loss weights before."""
    joined = schedule_of(Stage(from_step=5, weights={"s2": 1}, loss_weights={"s2": 7}), sources=3)
    assert [stage.loss_weights for stage in joined.program] == [None, (1, 1, 7)]
    changes = joined.check_state(json.loads(json.dumps(schedule_of().state_dict(5))))
    assert any("loss_weights" in change for change in changes)


# ---- A run may stop anywhere and resume on other ranks; changes of its data are refused


INDEX = packed_index(500, (16, 32, 64))
OTHER = packed_index(500, (16, 32, 64), seed=1)
TOKENS = 64 * 12


# Ranks and micro batch tokens that divide a step.
WORLDS = [(n, m) for n in (1, 2, 3, 4, 6, 12) for m in (64, 128) if TOKENS // m % n == 0]


@given(
    order=st.sampled_from(["proportional", "grow-p2", "uniform"]),
    cost_window=st.sampled_from([1, 3]),
    legs=st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 9)), min_size=1, max_size=6),
)
def test_chained_runs_equal_one_run(
    order: str, cost_window: int, legs: list[tuple[Any, int]]
) -> None:
    def fresh() -> Schedule:  # every leg is a new process
        return Schedule(INDEX, tokens_per_step=TOKENS, order=order, cost_window=cost_window)

    chained: list[list[int]] = []
    state = fresh().state_dict(0)
    for (size, micro), num_steps in legs:
        schedule = fresh()
        assert schedule.resume_step(json.loads(json.dumps(state))) == len(chained)
        span = {"start_step": len(chained), "num_steps": num_steps}
        steps: list[list[int]] = [[] for _ in range(num_steps)]
        for rank in range(size):
            for batch in BucketBatchSampler(schedule, **of_rank(rank, size, micro, **span)):
                steps[batch.step - len(chained)].extend(batch)
        chained += map(sorted, steps)
        state = schedule.state_dict(len(chained))
    assert chained == [sorted(step) for step in ids(fresh(), range(len(chained)))]


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"seed": 1}),
    ("tokens_per_step", {"tokens_per_step": 2 * TOKENS}),
    ("order", {"order": "uniform"}),
    ("num_cycles", {"num_cycles": 2}),
    ("cost_window", {"cost_window": 2}),
    ("row_tokens", {"row_tokens": 64}),
    ("mix, micro_step_tokens", {"mix": "micro_step", "micro_step_tokens": TOKENS // 2}),
]


@pytest.mark.parametrize(("fields", "change"), CHANGES)
def test_change_of_order_is_refused_or_allowed(fields: str, change: dict[str, Any]) -> None:
    state = Schedule(INDEX, tokens_per_step=TOKENS).state_dict(10)
    changed = Schedule(INDEX, **{"tokens_per_step": TOKENS, **change})
    with pytest.raises(ResumeError) as refused:
        changed.check_state(state)
    assert f"allow_change=({fields})" in str(refused.value)
    for name in fields.split(", "):
        assert f"{name} was {state[name]!r} and is {change[name]!r}" in str(refused.value)
    texts = changed.check_state(state, allow_change=fields.split(", "))
    assert len(texts) == len(fields.split(", ")) and all(": " in text for text in texts)


def test_every_rewritten_stage_is_refused_or_allowed_by_name() -> None:
    """Also if an earlier stage differs and is allowed."""

    def of(tokens: int, weight: float) -> Schedule:
        weights = {"s0": weight, "s1": 1}
        stages = (Stage(from_step=5, tokens_per_step=tokens), Stage(from_step=9, weights=weights))
        return schedule_of(*stages)

    state = of(48, 2).state_dict(20)
    with pytest.raises(ResumeError, match=r"weights was .*first difference is at 5.*\(weights\)"):
        of(144, 3).check_state(state, allow_change=["tokens_per_step"])
    assert len(of(144, 3).check_state(state, allow_change=["tokens_per_step", "weights"])) == 2


def test_other_data_and_other_weights_are_refused() -> None:
    def run(*indices: Any, weights: Any = (1, 2)) -> Schedule:
        return Schedule([*indices], weights=list(weights)[: len(indices)], tokens_per_step=TOKENS)

    state = run(INDEX, OTHER).state_dict(3)
    assert run(INDEX, OTHER).check_state(state) == []
    with pytest.raises(ResumeError, match="weights was"):
        run(INDEX, OTHER, weights=(1, 3)).check_state(state)
    with pytest.raises(ResumeError, match="indices was"):
        run(OTHER, INDEX).check_state(state)
    with pytest.raises(ResumeError, match="indices was"):
        run(OTHER).check_state(run(INDEX).state_dict(3))


def test_state_of_an_older_order_version_is_refused() -> None:
    schedule = Schedule([INDEX, OTHER], weights=[1, 2], tokens_per_step=TOKENS)
    old = {**schedule.state_dict(3), "order_version": 1}
    message = "order_version was 1 and is 3. Continue with the version of megapack that began"
    with pytest.raises(ResumeError, match=message):
        schedule.check_state(old)
    [text] = schedule.check_state(old, allow_change=["order_version"])
    assert "another version of megapack orders samples differently" in text


def test_ranks_cannot_change_within_a_step() -> None:
    def sampler(size: int, micro: int) -> BucketBatchSampler:
        schedule = Schedule(INDEX, tokens_per_step=TOKENS)
        return BucketBatchSampler(schedule, **of_rank(0, size, micro))

    begun = iter(sampler(2, 128))
    whole = [batch.sample_ids.tolist() for batch in sampler(2, 128)]
    next(begun)
    state = json.loads(json.dumps(begun.state_dict()))
    same = iter(sampler(2, 128))
    same.load_state_dict(state)
    assert [batch.sample_ids.tolist() for batch in same] == whole[1:]
    with pytest.raises(ResumeError, match="micro step 1 of a step assigned with"):
        iter(sampler(4, 64)).load_state_dict(state)  # the same number of micro steps, other samples
    for _ in range(sampler(2, 128).num_micro_steps(0) - 1):
        next(begun)
    other = iter(sampler(4, 64))
    other.load_state_dict(begun.state_dict())
    assert next(other).step == 1


@pytest.mark.parametrize("change", [{"tokens_per_step": 48}, {"skip_steps": 2}])
def test_a_step_in_progress_cannot_be_edited(change: dict[str, Any]) -> None:
    """It would mix two programs; later steps may change."""

    def begin(*stages: Stage) -> Any:
        return iter(BucketBatchSampler(schedule_of(*stages), **of_rank(0, 1, 48), num_steps=9))

    begun = begin()
    taken = [next(begun) for _ in range(3)]  # two in a step
    state = begun.state_dict()
    assert (state["step"], state["micro_step"]) == (1, 1) and taken[2].num_micro_steps == 2
    with pytest.raises(ResumeError, match=r"before step 2|from step 2 on"):
        begin(Stage(from_step=1, **change)).load_state_dict(state)
    later = begin(Stage(from_step=2, **change))
    later.load_state_dict(state)
    assert list(next(later)) == list(next(begun))


GOLDEN = Path(__file__).parents[1] / "golden" / "states"


def test_a_golden_state_is_written_and_resumed() -> None:
    """The state of a run whose second stage begins among skipped steps, as of ORDER_VERSION 3."""
    lengths = ([16] * 40, [16] * 24)
    index = [pack(np.array(of_source, np.int32), "bucket", buckets=(16,)) for of_source in lengths]
    edited = (
        Stage(from_step=8, skip_steps=4),
        Stage(from_step=10, weights={"code": 1.0}),
    )
    options: dict[str, Any] = {"weights": [1.0, 1.0], "names": ["web", "code"]}
    schedule = Schedule(index, tokens_per_step=64, seed=1, stages=edited, **options)
    golden = json.loads((GOLDEN / "version_3.json").read_text())
    assert schedule.state_dict(20) == golden
    assert schedule.resume_step(golden) == 20
    fewer = replace(edited[0], skip_steps=2)
    other = Schedule(index, tokens_per_step=64, seed=1, stages=(fewer, edited[1]), **options)
    with pytest.raises(ResumeError, match=r"skipped was .* skip_steps was 4 and is 2"):
        other.check_state(golden)


def test_a_new_stage_among_skipped_steps_is_refused_after_the_skip() -> None:
    """The stage would change which draws the steps already taken have skipped."""
    index = [pack([16] * count, "bucket", buckets=(16,)) for count in (40, 24)]

    def run(*later: Stage) -> Schedule:
        how: dict[str, Any] = {"weights": [1.0, 1.0], "names": ["web", "code"]}
        stages = (Stage(from_step=8, skip_steps=4), *later)
        return Schedule(index, tokens_per_step=64, seed=1, stages=stages, **how)

    among, behind = (run(Stage(from_step=at, weights={"code": 1.0})) for at in (10, 12))
    assert among.resume_step(run().state_dict(8)) == 8
    with pytest.raises(ResumeError, match=r"skipped was None and is"):
        among.resume_step(run().state_dict(9))
    assert behind.resume_step(run().state_dict(9)) == 9


@pytest.mark.parametrize("state", [{}, {"step": -1}, {"model": 0}, {"step": 3, "epoch": 1}])
def test_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ResumeError, match=r"not the state of a schedule .*give what state_dict"):
        schedule_of().resume_step(state)


def test_another_step_size_continues_at_the_tokens_seen() -> None:
    state = Schedule(INDEX, tokens_per_step=TOKENS).state_dict(11)
    assert len(json.dumps(state)) < 400 and state["step"] == 11
    larger = Schedule(INDEX, tokens_per_step=2 * TOKENS)
    assert larger.resume_step(state, allow_change=["tokens_per_step"]) == 5
    with pytest.raises(ConfigError, match="unknown field 'sed'; did you mean 'seed'"):
        larger.resume_step(state, allow_change=["sed"])

"""Attention windows change boundaries and nothing else; ramps of weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.data import (
    BucketBatchSampler,
    PackedDataset,
    Ramp,
    Schedule,
    Stage,
    build_loader,
    plan_run,
)
from megapack.data.batch import Bounds, cut_bounds, cut_lengths
from megapack.data.program import ramp_pieces
from megapack.data.stage_settings import Window
from megapack.data.steps import StepView
from megapack.errors import ConfigError, ResumeError
from megapack.packing import pack
from tests.data.corpora import (
    of_rank,
    packed_documents,
    packed_lengths,
    random_documents,
    samples_of_buckets,
    write_documents,
)
from tests.data.test_stages import schedule_of
from tests.reference.gather import pieces


@settings(max_examples=100)
@given(
    lists=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=3),
    window=st.integers(1, 24),
    tail=st.integers(0, 2),
    spare=st.integers(0, 3),
)
def test_segments_are_cut(lists: list[list[int]], window: int, tail: int, spare: int) -> None:
    longest = max(map(len, lists))
    flat = [length for lengths in lists for length in lengths]
    rows = [np.cumsum([0, *lengths, *[0] * (longest - len(lengths) + tail)]) for lengths in lists]
    sources = np.arange(len(flat), dtype=np.int32)
    bounds = Bounds(np.concatenate(rows).astype(np.int32), None, sources, 20)
    expected = [[piece for n in lengths for piece in pieces(n, window)] for lengths in lists]
    entries = max(map(len, expected)) + 1 + spare
    cut = cut_bounds(bounds, window, num_rows=len(lists), entries=entries)
    for row, lengths in zip(cut.cu_seqlens.reshape(len(lists), entries), expected, strict=True):
        whole = np.cumsum([0, *lengths])
        assert row.tolist() == [*whole, *[whole[-1]] * (entries - len(whole))]
    assert cut.max_seqlen == max(map(max, expected)) <= window
    of_piece = [i for i, n in enumerate(flat) for _ in pieces(n, window)]
    assert cut.dataset_ids.tolist() == of_piece
    assert cut.cu_seqlens.dtype == np.int32
    of_all = sorted(piece for row in expected for piece in row)
    assert sorted(cut_lengths(np.array(flat), window)) == of_all
    with pytest.raises(ValueError, match="raise num_cu_seqlens"):
        cut_bounds(bounds, window, num_rows=len(lists), entries=entries - spare - 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    prefix = tmp_path_factory.mktemp("window") / "d"
    dataset = packed_documents(prefix, random_documents(packed_lengths(200, 64, seed=5)), [32, 64])
    return PackedDataset(dataset, f"{prefix}.samples")


def test_window_of_a_step_reaches_batches_and_assigned_work(data: PackedDataset) -> None:
    index = data.samples.indices[0]
    stages = [Stage(from_step=2, attention_window=16), Stage(from_step=4, attention_window=0)]
    schedule = Schedule(index, tokens_per_step=512, stages=stages)
    plain = Schedule(index, tokens_per_step=512)
    for cu_seqlens in ("exact", "padded"):
        batches, shapes = [], set()
        for rank in range(2):
            arguments = of_rank(rank, 2, num_steps=6, cu_seqlens=cu_seqlens)
            batches += list(build_loader(data, schedule, **arguments))
        for batch in batches:
            shapes.add((batch["capacity"], batch["cu_seqlens"].shape))
            assert batch.get("attention_window") == (16 if batch["step"] in (2, 3) else None)
            longest = int(batch["cu_seqlens"].diff().max())
            assert batch["max_seqlen"] == longest
            assert longest <= (16 if batch["step"] in (2, 3) else 64)
        assert max(b["max_seqlen"] for b in batches) > 16
        if cu_seqlens == "padded":
            assert len(shapes) == 2, "a compiled model would be compiled again for a bucket"
    for step in range(6):
        assert schedule.step(step).sample_ids.tolist() == plain.step(step).sample_ids.tolist()
    sampler = BucketBatchSampler(schedule, **of_rank(0, 2))
    assert sampler.imbalance(2)[0].attention <= 1.1


def test_a_window_grows_linearly_across_stages() -> None:
    schedule = schedule_of(
        Stage(from_step=10, attention_window=8),
        Stage(from_step=20, attention_window=64, window_steps=70),
        Stage(from_step=30, tokens_per_step=48),
        Stage(from_step=60, attention_window=8, window_steps=4),
        Stage(from_step=80, attention_window=0),
    )

    def at(step: int) -> int | None:
        return schedule.settings_at(step).window_at(step)

    grown = [at(step) for step in (0, 9, 10, 19, 20, 29, 30, 39, 40, 59)]
    assert grown == [None, None, 8, 8, 8, 8, 16, 16, 24, 32]
    assert [at(step) for step in (60, 61, 62, 63, 64, 79, 80)] == [40, 32, 24, 16, 8, 8, None]
    assert schedule.smallest_window == 8
    assert str(schedule.settings_at(25).window) == "8 at step 20 to 64 at step 90"
    window = Window(8192, 512, 1000, 5000)
    values = [window.at(step) for step in range(1000, 6001)]
    assert values == sorted(values) and {v % 512 for v in values} == {0}
    assert (values[0], values[-2], values[-1]) == (512, 7680, 8192)


def test_invalid_windows_are_refused(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "d", random_documents([9, 5, 7]))
    index = pack(documents.document_lengths, "bucket", buckets=[16], alignment=4)
    data = PackedDataset(documents, index, alignment=4, attention_window=8)
    with pytest.raises(ConfigError, match="micro batch: attention_window is -4; it must be above"):
        data.micro_batch([0], view=StepView(window=-4))
    stages = [Stage(from_step=3, attention_window=10)]
    for options in ({"attention_window": 10}, {"stages": stages}):
        with pytest.raises(ConfigError, match="attention_window 10 is not a multiple of the align"):
            PackedDataset(documents, index, alignment=4, **options)  # type: ignore[arg-type]


# ---- Ramps: weights follow a line or a cosine in pieces, within the documented bound


BIG = [samples_of_buckets({8: 300, 16: 100 + number}) for number in range(3)]
NAMES = ["web", "code", "math"]


def progress(shape: str, x: float) -> float:
    return x if shape == "linear" else (1 - math.cos(math.pi * x)) / 2


@given(
    shape=st.sampled_from(["linear", "cosine"]),
    pieces=st.integers(1, 40),
    begin=st.integers(1, 10**6),
    length=st.integers(1, 5000),
    weights=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4).filter(
        lambda pairs: sum(a for a, _ in pairs) > 0.1 and sum(b for _, b in pairs) > 0.1
    ),
)
def test_pieces_have_the_mean_shares_of_their_steps(
    shape: Any, pieces: int, begin: int, length: int, weights: list[tuple[float, float]]
) -> None:
    before, after = ([pair[i] for pair in weights] for i in range(2))
    ramp = Ramp(until_step=begin + length, shape=shape, pieces=pieces)
    *ramp_parts, last = ramp_pieces(ramp, begin, begin + length, before, after)
    assert last == (begin + length, tuple(after))
    starts = [start for start, _ in ramp_parts] + [begin + length]
    assert starts[0] == begin and len(ramp_parts) == min(pieces, length)
    assert max(np.diff(starts)) - min(np.diff(starts)) <= 1
    old, new = np.array(before) / sum(before), np.array(after) / sum(after)
    for (low, shares), high in zip(ramp_parts, starts[1:], strict=True):
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        middles = low - begin + (np.arange(2000) + 0.5) / 2000 * (high - low)
        mean = np.mean([progress(shape, x / length) for x in middles.tolist()])
        assert np.allclose(shares, old + (new - old) * mean, atol=1e-7)


@pytest.mark.parametrize(("shape", "factor"), [("linear", 1.0), ("cosine", math.pi / 2)])
@pytest.mark.parametrize("pieces", [4, 32])
def test_draws_follow_the_ramp_within_the_bound(shape: Any, factor: float, pieces: int) -> None:
    """Count tokens of every source step by step and compare with the integral of the ramp."""
    begin, length, tokens = 10, 640, 256
    ramp = Ramp(until_step=begin + length, shape=shape, pieces=pieces)
    stage = Stage(from_step=begin, weights={"web": 1, "code": 2, "math": 1}, ramp=ramp)
    schedule = ramped(stage, weights=[8, 2, 0], tokens_per_step=tokens, seed=5)
    old, new = np.array([0.8, 0.2, 0.0]), np.array([0.25, 0.5, 0.25])
    taken, wanted, worst = np.zeros(3), np.zeros(3), 0.0
    for step in range(begin + length + 50):
        content = schedule.step(step)
        source, _ = schedule.samples.locate(content.sample_ids)
        taken += np.bincount(source, minlength=3) * content.capacity
        x = [min(max((step + d - begin) / length, 0), 1) for d in (0, 0.5, 1)]
        simpson = np.dot([1, 4, 1], [progress(shape, at) for at in x]) / 6
        wanted += tokens * (old + (new - old) * simpson)
        worst = max(worst, np.abs(taken - wanted).max())
    between = np.abs(new - old).max() * length / (8 * pieces**2) * factor * tokens
    assert worst < between + 1.69 * (pieces + 2) * (8 + 16)
    assert worst < 0.02 * length * tokens  # the bound is tight
    plan = plan_run(schedule, begin + length)
    assert f"steps 10 to {begin + length - 1}: a ramp in {pieces} pieces" in str(plan)


def ramped(*stages: Stage, **options: Any) -> Schedule:
    arguments = {"weights": [1.0, 3.0, 0.0], "tokens_per_step": 96, "seed": 1, **options}
    return Schedule(BIG, names=NAMES, stages=stages, **arguments)


RAMP = Stage(from_step=10, weights={"math": 1}, ramp=Ramp(until_step=50, pieces=4))


def begins(schedule: Schedule) -> list[int]:
    return [stage.begin for stage in schedule.stages]


def test_a_ramp_may_end_at_a_number_of_tokens() -> None:
    ramp = Ramp(until_tokens=96 * 10 + 192 * 40 - 1, pieces=4)
    by_tokens = replace(RAMP, tokens_per_step=192, ramp=ramp)
    assert begins(ramped(by_tokens)) == begins(ramped(RAMP)) == [0, 10, 20, 30, 40, 50]


def test_a_stage_inside_a_ramp_ends_it_only_with_weights() -> None:
    plain = ramped(RAMP)
    faster = ramped(RAMP, Stage(from_step=25, tokens_per_step=48))
    assert begins(faster) == [0, 10, 20, 25, 30, 40, 50]
    at = {stage.begin: stage for stage in faster.program}
    assert at[25].weights == at[20].weights and at[25].config.tokens_per_step == 48
    later = [stage.weights for stage in plain.program if stage.begin >= 30]
    assert [at[b].weights for b in (30, 40, 50)] == later
    assert at[50].config.tokens_per_step == 48
    on_an_end = ramped(RAMP, Stage(from_step=30, tokens_per_step=48))
    assert begins(on_an_end) == begins(plain)
    assert [s.weights for s in on_an_end.program] == [s.weights for s in plain.program]
    ended = ramped(RAMP, Stage(from_step=25, weights={"web": 1}))
    assert begins(ended) == [0, 10, 20, 25]
    turned = Stage(from_step=25, weights={"web": 1}, ramp=Ramp(until_step=29, pieces=2))
    again = ramped(RAMP, turned)
    assert begins(again) == [0, 10, 20, 25, 27, 29]
    reached = np.array(again.program[2].weights)
    assert np.allclose(again.program[3].weights, 0.75 * reached + 0.25 * np.array([1, 0, 0]))


def test_a_run_may_be_edited_in_the_middle_of_a_ramp() -> None:
    state = ramped(RAMP).state_dict(25)
    changes = ramped(RAMP, Stage(from_step=25, weights={"web": 1})).check_state(state)
    assert changes and all("weights was" in text for text in changes)
    longer = replace(RAMP, ramp=Ramp(until_step=60, pieces=4))
    with pytest.raises(ResumeError, match="weights was"):
        ramped(longer).check_state(state)


def test_a_ramp_to_the_present_weights_changes_nothing() -> None:
    same = Stage(from_step=10, weights={"web": 0.25, "code": 0.75}, ramp=Ramp(until_step=50))
    later = Stage(from_step=60, weights={"math": 1})
    assert begins(ramped(same, later, weights=[0.25, 0.75, 0.0])) == [0, 60]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ramp": {"until_step": 10}}, "begins at step 10 and its ramp ends at 10"),
        ({"ramp": {"until_tokens": 5}}, "its ramp ends at 1: make it end"),
        ({"ramp": {}}, "ends at until_step or at until_tokens"),
        ({"ramp": {"until_step": 9, "pieces": 0}}, "ramp: pieces is 0; it must be above 0"),
        ({"weights": None, "ramp": {"until_step": 20}}, "has a ramp and no weights"),
        ({"order": "grow-p2", "ramp": {"until_step": 20}}, "order grow-p2, which would restart"),
    ],
)
def test_invalid_ramps_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ramp = Ramp(**change.pop("ramp"))
        stage = {"from_step": 10, "weights": {"math": 1}, **change, "ramp": ramp}
        ramped(Stage(**stage))
    assert message in str(caught.value)


def test_ramps_need_weights_at_their_begin() -> None:
    with pytest.raises(ConfigError, match="the sources have no weights before it"):
        Schedule(BIG, names=NAMES, tokens_per_step=96, stages=[RAMP])

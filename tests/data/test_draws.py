"""The order of draws: what ``locate`` says of one draw is what counting all before it says."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from megapack.data import ORDERS
from megapack.data.bucket_order import DrawOrder

draw_orders = st.builds(
    lambda sizes, order, num_cycles, seed: DrawOrder(
        samples_per_epoch=tuple(samples for samples, _ in sizes),
        samples_per_draw=tuple(per_draw for _, per_draw in sizes),
        order=ORDERS[order],
        num_cycles=num_cycles,
        seed=seed,
    ),
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=6),
    order=st.sampled_from(sorted(ORDERS)),
    num_cycles=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 2**63),
)


@given(draws=draw_orders, end=st.integers(0, 150))
def test_every_bucket_takes_its_turns_one_after_the_other(draws: DrawOrder, end: int) -> None:
    turns: Counter[int] = Counter()
    for draw in range(end):
        bucket, turn = draws.locate(draw)
        assert turn == turns[bucket]
        turns[bucket] += 1
    buckets = draws.buckets(0, end).tolist()
    assert buckets == [draws.locate(draw)[0] for draw in range(end)]
    num_buckets = len(draws.samples_per_draw)
    assert draws.counts(end).tolist() == [turns[b] for b in range(num_buckets)]


@given(draws=draw_orders, cycles=st.integers(0, 10))
def test_cycles_cover_their_share_of_the_samples_with_no_draw_too_many(
    draws: DrawOrder, cycles: int
) -> None:
    """drawn(b, c) = ceil(c * samples / (cycles per epoch * samples per draw)), and no rounding."""
    counts = draws.counts(draws.begin(cycles)).tolist()
    for b, (samples, per_draw) in enumerate(
        zip(draws.samples_per_epoch, draws.samples_per_draw, strict=True)
    ):
        needed = ceil(Fraction(cycles * samples, draws.num_cycles * per_draw))
        assert counts[b] == draws.drawn(b, cycles) == needed


@given(draws=draw_orders, far=st.integers(10**6, 10**15), back=st.integers(0, 200))
def test_a_draw_far_ahead_stands_where_counting_from_a_cycle_before_it_arrives(
    draws: DrawOrder, far: int, back: int
) -> None:
    """Induction step of the test above, anywhere: the next turn of a bucket is one more."""
    begin = far - back
    counts = draws.counts(begin).tolist()
    for draw in range(begin, begin + 40):
        bucket, turn = draws.locate(draw)
        assert turn == counts[bucket]
        counts[bucket] += 1
    assert draws.counts(begin + 40).tolist() == counts

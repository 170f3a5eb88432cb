"""Every strategy is its plain-Python definition, segment by segment."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_inputs import ADVERSARIAL, as_packing, lengths, packings, same_arrays
from reference import DEFINITIONS
from reference.random import DOCUMENTS, random_for, shuffled

from megapack import _core
from megapack.packing import STRATEGIES, pack

NAMES = sorted(STRATEGIES)


def test_every_strategy_has_a_definition_with_the_same_parameters() -> None:
    assert sorted(DEFINITIONS) == NAMES
    for name, definition in DEFINITIONS.items():
        if name == "bucket_v0":  # passes everything on to bucket_llm
            assert STRATEGIES[name].parameters == STRATEGIES["bucket_llm"].parameters
            continue
        signature = inspect.signature(definition).parameters
        defaults = {p.name: p.default for p in signature.values() if p.kind is p.KEYWORD_ONLY}
        defaults.pop("pairs", None)
        assert defaults == {p.name: p.default for p in STRATEGIES[name].parameters}, name


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_core_equals_definition(name: str, data: st.DataObject) -> None:
    documents = data.draw(lengths, label="lengths")
    chosen: dict[str, Any] = data.draw(packings(name), label="packing")
    defined = DEFINITIONS[name](documents, **chosen)
    for threads in (1, 3):
        index = pack(np.array(documents, np.int32), name, threads=threads, **chosen)
        assert as_packing(index) == defined


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("documents", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
def test_core_equals_definition_on_adversarial_lengths(name: str, documents: list[int]) -> None:
    buckets = [4, 8, 16] if STRATEGIES[name].many_buckets else [16]
    defined = DEFINITIONS[name](documents, buckets, 1)
    assert as_packing(pack(documents, name, buckets=buckets, seed=1)) == defined


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["paper", "published"])
def test_presets_are_the_parameters_of_the_papers(name: str, preset: str) -> None:
    documents = [0, 700, 4000, 513, 90, 1500, 1024, 66, 2049, 300, 30, 801]
    buckets = [256, 512, 1024] if STRATEGIES[name].many_buckets else [512]
    if preset not in STRATEGIES[name].presets:
        with pytest.raises(ValueError, match=f"{name!r} has no preset {preset!r}"):
            pack(documents, name, buckets=buckets, preset=preset)
        return
    chosen = STRATEGIES[name].presets[preset](buckets[-1])
    index = pack(documents, name, buckets=buckets, preset=preset)
    assert chosen.items() <= index.parameters.items()
    assert as_packing(index) == DEFINITIONS[name](documents, buckets, 0, **chosen)


def test_a_shuffle_of_several_groups_is_the_documented_one() -> None:
    count = 70_000
    index = pack(np.ones(count, np.int32), "concat", buckets=1, seed=5, threads=2)
    order = shuffled(count, random_for(5, DOCUMENTS))
    assert index.segment_document.tolist() == order
    assert sorted(order) == list(range(count))


@pytest.mark.parametrize("name", NAMES)
def test_a_million_documents_come_out_alike_on_any_number_of_threads(name: str) -> None:
    # More documents than one task handles (2**20), so that tasks meet in the middle of samples.
    documents = np.random.default_rng(0).integers(0, 300, 2_200_000).astype(np.int32)
    documents[::1000] *= 50
    buckets = [64, 256, 1024] if STRATEGIES[name].many_buckets else [1024]
    parameters = {"pool_size": 300_000} if name.startswith("bucket_") else {}
    if name == "bucket_naive":
        parameters = {}
    single = pack(documents, name, buckets=buckets, seed=3, **parameters)
    single.metrics()  # asserts that every token is accounted for
    for threads in (2, 7):
        other = pack(documents, name, buckets=buckets, seed=3, threads=threads, **parameters)
        assert same_arrays(single, other), threads


@pytest.mark.parametrize("name", NAMES)
def test_wide_document_numbers_and_lengths_give_the_same_samples(name: str) -> None:
    from megapack.packing.strategies import Request  # noqa: PLC0415

    documents = np.random.default_rng(1).integers(0, 90, 500)
    buckets = [8, 16, 32] if STRATEGIES[name].many_buckets else [32]
    strategy = STRATEGIES[name]
    packed = [
        strategy.run(
            Request(
                lengths=_core.DocumentLengths(documents.astype(dtype)),
                buckets=buckets,
                parameters=strategy.resolve({}),
                seed=2,
                threads=2,
                wide_ids=wide,
            )
        )
        for dtype in (np.int32, np.int64)
        for wide in (False, True)
    ]
    types = [(p["segment_document"].dtype, p["segment_begin"].dtype) for p in packed]
    assert types == [("i4", "i4"), ("i8", "i4"), ("i8", "i8"), ("i8", "i8")]
    for other in packed[1:]:
        for key, value in packed[0].items():
            assert np.array_equal(value, other[key]), key


def test_a_document_longer_than_int32_is_cut_where_it_should_be() -> None:
    capacity = 1 << 20
    documents = np.array([3, (1 << 31) + 5, 7], np.int64)
    index = pack(documents, "concat", buckets=capacity, shuffle=False)
    assert index.segment_begin.dtype == np.int64
    assert index.segment_document.dtype == np.int32
    assert index.sample(index.num_samples - 1)[1] == [(1, (1 << 31) - 3, 8), (2, 0, 7)]
    assert index.metrics()["num_tokens"] == (1 << 31) + 15


def test_five_documents_need_no_memory_for_all_lengths_that_a_bucket_holds() -> None:
    """Tables of 2^24 lengths have 128 MiB each."""
    program = """
import resource, numpy as np
from megapack import pack
lengths = np.array([5, 7, 100, 2, 9], np.int32)
pack(lengths, "bucket", buckets=[128])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for strategy in ("bucket", "bucket_llm", "length_sorted"):
    buckets = [1 << 24] if strategy == "length_sorted" else [64, 1 << 24]
    index = pack(lengths, strategy, buckets=buckets, threads=2)
    assert sorted(index.segment_length.tolist()) == [2, 5, 7, 9, 100], strategy
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 32 << 10, (strategy, grown)
"""
    subprocess.run([sys.executable, "-c", program], check=True)

"""Where a peer does the same, the result is the same: TRL's best fit, Megatron's sample index."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from peers import peer

from megapack.packing import pack

helpers = peer("megatron.core.datasets.helpers")
_pack_bfd = peer("trl.data_utils")._pack_bfd


def documents(seed: int, count: int = 3000) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.exp(generator.normal(4, 1, count)).astype(np.int32) + 1


@pytest.mark.parametrize("capacity", [64, 257, 1024])
def test_best_fit_decreasing_makes_the_samples_of_trl(capacity: int) -> None:
    lengths = documents(capacity)
    tokens = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    theirs = _pack_bfd(table, capacity, "split")["seq_lengths"].to_pylist()

    index = pack(lengths, "best_fit_decreasing", buckets=capacity)
    ours = [[n for _, _, n in index.sample(i)[1]] for i in range(index.num_samples)]
    # Which of several equally long documents goes where is open there (its sort is not stable).
    assert sorted(ours) == sorted(theirs)
    assert len(ours) > 100


@pytest.mark.parametrize("capacity", [64, 257, 1024])
def test_concat_in_file_order_begins_samples_where_megatron_does(capacity: int) -> None:
    lengths = documents(capacity)
    order = np.arange(len(lengths), dtype=np.int32)
    num_tokens = int(lengths.sum())
    theirs = helpers.build_sample_idx(lengths, order, capacity, 1, num_tokens, True, False)
    index = pack(lengths, "concat", buckets=capacity, shuffle=False, last="drop")
    assert index.num_samples == len(theirs) - 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    first = index.sample_segment_offsets[:-1]
    ours = offsets[index.segment_document[first]] + index.segment_begin[first]
    assert np.array_equal(ours, offsets[theirs[:-1, 0]] + theirs[:-1, 1])

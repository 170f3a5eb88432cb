"""Wrong arguments of pack() are refused in words a person can act on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megapack.errors import ConfigError, DataError
from megapack.packing import STRATEGIES, pack


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "bucket_lm"}, "no packing strategy 'bucket_lm'; did you mean 'bucket_llm'"),
        ({"pool_sise": 3}, "'bucket' has no parameter 'pool_sise'; did you mean 'pool_size'"),
        ({"preset": "papr"}, "no preset 'papr' .known: none"),
        ({"promote": "yes"}, "promote is 'yes'; it must be one of auto, on, off"),
        ({"pool_size": 0}, "pool_size is 0; it must be from 1 to"),
        ({"pool_size": 2.5}, "pool_size is 2.5; it must be of type int"),
        ({"max_segments": 0}, "max_segments is 0; it must be from 1 to"),
        ({"max_segments": 4, "refine": True}, "any number of segments, and max_segments is 4"),
        ({"padding_threshold": 1.5}, "padding_threshold is 1.5; it must be from 0.0 to 1.0"),
        ({"padding_threshold": float("nan")}, "padding_threshold is nan"),
        ({"strategy": "bucket_naive", "shuffle": 1}, "shuffle is 1; it must be True or False"),
        ({"strategy": "concat"}, "samples of one length; buckets is .8, 16."),
        ({"buckets": []}, "buckets is empty"),
        ({"buckets": [0]}, "bucket is 0; it must be from 1 to 16,777,216"),
        ({"buckets": [True]}, "bucket is True; it must be an integer"),
        ({"buckets": [8, 8]}, "names a capacity twice"),
        ({"buckets": [8.5]}, "bucket is 8.5; it must be an integer"),
        ({"buckets": [1 << 30]}, "bucket is 1,073,741,824; it must be from 1 to 16,777,216"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
        ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
        ({"seed": True}, "seed is True; it must be an integer"),
        ({"seed": 1 << 64}, "seed is 18,446,744,073,709,551,616; it must be from 0"),
        ({"threads": 0}, "threads is 0; it must be from 1"),
        ({"threads": 1.5}, "threads is 1.5; it must be an integer"),
        ({"threads": 1 << 40}, "threads is 1,099,511,627,776; it must be from 1"),
        ({"pool_size": 1 << 63}, "pool_size is 9223372036854775808; it must be from 1 to"),
        ({"lengths": [[1, 2]]}, "it must be a one-dimensional array of integers"),
        ({"lengths": [1.5]}, "it must be a one-dimensional array of integers"),
        ({"strategy": "concat", "buckets": 8, "atom_size": 3}, "atom_size is 3 and the capacity 8"),
        ({"strategy": "decompose", "buckets": [12]}, "bucket is 12; decompose needs powers of two"),
        ({"strategy": "decompose", "min_bucket": 32}, "min_bucket is 32; the largest bucket is 16"),
    ],
)
def test_wrong_arguments_name_the_value_and_the_limit(arguments: dict, message: str) -> None:
    call: dict[str, Any] = {"lengths": [1, 2, 3], "buckets": [8, 16], **arguments}
    kind = DataError if "lengths" in arguments else ConfigError
    with pytest.raises(kind, match=message):
        pack(**call)


def test_a_negative_length_names_the_document() -> None:
    for dtype in (np.int32, np.int64):
        with pytest.raises(DataError, match="document 2 has length -7"):
            pack(np.array([1, 2, -7, 3], dtype), buckets=8)


def test_an_unsigned_length_beyond_int64_is_printed_as_it_is() -> None:
    with pytest.raises(DataError, match="the longest has 9223372036854775813"):
        pack(np.array([1, (1 << 63) + 5], np.uint64), buckets=8)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64, np.uint32])
def test_lengths_of_any_integer_type_are_the_same_lengths(dtype: type) -> None:
    documents = np.array([3, 9, 200, 1], dtype)
    index = pack(documents[::-1], buckets=[8, 16])  # a view with a stride, too
    assert index.fingerprint == pack([1, 200, 9, 3], buckets=(16, 8)).fingerprint


def test_the_lengths_given_are_not_changed_and_not_copied() -> None:
    documents = np.arange(100, dtype=np.int32)
    documents.flags.writeable = False
    for name in STRATEGIES:
        pack(documents, name, buckets=128).metrics()
    assert documents.tolist() == list(range(100))


def test_progress_is_told_and_may_stop_the_packing() -> None:
    seen: list[tuple[int, int]] = []
    documents = np.ones(3_000_000, np.int32)
    for name in STRATEGIES:
        seen.clear()
        pack(documents, name, buckets=64, progress=lambda done, total: seen.append((done, total)))
        assert seen and seen[-1][0] == seen[-1][1], name
        assert seen == sorted(seen), name

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(documents, "bucket", buckets=64, threads=2, progress=stop)

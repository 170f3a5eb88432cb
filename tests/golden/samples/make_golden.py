"""Writes version_2.samples, version_3.samples, of groups, version_4.samples, of trees, and
version_5.samples, of second sizes. Run it only to add a golden file for a new version of the
format:

    python tests/golden/samples/make_golden.py

``test_packing_index.py`` reads every golden file, and checks that what is written today has the
same bytes as the newest (but for the version of megapack in the header).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megapack.packing import SampleIndex, pack

LENGTHS = np.array([5, 0, 12, 3, 40, 8, 8, 1, 16, 2, 7, 7, 31], np.int32)
SOURCE = {"fingerprint": "0123456789abcdef", "prefix": "golden"}
GROUPS = np.array([1, 1, -1, 4, 4, 1, 4, 2, 2, 9, 9, -1, 9])
FILES = Path(__file__).parent


def golden_index() -> SampleIndex:
    return pack(LENGTHS, "bucket_llm", buckets=[8, 16], seed=11, pool_size=6)


def golden_groups() -> SampleIndex:
    return pack(LENGTHS, "bucket", buckets=[8, 16], seed=11, groups=GROUPS)


def golden_trees() -> SampleIndex:
    ends = np.append(0, np.cumsum(LENGTHS))
    tokens = np.concatenate([np.arange(n) // (i % 4 + 2) for i, n in enumerate(LENGTHS)])
    return pack(LENGTHS, "tree", buckets=48, tokens=(tokens, ends), groups=GROUPS)


def golden_second() -> SampleIndex:
    return pack(LENGTHS, buckets=[8, 16], seed=11, second=LENGTHS % 5, second_capacity=[4, 6])


if __name__ == "__main__":
    golden_index().save(FILES / "version_2.samples", source=SOURCE)
    golden_groups().save(FILES / "version_3.samples", source=SOURCE)
    golden_trees().save(FILES / "version_4.samples", source=SOURCE)
    golden_second().save(FILES / "version_5.samples", source=SOURCE)

"""Writes version_2.samples. Run it only to add a golden file for a new version of the format:

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
FILE = Path(__file__).with_name("version_2.samples")


def golden_index() -> SampleIndex:
    return pack(LENGTHS, "bucket_llm", buckets=[8, 16], seed=11, pool_size=6)


if __name__ == "__main__":
    golden_index().save(FILE, source=SOURCE)

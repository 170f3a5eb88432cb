"""Leak detector: does a document of a packed batch depend on the others?

    report = probe(model, batch)           # batch has input_ids, and cu_seqlens or position_ids
    print(report)
    # 2 documents leak (5 forward passes, 0.4 s; rounding explains 0.001 of a change)
    # document 0 -> 1 (forward, from position 37): 0.41, first in layers.0.self_attn: attention_mask
    report.raise_if_leaking()              # LeakError

The package needs torch only: no other package, and no compiled extension.
"""

from __future__ import annotations

from megapack.probe.boundaries import SegmentPlaces
from megapack.probe.detector import probe
from megapack.probe.report import Leak, LeakError, Report
from megapack.probe.rows import check_rows
from megapack.probe.watch import LeakCallback, watch

__all__ = [
    "Leak",
    "LeakCallback",
    "LeakError",
    "Report",
    "SegmentPlaces",
    "check_rows",
    "probe",
    "watch",
]

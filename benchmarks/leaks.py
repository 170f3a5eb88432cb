"""``make bench-leaks``: which attention keeps documents apart, by architecture of transformers.

One row per architecture and way of passing boundaries, with a column per attention implementation:
``safe``, ``leaks: LAYER`` (the first that leaks) or ``refused`` (an error, or not offered), in
float32; what is safe is probed in bfloat16, too, and named if it differs. It is ``megapack-probe
--all`` (megapack/attention/leak_table.py). A run that is stopped continues with the architectures
that today's file does not have; ONLY=llama,mamba2 chooses architectures; QUICK=1 takes these two.
"""

from __future__ import annotations

import json
import os
import warnings
from datetime import date
from typing import Any

import torch
from common import RESULTS, only, quick, write_results
from transformers import logging

from megapack.attention.leak_table import (
    WAYS,
    Combination,
    architectures,
    findings,
    read_configuration,
)

ATTENTION = ("eager", "sdpa", "megapack")


def found_in(name: str) -> list[Combination]:
    """Probe one architecture in float32, and the ways that are safe there in bfloat16."""
    configuration = read_configuration(name)
    found = findings(name, configuration, attention=ATTENTION)
    safe = dict.fromkeys(x.boundaries for x in found if x.verdict == "safe")
    return found + findings(
        name, configuration, attention=ATTENTION, boundaries=safe, dtype=torch.bfloat16
    )


def rows_of(name: str, found: list[Combination]) -> list[dict[str, Any]]:
    """Return the rows of one architecture."""
    rows: dict[str, dict[str, Any]] = {
        way: {"architecture": name, "boundaries": way} for way in WAYS
    }
    for finding in found:
        row = rows[finding.boundaries]
        if finding.dtype == "float32":
            row[finding.attention] = str(finding)
        elif row[finding.attention] == "safe" != finding.verdict:
            row[finding.attention] += f"; bfloat16 {finding}"
    return list(rows.values())


def measured() -> set[str]:
    """Return the architectures that today's file has."""
    files = RESULTS.glob(f"leaks-*-{date.today()}.json")
    runs = [json.loads(path.read_text()) for path in files if "-quick-" not in path.name]
    return {row["architecture"] for run in runs for row in run["results"]["rows"]}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    names = only(architectures())
    if "ONLY" not in os.environ:
        names = ["llama", "mamba2"] if quick() else sorted({*names} - measured())
    for name in names:
        try:
            rows = rows_of(name, found_in(name))
        except Exception as error:  # a configuration without defaults
            why = f"refused: {error}".replace("\n", " ")[:80]
            rows = [{"architecture": name, "boundaries": "all", "eager": why}]
        write_results("leaks", {"rows": rows}, parts="architecture", **{name: rows})


if __name__ == "__main__":
    main()

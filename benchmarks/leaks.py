"""``make bench-leaks``: which attention keeps documents apart, by architecture of transformers.

One row per architecture and way of passing boundaries, with a column per attention implementation:
``safe``, ``leaks: LAYER`` (the first that leaks) or ``refused`` (an error, or not offered). It is
``megapack-probe --all`` (megapack/attention/leak_table.py). ONLY=llama,mamba2 chooses
architectures; QUICK=1 takes these two.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from common import only, quick, write_results
from transformers import logging

from megapack.attention.leak_table import WAYS, architectures, findings, read_configuration

ATTENTION = ("eager", "sdpa", "megapack")


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of one architecture."""
    try:
        found = findings(name, read_configuration(name), attention=ATTENTION)
    except Exception as error:  # a configuration without defaults
        return [{"architecture": name, "boundaries": "all", "eager": f"refused: {error}"[:80]}]
    rows: dict[str, dict[str, Any]] = {
        way: {"architecture": name, "boundaries": way} for way in WAYS
    }
    for finding in found:
        rows[finding.boundaries][finding.attention] = str(finding)
    return list(rows.values())


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    names = only(architectures())
    if quick() and "ONLY" not in os.environ:
        names = ["llama", "mamba2"]
    for name in names:  # a run that is stopped keeps what it has
        rows = rows_of(name)
        write_results("leaks", {"rows": rows}, parts="architecture", **{name: rows})


if __name__ == "__main__":
    main()

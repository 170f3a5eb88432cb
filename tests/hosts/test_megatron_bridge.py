"""A real Megatron-Bridge checkout: what its configuration and data path make of our rows.

``MEGATRON_BRIDGE=/path MEGATRON_LM=/path/to/main make test-hosts``; beside Megatron-LM's packages
it imports hydra-core, omegaconf and megatron-energon
(on PYTHONPATH, with ``pytest -p no:hydra_pytest``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.hosts import matrix
from tests.hosts.check import check_run, load_ranks
from tests.hosts.corpus import Corpus
from tests.hosts.layouts import environment
from tests.hosts.processes import LAUNCHERS, finish, trees_of
from tests.hosts.test_megatron_lm import TREES as CORES

TREES = trees_of("MEGATRON_BRIDGE")

pytestmark = pytest.mark.skipif(
    not (TREES and CORES), reason="MEGATRON_BRIDGE and MEGATRON_LM name no checkouts"
)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("data", ["web.json", "program.json"])
def test_every_stage_is_handed_the_documents(
    tree: Path, data: str, corpus: Corpus, tmp_path: Path
) -> None:
    """Three stages, the one between included, of which Bridge says nothing without packing."""
    env = environment(CORES[-1])
    paths = (str(tree / "src"), env["PYTHONPATH"], os.environ.get("PYTHONPATH", ""))
    env |= {"PYTHONPATH": os.pathsep.join(paths), "RANK": "0", "WORLD_SIZE": "1"}
    command = [
        sys.executable,
        str(LAUNCHERS / "launch_bridge.py"),
        str(tmp_path),
        corpus.path(data),
    ]
    finish(command, tmp_path, env, f"{tree}, {data}")
    ranks = load_ranks(tmp_path)
    found = check_run(ranks, corpus)
    matrix.note("Megatron-Bridge", "main", f"PP 3, {data}", found)
    assert not found.problems, "\n".join(found.problems[:20])
    assert len(ranks) == 3 and found.calls == 3 * 24 and found.segments > found.calls

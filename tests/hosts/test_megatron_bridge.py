"""A real Megatron-Bridge checkout: its configuration, its data path and its ``pretrain``.

``MEGATRON_BRIDGE=/path MEGATRON_LM=/path/to/main make test-hosts``; in addition to Megatron-LM's
packages it imports hydra-core, omegaconf, antlr4-python3-runtime 4.9.3 and megatron-energon (on
PYTHONPATH, with ``pytest -p no:hydra_pytest``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.hosts import matrix
from tests.hosts.check import check_run, load_ranks
from tests.hosts.corpus import ROW, STEP_ROWS, Corpus
from tests.hosts.layouts import environment
from tests.hosts.losses import iterations, wrong_losses
from tests.hosts.processes import LAUNCHERS, LEAK, REFUSED, finish, torchrun, trees_of
from tests.hosts.test_megatron_lm import TREES as CORES

TREES = trees_of("MEGATRON_BRIDGE")
STEPS = 3  # launch_bridge.py

pytestmark = pytest.mark.skipif(
    not (TREES and CORES), reason="MEGATRON_BRIDGE and MEGATRON_LM name no checkouts"
)


def run(tree: Path, folder: Path, launch: list[str], *arguments: str) -> str:
    """Run ``launch_bridge.py`` by torchrun, or as one process; return the log."""
    env = environment(CORES[-1])
    paths = (str(tree / "src"), env["PYTHONPATH"], os.environ.get("PYTHONPATH", ""))
    env |= {"PYTHONPATH": os.pathsep.join(paths), "RANK": "0", "WORLD_SIZE": "1"}
    return finish([*launch, str(folder), *arguments], folder, env, str(tree))


def train(tree: Path, folder: Path, data: str, ranks: int, stages: int, fault: str = "none") -> str:
    launch = torchrun(ranks, "launch_bridge.py")
    return run(tree, folder, launch, data, "pretrain", str(stages), fault)


@pytest.mark.parametrize("data", ["web.json", "program.json"])
def test_every_stage_gets_the_documents(
    tree: Path, data: str, corpus: Corpus, tmp_path: Path
) -> None:
    """Three stages, the one between included, of which Bridge says nothing without packing."""
    run(tree, tmp_path, [sys.executable, str(LAUNCHERS / "launch_bridge.py")], corpus.path(data))
    ranks = load_ranks(tmp_path)
    found = check_run(ranks, corpus)
    matrix.note("Megatron-Bridge", "main", f"PP 3, {data}", found)
    found.hold()
    assert len(ranks) == 3 and found.calls == 3 * 24 and found.segments > found.calls


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2)], ids=["DP 2", "PP 2"])
def test_pretrain_trains_on_the_documents(
    tree: Path, ranks: int, stages: int, corpus: Corpus, tmp_path: Path
) -> None:
    """The log has the mean over all labels of a step, from the model's losses."""
    log = train(tree, tmp_path, corpus.path("mix.json"), ranks, stages)
    assert "segments of a micro batch are kept apart: probed in" in log
    recorded = load_ranks(tmp_path)
    found = check_run(recorded, corpus)
    # Bridge evaluates rows in another order ("cyclic").
    found.problems = [text for text in found.problems if not text.startswith("valid, micro step")]
    matrix.note("Megatron-Bridge", "main", f"pretrain, {ranks} ranks, {stages} stages", found)
    found.problems += wrong_losses(log, recorded, 0, ROW)
    found.hold()
    assert found.rows.keys() == set(range(STEPS * STEP_ROWS))
    assert found.splits == {"train", "valid"} and found.segments > found.calls > 0
    assert len(iterations(log)) == STEPS


@pytest.mark.parametrize("fault", ["boundaries shifted", "boundaries lost"])
def test_probe_catches_injected_faults(
    tree: Path, fault: str, corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=rf"{REFUSED}megatron-core.*{LEAK}"):
        train(tree, tmp_path, corpus.path("web.json"), 1, 1, fault)

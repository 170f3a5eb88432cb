"""Mamba layers of packed rows: told where segments are, or refused at start.

The mixer itself is CUDA code. What is checked is the tensor by which it tells segments apart.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.layouts import environment, release_of
from tests.hosts.processes import LAUNCHERS
from tests.hosts.test_megatron_lm import TREES

pytestmark = pytest.mark.skipif(not TREES, reason="MEGATRON_LM names no checkout of Megatron-LM")

SEQ_IDX = """
import typing, typing_extensions
typing.override = typing_extensions.override
import torch
from megapack.integrations.megatron import to_packed_seq_params
bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
params = to_packed_seq_params(bounds, 8, total_tokens=16)
print(getattr(params, "seq_idx", None) is not None and params.seq_idx.tolist())
"""


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_segments_are_numbered_where_the_release_has_a_place_for_it(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEQ_IDX],
        check=True,
        capture_output=True,
        text=True,
        env=environment(tree),
    )
    numbered = [[0] * 3 + [1] * 5 + [2] * 8]
    expected = str(numbered) if release_of(tree) >= (0, 17) else "False"
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_a_hybrid_script_is_refused_where_there_is_none(tree: Path, tmp_path: Path) -> None:
    if release_of(tree) >= (0, 17):
        pytest.skip("this release has seq_idx")
    done = subprocess.run(
        [
            *(sys.executable, str(LAUNCHERS / "launch.py"), str(tmp_path)),
            str(tree / "pretrain_mamba.py"),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment(tree), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )
    assert done.returncode != 0 and "Train hybrid models with 0.17" in done.stderr
    assert not list(tmp_path.iterdir())

"""Why context parallelism with inter-document masking is refused: when this fails, it need not be.

Megatron then cuts whole rows between ranks. Its RoPE is asked which position it gives every token.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.layouts import environment, release_of
from tests.hosts.test_megatron_lm import TREES

pytestmark = pytest.mark.skipif(not TREES, reason="MEGATRON_LM names no checkout of Megatron-LM")

# Two documents, of 4 and 12 tokens; two ranks hold quarters 0 and 3, and 1 and 2, of the row.
BOUNDS = [0, 4, 16]
HELD = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
TRUE = [*range(4), *range(12)]
PROGRAM = """
import json, sys, typing, typing_extensions
typing.override = typing_extensions.override
from types import SimpleNamespace
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
bounds = torch.tensor(json.loads(sys.argv[1]), dtype=torch.int32)
angles = torch.arange(12.0).reshape(-1, 1, 1, 1).expand(-1, 1, 1, 2) / 10
found = []
for rank in range(2):
    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    tokens = torch.tensor([1.0, 0.0]).expand(8, 1, 2)
    turned = _apply_rotary_pos_emb_thd(tokens, bounds, angles, cp_group=group)[:, 0]
    found.append((10 * torch.atan2(turned[:, 1], turned[:, 0])).round().int().tolist())
print(json.dumps(found))
"""


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_rope_takes_parts_of_a_row_for_parts_of_its_documents(tree: Path) -> None:
    if release_of(tree) < (0, 19):
        pytest.skip("this release has no inter-document masking")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(BOUNDS)],
        check=True,
        capture_output=True,
        text=True,
        env=environment(tree),
    )
    given = json.loads(done.stdout.splitlines()[-1])
    expected = [[TRUE[i] for i in held] for held in HELD]
    assert given != expected
    # What it gives are the positions of parts of documents: chunks r and 3 - r of each.
    assert given == [[0, 3, 0, 1, 2, 9, 10, 11], [1, 2, 3, 4, 5, 6, 7, 8]]

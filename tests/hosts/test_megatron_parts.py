"""Parts of Megatron-LM in a separate process, without a run.

- Mamba layers get segments, or are refused at start (the mixer itself is CUDA code).
- RoPE gives wrong positions to whole rows that ranks cut: why that is refused.
- A step plan as hybrid (in the branch dev: dynamic) context parallelism takes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.hosts.layouts import environment, release_of
from tests.hosts.processes import LAUNCHERS, is_refused, last_line, marks_of
from tests.hosts.test_megatron_lm import TREES

pytestmark = marks_of(TREES, "MEGATRON_LM", "Megatron-LM")

# ---- Mamba layers

SEQ_IDX = """
import torch
from megapack.integrations.hosts.megatron import to_packed_seq_params
bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
params = to_packed_seq_params(bounds, 8, total_tokens=16)
print(getattr(params, "seq_idx", None) is not None and params.seq_idx.tolist())
"""


def test_segments_are_numbered_from_0_17_on(tree: Path) -> None:
    numbered = [[0] * 3 + [1] * 5 + [2] * 8]
    expected = str(numbered) if release_of(tree) >= (0, 17) else "False"
    assert last_line(SEQ_IDX, environment(tree)) == expected


def test_hybrid_script_is_refused_before_0_17(tree: Path, tmp_path: Path) -> None:
    if release_of(tree) >= (0, 17):
        pytest.skip("this release has seq_idx")
    command = [sys.executable, str(LAUNCHERS / "launch.py"), str(tmp_path)]
    command += [str(tree / "pretrain_mamba.py")]
    around = environment(tree) | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    is_refused(command, tmp_path, around, "Train hybrid models with 0.17")


# ---- Whole rows cut between ranks: when this fails, they need not be refused

# Two documents, of 4 and 12 tokens; two ranks hold quarters 0 and 3, and 1 and 2, of the row.
BOUNDS = [0, 4, 16]
HELD = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
TRUE = [*range(4), *range(12)]
ROPE = """
import json, sys
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


def test_rope_assumes_that_each_document_is_split(tree: Path) -> None:
    if release_of(tree) < (0, 19):
        pytest.skip("this release has no inter-document masking")
    given = json.loads(last_line(ROPE, environment(tree), json.dumps(BOUNDS)))
    expected = [[TRUE[i] for i in held] for held in HELD]
    assert given != expected
    # What it gives are the positions of parts of documents: chunks r and 3 - r of each.
    assert given == [[0, 3, 0, 1, 2, 9, 10, 11], [1, 2, 3, 4, 5, 6, 7, 8]]


# ---- A step plan: Megatron's own functions make groups of ranks, cut the documents between them
# and pack the rows; what they give is what ``rank_micro_batches`` says. Process groups are torch's
# fakes: nothing is sent.

PLAN = """
import numpy as np, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from megapack.planning import plan_step, rank_micro_batches
try:
    from megatron.core.datasets.data_schedule_utils import build_packed_microbatches
except ImportError:
    build_packed_microbatches = None
dynamic = hasattr(parallel_state, "create_dynamic_dp_cp_groups")
kind = "dynamic" if dynamic else "hybrid"
make_groups = getattr(parallel_state, f"create_{kind}_dp_cp_groups")

RANKS = 8
ROW = ("tokens", "labels", "loss_mask", "position_ids")
lengths = np.random.default_rng(2).lognormal(4, 1.2, 150).astype(np.int64) + 1
lengths = np.append(lengths, [900, 1300, 1900, 3900])
unit = 2 * RANKS
rounded = -(-lengths // unit) * unit
rules = {"num_ranks": RANKS, "max_context_parallel_size": RANKS, "max_tokens_per_rank": 512}
plan = plan_step(rounded, linear_cost_tokens=12 * 4096, **rules)
of_ranks = [plan.of_rank(rank) for rank in range(RANKS)]
sample_id_groups = [
    [of_rank[m].tolist() for of_rank in of_ranks] for m in range(plan.num_micro_batches)
]
seen = set()
for rank in range(RANKS):
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    groups = {**make_groups(rank, list(range(RANKS)), None), RANKS: dist.group.WORLD}
    batches = rank_micro_batches(plan, rank, lengths=lengths, align=unit)
    for batch in batches:
        size = batch.local_cp_size
        seen.add(size)
        if size > 1:
            partners = list(range(rank - batch.cp_rank, rank - batch.cp_rank + size))
            assert dist.get_process_group_ranks(groups[size]) == partners
            assert dist.get_rank(groups[size]) == batch.cp_rank
        held = []
        for begin, end in zip(batch.cu_seqlens_padded, batch.cu_seqlens_padded[1:]):
            alone = {
                "tokens": torch.arange(begin, end)[None],
                "cu_seqlens": torch.tensor([[0, end - begin]], dtype=torch.int32),
                "local_cp_size": torch.tensor(size, dtype=torch.int32),
            }
            func = lambda group_size: groups[group_size]
            mine = get_batch_on_this_cp_rank(alone, True, dist.group.WORLD, func)
            held += mine["tokens"][0].tolist()
        assert held == batch.indices.tolist()
    if build_packed_microbatches is not None:
        samples = {
            i: {
                **dict.fromkeys(ROW, torch.arange(int(rounded[i]))),
                "original_seq_len": torch.tensor([int(lengths[i])], dtype=torch.int32),
                "padded_seq_len": torch.tensor([int(rounded[i])], dtype=torch.int32),
            }
            for of_rank in of_ranks[rank] for i in of_rank.tolist()
        }
        if dynamic:
            rows = samples, sample_id_groups, rank, torch.device("cpu"), True
        else:  # of main: samples by micro batch, without degrees
            rows = [[samples[i] for i in m.tolist()] for m in of_ranks[rank]], torch.device("cpu")
        packed = build_packed_microbatches(*rows)
        assert len(packed) == len(batches)
        for theirs, ours in zip(packed, batches):
            for key in ("cu_seqlens", "cu_seqlens_padded"):
                assert theirs[key].dtype == torch.int32 and getattr(ours, key).dtype == np.int32
                assert theirs[key].tolist() == getattr(ours, key).tolist()
            for key in ("max_seqlen", "local_cp_size") if dynamic else ("max_seqlen",):
                assert int(theirs[key]) == getattr(ours, key)
            assert len(theirs["tokens"]) == ours.cu_seqlens_padded[-1]
    dist.destroy_process_group()
print(sorted(seen), kind if build_packed_microbatches else "unpacked")
"""


def test_groups_and_rows_equal_those_of_megatron(tree: Path) -> None:
    if release_of(tree) < (0, 19):
        pytest.skip("this release cuts batches of hybrid context parallelism in another way")
    *sizes, how = last_line(PLAN, environment(tree)).split()
    assert sizes == ["[1,", "2,", "4,", "8]"], "the step has groups of every size"
    packs = (tree / "megatron" / "core" / "datasets" / "data_schedule_utils.py").exists()
    assert (how != "unpacked") == packs, "rows were compared where the release makes some"

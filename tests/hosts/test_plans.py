"""A plan as Megatron's hybrid (in its branch dev: dynamic) context parallelism takes it.

Its own functions make the groups of ranks, cut the documents between them and pack the rows; what
they give is what ``rank_micro_batches`` says. Process groups are torch's fakes: nothing is sent.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.layouts import environment, release_of
from tests.hosts.test_megatron_lm import TREES

pytestmark = pytest.mark.skipif(not TREES, reason="MEGATRON_LM names no checkout of Megatron-LM")

PROGRAM = """
import typing, typing_extensions
typing.override = typing_extensions.override
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
rules = {"num_ranks": RANKS, "max_degree": RANKS, "max_tokens_per_rank": 512}
plan = plan_step(rounded, linear_length=12 * 4096, **rules)
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


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_groups_parts_and_rows_are_those_that_megatron_makes(tree: Path) -> None:
    if release_of(tree) < (0, 19):
        pytest.skip("this release cuts batches of hybrid context parallelism in another way")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        env=environment(tree),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *sizes, how = done.stdout.splitlines()[-1].split()
    assert sizes == ["[1,", "2,", "4,", "8]"], "the step has groups of every size"
    packs = (tree / "megatron" / "core" / "datasets" / "data_schedule_utils.py").exists()
    assert (how != "unpacked") == packs, "rows were compared where the release makes some"

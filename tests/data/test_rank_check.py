"""Ranks that disagree stop, all of them, with the rank and the field: four real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megapack.data.loader import _describe

if TYPE_CHECKING:
    from tests.training.processes import Zygote

PROGRAM = """
import json, os, sys
import torch.distributed as dist
from megapack.data import PackedDataset, Schedule, build_loader
from megapack.errors import RankMismatchError
from megapack.packing import pack
from megapack.storage import IndexedDataset

rank, folder, options = int(os.environ["RANK"]), sys.argv[1], json.loads(sys.argv[2])
dist.init_process_group("gloo")
mine = options.get(str(rank), {})
dataset = IndexedDataset(f"{folder}/d")
index = pack(dataset.document_lengths, "concat", buckets=[32], seed=mine.get("pack_seed", 0))
packed = PackedDataset(dataset, index)
schedule = Schedule(packed, tokens_per_step=32 * 8, seed=mine.get("seed", 7))
loader = build_loader(
    packed, schedule, data_parallel_rank=rank, data_parallel_size=4, micro_batch_tokens=64,
    start_step=mine.get("start_step", 0), num_steps=mine.get("num_steps", 9), check_ranks_every=3,
)
done = 0
try:
    for batch in loader:
        done = batch["step"]
    print(json.dumps({"finished": True, "step": done}))
except RankMismatchError as error:
    print(json.dumps({"finished": False, "step": done, "error": str(error)}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.data.corpora import packed_lengths, random_documents, write_documents  # noqa: PLC0415

    path = tmp_path_factory.mktemp("ranks")
    write_documents(path / "d", random_documents(packed_lengths(200, 32)))
    return path


def run_ranks(
    zygote: Zygote, folder: Path, options: dict[int, dict[str, int]]
) -> list[dict[str, Any]]:
    program, log = folder / "program.py", folder / f"{len(list(folder.iterdir()))}.log"
    program.write_text(PROGRAM)
    ranks = zygote.start([str(program), str(folder), json.dumps(options)], 4, log)
    ranks.succeed()
    return [json.loads(path.read_text().splitlines()[-1]) for path in ranks.logs]


@pytest.mark.multiprocess
def test_rank_of_another_seed_stops_all_by_name(zygote: Zygote, folder: Path) -> None:
    for result in run_ranks(zygote, folder, {2: {"seed": 8}}):
        assert not result["finished"] and result["step"] == 0
        assert "seed is 8 on rank 2 and 7 on the other 3" in result["error"]


@pytest.mark.multiprocess
def test_ranks_that_agree_end_and_others_are_named(zygote: Zygote, folder: Path) -> None:
    assert all(r["finished"] and r["step"] == 8 for r in run_ranks(zygote, folder, {}))
    wrong = {1: {"pack_seed": 5}, 3: {"start_step": 4, "num_steps": 5}}
    for result in run_ranks(zygote, folder, wrong):
        assert not result["finished"]
        assert "step is 4 on rank 3 and 0 on the other 3" in result["error"]
        assert "indices is #" in result["error"] and "on rank 1" in result["error"]


def test_a_message_names_at_most_eight_ranks() -> None:
    text = _describe("seed", [3] * 20 + list(range(10, 22)))
    assert text.count("on rank") == 8
    assert text.endswith("and 3 on the other 20")

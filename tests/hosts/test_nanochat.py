"""A real nanochat checkout: its base_train on packed rows, on the CPU, stopped and resumed.

``NANOCHAT=/path/to/checkout make test-hosts``; needs rustbpe, tiktoken, filelock and wandb.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import Table, parquet

from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.hosts.processes import ROOT, environment_of, finish, marks_of, trees_of

TREES = trees_of("NANOCHAT")
pytestmark = marks_of(TREES, "NANOCHAT", "nanochat")

ROWS, ROW, STEPS = 2, 64, 8
OPTIONS = (
    *(f"--{name}=32" for name in ("aspect-ratio", "head-dim")),
    *(f"--{name}=-1" for name in ("core-metric-every", "sample-every")),
    *("--depth=1", "--window-pattern=L", f"--max-seq-len={ROW}", f"--device-batch-size={ROWS}"),
    *(f"--total-batch-size={2 * ROWS * ROW}", f"--num-iterations={STEPS}", "--warmup-steps=2"),
    *("--save-every=3", "--eval-tokens=512", f"--eval-every={STEPS}"),
)


@pytest.fixture(scope="module")
def base(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nanochat's folder of data: three shards of text, and a tokenizer that it trains on them."""
    folder = tmp_path_factory.mktemp("nanochat")
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(2, 7))) for _ in range(200)]
    (folder / "base_data_climbmix").mkdir()
    for shard in range(3):
        lengths = [int(rng.lognormvariate(2.5, 1)) + 3 for _ in range(300)]
        texts = [" ".join(rng.choices(words, k=length)) for length in lengths]
        path = folder / f"base_data_climbmix/shard_{shard:05d}.parquet"
        parquet.write_table(Table.from_pydict({"text": texts}), path, row_group_size=100)
    train_tokenizer = ("-m", "scripts.tok_train", "--vocab-size=400")
    launched(tree, folder, *train_tokenizer)
    return folder


def launched(tree: Path, base: Path, *command: str) -> str:
    environment = {**environment_of(tree, "hosts-nanochat"), "NANOCHAT_BASE_DIR": str(base)}
    return finish([sys.executable, *command], base, environment, "nanochat")


def losses_of(output: str) -> dict[int, float]:
    """Return the logged loss of every step (nanochat's average of the last ones)."""
    found = re.findall(r"^step (\d+)/\d+ .*?loss: ([\d.]+)", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_base_train_learns_from_packed_rows_and_resumes_on_them(tree: Path, base: Path) -> None:
    example = str(ROOT / "examples/nanochat_packed.py")
    whole = losses_of(launched(tree, base, example, "climb", *OPTIONS))
    assert [*whole] == [*range(STEPS)] and whole[STEPS - 1] < whole[0]
    state = json.loads((base / "base_checkpoints/d1/meta_000003.json").read_text())
    # Two micro steps per step: the fetched batch, which is not trained yet, comes first on resume.
    assert state["dataloader_state_dict"]["megapack"]["step"] == 6
    resumed = losses_of(launched(tree, base, example, "climb", *OPTIONS, "--resume-from-step=3"))
    assert resumed == pytest.approx({step: whole[step] for step in range(3, STEPS)}, abs=1e-4)
    # Other bytes of the same lengths, which the index does not show.
    documents = IndexedDataset(base / "climb")
    for name in ("climb.bin", "climb.meta.json"):
        shutil.copy(base / name, base / f"{name}.kept")
    tokens, ends = np.array(documents.tokens), np.cumsum([0, *documents.document_lengths])
    tokens[1::7] = tokens[2::7][: len(tokens[1::7])]
    options = {"vocab_size": documents.vocab_size, "overwrite": True}
    with IndexedDatasetBuilder(base / "climb", documents.dtype, **options) as builder:
        builder.add_documents(tokens, ends)
    with pytest.raises(AssertionError, match=r"ResumeError.*data\.content was"):
        launched(tree, base, example, "climb", *OPTIONS, "--resume-from-step=3")
    for name in ("climb.bin", "climb.meta.json"):
        shutil.move(base / f"{name}.kept", base / name)


ONE_EPOCH = f"""
import itertools, torch
from nanochat.tokenizer import get_tokenizer
from megapack.integrations.hosts.nanochat import packed_batches
batches = packed_batches("climb", get_tokenizer(), {ROWS}, {ROW}, device="cpu")
first = itertools.takewhile(lambda batch: batch[2]["epoch"] == 1, batches)
torch.save([batch[:2] for batch in first], "batches.pt")
"""


def test_rows_hold_every_token_once_and_cut_only_long_documents(tree: Path, base: Path) -> None:
    launched(tree, base, "-c", ONE_EPOCH)
    dataset = IndexedDataset(base / "climb")
    index = pack(dataset.document_lengths, buckets=[ROW])
    assert index.metrics()["dropped_tokens"] == 0
    longer = (dataset.document_lengths > ROW).mean()
    assert 0 < index.metrics()["truncation_ratio"] == pytest.approx(longer)
    batches = torch.load(base / "batches.pt")
    # An epoch has every sample once; to fill its last step, it may begin the next.
    assert 0 <= len(batches) * ROWS - index.num_samples < ROWS
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (ROWS, ROW)
        follows = targets[:, :-1] == inputs[:, 1:]
        assert (follows | (targets[:, :-1] == -1)).all(), "a label is the next token of its row"

"""A real torchtitan checkout: every call of the model in a training, on all ranks.

``TORCHTITAN=/path/to/checkout[:/another] make test-hosts``. torchtitan's own train.py is started by
torchrun with the example's configuration and trains on the CPU under FSDP, its FlexAttention masks
computed by torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.hosts import matrix
from tests.hosts.corpus import ROW, STEP_ROWS, Corpus, write_short
from tests.hosts.processes import (
    CHANGED,
    LEAK,
    ROOT,
    environment_of,
    finish,
    is_refused,
    marks_of,
    torchrun,
    trees_of,
)

TREES = trees_of("TORCHTITAN")
HOST = "torchtitan"
STEPS = 4

pytestmark = marks_of(TREES, "TORCHTITAN", "torchtitan")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its number of ranks, torchtitan's options, and its data."""

    name: str
    ranks: int = 1
    micro_batch: int = 1
    options: str = ""
    attention: str = "flex"
    data: str = "web.json"
    steps: int = STEPS
    probed: bool = True


READERS = """--parallelism.data_parallel_replicate_degree 2
    --parallelism.data_parallel_shard_degree 1 --dataloader.num_workers 2"""
EVALUATED = "--validator.enable --validator.freq 3 --validator.steps 2"
LAYOUTS = (
    Layout(name="DP 1, 3 epochs", micro_batch=3, steps=12),
    Layout(name="DP 2 (FSDP), blend", ranks=2, data="mix.json"),
    Layout(name="DP 2, micro batch 3", ranks=2, micro_batch=3),
    Layout(name="DP 2 (replicated), readers", ranks=2, micro_batch=2, options=READERS),
    Layout(name="DP 2, evaluation", ranks=2, options=EVALUATED),
    Layout(name="DP 2, varlen", ranks=2, attention="varlen"),
    Layout(name="TP 2", ranks=2, options="--parallelism.tensor_parallel_degree 2", probed=False),
)


def is_flat(tree: Path) -> bool:
    """Return whether sizes are counted in tokens (after torchtitan 0.3)."""
    return not (tree / "torchtitan/components/dataloader.py").exists()


def sizes(tree: Path, layout: Layout) -> list[str]:
    names = {
        "max_context_length": ROW,
        "num_tokens_per_microbatch_per_dp_rank": ROW * layout.micro_batch,
        "num_tokens_per_train_step": ROW * STEP_ROWS,
    }
    if not is_flat(tree):
        names = {
            "seq_len": ROW,
            "local_batch_size": layout.micro_batch,
            "global_batch_size": STEP_ROWS,
        }
    return [text for name, size in names.items() for text in (f"--training.{name}", str(size))]


def command(tree: Path, layout: Layout, corpus: Corpus, *more: str) -> list[str]:
    return [
        *torchrun(layout.ranks, "launch_torchtitan.py"),
        *("--module", "torchtitan_packed", "--config", "packed_debugmodel"),
        *("--dataloader.data_path", corpus.path(layout.data)),
        *("--validator.dataloader.data_path", corpus.path(layout.data)),
        *("--training.steps", str(layout.steps), "--training.disable_cuda_graphs"),
        *("--training.mixed_precision_param", "float32", "--validator.no-enable"),
        *("--parallelism.spmd_backend", "partial_dtensor"),  # the other wants a newer torch
        *("--hf_assets_path", corpus.path("assets")),
        *sizes(tree, layout),
        *layout.options.split(),
        *more,
    ]


def environment(tree: Path, layout: Layout, corpus: Corpus, folder: Path) -> dict[str, str]:
    """Return the arguments of a run in a new folder with the example."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torchtitan_packed.py").symlink_to(ROOT / "examples" / "torchtitan_packed.py")
    assets = corpus.folder / "assets"
    assets.mkdir(exist_ok=True)  # torchtitan opens a tokenizer that packed rows do not need
    Tokenizer(WordLevel({"text": 0}, unk_token="text")).save(str(assets / "tokenizer.json"))
    return {
        **environment_of(tree, "hosts-torchtitan"),
        "HOST_RECORDS": str(folder),
        "HOST_ATTENTION": layout.attention,
        "HOST_VOCABULARY": str(corpus.vocabulary),
    }


def run(
    tree: Path, layout: Layout, corpus: Corpus, folder: Path, *more: str, **variables: str
) -> str:
    """Run the layout through torchtitan's train.py; return the log."""
    around = environment(tree, layout, corpus, folder) | variables
    return finish(command(tree, layout, corpus, *more), folder, around, f"{layout.name} on {tree}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_gets_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Any]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    known = known_rows.setdefault(layout.data, {})
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    found = matrix.trained(*told, steps=layout.steps, known=known)
    assert len(re.findall(r"step: *\d+ .*loss: *[\d.]+", log)) >= layout.steps
    assert log.count("documents of a micro batch are kept apart") == layout.ranks * layout.probed
    # It validates after step 1 and step 3, and opens a loader each time.
    evaluated = {"valid", "test"} if "evaluation" in layout.name else set()
    assert found.splits == {"train"} | evaluated


def test_row_equals_its_documents(tree: Path, corpus: Corpus, tmp_path: Path) -> None:
    """By torchtitan's model and the masks that it makes of positions, after two steps."""
    layout = Layout(name="one by one", steps=2)
    log = run(tree, layout, corpus, tmp_path / "run", HOST_ONE_BY_ONE="1")
    (difference,) = re.findall(r"one by one: (\S+)", log)
    assert float(difference) < 1e-4


@pytest.mark.parametrize(
    ("ranks", "micro_batch"), [(1, 1), (2, 2)], ids=["DP 1", "DP 2, micro batch 2"]
)
def test_validation_loss_equals_that_of_single_documents(
    ranks: int, micro_batch: int, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Every document once, of which none is cut; the last rows are empty."""
    texts = write_short(corpus, ROW)
    name = f"validation to its end, DP {ranks}"
    options = ["--validator.enable", "--validator.steps", "-1"]
    options += ["--validator.dataloader.data_path", corpus.path("short.json")]
    options += ["--validator.dataloader.split", "0.0", "1.0"]
    layout = Layout(name=name, ranks=ranks, micro_batch=micro_batch, steps=1)
    folder = tmp_path / "run"
    log = run(tree, layout, corpus, folder, *options, HOST_VALIDATED=corpus.path("short"))
    told = {"log": log, "texts": texts, "ranks": ranks, "tolerance": 1e-6}
    matrix.evaluated(HOST, tree, name, folder, corpus, **told)


def test_run_resumes_on_other_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to step 2, then one rank with micro batches of 3 from its checkpoint."""
    keep = ["--dump_folder", str(tmp_path / "kept"), "--checkpoint.enable"]
    keep += ["--checkpoint.interval", "2"]
    then = Layout(name="load", micro_batch=3, data="mix.json")
    first = Layout(name="save", ranks=2, data="mix.json", steps=2)
    run(tree, first, corpus, tmp_path / "saved", *keep)
    run(tree, then, corpus, tmp_path / "loaded", *keep)
    folders = (tmp_path / "saved", tmp_path / "loaded")
    matrix.resumed(HOST, tree, folders, corpus)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("boundary", LEAK),
        ("no boundary", LEAK),
        ("labels", "against the loss mask; this holds for"),
        ("loader", f"'labels' {CHANGED}"),
        ("window", "attention windows"),
    ],
)
def test_injected_faults_are_refused(
    wrong: str, said: str, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Faults between the loader and the model; a window is refused at start."""
    layout = Layout(name="wrong", data="program.json" if wrong == "window" else "web.json")
    around = environment(tree, layout, corpus, tmp_path) | {"HOST_SABOTAGE": wrong}
    is_refused(command(tree, layout, corpus), tmp_path, around, said)

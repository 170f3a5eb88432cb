"""A real Megatron-DeepSpeed checkout: every call of the model in a training, on all ranks.

``MEGATRON_DEEPSPEED=/path/to/checkout make test-hosts``. The guide's pretrain_packed.py runs the
host's pretrain_gpt.py under DeepSpeed's launcher; DeepSpeed's engine trains on the CPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from tests.hosts import matrix
from tests.hosts.corpus import LAYERS, ROW, STEP_ROWS, Corpus
from tests.hosts.processes import LAUNCHERS, ROOT, environment_of, finish, marks_of, trees_of

TREES = trees_of("MEGATRON_DEEPSPEED")
HOST = "Megatron-DeepSpeed"

pytestmark = marks_of(TREES, "MEGATRON_DEEPSPEED", "Megatron-DeepSpeed")

# Flags of docs/guides/megatron_deepspeed.md.
SCRIPT = """import runpy

from megapack.integrations.hosts import megatron_deepspeed

megatron_deepspeed.install()
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""
PACKED = "--use-flash-attn-v2 --dataloader-type single --pipeline-model-parallel-size 1"

# A tiny model, in bf16, because the host calls flash-attn with no other dtype.
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length {ROW} --max-position-embeddings {ROW} --bf16
    --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-gradient-accumulation-fusion --lr 1e-3 --clip-grad 1
    --distributed-backend gloo --tokenizer-type NullTokenizer --num-workers 0
    --eval-interval 3 --eval-iters 1 --log-interval 1 --save-interval 1000
""".split()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its number of ranks, the host's flags, and its data."""

    name: str
    ranks: int
    micro_batch: int = 1
    engine: bool = False
    """With DeepSpeed's pipeline engine (one stage), the host's default; else the plain engine."""
    flags: str = ""
    zero: int = 0
    """Stage of ZeRO."""
    data: str = "web.json"
    """A manifest of corpus.py, or ``list``: a weighted list."""
    train_iters: int = 4
    full_validation: bool = False


TENSOR = "--tensor-model-parallel-size 2"
LAYOUTS = (
    Layout(name="DP 1, 3 epochs", ranks=1, train_iters=12),
    Layout(name="DP 2, blend, ZeRO 1", ranks=2, data="mix.json", zero=1),
    Layout(name="DP 2, micro batch 2", ranks=2, micro_batch=2),
    Layout(name="DP 3, weighted list", ranks=3, data="list"),
    # With one row per micro batch some have no label, since their documents are excluded.
    Layout(name="DP 2, stages and a window", ranks=2, micro_batch=2, data="program.json"),
    Layout(name="TP 2", ranks=2, flags=TENSOR),
    Layout(name="DP 2, pipeline engine", ranks=2, micro_batch=2, engine=True),
    Layout(name="TP 2, pipeline engine", ranks=2, engine=True, flags=TENSOR),
)

FULL_VALIDATION = tuple(
    Layout(
        name=f"full validation, {name}",
        ranks=2,
        engine="engine" in name,
        flags=f"--split 70,20,10 {flags}",
        full_validation=True,
    )
    for name, flags in (("DP 2", ""), ("DP 2, pipeline engine", ""), ("TP 2", TENSOR))
)


def data_flags(corpus: Corpus, data: str) -> list[str]:
    paths = ["0.7", corpus.path("web"), "0.3", corpus.path("code")]
    if data != "list":
        paths = [corpus.path(data)]
    return ["--data-path", *paths, "--split", "90,10,0", "--data-cache-path", corpus.path("cache")]


def engine_flags(layout: Layout, folder: Path) -> list[str]:
    """Return the configuration of DeepSpeed, which repeats the values of the flags."""
    config = {
        "train_batch_size": STEP_ROWS,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "zero_optimization": {"stage": layout.zero},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    flags = ["--deepspeed", "--deepspeed_config", str(path), "--zero-stage", str(layout.zero)]
    return flags if layout.engine else [*flags, "--no-pipeline-parallel"]


def run(tree: Path, layout: Layout, corpus: Corpus, folder: Path, *more: str) -> str:
    """Run the layout under DeepSpeed's launcher, with more flags; return the log. Records are in
    the folder."""
    folder.mkdir(parents=True)
    (folder / "pretrain_gpt.py").symlink_to(tree / "pretrain_gpt.py")
    whole = f"install({'full_validation=True' if layout.full_validation else ''})"
    (folder / "pretrain_packed.py").write_text(SCRIPT.replace("install()", whole))
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(layout.ranks)),
        *("--master_port", str(free_port()), str(LAUNCHERS / "launch_mds.py")),
        *MODEL,
        *PACKED.split(),
        *("--vocab-size", str(corpus.vocabulary), "--train-iters", str(layout.train_iters)),
        *("--micro-batch-size", str(layout.micro_batch), "--global-batch-size", str(STEP_ROWS)),
        *data_flags(corpus, layout.data),
        *engine_flags(layout, folder),
        *layout.flags.split(),
        *more,
    ]
    environment = {
        **environment_of(tree, "hosts-mds"),
        "HOST_RECORDS": str(folder),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(layout.ranks),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    return finish(command, folder, environment, f"{layout.name} on {tree}")


def test_the_guide_has_the_script_that_is_run() -> None:
    guide = (ROOT / "docs" / "guides" / "megatron_deepspeed.md").read_text()
    assert f"```python\n{SCRIPT}```" in guide


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_gets_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Any]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    known = known_rows.setdefault(layout.data, {})
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    how = {"shifted": True, "program": layout.data == "program.json"}
    found = matrix.trained(*told, steps=layout.train_iters, known=known, **how)
    assert found.attentions == LAYERS * found.calls
    assert "validation loss at iteration 3" in log
    assert log.count("| lm loss:") == layout.train_iters, "and the run went to its end"


def test_run_resumes_on_other_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to iteration 2, then one rank with micro batches of 3 from its checkpoint.

    Not with the pipeline engine: loading what DeepSpeed's bf16 optimizer of two ranks saved is a
    KeyError in DeepSpeed.
    """
    checkpoint = str(tmp_path / "checkpoint")
    keep = ("--save", checkpoint, "--save-interval", "2")
    first = Layout(name="save", ranks=2)
    then = Layout(name="load", ranks=1, micro_batch=3)
    run(tree, first, corpus, tmp_path / "saved", *keep, "--exit-interval", "2")
    run(tree, then, corpus, tmp_path / "loaded", *keep, "--load", checkpoint)
    folders = (tmp_path / "saved", tmp_path / "loaded")
    matrix.resumed(HOST, tree, folders, corpus, shifted=True)


@pytest.mark.parametrize("layout", FULL_VALIDATION, ids=lambda layout: layout.name)
def test_full_validation_loss_equals_that_of_single_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Each once, and what is logged is the mean over all labels; also of a run that is resumed."""
    folders = [tmp_path / "saved", tmp_path / "loaded"]
    keep = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "2")
    until = ("--eval-interval", "2", "--exit-interval", "2")
    logs = [run(tree, layout, corpus, folders[0], *keep, *until)]
    # With the pipeline engine from the beginning: DeepSpeed cannot load, see above.
    then = () if layout.engine else (*keep, "--load", keep[1])
    logs.append(run(tree, layout, corpus, folders[1], *then))
    matrix.validated(HOST, tree, layout.name, folders, corpus, logs)

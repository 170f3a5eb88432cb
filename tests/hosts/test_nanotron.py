"""A real nanotron checkout: every call of the model in a training, on all ranks.

``NANOTRON=/path/to/checkout[:/another] make test-hosts``. The example is started by torchrun and
trains on the CPU: nanotron's trainer, engine, Qwen2, optimizers, sanity checks and checkpoints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.hosts import matrix
from tests.hosts.corpus import LAYERS, ROW, STEP_ROWS, Corpus
from tests.hosts.processes import (
    CHANGED,
    LEAK,
    environment_of,
    finish,
    is_refused,
    marks_of,
    torchrun,
    trees_of,
)

TREES = trees_of("NANOTRON")
HOST = "nanotron"
STEPS = 4
TOLERANCE = 1e-5  # of a gradient's largest entry, float32

pytestmark = marks_of(TREES, "NANOTRON", "nanotron")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its ranks along each kind of parallelism, its data and other options."""

    name: str
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batch: int = 3
    zero: int = 0
    dtype: str = "float32"
    workers: int = 0
    data: str = "web.json"
    steps: int = STEPS
    stages: int = 1

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel


LAYOUTS = (
    Layout(name="DP 1, 3 epochs", steps=12),
    Layout(name="DP 2", data_parallel=2),
    Layout(name="DP 2, blend, ZeRO 1", data_parallel=2, micro_batch=1, zero=1, data="mix.json"),
    Layout(name="DP 2, readers", data_parallel=2, micro_batch=6, workers=2),
    Layout(name="TP 2", tensor_parallel=2),
    Layout(name="DP 2, bfloat16", data_parallel=2, dtype="bfloat16"),
)


# nanotron's options of a tiny Qwen2; ``configuration`` adds those that depend on the layout.
CONFIGURATION = f"""
checkpoints: {{checkpoint_interval: 2}}
general: {{project: test, run: test, seed: 1}}
logging: {{}}
model:
  ddp_bucket_cap_mb: 25
  make_vocab_size_divisible_by: 1
  init_method: {{std: 0.025}}
  model_config:
    {{is_qwen2_config: true, log_attn_probs: false, hidden_size: 64, intermediate_size: 128,
      max_position_embeddings: {ROW}, num_attention_heads: 4, num_hidden_layers: {LAYERS},
      num_key_value_heads: 2}}
optimizer:
  clip_grad: 1.0
  weight_decay: 0.01
  learning_rate_scheduler:
    {{learning_rate: 0.001, min_decay_lr: 0.00001, lr_warmup_steps: 0, lr_decay_steps: 10,
      lr_decay_style: cosine, lr_warmup_style: linear}}
  optimizer_factory:
    {{name: adamW, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 0.00000001,
      torch_adam_is_fused: false}}
parallelism: {{pp_engine: 1f1b, tp_mode: ALL_REDUCE, tp_linear_async_communication: false}}
tokenizer: {{tokenizer_name_or_path: none}}
tokens: {{sequence_length: {ROW}}}
"""


def configuration(layout: Layout, corpus: Corpus, saved: Path, resume: bool) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(CONFIGURATION)
    tree["checkpoints"]["checkpoints_path"] = str(saved)
    if resume:
        tree["checkpoints"]["resume_checkpoint_path"] = str(saved)
    data = {"dataset": None, "num_loading_workers": 0, "seed": 1}
    tree["data_stages"] = [
        {"name": f"stage {i}", "start_training_step": 1 + i, "data": data}
        for i in range(layout.stages)
    ]
    # One of its checks requires equal states on all ranks, although ZeRO shards them. Another stops
    # a run if ranks have equal micro batches: a step of the corpus' smallest bucket repeats rows.
    tree["general"]["ignore_sanity_checks"] = layout.zero > 0 or layout.micro_batch == 1
    tree["model"]["dtype"] = layout.dtype
    tree["model"]["model_config"]["vocab_size"] = corpus.vocabulary + corpus.vocabulary % 2
    tree["optimizer"]["accumulate_grad_in_fp32"] = layout.dtype != "float32"
    tree["optimizer"]["zero_stage"] = layout.zero
    sizes = {"dp": layout.data_parallel, "tp": layout.tensor_parallel}
    tree["parallelism"] |= {**sizes, "pp": layout.pipeline_parallel}
    tree["tokens"] |= {
        "train_steps": layout.steps,
        "micro_batch_size": layout.micro_batch,
        "batch_accumulation_per_replica": STEP_ROWS // layout.data_parallel // layout.micro_batch,
    }
    return tree


def command(layout: Layout, corpus: Corpus, folder: Path, saved: Path | None = None) -> list[str]:
    """Return the command of a run in a new folder with its configuration; ``saved``: resume from
    there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = configuration(layout, corpus, saved or folder / "saved", saved is not None)
    (folder / "config.yaml").write_text(yaml.safe_dump(text))
    return [
        *torchrun(layout.ranks, "launch_nanotron.py"),
        *("--config-file", str(folder / "config.yaml"), "--data-path", corpus.path(layout.data)),
        *("--num-workers", str(layout.workers)),
    ]


def environment(tree: Path, folder: Path) -> dict[str, str]:
    around = environment_of(tree / "src", "hosts-nanotron")
    return {**around, "HOST_RECORDS": str(folder), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def run(
    tree: Path,
    layout: Layout,
    corpus: Corpus,
    folder: Path,
    saved: Path | None = None,
    **variables: str,
) -> str:
    """Run the layout; return the log."""
    started = command(layout, corpus, folder, saved)
    around = environment(tree, folder) | variables
    return finish(started, folder, around, f"{layout.name} on {tree}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_gets_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Any]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    known = known_rows.setdefault(layout.data, {})
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    found = matrix.trained(*told, steps=layout.steps, known=known)
    assert found.attentions == LAYERS * found.calls
    assert len(re.findall(r"iteration: .*lm_loss: [\d.]+", log)) == layout.steps
    assert log.count("documents of a micro batch are kept apart: probed in") == layout.ranks


def test_loss_and_gradient_of_a_row_equal_those_of_its_documents(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    log = run(tree, Layout(name="one", steps=2), corpus, tmp_path / "run", HOST_ONE_BY_ONE="1")
    ((loss, gradient),) = re.findall(r"one by one: (\S+) (\S+)", log)
    assert float(loss) < TOLERANCE and float(gradient) < TOLERANCE


def test_gradient_is_a_mean_over_labels_for_any_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """nanotron's own mean of means is not."""
    whole = Layout(name="1", micro_batch=12, steps=1)
    cut = Layout(name="2", data_parallel=2, micro_batch=1, steps=1)
    for name, layout, wrong in (("1", whole, ""), ("2", cut, ""), ("means", cut, "mean of means")):
        run(tree, layout, corpus, tmp_path / name, HOST_GRADIENT="1", HOST_SABOTAGE=wrong)
    one, two, means = (torch.load(tmp_path / name / "gradient.pt") for name in ("1", "2", "means"))
    scale = one.abs().max()
    assert (two - one).abs().max() < TOLERANCE * scale
    assert (means - one).abs().max() > 100 * TOLERANCE * scale


def test_run_resumes_on_other_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to step 2, then one rank with larger micro batches from its checkpoint."""
    first = Layout(name="save", data_parallel=2, micro_batch=1, data="mix.json", steps=2)
    run(tree, first, corpus, tmp_path / "first")
    then = Layout(name="load", micro_batch=4, data="mix.json")
    run(tree, then, corpus, tmp_path / "then", saved=tmp_path / "first" / "saved")
    folders = (tmp_path / "first", tmp_path / "then")
    matrix.resumed(HOST, tree, folders, corpus)


@pytest.mark.parametrize(
    ("wrong", "layout", "said"),
    [
        ("boundary", Layout(name=""), LEAK),
        ("no boundary", Layout(name=""), LEAK),
        ("mask", Layout(name=""), "against the loss mask; this holds for"),
        ("loader", Layout(name=""), f"'label_ids' {CHANGED}"),
        ("", Layout(name="window", data="program.json"), "attention windows"),
        ("", Layout(name="pipeline", pipeline_parallel=2), "parallelism.pp is 2"),
        ("", Layout(name="stages", stages=2), "the number of data_stages is 2"),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else value or "stock",
)
def test_injected_faults_are_refused(
    wrong: str, layout: Layout, said: str, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Faults between the loader and the model, and options that rows do not support."""
    around = environment(tree, tmp_path) | {"HOST_SABOTAGE": wrong}
    is_refused(command(layout, corpus, tmp_path), tmp_path, around, said)

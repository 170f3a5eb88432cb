"""A real GPT-NeoX checkout: every call of the model in a training, on all ranks.

``GPT_NEOX=/path/to/checkout make test-hosts``. The guide's train_packed.py is started by NeoX's own
deepy.py and DeepSpeed's launcher; DeepSpeed's engine trains on the CPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_port
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.hosts import matrix
from tests.hosts.corpus import LAYERS, ROW, STEP_ROWS, Corpus
from tests.hosts.processes import LAUNCHERS, ROOT, environment_of, finish, marks_of, trees_of

TREES = trees_of("GPT_NEOX")
HOST = "GPT-NeoX"

pytestmark = marks_of(TREES, "GPT_NEOX", "GPT-NeoX")

# Settings of docs/guides/gpt_neox.md.
SCRIPT = """import runpy

from megapack.integrations.hosts import gpt_neox

gpt_neox.install()
runpy.run_path("train.py", run_name="__main__")
"""
PACKED = {"attention_config": [[["flash"], "all"]]}

# A tiny model without fused kernels, which need a GPU; sm3 is NeoX's one optimizer in plain torch.
MODEL = yaml.safe_load(f"""
{{num_layers: {LAYERS}, hidden_size: 32, num_attention_heads: 4, seq_length: {ROW},
  max_position_embeddings: {ROW}, pos_emb: learned, no_weight_tying: true, hidden_dropout: 0,
  attention_dropout: 0, scaled_upper_triang_masked_softmax_fusion: false, bias_gelu_fusion: false,
  rope_fusion: false, layernorm_fusion: false, optimizer: {{type: sm3, params: {{}}}},
  precision: fp32, tokenizer_type: HFTokenizer, num_workers: 0, use_wandb: false,
  log_interval: 1, eval_iters: 1, eval_interval: 3}}
""")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its number of ranks, NeoX's settings, and its data."""

    name: str
    ranks: int
    micro_batch: int = 1
    stages: int = 0
    """``pipe_parallel_size``: 0 without DeepSpeed's pipeline engine, 1 with it."""
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = "web.json"
    """A manifest of corpus.py, or ``paths``: weighted paths for each split."""
    train_iters: int = 4
    full_validation: bool = False

    @property
    def evaluates(self) -> bool:
        # NeoX's evaluate() unpacks (loss, metrics), which DeepSpeed's eval_batch does not return.
        return self.stages == 0


TENSOR = {"model_parallel_size": 2}
RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 1}
ZERO_1 = {
    "zero_optimization": {"stage": 1},
    "deepspeed_extra_args": {"zero_allow_untested_optimizer": True},
}
LAYOUTS = (
    Layout(name="DP 1, 3 epochs", ranks=1, train_iters=12),
    Layout(name="DP 2, blend", ranks=2, data="mix.json"),
    Layout(name="DP 2, micro batch 2", ranks=2, micro_batch=2),
    Layout(name="DP 3, weighted paths", ranks=3, data="paths"),
    # With one row per micro batch some have no label, since their documents are excluded.
    Layout(name="DP 2, stages and a window", ranks=2, micro_batch=2, data="program.json"),
    Layout(name="DP 2, recomputation, ZeRO 1", ranks=2, settings={**RECOMPUTED, **ZERO_1}),
    Layout(name="TP 2", ranks=2, settings=TENSOR),
    Layout(name="DP 2, pipeline engine", ranks=2, micro_batch=2, stages=1, settings=RECOMPUTED),
    Layout(name="TP 2, pipeline engine", ranks=2, stages=1, settings=TENSOR),
)

FULL_VALIDATION = tuple(
    Layout(
        name=f"full validation, {name}",
        ranks=2,
        settings={"split": "70,20,10", **settings},
        full_validation=True,
    )
    for name, settings in (("DP 2", {}), ("TP 2", TENSOR))
)


def data_settings(corpus: Corpus, layout: Layout) -> dict[str, Any]:
    if layout.data == "paths":
        web, code = corpus.path("web"), corpus.path("code")
        given = {"paths": [web, code], "weights": [0.7, 0.3]}
        splits = ("train", "valid", "test")
        return {f"{split}_data_{key}": of for split in splits for key, of in given.items()}
    split = "90,10,0" if layout.evaluates else "100,0,0"
    return {"data_path": corpus.path(layout.data), "split": split}


def settings(corpus: Corpus, layout: Layout, **more: Any) -> dict[str, Any]:
    """Return the configuration of the run for its yml."""
    tensor = layout.settings.get("model_parallel_size", 1)
    return {
        **MODEL,
        **PACKED,
        "num_gpus": layout.ranks,
        "master_port": free_port(),
        "pipe_parallel_size": layout.stages,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": STEP_ROWS * tensor // layout.micro_batch // layout.ranks,
        "train_iters": layout.train_iters,
        "lr_decay_iters": layout.train_iters,
        "checkpoint_factor": 1000,
        **data_settings(corpus, layout),
        **layout.settings,
        **more,
    }


def write_tokenizer(corpus: Corpus, path: Path) -> None:
    """NeoX takes its vocabulary from a tokenizer: here one with a word for every token id."""
    words = {f"t{number}": number for number in range(corpus.vocabulary)}
    words["<|endoftext|>"] = corpus.vocabulary
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(path))


def run(tree: Path, layout: Layout, corpus: Corpus, folder: Path, **more: Any) -> str:
    """Run the layout through deepy.py, with more settings; return the log. Records are in the
    folder."""
    folder.mkdir(parents=True)
    for name in ("deepy.py", "train.py"):
        (folder / name).symlink_to(tree / name)
    whole = f"install({'full_validation=True' if layout.full_validation else ''})"
    (folder / "train_packed.py").write_text(SCRIPT.replace("install()", whole))
    write_tokenizer(corpus, folder / "tokenizer.json")
    config = settings(corpus, layout, vocab_file=str(folder / "tokenizer.json"), **more)
    (folder / "config.yml").write_text(json.dumps(config))
    launcher = str(LAUNCHERS / "launch_neox.py")
    environment = {
        **environment_of(tree, "hosts-neox"),
        "HOST_RANKS": str(layout.ranks),
        "HOST_RECORDS": str(folder),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(layout.ranks),
    }
    command = [sys.executable, launcher, "deepy.py", launcher, "config.yml"]
    return finish(command, folder, environment, f"{layout.name} on {tree}")


def test_the_guide_has_the_script_that_is_run() -> None:
    guide = (ROOT / "docs" / "guides" / "gpt_neox.md").read_text()
    assert f"```python\n{SCRIPT}```" in guide


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_gets_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Any]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    # Where all documents train, rows are others.
    known = known_rows.setdefault(f"{layout.data}, {layout.evaluates}", {})
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    how = {"shifted": True, "program": layout.data == "program.json"}
    found = matrix.trained(*told, steps=layout.train_iters, known=known, **how)
    recomputed = bool(layout.settings.get("checkpoint_activations"))
    assert (found.attentions > LAYERS * found.calls) == recomputed
    assert log.count("| lm_loss:") == layout.train_iters, "and the run went to its end"
    assert "nan |" not in log.lower()
    assert ("validation results" in log) == layout.evaluates


@pytest.mark.parametrize("stages", [0, 1], ids=["", "pipeline engine"])
def test_run_resumes_on_other_ranks_and_micro_batches(
    stages: int, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to iteration 2, then one rank with micro batches of 3 from its checkpoint."""
    keep: dict[str, Any] = {"save": str(tmp_path / "checkpoint"), "checkpoint_factor": 2}
    # A resumed run begins validation elsewhere, counted in micro batches, and repeats what it read.
    keep["split"] = "100,0,0"
    first = Layout(name="save", ranks=2, stages=stages)
    then = Layout(name="load", ranks=1, micro_batch=3, stages=stages)
    run(tree, first, corpus, tmp_path / "saved", **keep, exit_interval=2)
    run(tree, then, corpus, tmp_path / "loaded", **keep, load=keep["save"])
    folders, remark = (tmp_path / "saved", tmp_path / "loaded"), ", pipeline engine" * stages
    matrix.resumed(HOST, tree, folders, corpus, remark=remark, shifted=True)


@pytest.mark.parametrize("layout", FULL_VALIDATION, ids=lambda layout: layout.name)
def test_full_validation_loss_equals_that_of_single_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Each once, and what is logged is the mean over all labels; also of a run that is resumed."""
    folders = [tmp_path / "saved", tmp_path / "loaded"]
    keep: dict[str, Any] = {"save": str(tmp_path / "checkpoint"), "checkpoint_factor": 2}
    saved = run(tree, layout, corpus, folders[0], **keep, eval_interval=2, exit_interval=2)
    logs = [saved, run(tree, layout, corpus, folders[1], **keep, load=keep["save"])]
    matrix.validated(HOST, tree, layout.name, folders, corpus, logs)

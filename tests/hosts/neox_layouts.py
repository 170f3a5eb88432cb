"""Runs of GPT-NeoX that are checked, and how one of them is started."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import free_port
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.hosts.corpus import Corpus
from tests.hosts.processes import LAUNCHERS, environment_of, finish

ROW = 128
GLOBAL_BATCH = 12
LAYERS = 2

# As docs/guides/gpt_neox.md has it.
SCRIPT = """import runpy

from megapack.integrations import gpt_neox

gpt_neox.install()
runpy.run_path("train.py", run_name="__main__")
"""
PACKED = {"attention_config": [[["flash"], "all"]]}

# A tiny model without fused kernels, which want a GPU; sm3 is NeoX's one optimizer in plain torch.
MODEL = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": ROW,
    "max_position_embeddings": ROW,
    "pos_emb": "learned",
    "no_weight_tying": True,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "rope_fusion": False,
    "layernorm_fusion": False,
    "precision": "fp32",
    "optimizer": {"type": "sm3", "params": {}},
    "tokenizer_type": "HFTokenizer",
    "num_workers": 0,
    "use_wandb": False,
    "log_interval": 1,
    "eval_iters": 1,
    "eval_interval": 3,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: how many ranks, which of NeoX's settings, which data."""

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


LAYOUTS = (
    Layout(name="DP 1, 3 epochs", ranks=1, train_iters=12),
    Layout(name="DP 2, blend", ranks=2, data="mix.json"),
    Layout(name="DP 2, micro batch 2", ranks=2, micro_batch=2),
    Layout(name="DP 3, weighted paths", ranks=3, data="paths"),
    # With one row per micro batch some have no label, since their documents are excluded.
    Layout(name="DP 2, stages and a window", ranks=2, micro_batch=2, data="program.json"),
    Layout(
        name="DP 2, recomputation, ZeRO 1",
        ranks=2,
        settings={
            "checkpoint_activations": True,
            "checkpoint_num_layers": 1,
            "zero_optimization": {"stage": 1},
            "deepspeed_extra_args": {"zero_allow_untested_optimizer": True},
        },
    ),
    Layout(name="TP 2", ranks=2, settings={"model_parallel_size": 2}),
    Layout(
        name="DP 2, pipeline engine",
        ranks=2,
        micro_batch=2,
        stages=1,
        settings={"checkpoint_activations": True, "checkpoint_num_layers": 1},
    ),
    Layout(name="TP 2, pipeline engine", ranks=2, stages=1, settings={"model_parallel_size": 2}),
)

SPLIT = {"split": "70,20,10"}
FULL_VALIDATION = (
    Layout(name="full validation, DP 2", ranks=2, settings=SPLIT, full_validation=True),
    Layout(
        name="full validation, TP 2",
        ranks=2,
        settings={"model_parallel_size": 2, **SPLIT},
        full_validation=True,
    ),
)


def data_settings(corpus: Corpus, layout: Layout) -> dict[str, Any]:
    if layout.data == "paths":
        web, code = corpus.path("web"), corpus.path("code")
        return {
            **{f"{split}_data_paths": [web, code] for split in ("train", "valid", "test")},
            **{f"{split}_data_weights": [0.7, 0.3] for split in ("train", "valid", "test")},
        }
    split = "90,10,0" if layout.evaluates else "100,0,0"
    return {"data_path": corpus.path(layout.data), "split": split}


def settings(corpus: Corpus, layout: Layout, **more: Any) -> dict[str, Any]:
    """The configuration of the run, as it is written to its yml."""
    tensor = layout.settings.get("model_parallel_size", 1)
    return {
        **MODEL,
        **PACKED,
        "num_gpus": layout.ranks,
        "master_port": free_port(),
        "pipe_parallel_size": layout.stages,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": GLOBAL_BATCH * tensor // layout.micro_batch // layout.ranks,
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


def script(layout: Layout) -> str:
    if not layout.full_validation:
        return SCRIPT
    return SCRIPT.replace("install()", "install(full_validation=True)")


def run(tree: Path, layout: Layout, corpus: Corpus, folder: Path, **more: Any) -> str:
    """Run the layout through deepy.py; what it logged. Raises AssertionError where it fails.

    Args:
        tree: the checkout.
        layout, corpus: what is run, on which documents.
        folder: is made; the records lie in it.
        more: settings beside the layout's.
    """
    folder.mkdir(parents=True)
    for name in ("deepy.py", "train.py"):
        (folder / name).symlink_to(tree / name)
    (folder / "train_packed.py").write_text(script(layout))
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

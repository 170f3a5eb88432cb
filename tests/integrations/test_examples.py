"""Every example runs unchanged and learns: tiny models, a tiny corpus, the CPU."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.integrations.harness import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ["--tokens-per-step", "1024", "--micro-batch-tokens", "512", "--steps", "12"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards: a model of two layers learns the next number quickly."""
    folder = tmp_path_factory.mktemp("examples")
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "text", np.uint16, vocab_size=1000) as builder:
        for length in np.minimum(rng.lognormal(4.0, 0.8, 300).astype(int) + 2, 400):
            builder.add_document((rng.integers(50) + np.arange(length)) % 50)
    dataset = IndexedDataset(folder / "text")
    index = pack(dataset.document_lengths, buckets=[128, 256, 512])
    index.save(folder / "text.samples", source=dataset)
    return folder


def run_example(name: str, arguments: list[str]) -> list[float]:
    losses: list[float] = runpy.run_path(str(EXAMPLES / name))["main"](arguments)
    return losses


def assert_learns(losses: list[float]) -> None:
    assert len(losses) == 12
    assert losses[0] == pytest.approx(np.log(1000), rel=0.15), "an untrained model knows nothing"
    assert max(losses[-3:]) < 0.9 * losses[0]


@pytest.mark.parametrize(
    "name", ["pytorch_loop.py", "transformers_trainer.py", "accelerate_loop.py"]
)
def test_an_example_learns(corpus: Path, tmp_path: Path, name: str) -> None:
    output = ["--output", str(tmp_path)] if name == "transformers_trainer.py" else []
    arguments = [str(corpus / "text"), str(corpus / "text.samples"), *SIZES, *output]
    assert_learns(run_example(name, arguments))


def test_the_trl_example_learns(corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    ends = {"pad_token": "[PAD]", "eos_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **ends)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = [str(corpus / "text"), str(corpus / "text.samples"), *SIZES]
    where = ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "run")]
    assert_learns(run_example("trl_sft.py", [*arguments, *where]))


@pytest.mark.parametrize("name", ["planned_accelerate.py", "planned_trl.py"])
def test_the_planned_steps_example_learns(tmp_path: Path, name: str) -> None:
    arguments = ["--method", "sft", "--output", str(tmp_path)] if "trl" in name else []
    losses = run_example(name, arguments)
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]


def test_the_planned_grpo_example_gains_reward(tmp_path: Path) -> None:
    arguments = ["--method", "grpo", "--steps", "4", "--output", str(tmp_path)]
    rewards = run_example("planned_trl.py", arguments)
    assert len(rewards) == 4 and all(0 <= reward <= 1 for reward in rewards)


@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_the_tree_example_trains_the_same_with_fewer_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # it starts processes that import it
    given = ["--method", method, "--steps", "2", "--prompt-tokens", "48", "--answer-tokens", "16"]
    given += ["--hidden-size", "64", "--output", str(tmp_path)]
    without, with_trees = importlib.import_module("tree_trl").main(given).values()
    assert with_trees["losses"] == pytest.approx(without["losses"], rel=1e-4, abs=1e-5)
    for ours, theirs in zip(with_trees["parameters"], without["parameters"], strict=True):
        assert abs(ours - theirs).max() < 1e-5
    assert with_trees["moved"] > 1e-4
    assert with_trees["tokens"] < 0.7 * without["tokens"]


@pytest.mark.multiprocess
def test_the_megatron_core_example_learns(corpus: Path) -> None:
    arguments = [str(corpus / "text"), "--seq-length", "256", "--steps", "12"]
    losses: Any = run_forked(run_example, "megatron_core_loop.py", arguments)
    assert_learns(losses)


def test_the_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(path.name in text for path in EXAMPLES.glob("*.py"))

"""Every example runs unchanged and learns: tiny models, a tiny corpus, the CPU."""

from __future__ import annotations

import importlib
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.data import PackedDataset
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


def test_the_image_example_learns() -> None:
    losses = run_example("image_documents.py", ["--documents", "400", "--steps", "12"])
    assert len(losses) == 12 and losses[-1] < 0.6 * losses[0]


def test_packed_documents_with_images_equal_the_documents_alone(tmp_path: Path) -> None:
    """Loss and every gradient, in float64; with the images in another order the loss differs."""
    torch = importlib.import_module("torch")
    example = runpy.run_path(str(EXAMPLES / "image_documents.py"))
    example["write_documents"](tmp_path, 60)
    prefix, images = tmp_path / "pages", np.load(tmp_path / "images.npy").astype(np.float64)
    dataset = IndexedDataset(prefix)
    model = example["build_model"]().double().eval()

    def gradients(loss: Any) -> list[Any]:
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    data = PackedDataset(prefix, f"{prefix}.samples", columns=["image"])
    packed = data.micro_batch(range(len(data)))
    assert len(packed["cu_seqlens"]) > 60 and (packed["image"] >= 0).sum() > 50
    loss = example["sum_of_losses"](model, packed, images)

    alone = torch.zeros((), dtype=torch.float64)
    for begin, end in pairwise(dataset.document_offsets.tolist()):
        tokens = torch.from_numpy(dataset.tokens[begin:end].astype(np.int64))
        rows = dataset.columns["image"].rows[begin:end]
        pixels = {"pixel_values": torch.from_numpy(images[rows[rows >= 0]])}
        logits = model(tokens[None], **(pixels if (rows >= 0).any() else {})).logits[0, :-1]
        kept = tokens[1:] != example["IMAGE_TOKEN"]
        alone += torch.nn.functional.cross_entropy(logits[kept], tokens[1:][kept], reduction="sum")
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)
    ours, theirs = gradients(loss), gradients(alone)
    assert len(ours) == len(theirs) > 40
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    wrong = example["sum_of_losses"](model, packed, np.roll(images, 1, axis=0))
    assert wrong.item() != pytest.approx(alone.item(), rel=1e-6)

"""PackedTrainer on prefix trees from disk: steps are those of every document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megapack import attention
from megapack.data import PackedDataset, Schedule
from megapack.errors import ConfigError
from megapack.integrations.hosts.transformers import MicroBatches, PackedTrainer, check_model
from megapack.packing import pack
from megapack.packing.trees import tokens_of
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.integrations.test_transformers import arguments, on_a_cpu, tiny_llama

__all__ = ["on_a_cpu"]  # fixture

CAPACITY = 64
STEP, MICRO = 4 * CAPACITY, 2 * CAPACITY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with documents ``text`` of 10 prompts, each with 4 branching answers."""
    random, folder = np.random.default_rng(1), tmp_path_factory.mktemp("trees")
    with IndexedDatasetBuilder(folder / "text", np.uint16, vocab_size=1000) as builder:
        for _ in range(10):
            prompt, turn = random.integers(1, 1000, 12), random.integers(1, 1000, 9)
            for k in range(4):
                answer = random.integers(1, 1000, random.integers(1, 12))
                builder.add_document(np.concatenate([prompt, turn[: 3 * k], answer]))
    dataset = IndexedDataset(folder / "text")
    lengths = dataset.document_lengths
    index = pack(lengths, "tree", buckets=CAPACITY, **tokens_of(dataset, "tree"))
    index.save(folder / "text.samples", source=dataset)
    return folder


def micro_batches(folder: Path) -> MicroBatches:
    dataset = PackedDataset(folder / "text", folder / "text.samples", attention="tree")
    return MicroBatches(dataset, Schedule(dataset, tokens_per_step=STEP), micro_batch_tokens=MICRO)


def trainer(folder: Path, out: Path, **options: Any) -> PackedTrainer:
    attention.register("sdpa")
    arguments_of = {"gradient_accumulation_steps": STEP // MICRO, "max_steps": 2, **options}
    data = micro_batches(folder)
    return PackedTrainer(
        model=tiny_llama(), args=arguments(out, **arguments_of), train_dataset=data
    )


def test_two_steps_equal_those_of_documents_alone(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, tmp_path)
    data = made.train_dataset
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    model, dataset = tiny_llama("eager"), IndexedDataset(folder / "text")
    index = data.dataset.samples.indices[0].open(0)
    expected = []
    for step in range(2):
        total, count = torch.zeros(()), 0
        for sample in data.schedule.step(step).sample_ids.tolist():
            for document, _ in index.documents_of(sample):
                tokens = torch.tensor(dataset[document].astype(np.int64))
                logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
                total = total + F.cross_entropy(logits, tokens[1:], reduction="sum")
                count += len(tokens) - 1
        model.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        expected.append(float(total.detach() / count))
    assert losses == pytest.approx(expected, rel=1e-4)
    for (name, ours), theirs in zip(made.model.named_parameters(), model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-5, name


def test_what_would_train_trees_wrongly_is_refused(folder: Path, tmp_path: Path) -> None:
    data = micro_batches(folder)
    with pytest.raises(ConfigError, match="attention 'sdpa' ignores their paths"):
        check_model(tiny_llama("sdpa"), data.dataset)
    with pytest.raises(ConfigError, match="neftune_noise_alpha"):
        trainer(folder, tmp_path, neftune_noise_alpha=5.0).get_train_dataloader()
    with pytest.raises(ConfigError, match="eval_dataset"):
        trainer(folder, tmp_path).get_eval_dataloader(data)
    with pytest.raises(ConfigError, match="plain mean of its labels"):
        data[0]

"""Validation perplexity equals that of documents scored one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training import validation
from megapack.training.command import free_port
from megapack.training.config import EngineConfig
from megapack.training.engine.inputs import open_validation, read_lengths
from megapack.training.engine.world import World
from megapack.training.model.training_model import TrainingModel
from megapack.training.trainer import TimedBatches
from megapack.training.validation import (
    ValidationResult,
    perplexity_by_context,
    validate,
)

from .conftest import BUCKETS, Corpus
from .packing_helpers import tiny_model

CONFIG = EngineConfig(precision="fp32")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One process in its own process group."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    yield World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host="here")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model() -> TrainingModel:
    torch.manual_seed(0)
    result = tiny_model("llama_tiny", vocab_size=64, z_loss=0.3)  # not part of evaluation
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return result


def _brute_force(model: TrainingModel, dataset: IndexedDataset, context: int) -> tuple[float, int]:
    """Score documents in independent pieces of ``context`` tokens, with transformers."""
    model.model.set_attn_implementation("eager")
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(dataset.num_documents):
            tokens = torch.from_numpy(dataset[i].astype(np.int64))
            for at in range(0, len(tokens) - 1, context):
                piece = tokens[at : at + context + 1]
                logits = model.model(piece[:-1].unsqueeze(0), use_cache=False).logits[0]
                total += F.cross_entropy(logits, piece[1:], reduction="sum").item()
                count += len(piece) - 1
    model.model.set_attn_implementation("megapack")
    return total, count


@pytest.fixture
def evaluated(corpus: Corpus, model: TrainingModel, world: World) -> Callable[..., Any]:
    """``evaluated(index)``: validation of the documents."""

    def run(index: str | None = None, micro_batch_tokens: int = 256, **more: Any) -> Any:
        data = open_validation(str(corpus.valid), index, buckets=BUCKETS)
        options = {"micro_batch_tokens": micro_batch_tokens, **more}
        return validate(model, data, world=world, config=CONFIG, **options)

    return run


def test_perplexity_equals_that_of_single_documents(
    corpus: Corpus, model: TrainingModel, evaluated: Callable[..., Any]
) -> None:
    total, count = _brute_force(model, IndexedDataset(corpus.valid), max(BUCKETS))
    for index in (f"{corpus.valid}.samples", None):
        result = evaluated(index)
        assert sum(result.label_tokens.values()) == count
        assert result.loss == pytest.approx(total / count, rel=1e-5)
        assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
        assert sorted(result.label_tokens) == BUCKETS and all(result.label_tokens.values())
    assert model.training, "evaluation restores the training mode"


def test_contexts_score_the_same_tokens(corpus: Corpus, model: TrainingModel, world: World) -> None:
    dataset, contexts = IndexedDataset(corpus.valid), [16, 64, 256]
    how = {"world": world, "config": CONFIG, "micro_batch_tokens": 256}
    result = perplexity_by_context(model, dataset, contexts, **how)
    counts = {sum(r.label_tokens.values()) for r in result.values()}
    assert counts == {dataset.num_tokens - dataset.num_documents}
    for context in contexts:
        total, count = _brute_force(model, dataset, context)
        assert result[context].loss == pytest.approx(total / count, rel=1e-5)
    assert result[16].loss != pytest.approx(result[256].loss, rel=1e-3)


def test_a_long_validation_is_not_silent(
    evaluated: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="megapack"):
        evaluated()
        assert "validating" not in caplog.text
        monkeypatch.setattr(validation, "_SECONDS_BETWEEN_LINES", 0.0)
        evaluated()
    for bucket in BUCKETS:
        assert f"validating: bucket {bucket}, 0 micro batches done" in caplog.text


def test_result_ignores_micro_batches(evaluated: Callable[..., Any]) -> None:
    losses = [evaluated(micro_batch_tokens=n).loss for n in (32, 300, 4096)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_fewer_tokens_take_first_samples(evaluated: Callable[..., Any]) -> None:
    whole, part = evaluated(), evaluated(max_tokens=128)
    for capacity in BUCKETS:
        assert 0 < part.label_tokens[capacity] <= min(128, whole.label_tokens[capacity])
    assert sum(part.label_tokens.values()) < sum(whole.label_tokens.values())


def test_lossy_index_cannot_evaluate(corpus: Corpus, tmp_path: object) -> None:
    dataset = IndexedDataset(corpus.valid)
    index = pack(dataset.document_lengths, "concat", buckets=[64], last="drop")
    assert index.metrics()["dropped_tokens"], "the index must drop tokens"
    path = f"{tmp_path}/concat.samples"
    index.save(path, source=dataset)
    with pytest.raises(ConfigError, match="dropped_tokens; evaluate with an index"):
        open_validation(str(corpus.valid), path, buckets=BUCKETS)


@pytest.mark.parametrize("lengths", [[], [0, 0], [1, 1, 1]], ids=str)
def test_documents_without_a_label_cannot_evaluate(lengths: list[int], tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "valid", np.uint16, vocab_size=64) as builder:
        for length in lengths:
            builder.add_document(np.zeros(length, np.uint16))
    with pytest.raises(ConfigError, match=f"none of its {len(lengths)} held-out documents has a"):
        open_validation(str(tmp_path / "valid"), None, buckets=BUCKETS)


def test_large_loss_gives_infinite_perplexity() -> None:
    result = ValidationResult(loss_sums={8: 1e6}, label_tokens={8: 10})
    assert result.perplexity == math.inf
    nothing = ValidationResult(loss_sums={8: 0.0}, label_tokens={8: 0})
    assert nothing.report()["bucket_loss"] == {}
    assert math.isnan(nothing.loss) and math.isnan(nothing.perplexity)


# ---- Lengths without documents


def test_lognormal_lengths_have_the_given_mean_and_median() -> None:
    lengths = read_lengths("lognormal:999,603,2e5", seed=1)
    assert len(lengths) == 200_000 and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(999, rel=0.02)
    assert np.median(lengths) == pytest.approx(603, rel=0.02)
    assert np.array_equal(lengths, read_lengths("lognormal:999,603,2e5", seed=1))


@pytest.mark.parametrize("law", ["999,603", "3,9,10", "a,b,c", "9,3,nan", "inf,3,10", "9,3,0"])
def test_invalid_distribution_is_refused(law: str) -> None:
    with pytest.raises(ConfigError, match=f"'lognormal:{law}'"):
        read_lengths(f"lognormal:{law}", seed=0)


# ---- Requests of the trainer to the loader


def test_update_does_not_wait_for_the_next_batch() -> None:
    """Otherwise a slow loader would delay every update."""
    asked = []

    def loader() -> Iterator[Any]:
        for step in range(3):
            for micro_step in range(2):
                asked.append((step, micro_step))
                about = {"step": step, "micro_step": micro_step, "num_micro_steps": 2}
                yield {**about, "imbalance": 1.0 + step}

    batches = TimedBatches(loader())  # type: ignore[arg-type]
    seen = []
    for step, micro_batches in batches.steps():
        seen += [(step, batch["micro_step"]) for batch in micro_batches]
        assert asked == seen, "requested more than the step has"
        assert batches.imbalance == 1.0 + step
    assert seen == [(step, micro_step) for step in range(3) for micro_step in range(2)]

"""Runs with ``data.attention: tree``: loss, gradient and steps are those of the documents alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.packing.trees import tokens_of
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED, WEIGHTS
from megapack.training.config import PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.engine.directory import RunDirectory
from megapack.training.engine.inputs import Inputs
from megapack.training.start import check_start

from .conftest import VOCAB, Corpus, NewRun
from .packing_helpers import check_gradients, plain

CAPACITY = 128


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of documents: 12 prompts, each with 6 answers that branch."""
    random = np.random.default_rng(5)
    prefix = tmp_path_factory.mktemp("rollouts") / "rollouts"

    def walk(length: int) -> list[int]:
        steps = random.choice([0, 1, 2], length, p=[0.2, 0.6, 0.2])
        return ((random.integers(VOCAB) + steps.cumsum()) % VOCAB).tolist()

    texts = []
    for _ in range(12):
        prompt, turns = walk(random.integers(10, 40)), [walk(8), walk(12)]
        for _ in range(6):
            turn = turns[random.integers(2)]
            texts.append(prompt + turn[: random.integers(1, len(turn))] + walk(random.integers(30)))
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, vocab_size=VOCAB) as builder:
        for i in random.permutation(len(texts)).tolist():
            builder.add_document(texts[i])
    dataset = IndexedDataset(prefix)
    drawn = [random.choice([0.0, 0.5, 1.0, 2.0], len(text)) for text in dataset]
    add_column(prefix, WEIGHTS, drawn, INTERPRETED[WEIGHTS])
    dataset = IndexedDataset(prefix)
    lengths = dataset.document_lengths
    index = pack(lengths, "tree", buckets=CAPACITY, **tokens_of(dataset, "tree"))
    assert index.metrics()["shared_tokens"] > 0.3 * index.num_tokens
    index.save(f"{prefix}.samples", source=dataset)
    return prefix


def section(prefix: Path, **more: Any) -> dict[str, Any]:
    sizes = {"tokens_per_step": 8 * CAPACITY, "micro_batch_tokens": 2 * CAPACITY}
    files = {"prefix": str(prefix), "index": f"{prefix}.samples"}
    return {**files, "attention": "tree", "pad_last": True, **sizes, **more}


def mean_loss(model: Any, inputs: Inputs, step: int) -> torch.Tensor:
    """Return the weighted mean over the tokens of all documents of a step, each alone."""
    index, dataset = inputs.data.samples.indices[0].open(0), inputs.data.datasets[0].open(0)
    weights = np.asarray(dataset.columns[WEIGHTS].rows)
    total, count = torch.zeros(()), 0.0
    for sample in inputs.schedule.step(step).sample_ids.tolist():
        for document, _ in index.documents_of(sample):
            tokens = torch.tensor(dataset[document].astype(np.int64))
            first = int(dataset.document_offsets[document])
            weight = torch.from_numpy(weights[first + 1 : first + len(tokens)].astype(np.float32))
            logits = model.model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            total = total + weight @ F.cross_entropy(logits, tokens[1:], reduction="none")
            count += float(weight.sum())
    return total / count


def test_gradients_are_those_of_the_documents_alone(rollouts: Path, new_run: NewRun) -> None:
    def made(name: str, **engine: Any) -> Any:
        engine = {"precision": "fp32", **engine}
        return new_run(name, num_steps=2, data=section(rollouts, valid_prefix=None), engine=engine)

    config = load_config(PretrainConfig, made("plain").config)
    inputs, model = plain(config)
    expected = mean_loss(model, inputs, 0)
    expected.backward()
    model.loss = expected
    results = []
    for ranks, stage in ((1, 0), (2, 0), (2, 3)):
        result = made(f"r{ranks}s{stage}", zero_stage=stage).worker(ranks)
        assert result["losses"][0] == pytest.approx(expected.item(), rel=1e-5)
        check_gradients(result["grads"], model)
        results.append(result)
    for result in results[1:]:
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=1e-4)


def test_a_run_trains_probes_and_evaluates(rollouts: Path, new_run: NewRun, corpus: Corpus) -> None:
    evaluation = {"every": 2, "buckets": [32, 64, 128]}
    data = section(rollouts, valid_prefix=str(corpus.valid))
    run = new_run("run", num_steps=3, data=data, evaluation=evaluation)
    text = run.succeed(ranks=2)
    assert "documents of a micro batch are kept apart: probed" in text
    losses = [line["loss"] for line in run.log]
    assert losses and losses[-1] < losses[0] + 0.1
    config = load_config(PretrainConfig, run.config)
    inputs = Inputs(config)
    line = run.log[-1]
    content = inputs.schedule.step(line["step"])
    assert line["padding"] > 0 and content.num_label_tokens > CAPACITY
    with pytest.raises(Exception, match="attention"):
        run.start("data.attention=document", ranks=1).end_with(1, "nothing")


def test_settings_that_trees_do_not_have_are_refused_at_startup(
    rollouts: Path, corpus: Corpus, tmp_path: Path
) -> None:
    def message(**sections: Any) -> str:
        data = {**section(rollouts, valid_prefix=None), **sections.pop("data", {})}
        path = corpus.config(tmp_path / "run", data=data, **sections)
        config = load_config(PretrainConfig, path)
        with pytest.raises(ConfigError) as caught:
            check_start(config, RunDirectory(config.run_dir), 2)
        return str(caught.value)

    assert "engine.compile is set with data.attention: tree" in message(engine={"compile": True})
    assert "distill is set with data.attention: tree" in message(distill={"alpha": 0.5})
    assert "sequence_parallel_size is 2" in message(engine={"sequence_parallel_size": 2})
    assert "has prefix trees" in message(data={"attention": "document"})
    assert "has prefix trees" in message(
        data={"valid_prefix": str(rollouts), "valid_index": f"{rollouts}.samples"}
    )
    routed = {"preset": "qwen3_30b_a3b", "overrides": {"output_router_logits": True}}
    assert "output_router_logits is set" in message(model=routed)
    config = load_config(PretrainConfig, corpus.config(tmp_path / "dry", data=section(rollouts)))
    with pytest.raises(ConfigError, match="the trees depend on tokens"):
        dry_run(config, world_size=2, lengths="lognormal:30,20,100")
    assert "attention inside: tree" in dry_run(config, world_size=2)

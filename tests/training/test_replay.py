"""A run that replays routes trains with the experts that its column records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megapack.attention import record_routes, replay_routes
from megapack.config import load_config
from megapack.data import BucketBatchSampler
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import add_column
from megapack.storage.columns import ColumnSpec
from megapack.training.config import PretrainConfig
from megapack.training.engine.inputs import Inputs, check_run

from .conftest import NewRun, make_corpus
from .test_experts import opened, saved

LAYERS, TOP_K, EXPERTS = 2, 2, 6
SPEC = ColumnSpec(dtype="int16", shape=(LAYERS, TOP_K), fill=-1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sections of a configuration whose training documents have random routes."""
    folder = tmp_path_factory.mktemp("recorded")
    corpus = make_corpus(folder)
    num_tokens = IndexedDataset(corpus.train).num_tokens
    drawn = np.random.default_rng(0).random((num_tokens, LAYERS, EXPERTS)).argsort(-1)
    add_column(corpus.train, "routes", drawn[..., :TOP_K].astype(np.int16), SPEC)
    data = {
        **{"prefix": str(corpus.train), "index": f"{corpus.train}.samples"},
        **{"valid_prefix": str(corpus.valid), "columns": ["routes"]},
    }
    pretrained = str(saved("qwen3_moe", folder / "model"))
    overrides = {"output_router_logits": False}
    model = {"preset": None, "pretrained": pretrained, "overrides": overrides}
    return {"data": data, "model": {**model, "replay_routes": True}}


def plain_step(model: Any, inputs: Inputs, config: PretrainConfig, replays: bool) -> Tensor:
    """Return the loss of step 0 document by document, with the routes of the file."""
    samples, losses, labels = inputs.schedule.samples, [], 0
    sampler = BucketBatchSampler(
        inputs.schedule,
        **{"data_parallel_rank": 0, "data_parallel_size": 1},
        micro_batch_tokens=config.data.micro_batch_tokens,
    )
    dataset = inputs.data.datasets[0].open(0)
    begins = np.concatenate([[0], np.cumsum(dataset.document_lengths)])
    for batch in sampler.micro_batches(0):
        for sample in batch:
            for document, begin, length in samples.segments(sample)[1]:
                text = torch.from_numpy(dataset[document].astype(np.int64))
                first = int(begins[document]) + begin
                rows = torch.tensor(dataset.columns["routes"].rows[first : first + length])
                arguments = {"input_ids": text[None, begin : begin + length], "use_cache": False}
                if replays:
                    with replay_routes(model, rows):
                        logits = model(**arguments).logits[0]
                else:
                    logits = model(**arguments).logits[0]
                label = text[begin + 1 :][:length]
                losses.append(F.cross_entropy(logits[: len(label)], label, reduction="sum"))
                labels += len(label)
    assert labels == inputs.schedule.step(0).num_label_tokens
    return torch.stack(losses).sum() / labels


@pytest.mark.parametrize(
    ("ranks", "engine"),
    [
        (1, {}),
        (2, {"zero_stage": 0}),
        (2, {"zero_stage": 3, "activation_checkpointing": True}),
        (1, {"compile": True}),
    ],
)
def test_step_equals_documents_with_the_routes_of_the_file(
    new_run: NewRun, recorded: dict[str, Any], ranks: int, engine: dict[str, Any]
) -> None:
    run = new_run("replay", **recorded, engine=engine)
    found = run.worker(ranks, more=["num_steps=2"], env={"COMPILED_BY": "eager"})
    config = load_config(PretrainConfig, run.config)
    overrides = config.model.overrides
    model = opened(Path(str(config.model.pretrained)), **overrides).model
    model.set_attn_implementation("eager")
    inputs = Inputs(config)
    with torch.no_grad():
        assert abs(float(plain_step(model, inputs, config, False)) - found["losses"][0]) > 0.01
    loss = plain_step(model, inputs, config, True)
    loss.backward()
    assert found["losses"][0] == pytest.approx(loss.item(), rel=1e-5)
    for key, parameter in model.named_parameters():
        grad = parameter.grad
        error = (found["grads"][f"model.{key}"] - grad).norm() / grad.norm().clamp(min=1e-6)
        assert error < 1e-5, f"{key}: {error:.1e}"


def test_slices_replay_their_part_of_the_routes(new_run: NewRun, recorded: dict[str, Any]) -> None:
    alone, shared = (
        new_run(
            f"{ranks}",
            num_steps=1,
            model=recorded["model"],
            data={**recorded["data"], "micro_batch_tokens": micro},
            engine={"sequence_parallel_size": ranks},
        ).worker(ranks)
        for ranks, micro in ((1, 128), (2, 64))
    )
    assert alone["capacities"] == {128}, "the first step has the longest bucket"
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for key, grad in alone["grads"].items():
        assert (shared["grads"][key] - grad).norm() < 2e-3 * grad.norm().clamp(min=1e-6), key


def test_run_replays_and_validates(new_run: NewRun, recorded: dict[str, Any]) -> None:
    run = new_run("run", **recorded, num_steps=4, evaluation={"every": 2})
    run.start("engine.zero_stage=1").succeed("with replayed routes")
    assert [line["step"] for line in run.log] == [0, 1, 2, 3]
    assert len(run.lines("evaluation")) >= 2, "with the router's own choices"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"columns": []}}, r"no column 'routes': set data.columns=\[routes\]"),
        (
            {"model": {"overrides": {"num_experts_per_tok": 3}}},
            r"column 'routes' is int16 \[2, 2\] of token; 'qwen3_moe' needs int16 \[2, 3\]",
        ),
    ],
)
def test_wrong_columns_are_refused_at_startup(
    new_run: NewRun, recorded: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    sections = {key: {**recorded[key], **changes.get(key, {})} for key in recorded}
    refused(new_run, sections, message)


def test_layers_that_are_compiled_and_recomputed_are_refused(
    new_run: NewRun, recorded: dict[str, Any]
) -> None:
    engine = {"compile": True, "activation_checkpointing": True}
    run = new_run("both", **recorded, engine=engine)
    with pytest.raises(ConfigError, match="both compiled and recomputed cannot replay"):
        load_config(PretrainConfig, run.config)


def test_model_without_experts_is_refused_at_startup(
    new_run: NewRun, recorded: dict[str, Any]
) -> None:
    model = {"preset": "llama_tiny", "replay_routes": True}
    message = "it has no router that chooses experts by topk"
    refused(new_run, {"model": model, "data": recorded["data"]}, message)


def refused(new_run: NewRun, sections: dict[str, Any], message: str) -> None:
    config = load_config(PretrainConfig, new_run("wrong", **sections).config)
    with pytest.raises(ConfigError, match=message):
        check_run(config, Inputs(config), 1)


def test_recorded_routes_fit_the_column(recorded: dict[str, Any]) -> None:
    model = opened(Path(recorded["model"]["pretrained"]), output_router_logits=False).model
    with torch.no_grad(), record_routes(model) as recording:
        model.set_attn_implementation("eager")
        model(input_ids=torch.arange(20)[None], use_cache=False)
    assert SPEC.rows(recording.routes()).shape == (20, LAYERS, TOP_K)

"""Losses, validation and epochs by source of a blend."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megapack.cli.report import checks
from megapack.cli.report_charts import read_run
from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDataset, read_document_lengths
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from megapack.storage.merge import merge
from megapack.training.config import PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.engine.engine import _sum_by_sample
from megapack.training.engine.inputs import Inputs
from megapack.training.monitoring.monitor import mean_by_source, named_means

from .conftest import (
    BUCKETS,
    PER_STEP,
    ROW,
    Corpus,
    NewRun,
    blend_config,
    drawn_from,
    noisy_blend,
    write_blend,
)
from .packing_helpers import check_gradients, losses_one_by_one, plain


@contextmanager
def edited(blend: Path) -> Iterator[dict[str, Any]]:
    """Yield the tree of a manifest, then write it."""
    tree = yaml.safe_load(blend.read_text())
    yield tree
    blend.write_text(yaml.safe_dump(tree))


def expected_losses(config: PretrainConfig, window: int = 10**9) -> dict[str, tuple[float, int]]:
    """Return source -> (mean loss, labels) of step 0 with a new model, document by document."""
    inputs, model = plain(config)
    with torch.no_grad():
        found = losses_one_by_one(model, inputs, 0, window)
    result = {}
    for number, name in enumerate(inputs.schedule.samples.names):
        labels = sum(count for source, _, count in found if source == number)
        total = sum(loss.item() for source, loss, _ in found if source == number)
        result[name] = (total / labels, labels)
    return result


def test_run_logs_the_loss_of_every_source(new_run: NewRun, blend: Path) -> None:
    runs = [
        new_run(
            f"run{ranks}",
            num_steps=2,
            data=drawn_from(blend),
            logging={"every": 1, "tensorboard": ranks == 2},
        )
        for ranks in (1, 2)
    ]
    _, output = (run.succeed(ranks=ranks) for ranks, run in enumerate(runs, start=1))
    expected = expected_losses(load_config(PretrainConfig, runs[1].config))
    assert set(expected) == {"web", "math"}
    for run in runs:
        first = run.log[0]
        assert first["source_label_tokens"] == {name: n for name, (_, n) in expected.items()}
        for name, (loss, _) in expected.items():
            assert first["source_loss"][name] == pytest.approx(loss, rel=1e-5)
        for line in run.log:
            tokens = line["source_label_tokens"]
            assert sum(tokens.values()) == line["label_tokens"]
            total = sum(line["source_loss"][name] * n for name, n in tokens.items())
            assert total / line["label_tokens"] == pytest.approx(line["loss"], rel=1e-5)
    assert re.search(r"loss [\d.]+ \((web|math) [\d.]+, (web|math) [\d.]+\), lr", output)
    assert re.search(r"validation perplexity [\d.]+ \(web [\d.]+, math [\d.]+\)", output)
    assert "realised" in output and re.search(r"epochs.*source", output), "before the launch"
    [line] = runs[1].lines("evaluation")
    losses = line["source_loss"]
    assert line["source_perplexity"]["math"] == pytest.approx(math.exp(losses["math"]))
    # The loss of the run is that of all held-out documents.
    assert min(losses.values()) < line["loss"] < max(losses.values())
    written = b"".join(p.read_bytes() for p in (runs[1].dir / "tensorboard").iterdir())
    assert b"source_loss/web" in written and b"valid_source_loss/math" in written


def test_step_without_weighted_labels_has_no_loss(new_run: NewRun, tmp_path: Path) -> None:
    """Regression: its loss was 0.0, which halved a mean of two steps and misled the autopilot."""
    blend = noisy_blend(tmp_path, num_steps=4, begin=4, noise=0)
    documents = np.ones((4, PER_STEP, ROW), np.float16)
    documents[1] = 0  # the second step draws it: scores are sorted
    add_column(tmp_path / "web", "weights", documents.reshape(-1), INTERPRETED["weights"])
    data = {**drawn_from(blend), "tokens_per_step": PER_STEP * ROW}
    run = new_run(num_steps=4, data=data, autopilot={"spikes": True, "confirm": 1})
    output = run.succeed()
    assert [line["loss"] is None for line in run.log] == [False, True, False, False]
    assert run.log[1]["grad_norm"] == 0 and f"step 2/4, loss {run.log[0]['loss']:.4f}, " in output
    losses = next(check for check in checks(read_run(run.dir)) if check.what == "losses")
    assert losses == (0, "losses", "all finite")


def test_label_counts_use_loss_weights(new_run: NewRun, blend: Path) -> None:
    """The gradient is that of the weighted mean over single documents, on any number of ranks."""
    weights = {"web": 1.0, "math": 4.0}
    with edited(blend) as tree:
        tree["sources"][1]["loss_weight"] = weights["math"]
        tree["stages"] = [{"from_step": 1, "loss_weights": {"math": 1}}]
    run = new_run(num_steps=2, data=drawn_from(blend), logging={"every": 1})
    config = load_config(PretrainConfig, run.config)
    inputs, model = plain(config)
    found = losses_one_by_one(model, inputs, 0)
    factor = [weights[name] for name in inputs.schedule.samples.names]
    total = sum(factor[source] * labels for source, _, labels in found)
    mean = torch.stack([factor[source] * loss for source, loss, _ in found]).sum() / total
    mean.backward()

    for ranks in (1, 2):
        result = run.worker(ranks)
        assert result["losses"][0] == pytest.approx(mean.item(), rel=1e-5)
        check_gradients(result["grads"], model)

    run.succeed()
    first, second = run.log
    assert first["loss"] == pytest.approx(mean.item(), rel=1e-5)
    for name, (loss, _) in expected_losses(config).items():
        assert first["source_loss"][name] == pytest.approx(loss, rel=1e-5), "not weighted"
    tokens = second["source_label_tokens"]
    total = sum(second["source_loss"][name] * n for name, n in tokens.items())
    assert second["loss"] == pytest.approx(total / second["label_tokens"], rel=1e-5)
    [start] = run.lines("starts")
    assert start["data_order"]["loss_weights"] == [1.0, 4.0]


# loss, ranks, ZeRO stage, ranks that share samples; all cases if MEGAPACK_GRADIENTS is set.
WEIGHED = [("token_mean", 2, 2, 1), ("sequence_mean", 2, 3, 2), ("longalign", 1, 1, 1)]
if os.environ.get("MEGAPACK_GRADIENTS"):
    WEIGHED = [
        (loss, ranks, stage, shared)
        for loss in ("token_mean", "sequence_mean", "longalign")
        for ranks, stage, shared in [(1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1), (2, 2, 1)]
        + [(2, 3, 1), (4, 1, 1), (2, 1, 2), (4, 2, 2), (2, 3, 2)]
    ]


@pytest.mark.parametrize(("loss", "ranks", "stage", "shared"), WEIGHED)
def test_weights_of_tokens_multiply_their_losses(
    new_run: NewRun, blend: Path, loss: str, ranks: int, stage: int, shared: int
) -> None:
    """The gradient equals that of documents one by one, with weights of tokens and sources, over
    all tokens or over means of sequences."""
    weights = []
    with edited(blend) as tree:
        for source, seed in zip(tree["sources"], (1, 2), strict=True):
            lengths = read_document_lengths(source["prefix"])
            random = np.random.default_rng(seed)
            own = random.choice([0, 0.25, 1, 3], size=int(lengths.sum())).astype(np.float32)
            prefix = str(blend.with_name(source["name"]))
            merge([source["prefix"]], prefix)
            add_column(prefix, "weights", own, INTERPRETED["weights"])
            source["prefix"] = prefix
            weights.append(own)
        tree["sources"][1]["loss_weight"] = 2.5
    run = new_run(num_steps=1, data=drawn_from(blend))
    more = [f"data.loss={loss}", f"engine.zero_stage={stage}"]
    more += [f"engine.sequence_parallel_size={shared}", f"data.micro_batch_tokens={128 // shared}"]
    inputs, model = plain(load_config(PretrainConfig, run.config, more))
    found = losses_one_by_one(model, inputs, 0, weights=weights)
    factor = [1.0, 2.5] if inputs.schedule.samples.names[0] == "web" else [2.5, 1.0]
    if loss == "token_mean":
        total = sum(factor[source] * weight for source, _, weight in found)
        terms = [factor[source] * sums for source, sums, _ in found]
    else:
        total = sum(factor[source] for source, _, weight in found if weight)
        terms = [factor[source] * sums / weight for source, sums, weight in found if weight]
    mean = torch.stack(terms).sum() / total
    mean.backward()
    result = run.worker(ranks, more=more)
    assert result["losses"][0] == pytest.approx(mean.item(), rel=1e-6)
    check_gradients(result["grads"], model, rel=1e-6)


def test_attention_stays_in_the_window(new_run: NewRun, corpus: Corpus, blend: Path) -> None:
    """A token depends on its piece of the document alone; evaluation has no window."""
    stages = [{"from_step": 1, "attention_window": 0}]
    write_blend(blend, corpus, attention_window=16, stages=stages)
    run = new_run(num_steps=2, data=drawn_from(blend), logging={"every": 1})
    config = load_config(PretrainConfig, run.config)
    run.succeed()
    first, _ = run.log
    cut, whole = expected_losses(config, 16), expected_losses(config)
    assert {n: labels for n, (_, labels) in cut.items()} == first["source_label_tokens"]
    for name in ("web", "math"):
        assert first["source_loss"][name] == pytest.approx(cut[name][0], rel=1e-5)
        assert first["source_loss"][name] != pytest.approx(whole[name][0], rel=1e-4)
    assert "attention window: 16 tokens" in dry_run(config)
    [start] = run.lines("starts")
    assert start["data_order"]["attention_window"] == [16, 0, 0, 0]


def test_fim_documents_have_their_middle_last(
    new_run: NewRun, corpus: Corpus, tmp_path: Path
) -> None:
    """The loss equals that of documents transformed by the definition; the plan states how many
    documents have room for sentinels."""
    dataset = IndexedDataset(corpus.train)
    index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS, fim_room=3)
    index.save(tmp_path / "train.samples", source=dataset)
    fim = {"sentinels": {"prefix": 64, "suffix": 65, "middle": 66}, "eod": "none"}
    data = {"index": str(tmp_path / "train.samples"), "fim": fim}
    run = new_run(num_steps=2, data=data, logging={"every": 1})
    config = load_config(PretrainConfig, run.config)
    assert Inputs(config).schedule.step(0).view.epochs is not None
    run.succeed()
    [(loss, labels)] = expected_losses(config).values()
    assert run.log[0]["label_tokens"] == labels
    assert run.log[0]["loss"] == pytest.approx(loss, rel=1e-5)
    [start] = run.lines("starts")
    assert start["data_order"]["fim_rates"] == [0.5] and start["data_order"]["fim"]["middle"] == 66
    plan = dry_run(config)
    with_room = index.metrics()["num_documents_with_fim_room"]
    assert f"{with_room:,} of 700 documents have room for 3 tokens" in plan
    assert re.search(r"fill-in-the-middle, share of documents: \S+train 0.5", plan)
    small = load_config(PretrainConfig, run.config, ["data.fim.sentinels.middle=128"])
    with pytest.raises(ConfigError, match="fim writes token id 128, and the model has ids below"):
        dry_run(small)


def test_samples_are_summed_if_rows_end_in_padding() -> None:
    losses = torch.arange(1.0, 21.0)
    batch = {"capacity": 4, "row_tokens": 10, "sample_ids": torch.tensor([7, 3, 5])}
    losses[[4, 9, 14]] = 0  # of padding: row 1 is [1..4 .][6..9 .], row 2 [11..14 .] and empty
    assert _sum_by_sample(losses, batch).tolist() == [10.0, 30.0, 50.0]


def test_means_over_lines_weigh_by_label_tokens_without_nan() -> None:
    lines = [
        {"source_loss": {"a": 2.0, "b": 1.0}, "source_label_tokens": {"a": 10, "b": 30}},
        {"source_loss": {"a": 5.0, "b": None}, "source_label_tokens": {"a": 20, "b": 7}},
        {},
    ]
    assert mean_by_source(lines) == {"a": (4.0, 30), "b": (1.0, 30)}
    assert named_means(mean_by_source(lines)) == " (a 4.0000, b 1.0000)"
    many = {f"s{i}": (1.0, 1) for i in range(11)}
    assert named_means(many).endswith(", s7 1.0000, 3 more)")
    assert named_means({}) == ""


def test_dry_run_prints_epochs_of_every_source(corpus: Corpus, blend: Path, tmp_path: Path) -> None:
    config = load_config(PretrainConfig, blend_config(blend, corpus, tmp_path / "run", num_steps=8))
    text, samples = dry_run(config), Inputs(config).schedule.samples
    assert text.count("epochs") == 2
    for name, tokens in zip(("web", "math"), samples.tokens_per_epoch.tolist(), strict=True):
        [line] = [line for line in text.splitlines() if line.endswith(f"  {name}")]
        assert float(line.split()[2]) == pytest.approx(8 * 1024 / 2 / tokens, rel=0.2)
    write_blend(blend, corpus, max_epochs=0.5)
    with pytest.raises(ConfigError, match="would repeat source math"):
        dry_run(config)


def test_dry_run_counts_groups_of_a_source(corpus: Corpus, tmp_path: Path) -> None:
    lengths = read_document_lengths(str(corpus.train))
    groups = np.arange(len(lengths)) // 5
    grouped = pack(lengths, "bucket", buckets=[64, 128, 256], groups=groups)
    path = tmp_path / "grouped.samples"
    grouped.save(path, source=IndexedDataset(corpus.train))
    data = {"index": str(path), "attention": "group"}
    text = dry_run(load_config(PretrainConfig, corpus.config(tmp_path / "run", data=data)))
    cut = grouped.metrics()["num_cut_groups"]
    assert f": {-(-len(lengths) // 5):,}, {cut:,} cut, " in text and cut > 0


def test_held_out_sets_with_equal_names_are_refused(
    corpus: Corpus, blend: Path, tmp_path: Path
) -> None:
    config = load_config(PretrainConfig, blend_config(blend, corpus, tmp_path / "run"))
    with edited(blend) as tree:
        tree["sources"][1]["name"] = "web"
    with pytest.raises(ConfigError, match="two sources with held-out documents are named 'web'"):
        Inputs(config)
    with edited(blend) as tree:
        del tree["sources"][0]["valid_prefix"]
    with pytest.raises(ConfigError, match="has valid_index, but no valid_prefix"):
        Inputs(config)

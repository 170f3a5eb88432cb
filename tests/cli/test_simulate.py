"""megapack-build simulate says what a simulation of the same steps says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from peers import peer

from megapack import IndexedDataset, IndexedDatasetBuilder, pack
from megapack.cli.main import main
from megapack.planning import DEALERS, Cluster, DealtStep, simulate_step

CAP = 600
LENGTHS = np.random.default_rng(0).integers(1, CAP, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same lengths in every form, and a run."""
    place = tmp_path_factory.mktemp("simulate")
    with IndexedDatasetBuilder(place / "corpus", dtype="uint16", vocab_size=9) as builder:
        for n in LENGTHS.tolist():
            builder.add_document(np.zeros(n, np.uint16))
    dataset = IndexedDataset(place / "corpus")
    index = pack(dataset.document_lengths, "bucket", buckets=[128, 256, 1024])
    index.save(place / "corpus.samples", source=dataset)
    np.save(place / "lengths.npy", LENGTHS)
    (place / "lengths.txt").write_text("\n".join(map(str, LENGTHS.tolist())))
    data = {"prefix": str(place / "corpus"), "index": str(place / "corpus.samples")}
    data |= {"tokens_per_step": 8192, "micro_batch_tokens": 1024}
    run = {"run_dir": "run", "num_steps": 9, "data": data, "model": {"preset": "llama_tiny"}}
    (place / "run.yaml").write_text(yaml.safe_dump(run))
    return place


def ask(capsys: pytest.CaptureFixture[str], source: Path, *words: str) -> Any:
    assert main(["simulate", str(source), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


OPTIONS = ("--data-parallel", "4", "--max-tokens", str(CAP), "--linear-length", "50")


def test_lengths_of_every_form_are_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        ask(capsys, folder / name, *OPTIONS) for name in ("lengths.npy", "lengths.txt", "corpus")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["cluster"]["data_parallel"] == 4 and found[0]["steps"] == 4
    cut = ask(capsys, folder / "corpus.samples", *OPTIONS)
    assert cut["documents"] > 0 and cut != found[0]


def test_table_is_the_simulation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--documents-per-step", "150", "--pipeline", "2", "--barrier", "step", "--steps", "2")
    found = ask(capsys, folder / "lengths.npy", *OPTIONS, *words)
    assert found["documents"] == 300 and found["steps"] == 2
    assert [row["dealing"] for row in found["dealings"]] == list(DEALERS)
    cluster = Cluster(data_parallel=4, pipeline_parallel=2, barrier="step")
    for row in found["dealings"]:
        times, over = [], 0
        for documents in (LENGTHS[:150], LENGTHS[150:]):
            plan = DEALERS[row["dealing"]](documents, cluster, CAP, 50)
            dealt = DealtStep.of_plan(plan, documents)
            times.append(simulate_step(dealt, cluster, linear_length=50))
            over += int((plan.tokens > CAP).sum())
        total = sum(t.time for t in times)
        assert row["time"] == pytest.approx(total / sum(t.ideal for t in times))
        lost = sum(t.time * t.bubble for t in times) / total
        assert row["bubbles_%"] == pytest.approx(100 * lost)
        assert (row["over"], row["empty"]) == (over, sum(t.empty for t in times))
    assert main(["simulate", str(folder / "lengths.npy"), *OPTIONS, *words]) == 0
    text = capsys.readouterr().out
    assert "a model, not a measurement" in text and "ranks meet once a step" in text
    for row in found["dealings"]:
        assert f"{row['time']:.3f}" in next(
            line for line in text.splitlines() if line.startswith(row["dealing"])
        )


def test_default_step_is_eight_batches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, folder / "lengths.npy", *OPTIONS)
    plain = found["dealings"][0]
    assert plain["dealing"].startswith("plan_step") and 8 <= plain["micro_batches"] <= 9
    assert plain["over"] == plain["empty"] == 0


def test_documents_too_long_are_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(folder / "lengths.npy"), "--data-parallel", "4", "--max-tokens", "100"]
    assert main([*words, "--context", "4"]) == 0
    cut = int((LENGTHS > 400).sum())
    assert f"{cut} documents of more than 400 tokens cut there" in capsys.readouterr().err


def test_run_is_replayed_as_dealt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer("torch")  # which megapack.data needs
    from megapack.config import load_config  # noqa: PLC0415
    from megapack.data.run import open_run  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    words = ("--data-parallel", "4", "--linear-length", "50", "--steps", "9")
    found = ask(capsys, folder / "run.yaml", *words)
    assert found["max_tokens"] == 1024 and found["steps"] == 9
    row = found["dealings"][0]
    assert row["dealing"] == "the run's schedule"
    opened = open_run(load_config(PretrainConfig, folder / "run.yaml", []))
    sampler = opened.sampler(0, 4)
    time = useful = 0.0
    for i in range(9):
        content = opened.schedule.step(i)
        lengths = opened.schedule.samples.segment_lengths(content.sample_ids)
        time += (sampler.attention_of_ranks(i) + 50 * 1024).max(axis=1).sum()
        useful += (lengths.astype(float) ** 2).sum() + 50 * lengths.sum()
    assert row["time"] == pytest.approx(time / (useful / 4))
    assert row["extra_%"] > 0 and row["micro_batches"] == 2
    planned = found["dealings"][1]
    assert planned["dealing"].startswith("plan_step") and planned["extra_%"] == 0


def test_shared_samples_run_on_groups(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer("torch")
    words = ["--data-parallel", "2", "--context", "2", "--set", "data.micro_batch_tokens=512"]
    words += ["--set", "engine.sequence_parallel_size=2", "--exchange-length", "1000000"]
    with_exchange = ask(capsys, folder / "run.yaml", *words)
    without = ask(capsys, folder / "run.yaml", *words[:-1], "0")
    assert with_exchange["dealings"][0]["time"] > without["dealings"][0]["time"]


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        ("lengths.npy", (), "holds lengths alone: give --max-tokens"),
        ("lengths.npy", ("--max-tokens", "600", "--linear-length", "-1"), "--linear-length is -1"),
        ("lengths.npy", ("--max-tokens", "600", "--context", "3"), "context_parallel is 3"),
        ("run.yaml", ("--max-tokens", "600"), "says itself what a step holds"),
        ("run.yaml", ("--context", "2"), "engine.sequence_parallel_size 1: give the same"),
        ("wrong.txt", ("--max-tokens", "600"), "'seven' is no number of tokens"),
        ("empty.txt", ("--max-tokens", "600"), "no document has a token"),
    ],
)
def test_errors_say_what_is_wrong(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    peer("torch")
    (folder / "wrong.txt").write_text("3\nseven\n")
    (folder / "empty.txt").write_text("0\n")
    assert main(["simulate", str(folder / source), *words]) in (1, 2)
    assert message in capsys.readouterr().err

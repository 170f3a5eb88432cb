"""megapack-build compare and simulate, run from the command line."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import build, printed
from html_pages import words_of
from peers import peer

from megapack.cli.main import main
from megapack.compare import MODELS, measure_plans
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.planning import ASSIGNMENTS, AssignedStep, Cluster, plan_trees, simulate_step
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.units import percent

SMALL = ["--buckets", "64,128,256", "--tokens-per-rank", "512", "--num-gpus", "8"]


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return build("compare", *arguments)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(1).integers(1, 400, 500, dtype=np.int32))
    return path


def test_table_json_and_page_from_bare_lengths(lengths: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = compare("--lengths", lengths, *SMALL, "--html", page, "--seed", 9)
    assert done.returncode == 0, done.stderr
    tree = json.loads(compare("--lengths", lengths, *SMALL, "--json", "--seed", 9).stdout)
    assert [row["strategy"] for row in tree["strategies"]] == list(STRATEGIES)
    assert sum(tree["corpus"]["documents_per_interval"]) == 500
    for row in tree["strategies"]:
        index = pack(np.load(lengths), row["strategy"], buckets=row["buckets"], seed=9)
        assert row["metrics"] == index.metrics()
        assert row["label"] in done.stdout
        assert row["label"] in page.read_text()
    last = done.stdout[done.stdout.index("recommended:") :]
    assert tree["recommendation"]["label"] in last
    assert tree["recommendation"]["reasons"][0] in last
    assert tree["recommendation"]["command"] in last
    again = compare("--lengths", lengths, *SMALL, "--html", page)
    assert again.returncode == 2 and "Replace it with --overwrite" in again.stderr
    assert not list(tmp_path.glob("*.tmp-*"))


def test_second_sizes_limit_samples_and_have_their_padding(lengths: Path, tmp_path: Path) -> None:
    """The table, the page and JSON have both paddings; strategies of one capacity are left out."""
    images, page = np.arange(500) % 4, tmp_path / "report.html"
    np.save(tmp_path / "images.npy", images)
    given = ("--lengths", lengths, *SMALL, "--second", tmp_path / "images.npy")
    options = (*given, "--second-capacity", "4,6,8")
    done = compare(*options, "--html", page)
    assert done.returncode == 0, done.stderr
    tree = json.loads(compare(*options, "--json").stdout)
    [row] = tree["strategies"]
    capacities = {"second": images, "second_capacity": [4, 6, 8]}
    metrics = pack(np.load(lengths), buckets=[64, 128, 256], **capacities).metrics()
    assert row["strategy"] == "bucket" and row["metrics"] == metrics
    assert "no second capacity; choose bucket" in tree["left_out"]["concat"]
    shown = percent(metrics["second_padding_ratio"], None)
    assert "2nd pad %" in done.stdout and f"{shown} of the second capacities" in done.stdout
    text = words_of(page.read_text())
    assert f"second padding {shown} of the second capacities" in text
    assert "second padding %" in text and "concat: strategy" in text
    command = tree["recommendation"]["command"]
    assert f"--second {tmp_path / 'images.npy'} --second-capacity 4,6,8" in command
    with IndexedDatasetBuilder(tmp_path / "docs", np.uint16) as builder:
        for length in np.load(lengths):
            builder.add_document(np.zeros(length, np.uint16))
    printed(*shlex.split(command.replace("PREFIX", str(tmp_path / "docs")))[1:])
    assert SampleIndex.load(tmp_path / "docs.samples").metrics() == metrics
    few = json.loads(compare(*options, "--max-documents", 100, "--json").stdout)
    assert sum(few["strategies"][0]["metrics"]["second_per_bucket"]) < images.sum() / 3
    np.save(tmp_path / "images.npy", images[:50])
    short = compare(*options, "--max-documents", 100)
    assert short.returncode == 1 and "50 numbers, and there are 500 documents" in short.stderr
    for words, message in (
        (given, "needs --second-capacity"),
        ((*given[:-1], "images", "--second-capacity", "8"), "--second images needs a dataset"),
        ((*given, "--second-capacity", "8", "--strategies", "concat"), "has no second capacity"),
    ):
        wrong = compare(*words)
        assert wrong.returncode == 2 and message in wrong.stderr


def test_micro_batch_tokens_adds_planned_steps(lengths: Path) -> None:
    options = ["--lengths", lengths, *SMALL, "--strategies", "bucket", "--model", "350m"]
    plain = compare(*options)
    assert plain.returncode == 0 and "planned" not in plain.stdout
    assert json.loads(compare(*options, "--json").stdout)["planned_steps"] == []
    options += ["--micro-batch-tokens", 128]
    works = measure_plans(
        np.load(lengths),
        num_ranks=8,
        tokens_per_rank=512,
        micro_batch_tokens=128,
        linear_cost_tokens=MODELS["350m"].linear_cost_tokens,
    )
    assert [work.max_context_parallel_size for work in works] == [1, 4, 8]
    tree = json.loads(compare(*options, "--json").stdout)
    assert tree["planned_steps"] == [asdict(work) for work in works]
    text = compare(*options).stdout
    for work, name in zip(works, ("one rank", "up to 4 ranks", "up to 8 ranks"), strict=True):
        [line] = [line for line in text.splitlines() if line.startswith(name)]
        cells = line.removeprefix(name).split()
        assert cells[0] == f"{100 * work.split_ratio:.3f}"
        assert cells[-2:] == [f"{work.model.per_step:.3f}", f"{work.model.per_micro_batch:.3f}"]
    (bucket,) = tree["strategies"]
    waiting = bucket["cost"]["waiting"] / bucket["cost"]["gpu_hours"]
    assert f"(step of bucket: {1 / (1 - waiting):.3f})" in text
    refused = compare(*options, "--tokens-per-rank", 100)
    assert refused.returncode == 2 and "micro_batch_tokens is 128" in refused.stderr


def test_dataset_and_its_lengths_compare_equal(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    lengths = generator.integers(1, 300, 60)
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for length in lengths:
            builder.add_document(generator.integers(0, 9, length))
    np.save(tmp_path / "bare.npy", lengths)
    options = [*SMALL, "--strategies", "bucket", "concat@128", "--json"]
    Path(f"{prefix}.bin").unlink()  # only the .idx is read
    done = [compare(prefix, *options), compare("--lengths", tmp_path / "bare.npy", *options)]
    assert [one.returncode for one in done] == [0, 0]
    first, second = (json.loads(one.stdout) for one in done)
    assert first["corpus"]["name"] == "corpus"
    for one, other in zip(first["strategies"], second["strategies"], strict=True):
        assert one["metrics"] == other["metrics"]
    assert [row["label"] for row in first["strategies"]] == ["bucket", "concat@128"]


def test_sampling_is_stated_and_reproducible(lengths: Path) -> None:
    options = ["--lengths", lengths, *SMALL, "--strategies", "bucket", "--max-documents"]
    assert "a random sample of 100 of 500 documents" in compare(*options, 100).stdout
    one, two = (json.loads(compare(*options, 100, "--json").stdout) for _ in range(2))
    assert one["corpus"] == two["corpus"]
    assert one["corpus"]["sampled_from"] == 500
    whole = compare(*options, 500)
    assert "sample of" not in whole.stdout and whole.returncode == 0


def test_recommended_command_packs_as_reported(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for length in np.random.default_rng(2).integers(1, 300, 60):
            builder.add_document(np.zeros(length, np.uint16))
    cases = ("bucket:promote=off", "seamless@64:preset=paper,last=pad", "next_fit@32:shuffle=no")
    for case in cases:
        options = [prefix, *SMALL, "--strategies", case, "--alignment", 8, "--seed", 3]
        options += ["--fim-room", 4]
        tree = json.loads(compare(*options, "--json").stdout)
        command = shlex.split(tree["recommendation"]["command"])
        assert command[:2] == ["megapack-build", "pack"]
        output = ["--output", str(tmp_path / "x.samples"), "--overwrite", "--json"]
        packed = build(*command[1:], *output)
        assert packed.returncode == 0, packed.stderr
        assert json.loads(packed.stdout) == tree["strategies"][0]["metrics"], case


def test_unsupported_strategies_are_left_out_before_packing(lengths: Path) -> None:
    options = ["--lengths", lengths, "--buckets", "100,300", "--tokens-per-rank", "512"]
    done = compare(*options)
    assert done.returncode == 0, done.stderr
    assert "left out: decompose: bucket is 100; decompose needs powers of two" in done.stdout
    refused = compare(*options, "--strategies", "bucket", "decompose", "--html", "x.html")
    assert refused.returncode == 2 and "needs powers of two" in refused.stderr
    unaligned = compare(*options, "--alignment", 8)
    assert unaligned.returncode == 2 and "no strategy" in unaligned.stderr


def test_training_options_reach_the_estimate(lengths: Path) -> None:
    done = compare(
        "--lengths", lengths, *SMALL, "--strategies", "concat@64", "--json",
        "--model-shape", "2e9,10,1000", "--gpu-tflops", 100, "--gpu-price", 3, "--utilization",
        0.5, "--train-tokens", "1e9", "--attention", "sample",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    (row,) = tree["strategies"]
    metrics = row["metrics"]
    positions = metrics["placed_tokens"] + metrics["padding_tokens"]
    operations = 6 * 2e9 * positions + 7 * 10 * 1000 * metrics["attention_cost_sample"]
    hours = operations * (1e9 / metrics["num_tokens"]) / (3600 * 100e12 * 0.5)
    assert row["cost"]["gpu_hours"] == pytest.approx(hours)
    assert row["cost"]["cost"] == pytest.approx(3 * hours)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--lengths", "missing.npy"], 1, "missing.npy"),
        (["--lengths", "text.npy"], 1, "text.npy is not a .npy file of numbers"),
        (["--lengths", "floats.npy"], 1, "give 1-D integers"),
        (["--lengths", "long.npy"], 1, f"a document has {1 << 62} tokens; the limit is {1 << 40}"),
        (["--lengths", "good.npy", "--strategies", "buket"], 2, "did you mean 'bucket'?"),
        (["--lengths", "good.npy", "--model-shape", "2e9,10"], 2, "is not PARAMETERS,LAYERS,WIDTH"),
        (["--lengths", "good.npy", "--utilization", "40"], 2, "must be above 0 and at most 1"),
        (["--lengths", "good.npy", "--max-documents", "0"], 2, "'0' is not a whole number"),
        (["--lengths", "negative.npy"], 1, "document 1 has length -3"),
        (["--lengths", "zeros.npy"], 1, "holds no document with a token"),
        (["--data-prefix", "nowhere"], 1, "nowhere.idx"),
    ],
)
def test_wrong_input_is_an_error_without_report(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("not an array")
    np.save("floats.npy", np.ones(3))
    np.save("good.npy", np.arange(1, 9))
    np.save("negative.npy", np.array([4, -3, 5]))
    np.save("zeros.npy", np.zeros(4, np.int32))
    np.save("long.npy", np.array([1, 1 << 62]))
    done = compare(*arguments, "--html", "report.html")
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert not Path("report.html").exists()


# ---- megapack-build simulate


CAP = 600
LENGTHS = np.random.default_rng(0).integers(1, CAP, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same lengths in every format, and the configuration of a run."""
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


def ask(source: Path, *words: str) -> Any:
    return json.loads(printed("simulate", source, "--json", *words))


OPTIONS = ("--data-parallel", "4", "--max-tokens", str(CAP), "--linear-cost-tokens", "50")


def test_all_formats_of_lengths_give_the_same(folder: Path) -> None:
    found = [ask(folder / name, *OPTIONS) for name in ("lengths.npy", "lengths.txt", "corpus")]
    assert found[0] == found[1] == found[2]
    assert found[0]["cluster"]["data_parallel"] == 4 and found[0]["steps"] == 4
    cut = ask(folder / "corpus.samples", *OPTIONS)
    assert cut["documents"] > 0 and cut != found[0]


def test_table_equals_the_simulation(folder: Path) -> None:
    words = ("--documents-per-step", "150", "--pipeline", "2", "--barrier", "step", "--steps", "2")
    found = ask(folder / "lengths.npy", *OPTIONS, *words)
    assert found["documents"] == 300 and found["steps"] == 2
    assert [row["assignment"] for row in found["assignments"]] == list(ASSIGNMENTS)
    cluster = Cluster(data_parallel=4, pipeline_parallel=2, barrier="step")
    for row in found["assignments"]:
        times, over = [], 0
        for documents in (LENGTHS[:150], LENGTHS[150:]):
            plan = ASSIGNMENTS[row["assignment"]](documents, cluster, CAP, 50)
            dealt = AssignedStep.of_plan(plan, documents)
            times.append(simulate_step(dealt, cluster, linear_cost_tokens=50))
            over += int((plan.tokens > CAP).sum())
        total = sum(t.time for t in times)
        assert row["time"] == pytest.approx(total / sum(t.ideal for t in times))
        lost = sum(t.time * t.bubble for t in times) / total
        assert row["bubbles_%"] == pytest.approx(100 * lost)
        assert (row["over"], row["empty"]) == (over, sum(t.empty for t in times))
    text = printed("simulate", folder / "lengths.npy", *OPTIONS, *words)
    assert "a model, not a measurement" in text and "ranks synchronize once per step" in text
    for row in found["assignments"]:
        assert f"{row['time']:.3f}" in next(
            line for line in text.splitlines() if line.startswith(row["assignment"])
        )


def test_default_step_is_eight_batches(folder: Path) -> None:
    found = ask(folder / "lengths.npy", *OPTIONS)
    plain = found["assignments"][0]
    assert plain["assignment"].startswith("plan_step") and 8 <= plain["micro_batches"] <= 9
    assert plain["over"] == plain["empty"] == 0


def test_documents_above_the_limit_are_cut(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(folder / "lengths.npy"), "--data-parallel", "4", "--max-tokens", "100"]
    assert main([*words, "--context", "4"]) == 0
    cut = int((LENGTHS > 400).sum())
    assert f"{cut} documents of more than 400 tokens cut there" in capsys.readouterr().err


def test_run_is_simulated_with_its_own_assignment(folder: Path) -> None:
    peer("torch")  # which megapack.data needs
    from megapack.config import load_config  # noqa: PLC0415
    from megapack.data.run import OpenRun  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    words = ("--data-parallel", "4", "--linear-cost-tokens", "50", "--steps", "9")
    found = ask(folder / "run.yaml", *words)
    assert found["max_tokens"] == 1024 and found["steps"] == 9
    row = found["assignments"][0]
    assert row["assignment"] == "the run's schedule"
    opened = OpenRun(load_config(PretrainConfig, folder / "run.yaml", []))
    sampler = opened.sampler(0, 4)
    time = useful = 0.0
    for i in range(9):
        content = opened.schedule.step(i)
        lengths = opened.schedule.samples.segment_lengths(content.sample_ids)
        time += (sampler.attention_of_ranks(i) + 50 * 1024).max(axis=1).sum()
        useful += (lengths.astype(float) ** 2).sum() + 50 * lengths.sum()
    assert row["time"] == pytest.approx(time / (useful / 4))
    assert row["extra_%"] > 0 and row["micro_batches"] == 2
    planned = found["assignments"][1]
    assert planned["assignment"].startswith("plan_step") and planned["extra_%"] == 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Write 60 prompts with three answers each, and a run on their trees."""
    place, r = tmp_path_factory.mktemp("trees"), np.random.default_rng(2)
    texts = []
    for _ in range(60):
        prompt = r.integers(0, 9, r.integers(20, 60)).tolist()
        texts += [prompt + r.integers(0, 9, r.integers(1, 30)).tolist() for _ in range(3)]
    with IndexedDatasetBuilder(place / "pairs", dtype="uint16", vocab_size=9) as builder:
        for text in texts:
            builder.add_document(text)
    printed("pack", place / "pairs", "--strategy", "tree", "--buckets", "256")
    data = {"prefix": str(place / "pairs"), "index": str(place / "pairs.samples")}
    data |= {"attention": "tree", "tokens_per_step": 2048, "micro_batch_tokens": 512}
    run = {"run_dir": "run", "num_steps": 4, "data": data, "model": {"preset": "llama_tiny"}}
    (place / "run.yaml").write_text(yaml.safe_dump(run))
    return place, texts


def test_trees_compute_a_prompt_once(pairs: tuple[Path, list[list[int]]]) -> None:
    place, texts = pairs
    words = ("--data-parallel", "2", "--max-tokens", "512", "--linear-cost-tokens", "50")
    words += ("--documents-per-step", "90", "--barrier", "step")
    trees, rows, *_ = ask(place / "pairs", *words, "--trees")["assignments"]
    assert (trees["assignment"], trees["over"], trees["extra_%"]) == ("prefix trees", 0, 0)
    plans = [
        plan_trees(
            part, num_ranks=2, max_tokens_per_rank=512, linear_cost_tokens=50, balance="step"
        )
        for part in (texts[:90], texts[90:])
    ]
    assert trees["tokens"] == sum(plan.num_tokens.sum() for plan in plans)
    assert rows["tokens"] == sum(map(len, texts))
    of_ranks = sum(plan.cost(50).sum(axis=0).max() for plan in plans)
    ideal = sum(len(text) ** 2 + 50 * len(text) for text in texts) / 2
    assert trees["time"] == pytest.approx(of_ranks / ideal) and trees["time"] < 0.8 < rows["time"]
    assert trees["micro_batches"] < rows["micro_batches"]


def test_run_on_trees_is_compared_with_rows_of_its_documents(
    pairs: tuple[Path, list[list[int]]],
) -> None:
    peer("torch")
    place, texts = pairs
    found = ask(place / "run.yaml", "--data-parallel", "2", "--steps", "1")
    schedule, rows, *_ = found["assignments"]
    assert schedule["assignment"] == "the run's schedule" and schedule["tokens"] == 2048
    index = SampleIndex.load(place / "pairs.samples")
    assert index.num_samples >= 8, "a step has 8 samples of 256 tokens"
    assert rows["tokens"] > 1.4 * schedule["tokens"] and schedule["time"] < 0.9 < rows["time"]
    assert found["documents"] < len(texts)


def test_context_parallel_samples_run_on_groups_of_ranks(folder: Path) -> None:
    peer("torch")
    words = ["--data-parallel", "2", "--context", "2", "--set", "data.micro_batch_tokens=512"]
    words += ["--set", "engine.sequence_parallel_size=2", "--exchange-cost-tokens", "1000000"]
    with_exchange = ask(folder / "run.yaml", *words)
    without = ask(folder / "run.yaml", *words[:-1], "0")
    assert with_exchange["assignments"][0]["time"] > without["assignments"][0]["time"]


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        ("lengths.npy", (), "--max-tokens is missing: give the tokens per rank"),
        (
            "lengths.npy",
            ("--max-tokens", "600", "--linear-cost-tokens", "-1"),
            "--linear-cost-tokens is -1",
        ),
        (
            "lengths.npy",
            ("--max-tokens", "600", "--exchange-cost-tokens", "nan"),
            "must be a finite",
        ),
        ("lengths.npy", ("--max-tokens", "600", "--context", "3"), "context_parallel is 3"),
        ("run.yaml", ("--max-tokens", "600"), "defines the size of a step"),
        ("run.yaml", ("--trees",), "--trees does not apply to a run ("),
        ("lengths.npy", ("--max-tokens", "600", "--trees"), "is not a local dataset PREFIX"),
        ("corpus", ("--max-tokens", "99", "--trees"), "tokens, and a micro batch has 99: trees"),
        (
            "corpus",
            ("--max-tokens", "600", "--trees", "--context", "2"),
            "--context is 2, and ranks",
        ),
        ("run.yaml", ("--context", "2"), "engine.sequence_parallel_size 1: give the same"),
        ("wrong.txt", ("--max-tokens", "600"), "'seven' is not a number of tokens"),
        ("large.txt", ("--max-tokens", "600"), f"'{1 << 62}' is not a number of tokens up to 2^40"),
        ("empty.txt", ("--max-tokens", "600"), "no document has a token"),
        ("below.npy", ("--max-tokens", "600"), "a document has -3 tokens; give 0 or more"),
        (
            "lengths.npy",
            ("--max-tokens", "6", "--set", "seed=1"),
            "--set seed=1 works only with a run",
        ),
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
    (folder / "large.txt").write_text(f"3\n{1 << 62}\n")
    (folder / "empty.txt").write_text("0\n")
    np.save(folder / "below.npy", np.array([7, -3]))
    assert main(["simulate", str(folder / source), *words]) in (1, 2)
    assert message in capsys.readouterr().err

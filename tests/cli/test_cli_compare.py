"""megapack-build compare, as a person runs it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megapack.compare import MODELS, measure_plans
from megapack.packing import STRATEGIES, pack
from megapack.storage import IndexedDatasetBuilder

SMALL = ["--buckets", "64,128,256", "--tokens-per-rank", "512", "--num-gpus", "8"]


def run_megapack(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megapack.cli.main", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_megapack("compare", *arguments)


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


def test_planned_steps_are_said_where_micro_batches_are_given(lengths: Path) -> None:
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
        linear_length=MODELS["350m"].linear_length,
    )
    assert [work.max_degree for work in works] == [1, 4, 8]
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
    assert refused.returncode == 2 and "micro_batch_tokens 128" in refused.stderr


def test_a_dataset_gives_what_its_lengths_give(tmp_path: Path) -> None:
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


def test_a_sample_is_stated_and_reproducible(lengths: Path, tmp_path: Path) -> None:
    options = ["--lengths", lengths, *SMALL, "--strategies", "bucket", "--max-documents"]
    first = compare(*options, 100, "--html", tmp_path / "1.html")
    assert "a random sample of 100 of 500 documents" in first.stdout
    assert "random sample of 100 of 500 documents" in (tmp_path / "1.html").read_text()
    one, two = (json.loads(compare(*options, 100, "--json").stdout) for _ in range(2))
    assert one["corpus"] == two["corpus"]
    assert one["corpus"]["sampled_from"] == 500
    whole = compare(*options, 500)
    assert "sample of" not in whole.stdout and whole.returncode == 0


def test_the_command_it_recommends_packs_what_it_reported(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for length in np.random.default_rng(2).integers(1, 300, 60):
            builder.add_document(np.zeros(length, np.uint16))
    cases = ("bucket:promote=off", "seamless@64:preset=paper,last=pad", "next_fit@32:shuffle=no")
    for case in cases:
        options = [prefix, *SMALL, "--strategies", case, "--alignment", 8, "--seed", 3]
        tree = json.loads(compare(*options, "--json").stdout)
        command = shlex.split(tree["recommendation"]["command"])
        assert command[:2] == ["megapack-build", "pack"]
        output = ["--output", str(tmp_path / "x.samples"), "--overwrite", "--json"]
        packed = run_megapack(*command[1:], *output)
        assert packed.returncode == 0, packed.stderr
        assert json.loads(packed.stdout) == tree["strategies"][0]["metrics"], case


def test_strategies_that_cannot_serve_are_left_out_before_any_work(lengths: Path) -> None:
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
        (["--lengths", "floats.npy"], 1, "does not hold a one-dimensional array of integers"),
        (["--lengths", "good.npy", "--strategies", "buket"], 2, "did you mean 'bucket'?"),
        (["--lengths", "good.npy", "--model-shape", "2e9,10"], 2, "is not PARAMETERS,LAYERS,WIDTH"),
        (["--lengths", "good.npy", "--utilization", "40"], 2, "it is a share"),
        (["--lengths", "good.npy", "--max-documents", "0"], 2, "'0' is not a whole number"),
        (["--lengths", "negative.npy"], 1, "document 1 has length -3"),
        (["--lengths", "zeros.npy"], 1, "holds no document with a token"),
        (["--data-prefix", "nowhere"], 1, "nowhere.idx"),
    ],
)
def test_bad_input_is_named_and_leaves_no_report(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("not an array")
    np.save("floats.npy", np.ones(3))
    np.save("good.npy", np.arange(1, 9))
    np.save("negative.npy", np.array([4, -3, 5]))
    np.save("zeros.npy", np.zeros(4, np.int32))
    done = compare(*arguments, "--html", "report.html")
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert not Path("report.html").exists()


def test_a_command_line_that_cannot_be_parsed_exits_with_2(lengths: Path) -> None:
    assert compare().returncode == 2
    done = compare("--lengths", lengths, "--buckets", "1k")
    assert done.returncode == 2
    assert "'1k' is not a list of capacities" in done.stderr


def test_help_teaches_by_example() -> None:
    done = compare("--help")
    assert done.returncode == 0
    assert "--strategies bucket" in done.stdout
    assert "NAME[@CAPACITY[+CAPACITY...]][:KEY=VALUE[,KEY=VALUE...]]" in done.stdout

"""megapack-build compare, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megapack.packing import STRATEGIES, pack
from megapack.storage import IndexedDatasetBuilder

SMALL = ["--buckets", "64,128,256", "--tokens-per-rank", "512", "--num-gpus", "8"]


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megapack.cli.main", "compare", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(1).integers(1, 400, 500, dtype=np.int32))
    return path


def test_table_json_and_page_from_bare_lengths(lengths: Path, tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    done = compare("--lengths", lengths, *SMALL, "--json", report, "--html", page, "--seed", 9)
    assert done.returncode == 0, done.stderr
    tree = json.loads(report.read_text())
    assert [row["strategy"] for row in tree["strategies"]] == list(STRATEGIES)
    for row in tree["strategies"]:
        index = pack(np.load(lengths), row["strategy"], buckets=row["buckets"], seed=9)
        assert row["metrics"] == index.metrics()
        assert row["label"] in done.stdout
        assert row["label"] in page.read_text()
    last = done.stdout[done.stdout.index("recommended:") :]
    assert tree["recommendation"]["label"] in last
    assert tree["recommendation"]["reasons"][0] in last
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_dataset_gives_what_its_lengths_give(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    lengths = generator.integers(1, 300, 60)
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for length in lengths:
            builder.add_document(generator.integers(0, 9, length))
    np.save(tmp_path / "bare.npy", lengths)
    options = [*SMALL, "--strategies", "bucket", "concat@128", "--json"]
    assert compare("--data-prefix", prefix, *options, tmp_path / "a.json").returncode == 0
    assert (
        compare("--lengths", tmp_path / "bare.npy", *options, tmp_path / "b.json").returncode == 0
    )
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["corpus"]["name"] == "corpus"
    for one, other in zip(first["strategies"], second["strategies"], strict=True):
        assert one["metrics"] == other["metrics"]
    assert [row["label"] for row in first["strategies"]] == ["bucket", "concat@128"]


def test_a_sample_is_stated_and_reproducible(lengths: Path, tmp_path: Path) -> None:
    options = ["--lengths", lengths, *SMALL, "--strategies", "bucket", "--sample", 100]
    first = compare(*options, "--json", tmp_path / "1.json", "--html", tmp_path / "1.html")
    second = compare(*options, "--json", tmp_path / "2.json")
    assert "a random sample of 100 of 500 documents" in first.stdout
    assert "random sample of 100 of 500 documents" in (tmp_path / "1.html").read_text()
    one, two = (json.loads((tmp_path / f"{i}.json").read_text()) for i in (1, 2))
    assert one["corpus"] == two["corpus"]
    assert one["corpus"]["sampled_from"] == 500
    whole = compare("--lengths", lengths, *SMALL, "--strategies", "bucket", "--sample", 500)
    assert "sample of" not in whole.stdout
    assert second.returncode == whole.returncode == 0


def test_training_options_reach_the_estimate(lengths: Path, tmp_path: Path) -> None:
    done = compare(
        "--lengths", lengths, *SMALL, "--strategies", "concat@64", "--json", tmp_path / "r.json",
        "--model-shape", "2e9,10,1000", "--gpu-tflops", 100, "--gpu-price", 3, "--utilization",
        0.5, "--train-tokens", "1e9", "--attention", "sample",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tree = json.loads((tmp_path / "r.json").read_text())
    (row,) = tree["strategies"]
    metrics = row["metrics"]
    positions = metrics["placed_tokens"] + metrics["padding_tokens"]
    operations = 6 * 2e9 * positions + 7 * 10 * 1000 * metrics["attention_cost_sample"]
    hours = operations * (1e9 / metrics["num_tokens"]) / (3600 * 100e12 * 0.5)
    assert row["cost"]["gpu_hours"] == pytest.approx(hours)
    assert row["cost"]["cost"] == pytest.approx(3 * hours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "missing.npy"], "missing.npy"),
        (["--lengths", "text.npy"], "text.npy is not a .npy file of numbers"),
        (["--lengths", "floats.npy"], "does not hold a one-dimensional array of integers"),
        (["--lengths", "good.npy", "--strategies", "buket"], "did you mean 'bucket'?"),
        (["--lengths", "good.npy", "--model-shape", "2e9,10"], "is not PARAMETERS,LAYERS,WIDTH"),
        (["--lengths", "good.npy", "--utilization", "40"], "it is a share"),
        (["--lengths", "good.npy", "--sample", "0"], "--sample is 0"),
        (["--lengths", "negative.npy"], "document 1 has length -3"),
        (["--lengths", "zeros.npy"], "holds no document with a token"),
        (["--data-prefix", "nowhere"], "nowhere.idx"),
    ],
)
def test_bad_input_is_named_and_leaves_no_report(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("not an array")
    np.save("floats.npy", np.ones(3))
    np.save("good.npy", np.arange(1, 9))
    np.save("negative.npy", np.array([4, -3, 5]))
    np.save("zeros.npy", np.zeros(4, np.int32))
    done = compare(*arguments, "--json", "report.json")
    assert done.returncode in (1, 2), done.stdout
    assert message in done.stderr
    assert not Path("report.json").exists()


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

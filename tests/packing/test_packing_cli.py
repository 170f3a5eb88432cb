"""megapack-build pack, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packing_inputs import same_arrays

from megapack.cli import report
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

LENGTHS = np.random.default_rng(0).integers(0, 90, 300)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "corpus", dtype=np.uint16) as builder:
        for length in LENGTHS:
            builder.add_document(np.arange(length, dtype=np.uint16))
        builder.finalize()
    return tmp_path / "corpus"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megapack.cli.main", "pack", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_it_packs_as_pack_does_and_names_the_dataset(prefix: Path) -> None:
    done = run("--data-prefix", prefix, "--buckets", "32,64,16", "--seed", 5, "--threads", 2)
    assert done.returncode == 0, done.stderr
    index = SampleIndex.load(f"{prefix}.samples")
    assert same_arrays(index, pack(LENGTHS, buckets=[16, 32, 64], seed=5))
    index.check_source(IndexedDataset(prefix))
    assert f"{index.num_samples:,} samples" in done.stdout
    assert "padding ratio r_pad" in done.stdout and "promote" in done.stdout


def test_the_same_command_again_does_nothing_and_another_replaces(prefix: Path) -> None:
    command = ("--data-prefix", prefix, "--buckets", "32,64")
    output = Path(f"{prefix}.samples")
    assert run(*command).returncode == 0
    written, before = output.read_bytes(), output.stat().st_mtime_ns

    again = run(*command)
    assert "there already, packed from the same documents in the same way" in again.stderr
    assert output.stat().st_mtime_ns == before and "padding ratio" in again.stdout

    assert run(*command, "--force").returncode == 0
    assert output.stat().st_mtime_ns > before and output.read_bytes() == written

    other = run(*command, "--seed", 1, "--promote", "off")
    assert "replaced: it was packed with another parameters and seed" in other.stderr
    assert SampleIndex.load(output).seed == 1

    output.write_bytes(written[:-1])
    mended = run(*command)
    assert "truncated" in mended.stderr and "it is replaced" in mended.stderr
    assert output.read_bytes() == written


def test_parameters_and_presets_reach_the_strategy(prefix: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.samples"
    command = ("--data-prefix", prefix, "--output", output, "--strategy", "seamless")
    done = run(*command, "--buckets", 32, "--preset", "paper", "--r-max", 0.5, "--json")
    assert done.returncode == 0, done.stderr
    index = SampleIndex.load(output)
    assert index.parameters == {
        "r_max": 0.5,
        "placement": "paper",
        "extra_capacity": 10,
        "last": "drop",
    }
    assert json.loads(done.stdout) == index.metrics()
    concat = ("--data-prefix", prefix, "--output", output, "--strategy", "concat")
    assert run(*concat, "--buckets", 32, "--no-shuffle").returncode == 0
    assert same_arrays(SampleIndex.load(output), pack(LENGTHS, "concat", buckets=32, shuffle=False))


def test_alignment_is_part_of_what_a_file_was_packed_with(prefix: Path) -> None:
    command = ("--data-prefix", prefix, "--buckets", "32,64")
    assert run(*command).returncode == 0
    done = run(*command, "--alignment", 8)
    assert "replaced: it was packed with another parameters" in done.stderr
    index = SampleIndex.load(f"{prefix}.samples")
    assert index.alignment == 8
    assert same_arrays(index, pack(LENGTHS, buckets=[32, 64], alignment=8))
    assert "there already" in run(*command, "--alignment", 8).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--strategy", "bucket-llm"), 1, "no packing strategy 'bucket-llm'; did you mean 'buck"),
        (("--r-max", "0.3"), 1, "strategy 'bucket' has no parameter 'r_max'"),
        (("--alignment", "6"), 1, "bucket 8 is no multiple of the alignment 6"),
        (("--pool-size", "0"), 1, "pool_size is 0; it must be at least 1"),
        (("--preset", "paper"), 1, "has no preset 'paper'"),
        (("--buckets", "8,x"), 2, "'8,x' is not a list of capacities"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    prefix: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = run("--data-prefix", prefix, "--buckets", "8,16", *arguments)
    assert done.returncode == status
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not Path(f"{prefix}.samples").exists()


def test_a_missing_dataset_is_named(tmp_path: Path) -> None:
    done = run("--data-prefix", tmp_path / "nothing", "--buckets", "8")
    assert done.returncode == 1 and "nothing.idx" in done.stderr


def test_help_explains_every_strategy_and_parameter() -> None:
    text = run("--help").stdout
    for strategy in STRATEGIES.values():
        assert f"\n  {strategy.name}\n" in text
        for parameter in strategy.parameters:
            assert "--" + parameter.name.replace("_", "-") in text


def test_numbers_are_written_for_people() -> None:
    assert report.count(1234567) == "1,234,567"
    assert [report.short(n) for n in (7, 1500, 2.5e6, 1e9, 3.14159e12)] == [
        "7",
        "1.5 k",
        "2.5 M",
        "1 G",
        "3.14 T",
    ]
    assert report.percent(0.00123) == "0.12 %"


def test_progress_off_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    with report.Work("packing") as work:
        for step in range(1, 5):
            now += 6.0
            work(step, 4)
    assert capsys.readouterr().err.splitlines() == [
        "packing:  50% after 12 s",
        "packing: 100% after 24 s",
    ]

"""megapack-build pack, run as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packing_inputs import same_arrays

from megapack.cli import report
from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.sharded import load_shards
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


def test_the_same_command_again_does_nothing_and_another_needs_overwrite(prefix: Path) -> None:
    command = ("--data-prefix", prefix, "--buckets", "32,64")
    output = Path(f"{prefix}.samples")
    assert run(*command).returncode == 0
    written, before = output.read_bytes(), output.stat().st_mtime_ns

    again = run(*command)
    assert again.returncode == 0 and "nothing to do" in again.stderr
    assert output.stat().st_mtime_ns == before and "padding ratio" in again.stdout

    other = (*command, "--seed", 1, "--promote", "off")
    refused = run(*other)
    assert refused.returncode == 2 and output.read_bytes() == written
    assert "packed with other parameters and another seed. Replace it with --ov" in refused.stderr
    assert run(*other, "--overwrite").returncode == 0
    assert SampleIndex.load(output).seed == 1

    output.write_bytes(written[:-1])
    damaged = run(*command)
    assert damaged.returncode == 2 and "truncated" in damaged.stderr
    assert run(*command, "--overwrite").returncode == 0
    assert output.read_bytes() == written


def test_an_index_of_another_release_is_not_taken_for_ours(prefix: Path) -> None:
    output = Path(f"{prefix}.samples")
    index = pack(LENGTHS, buckets=[32, 64])
    dataclasses.replace(index, created_by="megapack 0.0.9").save(
        output, source=IndexedDataset(prefix)
    )
    done = run("--data-prefix", prefix, "--buckets", "32,64")
    assert done.returncode == 2
    assert "packed with another release (megapack 0.0.9)" in done.stderr


def test_only_the_idx_is_needed_and_a_prefix_may_stand_alone(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()
    done = run(prefix, "--buckets", "32,64")
    assert done.returncode == 0, done.stderr
    assert SampleIndex.load(f"{prefix}.samples").num_documents == len(LENGTHS)


def test_a_device_is_refused_before_any_work(prefix: Path) -> None:
    done = run(prefix, "--buckets", "32,64", "--output", "/dev/full")
    assert done.returncode == 2 and "/dev/full is a device" in done.stderr
    with pytest.raises(ConfigError, match="a device"):
        pack([1], buckets=8).save("/dev/full")
    with pytest.raises(ConfigError, match="packed with another seed"):
        path = prefix.with_name("x.samples")
        assert pack([1], buckets=8).save(path)
        assert not pack([1], buckets=8).save(path)
        pack([1], buckets=8, seed=1).save(path)


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
    assert run(*concat, "--buckets", 32, "--no-shuffle", "--overwrite").returncode == 0
    assert same_arrays(SampleIndex.load(output), pack(LENGTHS, "concat", buckets=32, shuffle=False))


def test_alignment_is_part_of_what_a_file_was_packed_with(prefix: Path) -> None:
    command = ("--data-prefix", prefix, "--buckets", "32,64")
    assert run(*command).returncode == 0
    done = run(*command, "--alignment", 8)
    assert "it was packed with other parameters" in done.stderr
    assert run(*command, "--alignment", 8, "--overwrite").returncode == 0
    index = SampleIndex.load(f"{prefix}.samples")
    assert index.alignment == 8
    assert same_arrays(index, pack(LENGTHS, buckets=[32, 64], alignment=8))
    assert "nothing to do" in run(*command, "--alignment", 8).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "bucket-llm"), "no packing strategy 'bucket-llm'; did you mean 'buck"),
        (("--r-max", "0.3"), "strategy 'bucket' has no parameter 'r_max'"),
        (("--alignment", "6"), "bucket 8 is no multiple of the alignment 6"),
        (("--pool-size", "0"), "pool_size is 0; it must be from 1 to"),
        (("--preset", "paper"), "has no preset 'paper'"),
        (("--buckets", "8,x"), "'8,x' is not a list of capacities"),
        (("--seed", "-1"), "seed is -1; it must be from 0"),
        (("--threads", "1.5"), "'1.5' is not a whole number"),
    ],
)
def test_mistakes_get_one_line(prefix: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("--data-prefix", prefix, "--buckets", "8,16", *arguments)
    assert done.returncode == 2
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


def test_many_datasets_become_one_source(tmp_path: Path) -> None:
    """From a quoted pattern, by two machines; labels are no dataset; a second run packs nothing."""
    for name in ("a", "b", "c", "b.labels"):
        with IndexedDatasetBuilder(tmp_path / name, dtype=np.int32) as builder:
            for length in LENGTHS[:50]:
                builder.add_document(np.arange(length, dtype=np.int32))
    manifest = tmp_path / "web.shards.json"
    command = (tmp_path / "*", "--buckets", "32,64", "--output", manifest)
    first = run(*command, "--part", "0/2", "--workers", 2)
    assert first.returncode == 0 and "part 0/2: 2 datasets packed" in first.stderr, first.stderr
    assert not manifest.exists()
    done = run(*command, "--workers", 1, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["num_shards"], facts["num_new_shards"], facts["num_documents"]) == (3, 3, 150)
    assert [shard.labels for shard in load_shards(manifest).shards] == [False, True, False]
    again = run(*command)
    assert "3 datasets, 0 of them new, 150 documents" in again.stdout, again.stderr
    several = run(tmp_path / "a", tmp_path / "b", "--buckets", "32")
    assert several.returncode == 2 and "--output NAME.shards.json" in several.stderr
    nothing = run(tmp_path / "x*", "--buckets", "32", "--output", manifest)
    assert nothing.returncode == 2 and "matches no file" in nothing.stderr

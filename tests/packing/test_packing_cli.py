"""``megapack-build pack`` and the checks of ``pack``'s arguments."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import build, printed
from packing_inputs import same_arrays, write_dataset

from megapack.cli import output
from megapack.cli.main import main
from megapack.errors import ConfigError, DataError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED

LENGTHS = np.random.default_rng(0).integers(0, 90, 300)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "corpus", LENGTHS)
    return tmp_path / "corpus"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return build("pack", *arguments)


def test_command_equals_pack_and_records_dataset(prefix: Path) -> None:
    how = ("--buckets", "32,64,16", "--seed", 5, "--threads", 2)
    text = printed("pack", "--data-prefix", prefix, *how)
    index = SampleIndex.load(f"{prefix}.samples")
    assert same_arrays(index, pack(LENGTHS, buckets=[16, 32, 64], seed=5))
    index.check_source(IndexedDataset(prefix))
    assert f"{index.num_samples:,} samples" in text
    assert "padding ratio r_pad" in text and "promote" in text


def test_repeated_command_does_nothing_other_options_need_overwrite(prefix: Path) -> None:
    command = ("--data-prefix", prefix, "--buckets", "32,64")
    output = Path(f"{prefix}.samples")
    assert run(*command).returncode == 0
    written, before = output.read_bytes(), output.stat().st_mtime_ns

    again = run(*command)
    assert again.returncode == 0 and "nothing to do" in again.stderr
    assert output.stat().st_mtime_ns == before and "padding ratio" in again.stdout

    other = (*command, "--seed", 1, "--alignment", 8)
    refusal = "packed with other parameters and another seed. Replace it with --overwrite"
    assert refusal in printed("pack", *other, status=2) and output.read_bytes() == written
    assert run(*other, "--overwrite").returncode == 0
    index = SampleIndex.load(output)
    assert same_arrays(index, pack(LENGTHS, buckets=[32, 64], seed=1, alignment=8))
    assert "nothing to do" in run(*other).stderr

    output.write_bytes(written[:-1])
    assert "truncated" in printed("pack", *command, status=2)
    assert run(*command, "--overwrite").returncode == 0
    assert output.read_bytes() == written


def test_index_of_another_release_is_packed_again(tmp_path: Path) -> None:
    index = pack(LENGTHS, buckets=[32, 64])
    replace(index, created_by="megapack 0.0.9").save(tmp_path / "x.samples")
    with pytest.raises(ConfigError, match=r"packed with another release \(megapack 0\.0\.9\)"):
        index.save(tmp_path / "x.samples")
    assert index.save(tmp_path / "x.samples", overwrite=True)
    assert not index.save(tmp_path / "x.samples"), "it is there"


def test_only_idx_is_needed_and_prefix_is_positional(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()
    printed("pack", prefix, "--buckets", "32,64")
    assert SampleIndex.load(f"{prefix}.samples").num_documents == len(LENGTHS)


def test_output_must_not_be_a_device_or_an_input(prefix: Path) -> None:
    before, command = Path(f"{prefix}.idx").read_bytes(), ("pack", prefix, "--buckets", "32,64")
    for words, message in (
        (["/dev/full"], "/dev/full is a device"),
        ([f"{prefix}.idx", "--overwrite"], ".idx is an input and would be replaced"),
    ):
        assert message in printed(*command, "--output", *words, status=2)
    assert Path(f"{prefix}.idx").read_bytes() == before


def test_parameters_and_presets_reach_the_strategy(prefix: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.samples"
    command = ("pack", prefix, "--output", output, "--buckets", 32, "--strategy")
    seamless = ("seamless", "--preset", "paper", "--r-max", 0.5, "--json")
    facts = json.loads(printed(*command, *seamless))
    index = SampleIndex.load(output)
    wanted = {"r_max": 0.5, "placement": "paper", "extra_capacity": 10, "last": "drop"}
    assert index.parameters == wanted
    assert facts == index.metrics()
    printed(*command, "concat", "--no-shuffle", "--overwrite")
    assert same_arrays(SampleIndex.load(output), pack(LENGTHS, "concat", buckets=32, shuffle=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "bucket-llm"), "no packing strategy 'bucket-llm'; did you mean 'buck"),
        (("--buckets", "8,x"), "'8,x' is not a list of capacities"),
        (("--threads", "1.5"), "'1.5' is not a whole number"),
    ],
)
def test_errors_are_one_line(prefix: Path, arguments: tuple[str, ...], message: str) -> None:
    text = printed("pack", "--data-prefix", prefix, "--buckets", "8,16", *arguments, status=2)
    assert message in text and "Traceback" not in text
    assert not Path(f"{prefix}.samples").exists()


def test_help_explains_every_strategy_and_parameter() -> None:
    text = printed("pack", "--help")
    for strategy in STRATEGIES.values():
        assert f"\n  {strategy.name}\n" in text
        for parameter in strategy.parameters:
            assert "--" + parameter.name.replace("_", "-") in text


def test_progress_without_terminal_prints_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.Work("packing") as work:
        for step in range(1, 5):
            now += 6.0
            work(step, 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["packing:  50% after 12 s", "packing: 100% after 24 s"]


def test_many_datasets_become_one_source(tmp_path: Path) -> None:
    """A quoted pattern, two machines; labels are not packed; a second run packs nothing."""
    for name in ("a", "b", "c"):
        write_dataset(tmp_path / name, LENGTHS[:50], np.int32)
    labels = np.ones(sum(LENGTHS[:50]), np.int32)
    add_column(tmp_path / "b", "labels", labels, INTERPRETED["labels"])
    manifest = tmp_path / "web.shards.json"
    command = (tmp_path / "*", "--buckets", "32,64", "--output", manifest)
    first = run(*command, "--part", "0/2", "--workers", 2)
    assert first.returncode == 0 and "part 0/2: 2 datasets packed" in first.stderr, first.stderr
    assert not manifest.exists()
    facts = json.loads(printed("pack", *command, "--workers", 1, "--json"))
    assert (facts["num_shards"], facts["num_new_shards"], facts["num_documents"]) == (3, 3, 150)
    columns = [list(shard.columns) for shard in load_shards(manifest).shards]
    assert columns == [[], ["labels"], []]
    assert "3 datasets, 0 of them new, 150 documents" in printed("pack", *command)
    fewer = printed("pack", tmp_path / "a", *command[1:])
    assert "3 datasets, 0 of them new and 2 from an earlier command (--overwrite" in fewer
    for given, message in (
        ([tmp_path / "a", tmp_path / "b"], "--output NAME.shards.json"),
        ([tmp_path / "x*", "--output", manifest], "matches no file"),
    ):
        assert message in printed("pack", *given, "--buckets", "32", status=2)


@pytest.mark.parametrize("where", ["begin", "end"])
def test_datasets_of_one_source_with_different_tokens_are_noted(tmp_path: Path, where: str) -> None:
    for name, token in (("a", 5), ("b", 6), ("c", 5)):
        metadata = {f"document_{where}_token": token}
        with IndexedDatasetBuilder(tmp_path / name, metadata=metadata) as builder:
            builder.add_document([token, 9, token])
    command = ("--buckets", 32, "--output", tmp_path / "web.shards.json")
    alike = run(tmp_path / "a", tmp_path / "c", *command)
    assert alike.returncode == 0 and f" {where} with " not in alike.stderr
    differing = run(tmp_path / "a", tmp_path / "b", *command, "--overwrite")
    expected = f"{where} with different tokens: 5 ({tmp_path}/a), 6 ({tmp_path}/b): build them"
    assert differing.returncode == 0 and expected in differing.stderr, differing.stderr


# ---- Errors for wrong arguments of pack()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "bucket_lm"}, "no packing strategy 'bucket_lm'; did you mean 'bucket_llm'"),
        ({"pool_sise": 3}, "unknown argument 'pool_sise'; did you mean 'pool_size'"),
        ({"preset": "papr"}, "no preset 'papr' .known: none"),
        ({"promote": "yes"}, "promote is 'yes'; it must be 'auto' or 'on' or 'lookahead' or 'off'"),
        ({"pool_size": 0}, "pool_size is 0; it must be from 1 to"),
        ({"pool_size": 2.5}, "pool_size is 2.5; it must be an integer"),
        ({"max_segments": 0}, "max_segments is 0; it must be from 1 to"),
        ({"max_segments": 4, "refine": True}, "max_segments is 4, and refine"),
        ({"padding_threshold": 1.5}, "padding_threshold is 1.5; it must be from 0.0 to 1.0"),
        ({"padding_threshold": float("nan")}, "padding_threshold is nan"),
        ({"strategy": "bucket_naive", "shuffle": 1}, "shuffle is 1; it must be True or False"),
        ({"strategy": "concat"}, "samples of one length; buckets is .8, 16."),
        ({"buckets": []}, "buckets is empty"),
        ({"buckets": [0]}, "bucket is 0; it must be from 1 to 16,777,216"),
        ({"buckets": [True]}, "bucket is True; it must be an integer"),
        ({"buckets": [8, 8]}, "each capacity must be given once"),
        ({"buckets": [8.5]}, "bucket is 8.5; it must be an integer"),
        ({"buckets": [1 << 30]}, "bucket is 1,073,741,824; it must be from 1 to 16,777,216"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
        ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
        ({"seed": True}, "seed is True; it must be an integer"),
        ({"seed": 1 << 64}, "seed is 18,446,744,073,709,551,616; it must be from 0"),
        ({"threads": 0}, "threads is 0; it must be from 1"),
        ({"threads": 1.5}, "threads is 1.5; it must be an integer"),
        ({"threads": 1025}, "threads is 1,025; it must be from 1 to 1,024"),
        ({"match_repetition": 0}, "match_repetition is 0; it must be above 0"),
        ({"match_repetition": 10**400}, "match_repetition is 1000"),
        ({"padding_threshold": 10**400}, "padding_threshold is 1000.*; it must be from 0.0 to 1.0"),
        ({"match_repetition": "a"}, "match_repetition is 'a'; it must be a number"),
        ({"pool_size": 1 << 63}, "pool_size is 9223372036854775808; it must be from 1 to"),
        ({"lengths": [[1, 2]]}, "it must be a one-dimensional array of integers"),
        ({"lengths": np.array([1, 2, -7], np.int32)}, "document 2 has length -7"),
        ({"lengths": np.array([1, 2, -7], np.int64)}, "document 2 has length -7"),
        ({"lengths": np.array([1, (1 << 63) + 5], np.uint64)}, "longest has 9223372036854775813"),
        ({"lengths": [1.5]}, "it must be a one-dimensional array of integers"),
        ({"lengths": 5, "groups": [1]}, r"shape \(\); it must be a one-dimensional array of"),
        ({"strategy": "concat", "buckets": 8, "atom_size": 3}, "atom_size is 3 and the capacity 8"),
        ({"strategy": "pad", "buckets": 8, "atom_size": 1 << 70}, "must be from 1 to 2147483647"),
        ({"strategy": "decompose", "buckets": [12]}, "bucket is 12; decompose needs powers of two"),
        ({"strategy": "decompose", "min_bucket": 32}, "min_bucket is 32; the largest bucket is 16"),
    ],
)
def test_wrong_arguments_name_the_value_and_the_limit(arguments: dict, message: str) -> None:
    call: dict[str, Any] = {"lengths": [1, 2, 3], "buckets": [8, 16], **arguments}
    kind = DataError if "lengths" in arguments else ConfigError
    with pytest.raises(kind, match=message):
        pack(**call)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64, np.uint32])
def test_integer_type_of_lengths_does_not_matter(dtype: type) -> None:
    documents = np.array([3, 9, 200, 1], dtype)
    index = pack(documents[::-1], buckets=[8, 16])  # a view with a stride, too
    assert index.fingerprint == pack([1, 200, 9, 3], buckets=(16, 8)).fingerprint
    in_file = np.frombuffer(b"." + documents[::-1].tobytes(), dtype, offset=1)  # at an odd byte
    assert index.fingerprint == pack(in_file, buckets=[8, 16]).fingerprint


def test_progress_is_reported_and_may_stop_packing() -> None:
    seen: list[tuple[int, int]] = []
    documents = np.ones(3_000_000, np.int32)
    for name in STRATEGIES:
        seen.clear()
        pack(documents, name, buckets=64, progress=lambda done, total: seen.append((done, total)))
        assert seen and seen[-1][0] == seen[-1][1], name
        assert seen == sorted(seen), name

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(documents, "bucket", buckets=64, threads=2, progress=stop)


# ---- A strategy is defined in the four places that CONTRIBUTING names, and in no others


ROOT = Path(__file__).parents[2]
PLACES = {  # name in CONTRIBUTING.md -> files
    "csrc/core/packing": r"csrc/core/packing/\w+\.[ch]pp",
    "csrc/bindings/register_packing.cpp": r"csrc/bindings/register_packing\.cpp",
    "megapack/packing/strategies.py": r"megapack/packing/strategies\.py",
    "tests/reference": r"tests/reference/\w+\.py",
    "tests/cpp/test_strategies.cpp": r"tests/cpp/\w+\.cpp",
}
# The default cases of compare, and their labels, are not part of a strategy.
CHOICES = r"megapack/(compare|cli)/"


# Strategies without special code, whose names have no other meaning.
@pytest.mark.parametrize("name", ["next_fit", "length_sorted", "bucket_naive"])
def test_strategy_is_defined_where_contributing_says(name: str) -> None:
    """In the core, the package and the tests' definitions, ignoring comments."""
    found = set()
    for top in ("csrc", "megapack", "tests/reference", "tests/cpp"):
        for path in (ROOT / top).rglob("*.*"):
            place = str(path.relative_to(ROOT))
            if path.suffix not in (".py", ".pyi", ".cpp", ".hpp") or re.match(CHOICES, place):
                continue
            code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            if re.search(rf"\b(pack_)?{name}\b", code):
                found.add(place)
    elsewhere = [path for path in found if not re.fullmatch("|".join(PLACES.values()), path)]
    assert not elsewhere, f"{name} is also in {sorted(elsewhere)}"
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = text[text.index("**a strategy?**") : text.index("**where a step becomes a batch?**")]
    for place, files in PLACES.items():
        assert any(re.fullmatch(files, path) for path in found), f"{name} is not in {place}"
        assert f"`{place}`" in named


def test_every_core_strategy_is_registered_and_sanitized() -> None:
    def names(pattern: str, path: str) -> set[str]:
        return set(re.findall(pattern, (ROOT / path).read_text(encoding="utf-8")))

    core = names(r"(?m)^ +MEGAPACK_STRATEGY\((\w+),", "csrc/bindings/register_packing.cpp")
    assert len(core) == 11
    assert core <= names(r'"(\w+)"', "megapack/packing/strategies.py")
    assert core <= names(r"MEGAPACK_RUN\((\w+),", "tests/cpp/test_strategies.cpp")


def test_registry_entry_suffices_in_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = replace(STRATEGIES["next_fit"], name="a_new_one", description="what it does")
    monkeypatch.setitem(STRATEGIES, "a_new_one", new)
    index = pack([5, 9, 12], "a_new_one", buckets=16, shuffle=False)
    assert index.strategy == "a_new_one" and index.num_samples == 2
    with pytest.raises(SystemExit, match="0"):
        main(["pack", "--help"])
    assert "a_new_one" in capsys.readouterr().out

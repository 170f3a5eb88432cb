"""The cached sample index: found by content, built by one, waited for by the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.errors import ConfigError
from megapack.integrations.rows import open_rows as index_cache
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.index import main as build_indices
from megapack.integrations.rows.open_rows import (
    Manifest,
    Recipe,
    build_index,
    cached_index,
    open_data_path,
)
from megapack.packing import SampleIndex
from megapack.storage import IndexedDataset
from tests.integrations.harness import run_ranks
from tests.integrations.samples import make_dataset


def recipe(**changes: Any) -> Recipe:
    documents = {"begin": 0, "end": 6, "seed": 1}
    packing = {"strategy": "bucket", "parameters": {}, "buckets": (16, 32)}
    return Recipe(**{**documents, **packing, **changes})


LENGTHS = [5, 40, 16, 3, 9, 30]


def test_index_is_built_once_and_mapped_later(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    first = cached_index(dataset, recipe(), tmp_path / "cache")
    [path] = (tmp_path / "cache").iterdir()
    stamp = path.stat().st_mtime_ns
    second = cached_index(dataset, recipe(), tmp_path / "cache")
    assert path.stat().st_mtime_ns == stamp
    assert second.fingerprint == first.fingerprint
    second.check_source(dataset)


@pytest.mark.parametrize(
    "change",
    [
        {"begin": 1},
        {"end": 5},
        {"strategy": "bucket_naive"},
        {"parameters": {"promote": "on"}},
        {"buckets": (16, 64)},
        {"seed": 2},
        {"align": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_recipe_changes_the_file_name(change: dict[str, Any]) -> None:
    assert replace(recipe(), **change).digest("f") != recipe().digest("f")
    assert recipe().digest("g") != recipe().digest("f")


def test_recipe_with_explicit_defaults_is_the_same() -> None:
    written_out = recipe(parameters={"promote": "auto"})
    assert written_out.digest("f") == recipe().digest("f")


def test_rewritten_documents_get_another_index(tmp_path: Path) -> None:
    for lengths, files in ((LENGTHS, 1), (LENGTHS, 1), ([*LENGTHS[:-1], 31], 2)):
        cached_index(make_dataset(tmp_path, lengths), recipe(), tmp_path / "cache")
        assert len(list((tmp_path / "cache").iterdir())) == files


def test_index_of_a_range_keeps_document_numbers(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    train = build_index(dataset, recipe(end=4))
    valid = build_index(dataset, recipe(begin=4))
    assert set(train.segment_document.tolist()) == {0, 1, 2, 3}
    assert set(valid.segment_document.tolist()) == {4, 5}
    assert valid.num_documents == dataset.num_documents


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=40),
    align=st.sampled_from([2, 4, 8]),
    strategy=st.sampled_from(["bucket", "bucket_naive", "concat"]),
)
def test_aligned_index_holds_every_token_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], align: int, strategy: str
) -> None:
    dataset = make_dataset(tmp_path_factory.mktemp("aligned"), lengths)
    buckets = (64,) if strategy == "concat" else (16, 64)
    changes = {"end": len(lengths), "strategy": strategy, "buckets": buckets, "align": align}
    index = build_index(dataset, recipe(**changes))
    covered = [np.zeros(length, np.int64) for length in lengths]
    for number in range(index.num_samples):
        bucket, segments = index.sample(number)
        room = sum(-(-length // align) * align for _, _, length in segments)
        assert room <= index.bucket_capacity[bucket]
        for document, begin, length in segments:
            assert length > 0 and begin % align == 0
            covered[document][begin : begin + length] += 1
    assert all((count == 1).all() for count in covered)
    assert index.metrics()["num_tokens"] == sum(lengths)


def test_unaligned_capacity_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bucket 18 is not a multiple of align 4"):
        build_index(make_dataset(tmp_path, LENGTHS), recipe(buckets=(16, 18), align=4))


def _open_in_rank(
    rank: int, world_size: int, folder: str, node_local: bool
) -> tuple[str, int, list[str]]:
    built = []
    original = index_cache._build_and_save

    def counting(dataset: Any, what: Any, path: Path) -> None:
        built.append(path.name)
        original(dataset, what, path)

    index_cache._build_and_save = counting
    # Two nodes of two ranks; with node_local each node has its own directory.
    cache = Path(folder) / (f"node{rank // 2}" if node_local else "shared")
    dataset = IndexedDataset(Path(folder) / "text")
    index = cached_index(dataset, recipe(), cache, node_local=node_local)
    return index.fingerprint, index.num_samples, built


@pytest.mark.multiprocess
@pytest.mark.parametrize("node_local", [False, True], ids=["shared", "node_local"])
def test_one_process_builds_the_index_for_all(
    tmp_path: Path, free_port: int, node_local: bool
) -> None:
    make_dataset(tmp_path, LENGTHS)
    answers = run_ranks(_open_in_rank, 4, free_port, str(tmp_path), node_local)
    assert len({fingerprint for fingerprint, _, _ in answers}) == 1
    builders = [rank for rank, (_, _, built) in enumerate(answers) if built]
    if node_local:
        assert sorted(rank // 2 for rank in builders) == [0, 1], "one of each node"
    else:
        assert builders == [0]


def test_timeout_names_the_missing_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "is_first_rank", lambda: False)
    monkeypatch.setattr(index_cache, "BUILD_TIMEOUT", 0.1)
    with pytest.raises(ConfigError, match=r"rank 0 builds it.*node_local"):
        cached_index(make_dataset(tmp_path, LENGTHS), recipe(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_failed_build_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SampleIndex, "save", fail)
    with pytest.raises(OSError, match="No space"):
        cached_index(make_dataset(tmp_path, LENGTHS), recipe(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_index_command_builds_the_index_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = make_dataset(tmp_path, LENGTHS * 20)
    options = ["--sequence-length", "64", "--seed", "5", "--split", "90,10,0"]
    directory = ["--cache-directory", str(tmp_path / "cache")]
    assert build_indices([dataset.prefix, *options, *directory]) == 0
    listed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in listed] == ["train", "valid"]
    stamps = {Path(line[2]): Path(line[2]).stat().st_mtime_ns for line in listed}
    assert set(stamps) == set((tmp_path / "cache").iterdir())
    how = RowOptions(sequence_length=64, rows_per_block=4, seed=5)
    where = {"split": (0.0, 0.9), "cache_directory": tmp_path / "cache"}
    rows = open_data_path(Manifest.read(dataset.prefix), how, **where)
    assert rows.packed.samples.indices[0].path in stamps
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert build_indices([str(tmp_path / "missing"), *options]) == 1
    assert "missing" in capsys.readouterr().err

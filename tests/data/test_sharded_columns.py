"""Columns of shards: what a manifest records, and that ``arrange`` keeps rows with their tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import build, printed

from megapack.data import PackedDataset
from megapack.data import arrange as arranging
from megapack.data.arrange import Arranger, arrange, plan_arrangement
from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.columns import ColumnSpec
from tests.data.corpora import packed_lengths, packed_shards
from tests.remote.far import signed

SPECS = {
    "experts": ColumnSpec(dtype="uint8", shape=(4,), fill=255),
    "logits": ColumnSpec(dtype="bfloat16", shape=(3, 5), of="target"),
    "score": ColumnSpec(dtype="float32", of="target", fill=-1),
}
sharded = partial(packed_shards, buckets=[16, 32, 64])


def write_shard(prefix: Path, names: list[str], seed: int = 0, **changed: ColumnSpec) -> None:
    """Write documents, some longer than the largest bucket, with random columns."""
    rng = np.random.default_rng(seed)
    lengths = packed_lengths(150, 90, seed)
    num_tokens = int(lengths.sum())
    tokens = rng.integers(1, 9000, num_tokens, np.uint16)
    specs = {name: changed.get(name, SPECS[name]) for name in names}
    rows = {
        name: rng.integers(0, 120, (num_tokens, *spec.shape)).astype(spec.numpy_dtype)
        for name, spec in specs.items()
    }
    with IndexedDatasetBuilder(prefix, np.uint16, columns=specs, overwrite=True) as builder:
        builder.add_documents(tokens, np.cumsum([0, *lengths]), columns=rows)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return three shards: the second lacks a column, the third has none."""
    folder = tmp_path_factory.mktemp("source")
    for seed, (name, columns) in enumerate(
        {"a": list(SPECS), "b": ["experts", "score"], "c": []}.items()
    ):
        write_shard(folder / name, columns, seed)
    sharded(folder / "web.shards.json", [folder / name for name in "abc"])
    return str(folder / "web.shards.json")


def arranged(source: str, output: Path, **options: Any) -> Arranger:
    how = {name: options.pop(name) for name in ("part",) if name in options}
    arranger = plan_arrangement(source, str(output), shard_bytes=40_000, **options)
    arrange(arranger, lambda _: None, **how)
    return arranger


def rows_by_definition(arranger: Arranger, number: int) -> Iterator[dict[str, list[bytes]]]:
    """Yield, for each segment of an arranged shard, its rows in the source, in plain Python."""
    source = PackedDataset(None, arranger.source)
    shards = source.samples.shards
    for _, ids in arranger._chunks(number):
        for sample in ids.tolist():
            ((shard,), (local,)) = shards.locate(np.array([sample]))
            dataset = source.documents(int(shard))
            _, segments = shards.index(int(shard)).sample(int(local))
            for document, begin, length in segments:
                first = int(dataset.document_offsets[document]) + begin
                last = min(first + length + 1, int(dataset.document_offsets[document + 1]))
                rows = {"": [dataset.tokens[i].tobytes() for i in range(first, last)]}
                for name, spec in SPECS.items():
                    column = dataset.columns.get(name)
                    rows[name] = [
                        spec.fill_row.tobytes() if column is None else column.rows[i].tobytes()
                        for i in range(first, last)
                    ]
                yield rows


def test_arranged_rows_are_those_of_their_tokens(source: str, tmp_path: Path) -> None:
    arranger = arranged(source, tmp_path / "new.shards.json", seed=1)
    index = load_shards(tmp_path / "new.shards.json")
    assert arranger.num_shards > 3 and index.columns == SPECS == load_shards(source).columns
    for number, shard in enumerate(index.shards):
        dataset = IndexedDataset(shard.prefix)
        arrays = {"": dataset.tokens, **{n: c.rows for n, c in dataset.columns.items()}}
        offsets = dataset.document_offsets.tolist()
        expected = list(rows_by_definition(arranger, number))
        assert len(expected) == dataset.num_documents
        for document, rows in enumerate(expected):
            places = slice(offsets[document], offsets[document + 1])
            for name, array in arrays.items():
                assert [row.tobytes() for row in array[places]] == rows[name], (document, name)


def test_arranged_bytes_do_not_depend_on_parts_or_chunks(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arranged(source, tmp_path / "a.shards.json", seed=1)
    monkeypatch.setattr(arranging, "_CHUNK_BYTES", 5000)
    arranger = arranged(source, tmp_path / "b.shards.json", seed=1, part=(1, 2))
    arrange(pickle.loads(pickle.dumps(arranger)), lambda _: None)  # as in a worker process
    files = sorted((tmp_path / "a.shards").iterdir())
    assert len([path for path in files if path.suffix == ".col"]) > 9
    for path in files:
        assert path.read_bytes() == (tmp_path / "b.shards" / path.name).read_bytes()


def test_arranging_again_after_a_column_was_added(tmp_path: Path) -> None:
    """Shards that were arranged without it are not taken for complete."""
    write_shard(tmp_path / "a", ["score"])
    manifest = str(tmp_path / "web.shards.json")
    sharded(manifest, [tmp_path / "a"])
    arranged(manifest, tmp_path / "new.shards.json")
    write_shard(tmp_path / "a", ["score", "experts"])
    sharded(manifest, [tmp_path / "a"])
    with pytest.raises(ConfigError, match=r"000000 exists and was made differently.*--overwrite"):
        arranged(manifest, tmp_path / "new.shards.json")
    arranged(manifest, tmp_path / "new.shards.json", overwrite=True)
    assert load_shards(tmp_path / "new.shards.json").columns.keys() == {"experts", "score"}


def test_manifest_records_columns(source: str, tmp_path: Path) -> None:
    content = json.loads(Path(source).read_text())
    assert content["version"] == 4 and "weights" not in content["shards"][0]
    assert content["shards"][2]["columns"] == {}
    assert content["shards"][1]["columns"]["experts"]["spec"] == {
        "dtype": "uint8",
        "shape": [4],
        "fill": 255,
        "of": "token",
    }
    assert [list(shard.columns) for shard in load_shards(source).shards] == [
        ["experts", "logits", "score"],
        ["experts", "score"],
        [],
    ]
    write_shard(tmp_path / "a", [])
    sharded(tmp_path / "web.shards.json", [tmp_path / "a"])
    content = json.loads((tmp_path / "web.shards.json").read_text())
    assert content["version"] == 4 and content["shards"][0]["columns"] == {}


def test_pack_and_inspect_show_columns(source: str) -> None:
    prefixes = [shard.prefix for shard in load_shards(source).shards]
    text = printed("pack", *prefixes, "--buckets", "16,32,64", "--output", source)
    assert "column experts: uint8 [4] of token, missing in 1 dataset\n" in text
    assert "column logits: bfloat16 [3, 5] of target, missing in 2 datasets\n" in text
    rows = [line.split() for line in printed("inspect", source, "--shards").splitlines()]
    assert [row[-2:] for row in rows if row and row[0] == prefixes[1]] == [["experts,", "score"]]
    facts = json.loads(build("inspect", source, "--shards", "--json").stdout)
    assert facts["columns"] == list(SPECS) and facts["shards"][2]["columns"] == {}


def test_changed_columns_are_refused_until_pack_records_them(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", ["score"])
    manifest = tmp_path / "web.shards.json"
    sharded(manifest, [tmp_path / "a"])
    tokens = PackedDataset(None, manifest)[0]["tokens"]
    write_shard(tmp_path / "a", ["score", "experts"])  # the same score, and another column
    assert torch.equal(PackedDataset(None, manifest)[0]["tokens"], tokens)
    write_shard(tmp_path / "a", ["score"], score=ColumnSpec(dtype="float32", fill=3))
    with pytest.raises(IndexMismatchError, match=r"column score of .*a has changed .* pack` again"):
        PackedDataset(None, manifest)[0]
    index = sharded(manifest, [tmp_path / "a"])
    assert index.columns["score"].fill == 3
    assert torch.equal(PackedDataset(None, manifest)[0]["tokens"], tokens)


def test_columns_that_a_manifest_does_not_record_are_not_read(tmp_path: Path) -> None:
    """A shard gets a column of another width after packing: its tokens keep the fill value."""
    write_shard(tmp_path / "a", ["score"])
    write_shard(tmp_path / "b", [], seed=1)
    manifest = str(tmp_path / "web.shards.json")
    sharded(manifest, [tmp_path / "a", tmp_path / "b"])

    def scores(path: str) -> list[Any]:
        data = PackedDataset(None, path, columns={"score": "fill"})
        return [data[i]["score"].tolist() for i in range(len(data))]

    before = scores(manifest)
    write_shard(tmp_path / "b", ["score"], seed=1, score=ColumnSpec(dtype="int8", shape=(2,)))
    assert scores(manifest) == before
    arranged(manifest, tmp_path / "new.shards.json")
    flat = [score for sample in scores(str(tmp_path / "new.shards.json")) for score in sample]
    assert sorted(flat) == sorted(score for sample in before for score in sample)


def test_columns_of_one_name_have_one_type(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", ["score"])
    write_shard(tmp_path / "b", ["score"], score=ColumnSpec(dtype="float16"))
    index = sharded(tmp_path / "web.shards.json", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(
        ConfigError, match=r"column score of .*b is .*float16.* of .*a is .*float32"
    ):
        assert index.columns


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"score": {"identity": "x"}}, "missing key 'spec'"),
        ({"score": {"spec": {"dtype": "float64"}, "identity": "x"}}, "column dtype is 'float64'"),
        ({"../x": {"spec": {"dtype": "int8"}, "identity": "x"}}, "column name '../x' is not valid"),
        ([1], "is damaged"),
    ],
)
def test_damaged_record_is_refused(tmp_path: Path, columns: Any, message: str) -> None:
    write_shard(tmp_path / "a", ["score"])
    manifest = tmp_path / "web.shards.json"
    sharded(manifest, [tmp_path / "a"])
    content = json.loads(manifest.read_text())
    content["shards"][0]["columns"] = columns
    manifest.write_text(signed(content))
    with pytest.raises(FormatError, match=f"shard 0.*{message}|{message}"):
        load_shards(manifest)

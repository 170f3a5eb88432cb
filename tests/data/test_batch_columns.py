"""Columns reach every rank's batches as the reference defines them: bytes, dtypes and shapes."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megapack.data import BucketBatchSampler, PackedDataset, Schedule, build_loader, loader
from megapack.data.batch import ReusedBuffers, allocate, column_names, cut_slice
from megapack.data.blend import BlendConfig, HostOptions, Source, Stage
from megapack.data.dataset import open_blend
from megapack.data.resume import check_record, content_digests
from megapack.data.run import DataConfig
from megapack.data.steps import PLAIN, StepView
from megapack.errors import ConfigError, DataError, FormatError, IndexMismatchError, ResumeError
from megapack.packing import pack
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import add_column, remove_column
from megapack.storage.columns import RESERVED, ColumnSpec
from tests.data.corpora import (
    bytes_of,
    column_of,
    column_specs,
    packed_lengths,
    packed_shards,
    random_documents,
    random_rows,
    write_columns,
    write_documents,
)
from tests.reference import gather as reference

BUCKETS = [16, 32]
STEP, MICRO = 256, 64  # tokens
Columns = dict[str, ColumnSpec]


def write_source(
    prefix: Path, columns: Columns, seed: int = 0, num_documents: int = 40
) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Write documents, samples and columns; return documents, and rows of every column."""
    lengths = packed_lengths(num_documents, max(BUCKETS), seed).tolist()
    documents = random_documents(lengths, seed)
    dataset = write_documents(prefix, documents)
    pack(dataset.document_lengths, "bucket", buckets=BUCKETS, alignment=2).save(
        f"{prefix}.samples", source=dataset
    )
    seeds = range(100 * seed, 100 * seed + len(columns))
    rows = {
        name: random_rows(spec, sum(lengths), number)
        for number, (name, spec) in zip(seeds, columns.items(), strict=True)
    }
    if columns:
        write_columns(prefix, {name: (columns[name], rows[name]) for name in columns})
    return documents, rows


class Definition:
    """Columns of samples, by the reference."""

    def __init__(self, data: PackedDataset, sources: Sequence[Any], **rules: Any) -> None:
        self.data, self.rules = data, rules
        self.documents = [document for documents, _ in sources for document in documents]
        self.first = np.cumsum([0, *(len(documents) for documents, _ in sources)]).tolist()
        self.columns = {}
        for name, spec in data.columns.items():
            joined = reference.Column([], spec.fill_row.tobytes(), spec.of)
            for documents, rows in sources:
                lengths = [len(document) for document in documents]
                missing = np.tile(spec.fill_row, sum(lengths)).reshape(sum(lengths), -1)
                of_source = column_of(spec, rows.get(name, missing), lengths)
                joined.rows.extend(of_source.rows)
            self.columns[name] = joined

    def check(self, batch: dict[str, Any], view: StepView = PLAIN) -> None:
        """Compare the columns of a whole micro batch, or of a rank's slice of it."""
        size, rank = (batch.get(f"sequence_parallel_{n}", d) for n, d in (("size", 1), ("rank", 0)))
        num_tokens = batch["tokens"].numel() * size
        samples = []
        for sample in batch["sample_ids"].tolist():
            source, segments = self.data.samples.segments(sample, view)
            samples.append([(self.first[source] + d, *place) for d, *place in segments])
        row_tokens, capacity = batch["row_tokens"], batch["capacity"]
        expected = reference.gather(
            self.documents, samples, num_rows=num_tokens // row_tokens, row_tokens=row_tokens,
            capacity=capacity, columns=self.columns, **self.rules,
        )  # fmt: skip
        assert sorted(column_names(batch)) == sorted(self.columns)
        here = slice(rank * num_tokens // size, (rank + 1) * num_tokens // size)
        assert batch["tokens"].flatten().tolist() == expected.tokens[here]
        for name, spec in self.data.columns.items():
            assert batch[name].shape == (*batch["tokens"].shape, *spec.shape)
            assert batch[name].dtype == getattr(torch, spec.dtype)
            assert bytes_of(batch[name]) == b"".join(expected.columns[name][here]), name


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw columns of two sources, of which the second may lack some, and options of a run."""
    specs = draw(st.lists(column_specs(), min_size=1, max_size=4))
    columns = {f"c{i}": spec for i, spec in enumerate(specs)}
    missing = draw(st.sets(st.sampled_from(sorted(columns))))
    attention = draw(st.sampled_from(["document", "sample"]))
    return {
        "columns": columns,
        "missing": missing,
        "rules": {
            "positions": draw(st.sampled_from(["segment", "document", "sample"])),
            "attention": attention,
            "label_boundary": draw(st.sampled_from(["document", "sample"])),
            "alignment": draw(st.sampled_from([1, 2])),
        },
        "exclude": draw(st.booleans()),
        "sizes": draw(st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=2)),
    }


LOADERS = [
    {},
    {"prefetch": 0},
    {"reuse_buffers": True},
    {"layout": "rows", "row_tokens": 64, "cu_seqlens": "padded"},
    {"layout": "rows", "row_tokens": 32, "cu_seqlens_per_row": True},
    {"sequence_parallel_size": 2},
]


# MEGAPACK_COLUMN_CASES sets the number of random runs of each loader, of 16 batches or more.
@pytest.mark.parametrize("options", LOADERS, ids=str)
@settings(max_examples=int(os.environ.get("MEGAPACK_COLUMN_CASES", settings().max_examples // 8)))
@given(case=runs(), start=st.integers(1, 2))
def test_batches_of_all_ranks_are_as_defined(
    options: dict[str, Any], case: dict[str, Any], start: int
) -> None:
    """Of one world size up to a step, of another from there on."""
    num_batches = 0
    columns, missing = case["columns"], case["missing"]
    with tempfile.TemporaryDirectory() as folder:
        prefixes = [Path(folder) / "a", Path(folder) / "b"]
        fewer = {name: spec for name, spec in columns.items() if name not in missing}
        sources = [write_source(prefixes[0], columns, 1), write_source(prefixes[1], fewer, 2)]
        (Path(folder) / "ids.txt").write_text("1\n5\n")
        stages = (Stage(from_step=1, exclude={"a": str(Path(folder) / "ids.txt")}),)
        blend = BlendConfig(
            sources=tuple(
                Source(prefix=str(p), index=f"{p}.samples", name=p.name) for p in prefixes
            ),
            stages=stages if case["exclude"] else (),
            columns=dict.fromkeys(columns, "fill") if missing else tuple(columns),
        )
        data = open_blend(blend, **case["rules"])
        definition = Definition(data, sources, **case["rules"])
        schedule = Schedule(data, tokens_per_step=STEP)
        shared = options.get("sequence_parallel_size", 1)
        parts = zip(case["sizes"], (0, start), (start, 4), strict=True)
        for size, first, last in parts:
            ranks = max(size, shared)
            for rank in range(ranks):
                batches = build_loader(
                    data, schedule, micro_batch_tokens=MICRO if shared == 1 else min(BUCKETS),
                    data_parallel_rank=rank, data_parallel_size=ranks, start_step=first,
                    num_steps=last - first, **options,
                )  # fmt: skip
                for batch in batches:
                    assert batch.keys() - columns.keys() <= RESERVED
                    definition.check(batch, schedule.stage_at(batch["step"]).view)
                    num_batches += 1
    event(f"{num_batches} batches")


def with_ids(data: PackedDataset, ids: Sequence[int]) -> dict[str, Any]:
    """Return a micro batch with what a loader says about it."""
    capacity = data.samples.capacity_of(ids[0])
    about = {"sample_ids": torch.tensor(ids), "capacity": capacity, "row_tokens": capacity}
    return {**data.micro_batch(ids), **about}


def opened(folder: Path, columns: Columns, **options: Any) -> tuple[PackedDataset, Definition]:
    source = write_source(folder / "d", columns)
    data = PackedDataset(folder / "d", folder / "d.samples", columns=list(columns), **options)
    return data, Definition(data, [source], **options)


MIXED = {
    "experts": ColumnSpec(dtype="uint8", shape=(6, 2), fill=255),
    "ids": ColumnSpec(dtype="uint32", shape=(5,), of="target"),
    "logits": ColumnSpec(dtype="bfloat16", shape=(5,), of="target"),
    "reward": ColumnSpec(dtype="float32", fill=-1),
}


@pytest.mark.parametrize(
    ("num_workers", "context"),
    [(0, None), pytest.param(2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.multiprocess)],
)
def test_workers_of_torch_carry_columns(
    tmp_path: Path, num_workers: int, context: str | None
) -> None:
    data, definition = opened(tmp_path, MIXED)
    sampler = BucketBatchSampler(
        Schedule(data, tokens_per_step=STEP), micro_batch_tokens=MICRO,
        data_parallel_rank=0, data_parallel_size=1, num_steps=3,
    )  # fmt: skip
    items = DataLoader(
        data, batch_sampler=sampler, num_workers=num_workers, collate_fn=list,
        multiprocessing_context=context,
    )  # fmt: skip
    wanted = list(sampler)
    num_samples = 0
    for batch, chosen in zip(items, wanted, strict=True):
        for sample, item in zip(chosen, batch, strict=True):
            capacity = item["tokens"].numel()
            rows = {name: item[name][None] for name in ("tokens", *MIXED)}
            about = {"sample_ids": torch.tensor([sample]), "capacity": capacity}
            definition.check({**rows, **about, "row_tokens": capacity})
            num_samples += 1
    assert num_samples > 20


@pytest.mark.parametrize("rule", ["require", "fill"])
def test_a_worker_refuses_columns_that_changed_during_the_run(tmp_path: Path, rule: str) -> None:
    """A worker that is spawned opens the files again; columns that are not in use may change."""
    spec, rows = ColumnSpec(dtype="uint8", fill=9), np.arange(3, dtype=np.uint8)
    prefix = tmp_path / "d"
    write_documents(prefix, [[1, 2, 3]])
    add_column(prefix, "a", rows, spec)
    data = PackedDataset(prefix, pack([3], buckets=[4]), columns={"a": rule})
    saved = pickle.dumps(data)
    add_column(prefix, "b", rows, spec)
    assert pickle.loads(saved)[0]["a"].tolist() == [0, 1, 2, 9]
    labels = ColumnSpec(dtype="int32", fill=-100, of="target")
    add_column(prefix, "labels", np.array([1, -100, 3]), labels)
    with pytest.raises(FormatError, match="a column was added, replaced or removed"):
        pickle.loads(saved)
    remove_column(prefix, "labels")
    add_column(prefix, "a", rows + 1, spec, overwrite=True)
    assert data[0]["a"].tolist() == [0, 1, 2, 9], "the open file"
    with pytest.raises(FormatError, match="a column was added, replaced or removed"):
        pickle.loads(saved)
    remove_column(prefix, "a")
    with pytest.raises(FormatError, match="a column was added, replaced or removed"):
        pickle.loads(saved)


def test_a_list_of_tensors_that_numpy_cannot_read_is_refused() -> None:
    spec = ColumnSpec(dtype="bfloat16", shape=(2,))
    with pytest.raises(DataError, match=r"an array .*BFloat16.*; stack them"):
        spec.rows([torch.ones(2).bfloat16()])
    assert spec.rows(torch.ones(1, 2).bfloat16()).tolist() == [[0x3F80, 0x3F80]]


def test_rows_of_64_kib(tmp_path: Path) -> None:
    spec = ColumnSpec(dtype="uint8", shape=(1 << 16,), of="target", fill=9)
    data, definition = opened(tmp_path, {"wide": spec})
    definition.check(with_ids(data, [0, 1]))


def test_slices_and_reused_memory(tmp_path: Path) -> None:
    data, _ = opened(tmp_path, MIXED)
    batch = data.micro_batch([0, 1])
    for name in MIXED:
        halves = [cut_slice(batch, rank, 2)[name] for rank in range(2)]
        assert torch.equal(torch.cat(halves, dim=1), batch[name])
    capacity = data.samples.capacity_of(0)
    buffers = ReusedBuffers(data.columns)
    taken = buffers.take(1, 2 * capacity)
    again = data.micro_batch([0, 1], out=taken)
    for name in ("tokens", *MIXED):
        assert again[name].data_ptr() == taken[name].data_ptr()
        assert bytes_of(again[name]) == bytes_of(batch[name])
    with pytest.raises(ConfigError, match=r"the buffers have columns \[\].*dataset.allocate"):
        data.micro_batch([0, 1], out=allocate(2 * capacity))


# ---- What is carried


def blend_of(folder: Path, columns: Any, of_b: Columns) -> Iterator[Any]:
    for name, specs in (("a", MIXED), ("b", of_b)):
        if not (folder / f"{name}.idx").exists():
            write_source(folder / name, specs)
    sources = tuple(
        Source(prefix=str(folder / n), index=str(folder / f"{n}.samples"), name=n) for n in "ab"
    )
    return open_blend(BlendConfig(sources=sources, columns=columns))


def test_sources_without_a_column_are_refused_or_filled(tmp_path: Path) -> None:
    other = {**MIXED, "reward": ColumnSpec(dtype="float32", of="target")}
    del other["experts"]
    for columns, message in (
        (("experts",), r"b has no column experts: .*columns: \{experts: fill\}"),
        ({"experts": "require"}, "has no column experts"),
        ({"experts": "maybe"}, "experts is 'maybe'; choose 'require' or 'fill'"),
        (("expert",), "unknown column 'expert'; did you mean 'experts'"),
        ("experts", r"columns is 'experts'; it must be a list or a mapping, as in \['experts'\]"),
        ({"reward": "fill"}, r"column reward is float32, of token, .* in .*a and .* of target"),
    ):
        with pytest.raises(ConfigError, match=message):
            blend_of(tmp_path, columns, other)
    data = blend_of(tmp_path, {"experts": "fill", "ids": "require"}, other)
    assert list(data.columns) == ["experts", "ids"]
    first_of_b = int(data.samples.bases[1])
    assert (data[first_of_b]["experts"] == 255).all() and (data[0]["experts"] != 255).any()
    assert not column_names(blend_of(tmp_path, (), other)[0]), "nothing is carried unless named"


def test_a_run_names_its_columns(tmp_path: Path) -> None:
    sizes = {"tokens_per_step": STEP, "micro_batch_tokens": MICRO}
    config = DataConfig(prefix="d", index="d.samples", columns=("a",), **sizes)
    assert config.columns == ("a",)
    with pytest.raises(ConfigError, match="columns is for prefix and index"):
        DataConfig(blend="b.yaml", columns=("a",), **sizes)


def test_a_resumed_run_carries_the_same_columns(tmp_path: Path) -> None:
    data, _ = opened(tmp_path, MIXED)
    state = Schedule(data, tokens_per_step=STEP).state_dict(2)
    assert state["columns"]["ids"]["of"] == "target" and json.loads(json.dumps(state)) == state
    plain = PackedDataset(tmp_path / "d", tmp_path / "d.samples")
    with pytest.raises(ResumeError, match="columns was"):
        Schedule(plain, tokens_per_step=STEP).check_state(state)
    before = {"data.content": content_digests(data)}
    for carried in ([], ["ids", "reward"]):  # as check_state allows it; the bytes are the same
        data = PackedDataset(tmp_path / "d", tmp_path / "d.samples", columns=carried)
        assert check_record({"data.content": content_digests(data)}, before) == []
    (tmp_path / "d.reward.col").write_bytes(bytes((tmp_path / "d.reward.col").stat().st_size))
    data = PackedDataset(tmp_path / "d", tmp_path / "d.samples", columns=["ids", "reward"])
    with pytest.raises(ResumeError, match=r"data\.content was \{'0 [0-9a-f]* reward': "):
        check_record({"data.content": content_digests(data)}, before)


def test_shards_record_their_columns(tmp_path: Path) -> None:
    sources = [write_source(tmp_path / name, MIXED, seed) for seed, name in enumerate("ab")]
    manifest = tmp_path / "all.shards.json"
    how = {"strategy": "bucket", "buckets": BUCKETS, "alignment": 2}
    index = packed_shards(manifest, [tmp_path / "a", tmp_path / "b"], **how)
    data = PackedDataset(None, manifest, columns=list(MIXED))
    (first, of_first), (second, of_second) = sources
    rows = {name: np.concatenate([of_first[name], of_second[name]]) for name in MIXED}
    definition = Definition(data, [(first + second, rows)])
    definition.check(with_ids(data, [0, 1, 2, 3]))
    assert index.shards[0].columns.keys() == MIXED.keys()

    changed = random_rows(MIXED["reward"], sum(map(len, first)), 77)
    write_columns(tmp_path / "a", {"reward": (MIXED["reward"], changed)})
    with pytest.raises(IndexMismatchError, match=r"column reward of .*a has changed"):
        PackedDataset(None, manifest, columns=["reward"])[0]
    remove_column(tmp_path / "a", "experts")
    packed_shards(manifest, [tmp_path / "a", tmp_path / "b"], **how)
    assert PackedDataset(None, manifest, columns=["reward"])[0]["reward"].numel()
    with pytest.raises(ConfigError, match=r"has no column experts: .* pack` if it is a shard"):
        PackedDataset(None, manifest, columns=["experts"])
    for name in "ab":
        dataset, late = IndexedDataset(tmp_path / name), ColumnSpec(dtype="uint8")
        add_column(tmp_path / name, "late", np.zeros(dataset.num_tokens, np.uint8), late)
    with pytest.raises(ConfigError, match=r"pack` again.*unknown column 'late'"):
        PackedDataset(None, manifest, columns=["late"])
    packed_shards(manifest, [tmp_path / "a", tmp_path / "b"], **how)
    assert PackedDataset(None, manifest, columns=["late"])[0]["late"].numel()
    content = json.loads(manifest.read_text())
    content["shards"][0]["columns"]["reward"]["dtype"] = "float8"
    manifest.write_text(json.dumps(content))
    with pytest.raises(FormatError):
        PackedDataset(None, manifest)


def test_reading_ahead_covers_columns(tmp_path: Path) -> None:
    wide = {"wide": ColumnSpec(dtype="uint8", shape=(4096,))}
    data, _ = opened(tmp_path, wide)
    plain = PackedDataset(tmp_path / "d", tmp_path / "d.samples")
    data.disable_readahead()
    num_tokens = int((data[3]["dataset_ids"] >= 0).sum())
    assert num_tokens
    used = sum(length for _, _, length in data.samples.segments(3)[1])
    assert data.prefetch([3]) - plain.prefetch([3]) >= 4096 * used


def test_few_batches_with_wide_columns_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, definition = opened(tmp_path, {"wide": ColumnSpec(dtype="uint8", shape=(4096,))})
    schedule = Schedule(data, tokens_per_step=STEP)
    sizes = {"micro_batch_tokens": MICRO, "data_parallel_rank": 0, "data_parallel_size": 1}
    started: list[int] = []
    monkeypatch.setattr(data, "prefetch", lambda ids: started.extend(ids) or 1 << 18)
    num_samples = [len(item) for item in build_loader(data, schedule, num_steps=5, **sizes).sampler]
    for limit, most in ((1 << 28, 16), (1, 1)):
        monkeypatch.setattr(loader, "_LOCAL_BYTES", limit)
        started.clear()
        ahead = []
        for number, batch in enumerate(
            build_loader(data, schedule, num_steps=5, prefetch=0, **sizes)
        ):
            definition.check(batch)
            num_started = np.searchsorted(np.cumsum(num_samples), len(started)) + 1
            ahead.append(num_started - number)
        assert max(ahead) == most and len(started) == sum(num_samples)


def test_manifests_of_hosts_name_columns() -> None:
    sources = (Source(prefix="a"),)
    assert HostOptions(sources=sources, columns=("x",)).mixture.columns == ("x",)
    assert replace(BlendConfig(sources=sources), columns={"x": "fill"}).mixture.columns == {
        "x": "fill"
    }


def test_a_damaged_column_is_refused_when_opened(tmp_path: Path) -> None:
    write_source(tmp_path / "d", MIXED)
    with (tmp_path / "d.ids.col").open("ab") as file:
        file.write(b"x")
    with pytest.raises(FormatError, match=r"d\.ids\.col has .* its meta file says"):
        PackedDataset(tmp_path / "d", tmp_path / "d.samples", columns=["reward"])
    assert len(PackedDataset(IndexedDataset(tmp_path / "d"), tmp_path / "d.samples"))

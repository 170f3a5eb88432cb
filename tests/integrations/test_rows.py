"""Rows of constant length: what they hold, and that hosts' samplers keep ranks in one bucket."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapack.data import PackedDataset, Schedule, Stage, load_blend, open_blend
from megapack.data.sampler import equal_groups
from megapack.errors import ConfigError
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.open_rows import Manifest, Source, is_manifest, open_data_path
from megapack.packing import pack
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from megapack.storage.merge import merge
from tests.data.corpora import packed_documents, packed_lengths, random_documents
from tests.integrations.samples import make_dataset

ROW = 64
OPTIONS = RowOptions(sequence_length=ROW, rows_per_block=8, seed=7)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(2.6, 0.9, 900).astype(int) + 1, 150).tolist()
    return make_dataset(tmp_path_factory.mktemp("rows"), [0, *lengths, 0])


def rows_of(
    corpus: IndexedDataset, options: RowOptions = OPTIONS, manifest: Any = None, **more: Any
) -> RowDataset:
    manifest = {"buckets": (16, 32, 64), **(manifest or {})}
    manifest = Manifest(sources=(Source(prefix=corpus.prefix),), **manifest)
    return open_data_path(manifest, options, **more)


def blend_of(corpus: IndexedDataset, folder: Path, *shares: float, **more: Any) -> Manifest:
    """Write a manifest of the corpus, ``web``, and another source, ``code``."""
    if not (folder / "code.idx").exists():
        make_dataset(folder, np.random.default_rng(5).integers(5, 60, 400).tolist(), "code")
    prefixes = {"web": str(corpus.prefix), "code": str(folder / "code")}
    sources = tuple(
        Source(prefix=prefix, weight=share, name=name)
        for (name, prefix), share in zip(prefixes.items(), shares, strict=False)
    )
    options = {"buckets": (16, 32, 64), "cache_directory": str(folder / "cache"), **more}
    return Manifest.read(Manifest(sources=sources, **options).to_json())


def staged(corpus: IndexedDataset, folder: Path, *stages: Stage, **options: Any) -> RowDataset:
    """Rows of two sources, the second of which joins by a stage."""
    shares = (1.0, 0.0)[: 1 + bool(stages)]
    manifest = blend_of(corpus, folder, *shares, stages=stages)
    return open_data_path(manifest, OPTIONS, num_rows=400, **options)


def test_stages_count_blocks_and_keep_earlier_rows(corpus: IndexedDataset, tmp_path: Path) -> None:
    """A host that resumes at row 80 with more stages continues from there."""
    (tmp_path / "gone.txt").write_text("\n".join(map(str, range(1, 900, 2))))
    join = Stage(from_step=10, weights={"web": 1, "code": 1})
    masked = Stage(from_step=20, skip_steps=3, exclude={"web": str(tmp_path / "gone.txt")})
    last = Stage(from_tokens=30 * 8 * ROW, order="grow-p2")
    plain, edited, full = (
        staged(corpus, tmp_path, *stages) for stages in ((), (join,), (join, masked, last))
    )
    for shorter, longer, end in ((plain, edited, 80), (edited, full, 160)):
        for number in (0, 7, end - 9, end - 1):
            for key, value in shorter[number].items():
                assert torch.equal(longer[number][key], value), (number, key)
    assert [stage.begin for stage in full.schedule.stages] == [0, 10, 20, 30]
    source = [full.packed.samples.locate(full.samples_of(i))[0] for i in range(400)]
    assert not any(part.any() for part in source[:80])
    assert 0.3 < np.mean(np.concatenate(source[80:])) < 0.7
    step = full.schedule.step(20)
    unmasked = edited.schedule.step(23)
    assert step.sample_ids.tolist() == unmasked.sample_ids.tolist()
    for number in range(160, 400):
        view = full.schedule.stage_at(number // full.options.rows_per_block).view
        labels = full.packed.count_labels(full.samples_of(number), view).sum()
        assert full[number]["loss_mask"].sum() == labels
        assert full.samples_of(number).max() < len(full.packed)
        for which, segments in full.segments_of(number):
            assert which or not any(document % 2 for document, _, _ in segments)
    again = pickle.loads(pickle.dumps(full))
    assert all(torch.equal(again[300][key], value) for key, value in full[300].items())


def test_rows_for_validation_have_no_stages(corpus: IndexedDataset, tmp_path: Path) -> None:
    join = Stage(from_step=10, weights={"code": 1})
    rows = staged(corpus, tmp_path, join, split=(0.9, 1.0))
    assert rows.packed.samples.names == ["web"] and len(rows.schedule.stages) == 1


def test_rows_keep_groups_of_documents_together(corpus: IndexedDataset, tmp_path: Path) -> None:
    """With attention ``group`` rows have fewer boundaries, positions that continue, and labels that
    cross documents."""
    lengths, path = corpus.document_lengths, tmp_path / "g.samples"
    index = pack(lengths, buckets=[16, 32, 64], groups=np.arange(len(lengths)) // 4)
    index.save(path, source=corpus)
    source = Source(prefix=corpus.prefix, index=str(path))
    manifest = Manifest(sources=(source,), attention="group")
    rows = open_data_path(manifest, OPTIONS, num_rows=64)
    together, apart = (PackedDataset(corpus, index, attention=a) for a in ("group", "document"))
    fewer = 0
    for number in range(64):
        row, ids = rows[number], [int(i) for i in rows.samples_of(number)]
        for key in ("tokens", "labels", "position_ids"):
            expected = torch.cat([together[i][key] for i in ids])
            assert row[key][: len(expected)].equal(expected), key
        begins = [torch.cat([of[i]["position_ids"] for i in ids]) == 0 for of in (together, apart)]
        fewer += bool(begins[0].sum() < begins[1].sum())
        labels = [sum(int(of[i]["loss_mask"].sum()) for i in ids) for of in (together, apart)]
        assert int(row["loss_mask"].sum()) == labels[0] >= labels[1]
    assert fewer > 20


@pytest.mark.parametrize(
    "change", [{"tokens_per_step": 64}, {"mix": "micro_step", "micro_step_tokens": 64}]
)
def test_stage_options_of_the_host_are_refused(change: dict[str, Any]) -> None:
    names = ", ".join(change)
    with pytest.raises(ConfigError, match=f"from step 5 has {names}, which the host decides"):
        Manifest(sources=(Source(prefix="x"),), stages=(Stage(from_step=5, **change),))


def test_attention_window_changes_only_boundaries(corpus: IndexedDataset) -> None:
    """From the block on at which a stage has one, and not in the rows of an evaluation."""
    staged = {"stages": (Stage(from_step=2, attention_window=12),)}
    whole, cut = rows_of(corpus), rows_of(corpus, manifest=staged)
    always = {"attention_window": 12}
    assert rows_of(corpus, manifest=always)[0]["max_seqlen"] <= 12 < whole[0]["max_seqlen"]
    held_out = rows_of(corpus, manifest=always, split=(0.9, 1.0))
    assert max(int(held_out[i]["max_seqlen"]) for i in range(len(held_out))) > 12
    assert len(whole) == len(cut) > 20
    compared = 0
    for i in range(len(whole)):
        before, after = whole[i], cut[i]
        if i < 2 * OPTIONS.rows_per_block:
            assert all(torch.equal(value, after[name]) for name, value in before.items())
            continue
        assert after["max_seqlen"] <= 12 and after["cu_seqlens"].shape == before["cu_seqlens"].shape
        # Rows of a block are dealt by work, which a window evens out.
        if whole.samples_of(i).tolist() == cut.samples_of(i).tolist():
            for name in ("tokens", "labels", "position_ids", "loss_mask"):
                assert torch.equal(before[name], after[name])
            assert segments_of(after) == [
                (at, min(at + 12, end))
                for begin, end in segments_of(before)
                for at in range(begin, end, 12)
            ]
            compared += 1
    assert compared > 3


def segments_of(row: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    bounds = row["cu_seqlens"].unique_consecutive().tolist()
    return list(itertools.pairwise(bounds))


def test_rows_hold_whole_samples_with_labels_and_positions_inside_documents(
    corpus: IndexedDataset,
) -> None:
    rows = rows_of(corpus)
    offsets = corpus.document_offsets
    seen = np.zeros(corpus.num_tokens, np.int64)
    for number in range(rows.rows_per_epoch):
        row = rows[number]
        assert row["tokens"].shape == row["labels"].shape == (ROW,)
        assert row["cu_seqlens"].shape == (ROW + 1,) and row["cu_seqlens"].dtype == torch.int32
        assert row["max_seqlen"].dtype == torch.int32 and row["max_seqlen"].dim() == 0
        assert int(row["max_seqlen"]) == max(e - b for b, e in segments_of(row))
        assert segments_of(row)[-1][1] == ROW
        assert torch.equal(row["loss_mask"] == 0, row["labels"] < 0)
        for begin, end in segments_of(row):
            assert row["position_ids"][begin:end].tolist() == list(range(end - begin))
            inside = row["labels"][begin : end - 1]
            if (inside >= 0).any():
                assert torch.equal(inside, row["tokens"][begin + 1 : end])
        capacity = (16, 32, 64)[rows.bucket_of(number)]
        samples = rows.samples_of(number)
        assert len(samples) == ROW // capacity
        for slot, sample in enumerate(samples.tolist()):
            _, segments = rows.packed.samples.indices[0].sample(sample)
            at = slot * capacity
            for document, begin, length in segments:
                start = int(offsets[document]) + begin
                np.testing.assert_array_equal(
                    row["tokens"][at : at + length].numpy(), corpus.tokens[start : start + length]
                )
                seen[start : start + length] += 1
                at += length
    # One epoch covers everything; what fills its last block is the begin of the next epoch.
    assert seen.min() == 1
    assert seen.sum() - len(seen) < 3 * OPTIONS.rows_per_block * ROW


def test_rows_do_not_depend_on_number_or_order_of_requests(
    corpus: IndexedDataset,
) -> None:
    few, many = rows_of(corpus, num_rows=40), rows_of(corpus, num_rows=4000)
    assert (len(few), len(many)) == (40, 4000)
    for number in (39, 3, 17, 0, 39):
        for key, value in many[number].items():
            assert torch.equal(few[number][key], value), (number, key)
    assert len({many.bucket_of(i) for i in range(4000)}) == 3
    with pytest.raises(IndexError, match="row 40 of 40"):
        few[40]


def test_block_of_rows_is_a_step_of_the_schedule_that_other_trainers_run(
    corpus: IndexedDataset,
) -> None:
    rows, block = rows_of(corpus), OPTIONS.rows_per_block
    packed = PackedDataset(corpus, rows.packed.samples.indices[0])
    schedule = Schedule(packed, tokens_per_step=block * ROW, seed=7)
    for step in range(schedule.num_steps(1)):
        mine = [rows.samples_of(step * block + r) for r in range(block)]
        assert sorted(np.concatenate(mine)) == sorted(schedule.step(step).sample_ids)


def test_exact_boundaries_end_with_the_row(corpus: IndexedDataset) -> None:
    rows = rows_of(corpus, replace(OPTIONS, cu_seqlens="exact"))
    padded = rows_of(corpus)
    for number in range(20):
        exact = rows[number]["cu_seqlens"]
        assert bool((exact.diff() > 0).all()) and int(exact[-1]) == ROW
        assert torch.equal(padded[number]["cu_seqlens"].unique_consecutive(), exact)


def test_aligned_segments_start_at_multiples(
    corpus: IndexedDataset,
) -> None:
    rows = rows_of(corpus, replace(OPTIONS, align=4, cu_seqlens="exact"))
    for number in range(rows.rows_per_epoch):
        row = rows[number]
        true, padded = row["cu_seqlens"], row["cu_seqlens_padded"]
        assert padded.shape == true.shape and int(padded[-1]) == ROW
        room = padded.diff() - true.diff()
        assert bool((padded % 4 == 0).all()) and 0 <= int(room.min()) <= int(room.max()) < 4
        assert int(row["max_seqlen"]) == int(padded.diff().max())
        restarts = (row["position_ids"] == 0).nonzero().flatten()
        assert set(padded[:-1].tolist()) <= set(restarts.tolist())


def test_assignment_balances_the_work_of_rows() -> None:
    rng = np.random.default_rng(1)
    costs = np.sort(rng.integers(1, 1000, 96))
    ids = np.arange(96) + 500
    rows = ids[equal_groups(costs, 96 // 8)]
    assert sorted(rows.reshape(-1).tolist()) == ids.tolist()
    work = costs[rows - 500].sum(axis=1)
    assert (np.diff(work) <= 0).all()
    naive = costs.reshape(8, 12).sum(axis=1)
    assert work.max() / work.mean() < 1.01 < naive.max() / naive.mean()
    single = ids[equal_groups(costs, 1)]
    assert single[0, 0] == 500 + int(np.argmax(costs))


def test_blend_gives_sources_their_share_of_the_tokens_of_all_buckets(
    tmp_path: Path, corpus: IndexedDataset
) -> None:
    rows = open_data_path(blend_of(corpus, tmp_path, 3.0, 1.0), OPTIONS, num_rows=2000)
    first, tokens = rows.packed.samples.bases[1], np.zeros(2)
    for number in range(2000):
        capacity = (16, 32, 64)[rows.bucket_of(number)]
        others = rows.samples_of(number) >= first
        tokens += [(~others).sum() * capacity, others.sum() * capacity]
    assert tokens[1] / tokens.sum() == pytest.approx(0.25, abs=0.01)


def test_split_parts_share_no_document(corpus: IndexedDataset, tmp_path: Path) -> None:
    parts = [
        rows_of(corpus, split=split, cache_directory=tmp_path) for split in ((0.0, 0.8), (0.8, 1.0))
    ]
    documents = [set(part.packed.samples.indices[0].segment_document.tolist()) for part in parts]
    assert documents[0] and documents[1] and not documents[0] & documents[1]
    filled = {d for d, length in enumerate(corpus.document_lengths) if length}
    assert documents[0] | documents[1] == filled


@pytest.mark.parametrize(
    ("manifest", "options", "message"),
    [
        ({"buckets": (16, 128)}, {}, r"bucket 128 is longer .* 64"),
        ({"max_epochs": 1.0}, {"num_rows": 100000}, "max_epochs is 1"),
        ({}, {"split": (0.99999, 1.0)}, "hold no tokens"),
        ({"strategy": "buckets"}, {}, "did you mean 'bucket'"),
        ({"order": "random"}, {}, "order is 'random'"),
    ],
)
def test_impossible_options_are_refused(
    corpus: IndexedDataset, manifest: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(corpus, manifest=manifest, **options)


def test_rows_hold_documents_with_their_middle_last(corpus: IndexedDataset, tmp_path: Path) -> None:
    """Packed with room for them, by the host's seed, and in training only."""
    fim = {"rate": 0.8, "sentinels": {"prefix": 900, "suffix": 901, "middle": 902}, "eod": "none"}
    tree = {
        "sources": [{"prefix": corpus.prefix, "name": "web"}],
        "buckets": [16, 32, 64],
        "fim": fim,
        "stages": [{"from_step": 20, "fim_rates": {"web": 0.0}}],
        "cache_directory": str(tmp_path),
    }
    manifest = Manifest.read(json.dumps(tree))
    rows = open_data_path(manifest, OPTIONS, num_rows=240)
    assert {index.fim_room for index in rows.packed.samples.indices} == {3}
    turned = 0
    for block in (0, 7, 19, 20):
        step = rows.schedule.step(block)
        numbers = range(8 * block, 8 * block + 8)
        batch = rows.micro_batch(numbers)
        tokens = sorted(batch["tokens"].reshape(-1, step.capacity).tolist())
        whole = rows.packed.micro_batch(step.sample_ids, view=step.view)
        assert tokens == sorted(whole["tokens"].reshape(-1, step.capacity).tolist())
        labels = (batch["labels"] >= 0).sum()
        assert labels == step.num_label_tokens == batch["loss_mask"].sum()
        turned += int((batch["tokens"] == 900).sum())
        assert (step.view.epochs is None) == (block == 20) == (900 not in batch["tokens"])
    assert turned > 20
    copied = pickle.loads(pickle.dumps(rows))
    assert torch.equal(copied.micro_batch([3, 60])["tokens"], rows.micro_batch([3, 60])["tokens"])
    held_out = open_data_path(manifest, OPTIONS, split=(0.5, 1.0))
    assert {index.fim_room for index in held_out.packed.samples.indices} == {0}
    assert held_out.schedule.step(0).view.epochs is None


def test_loss_weights_of_tokens_are_refused_by_name(corpus: IndexedDataset, tmp_path: Path) -> None:
    merge([corpus.prefix], tmp_path / "d")
    add_column(tmp_path / "d", "weights", np.ones(corpus.num_tokens), INTERPRETED["weights"])
    source = Source(prefix=str(tmp_path / "d"), name="web")
    manifest = Manifest(sources=(source,), buckets=(ROW,), cache_directory=str(tmp_path))
    said = r"'web' has loss weights per token .* token_weights: none"
    with pytest.raises(ConfigError, match=said):
        open_data_path(manifest, OPTIONS)


def test_every_source_of_a_blend_has_its_own_labels(corpus: IndexedDataset, tmp_path: Path) -> None:
    merge([corpus.prefix], tmp_path / "d")
    labels = np.full(corpus.num_tokens, -100)
    add_column(tmp_path / "d", "labels", labels, INTERPRETED["labels"])
    sources = (
        Source(prefix=str(tmp_path / "d"), weight=0.5),
        Source(prefix=corpus.prefix, weight=0.5),
    )
    manifest = Manifest(sources=sources, buckets=(ROW,), cache_directory=str(tmp_path))
    rows = open_data_path(manifest, OPTIONS)
    labelled = [bool(rows[i]["loss_mask"].any()) for i in range(40)]
    assert labelled.count(True) == labelled.count(False) == 20


def test_manifest_serves_training_and_hosts_and_its_index_is_not_packed_again(
    corpus: IndexedDataset, tmp_path: Path
) -> None:
    index = pack(corpus.document_lengths, "bucket", buckets=[16, 32, 64], seed=OPTIONS.seed)
    index.save(tmp_path / "d.samples", source=corpus)
    sources = [{"prefix": corpus.prefix, "index": "d.samples", "name": "web"}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    manifest = Manifest.read(str(tmp_path / "mix.json"))
    rows = open_data_path(manifest, OPTIONS, cache_directory=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    packed_here = rows_of(corpus)
    for number in (0, 9, 77):
        for name, value in packed_here[number].items():
            assert torch.equal(value, rows[number][name]), name
    packed = open_blend(load_blend(tmp_path / "mix.json"))
    assert packed.samples.names == rows.packed.samples.names == ["web"]
    assert packed.samples.fingerprints == rows.packed.samples.fingerprints
    aligned = replace(OPTIONS, align=4)
    for options, how, said in (
        (
            OPTIONS,
            {"split": (0.0, 0.9)},
            "contains all documents, and the host's split",
        ),
        (aligned, {}, "no room for segments at multiples of 4: pack it with"),
        (OPTIONS, {"split": (1.0, 1.0)}, "hold no tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_data_path(manifest, options, **how)


# ---- A data path that is a shard manifest: its rows are those of the dataset it stands for

SHARDED = RowOptions(sequence_length=ROW, rows_per_block=4, seed=1)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """One dataset whose samples are those of the only shard, which is the simplest law."""
    prefix, packing = tmp_path / "a", {"buckets": [16, 32, 64]}
    packed_documents(prefix, random_documents(packed_lengths(300, 64)), packing["buckets"])
    manifest = str(tmp_path / "web.shards.json")
    pack_shards(plan_packing(manifest, [str(prefix)], packing), lambda _: None)
    return manifest


def test_rows_of_a_shard_manifest(shards: str, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text("sources: [{prefix: a, index: a.samples}]\n")
    ours, theirs = open_data_path(shards, SHARDED), open_data_path(str(blend), SHARDED)
    assert not is_manifest(shards) and len(ours) == len(theirs) > 20
    for i in range(0, len(theirs), 5):
        assert all(torch.equal(ours[i][name], theirs[i][name]) for name in theirs[i])
    tokens = IndexedDataset(tmp_path / "a").tokens
    seen = np.concatenate([ours[i]["tokens"].numpy() for i in range(len(ours))])
    assert np.isin(np.unique(tokens), seen).all()


def test_rows_of_a_blend_of_shard_manifests_and_prefixes(shards: str) -> None:
    manifest = Manifest.of_blend([shards, "b"], [0.5, 0.5])
    assert [source.title for source in manifest.sources] == [shards, "b"]
    assert Manifest.read(manifest.to_json()) == manifest


def test_rows_of_a_part_of_a_shard_manifest_are_refused(shards: str) -> None:
    with pytest.raises(ConfigError, match=r"has index .*shards\.json, which contains all docum"):
        open_data_path(shards, SHARDED, split=(0.0, 0.9))

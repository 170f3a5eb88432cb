"""A source of many datasets equals their merge, and opens a dataset only when it is needed.

The specification is ``merge``: documents one after the other, and so the samples of every bucket.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import build

from megapack.data import (
    BlendConfig,
    BucketBatchSampler,
    PackedDataset,
    Schedule,
    Source,
    Stage,
    build_loader,
    open_blend,
    plan_exclusions,
    plan_run,
    unseen_documents,
)
from megapack.data.arrange import Arranger, arrange, plan_arrangement
from megapack.data.report import check_token_ids
from megapack.data.sample_order import Scores
from megapack.data.sources import Shards
from megapack.errors import ConfigError, IndexMismatchError, ResumeError
from megapack.packing import SampleIndex, pack
from megapack.packing.shard_packing import plan_packing
from megapack.packing.sharded import PackedShard, ShardedIndex, load_shards
from megapack.packing.verify import verify_shard
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.merge import merge
from megapack.storage.metadata import own_metadata
from megapack.storage.verify import has_errors, verify
from tests.data.corpora import (
    STEP_TOKENS,
    assert_same_batches,
    index_of,
    of_rank,
    packed_lengths,
    packed_shards,
    random_documents,
    write_documents,
    write_labels,
    write_weights,
)

BUCKETS = [16, 32, 64]
sharded = partial(packed_shards, buckets=BUCKETS)
SIZES = [40, 1, 90, 0, 33]  # documents per shard; one is empty


def merged_index(index: ShardedIndex, dataset: IndexedDataset) -> SampleIndex:
    """Return the samples of all shards as one index, built by the definition, sample by sample."""
    samples: dict[int, list[list[tuple[int, int, int]]]] = {capacity: [] for capacity in BUCKETS}
    first = 0
    for number, shard in enumerate(index.shards):
        shard_index = index.open(number)
        for i in range(shard_index.num_samples):
            bucket, segments = shard_index.sample(i)
            moved = [(first + document, begin, n) for document, begin, n in segments]
            samples[BUCKETS[bucket]].append(moved)
        first += shard.num_documents
    return index_of(samples, dataset.document_lengths)


@pytest.mark.parametrize("sizes", [[0, 2], [2, 0], [0, 0, 1, 0], [0, 3, 0, 2]])
def test_shards_may_be_empty(tmp_path: Path, sizes: list[int]) -> None:
    """Also if all but one are empty: an empty document is in no sample."""
    prefixes = [str(tmp_path / f"shard{i}") for i in range(len(sizes))]
    documents = [random_documents([5] * size or [0], seed=i) for i, size in enumerate(sizes)]
    for prefix, of_shard in zip(prefixes, documents, strict=True):
        write_documents(Path(prefix), of_shard)
    data = PackedDataset(None, sharded(tmp_path / "web.shards.json", prefixes), names=["web"])
    schedule = Schedule(data, tokens_per_step=16 * len(data))
    [batch] = build_loader(data, schedule, **of_rank(micro=16 * len(data)))
    kept = batch["loss_mask"] > 0
    seen = batch["tokens"][kept].tolist()
    assert sorted(seen) == sorted(t for of_shard in documents for d in of_shard for t in d[:-1])
    assert int(kept.sum()) == schedule.step(0).num_label_tokens == 4 * sum(sizes)


def test_ids_are_located_in_every_layout_of_shards() -> None:
    """By the definition: bucket after bucket of a source, in each bucket shard after shard."""
    random = np.random.default_rng(0)

    def layout() -> np.ndarray:
        counts = random.integers(0, 4, (random.integers(1, 5), random.integers(1, 4)))
        return counts * (random.random() < 0.6)

    for _ in range(300):
        layouts = [layout() for _ in range(random.integers(1, 4))]
        shards = Shards([index_of_counts(counts) for counts in layouts])
        places, first_shard = [], 0
        for counts in layouts:
            before = np.cumsum(counts, axis=1) - counts
            for bucket, shard in np.ndindex(*counts.T.shape):
                for i in range(counts[shard, bucket]):
                    places.append((first_shard + shard, int(before[shard, bucket]) + i))
            first_shard += len(counts)
        ids = random.permutation(len(places))
        located = np.stack(shards.locate(ids), axis=1).tolist()
        assert located == [list(places[i]) for i in ids.tolist()]
        for shard in range(first_shard):
            of_shard = [i for i, place in enumerate(places) if place[0] == shard]
            assert sorted(shards.ids(shard).tolist()) == of_shard


def index_of_counts(counts: np.ndarray) -> ShardedIndex:
    """Return shards with these numbers of samples per bucket, without files."""
    none = dict.fromkeys((f.name for f in dataclasses.fields(PackedShard)), None)
    none["num_documents"] = 1
    rows = [
        PackedShard(**{**none, "samples_per_bucket": tuple(of_shard)})
        for of_shard in counts.tolist()
    ]
    how = {"strategy": "bucket", "parameters": {}, "buckets": [], "seed": 0}
    capacities = np.arange(1, counts.shape[1] + 1)
    return ShardedIndex(path="none", shards=tuple(rows), bucket_capacity=capacities, **how)


class Corpus:
    """Shards, the dataset merged from them, and another source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefixes = [str(folder / f"shard{i}") for i in range(len(SIZES))]
        for i, (prefix, size) in enumerate(zip(self.prefixes, SIZES, strict=True)):
            lengths = packed_lengths(size, 64, seed=i)
            write_documents(Path(prefix), random_documents(lengths, seed=i))
        self.index = sharded(folder / "web.shards.json", self.prefixes)
        merge(self.prefixes, folder / "merged")
        self.dataset = IndexedDataset(folder / "merged")
        self.merged = merged_index(self.index, self.dataset)
        other = write_documents(folder / "other", random_documents(packed_lengths(60, 64, 9)))
        self.other = (other, pack(other.document_lengths, buckets=BUCKETS))

    def both(self, *, blend: bool = False, **options: Any) -> tuple[PackedDataset, PackedDataset]:
        """Return the sharded and the merged dataset."""
        pair = ((None, self.index), (self.dataset, self.merged))
        if not blend:
            sharded_data, merged_data = (
                PackedDataset(*web, names=["web"], **options) for web in pair
            )
            return sharded_data, merged_data
        how: dict[str, Any] = {"names": ["other", "web"], "weights": [1, 3], **options}
        sharded_data, merged_data = (
            PackedDataset(*zip(self.other, web, strict=True), **how) for web in pair
        )
        return sharded_data, merged_data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("sharded"))


schedule_of = partial(Schedule, tokens_per_step=STEP_TOKENS, seed=5)


def batches(packed: PackedDataset, num_steps: int = 12, **options: Any) -> list[dict[str, Any]]:
    schedule = schedule_of(packed)
    return list(build_loader(packed, schedule, **of_rank(1, 2, num_steps=num_steps, **options)))


def test_batches_equal_those_of_the_merged_dataset(corpus: Corpus) -> None:
    """Compare three epochs, with assignment costs and label counts from the shards."""
    sharded, merged = corpus.both()
    assert len(sharded) == len(merged) > 60
    assert_same_batches(*(batches(packed, 30, cu_seqlens="padded") for packed in (sharded, merged)))
    schedule = schedule_of(sharded)
    drawn = np.concatenate([schedule.step(i).sample_ids for i in range(schedule.num_steps())])
    assert set(drawn.tolist()) == set(range(len(sharded))), "an epoch has every sample"


def test_in_a_blend_with_stages_lists_windows_and_scores(corpus: Corpus, tmp_path: Path) -> None:
    """Documents are numbered through all shards in lists, scores and queries."""
    gone = np.array([0, 7, 39, 40, 41, 99, 130, 131, 163])
    assert gone[-1] == sum(SIZES) - 1
    np.save(tmp_path / "gone.npy", gone)
    quality = np.random.default_rng(1).integers(0, 4, sum(SIZES)).astype(np.float64)
    np.save(tmp_path / "quality.npy", quality)
    stages = [
        Stage(from_step=3, exclude={"web": str(tmp_path / "gone.npy")}),
        Stage(from_step=6, weights={"web": 1, "other": 1}, attention_window=8),
    ]
    scores = [None, Scores(path=str(tmp_path / "quality.npy"), order="descending")]
    pair = corpus.both(blend=True, stages=stages, scores=scores)
    assert_same_batches(*(batches(packed) for packed in pair))
    sharded, merged = map(schedule_of, pair)
    assert plan_run(sharded, 20).table() == plan_run(merged, 20).table()
    assert plan_exclusions(sharded, 20) == plan_exclusions(merged, 20) != []
    for sample in range(0, len(pair[0]), 7):
        assert pair[0].samples.segments(sample) == pair[1].samples.segments(sample)
        assert sharded.steps_of(sample, 40) == merged.steps_of(sample, 40)
    for document in (0, 40, 41, 130, 131, 163):
        holders = pair[0].samples.samples_of(1, document)
        assert holders == pair[1].samples.samples_of(1, document) and holders
    unseen, passes = unseen_documents(sharded, 1, 9)
    expected, as_many = unseen_documents(merged, 1, 9)
    assert unseen.tolist() == expected.tolist() and passes == as_many and len(unseen) > 5
    with pytest.raises(ConfigError, match="document 164 of web: it has 164 documents"):
        pair[0].samples.samples_of(1, 164)


def test_bare_indices_make_the_same_schedule(corpus: Corpus) -> None:
    sharded_schedule, merged_schedule = (
        schedule_of(index, cost_window=4) for index in (corpus.index, corpus.merged)
    )
    for i in range(10):
        assert (
            sharded_schedule.step(i).sample_ids.tolist()
            == merged_schedule.step(i).sample_ids.tolist()
        )
        assert sharded_schedule.step(i).num_label_tokens == merged_schedule.step(i).num_label_tokens


def moved(folder: Path, to: Path, number: int) -> None:
    """Move the files of a shard away."""
    for path in [*folder.glob(f"shard{number}*"), *folder.glob(f"web.shards/shard{number}-*")]:
        path.rename(to / path.name)


def test_shards_are_opened_at_their_first_draw(tmp_path: Path) -> None:
    """Without any file a run starts; without one shard, draws from the other shards work."""
    corpus, away = Corpus(tmp_path), tmp_path / "away"
    away.mkdir()
    for number in range(len(SIZES)):
        moved(tmp_path, away, number)
    packed = PackedDataset(None, tmp_path / "web.shards.json")
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS)
    sampler = BucketBatchSampler(schedule, **of_rank())
    assert len(sampler) > 10 and plan_run(schedule, 10).datasets[0].num_samples == len(packed)
    assert schedule.state_dict(3)["indices"] == [corpus.index.fingerprint]
    check_token_ids(packed, 120)
    with pytest.raises(ConfigError, match=r"web\.shards\.json holds token id 119"):
        check_token_ids(packed, 119)
    with pytest.raises(FileNotFoundError, match=r"shard\d"):
        sampler.micro_batches(0)
    for path in sorted(away.iterdir()):
        home = tmp_path / "web.shards" if path.suffix == ".samples" else tmp_path
        path.rename(home / path.name)
    moved(tmp_path, away, 2)
    index, (shards, _) = corpus.index, packed.samples.shards.locate(np.arange(len(packed)))
    largest = np.arange(*index.bucket_sample_offsets[2:4])
    for sample in largest[shards[largest] != 2].tolist():
        packed[sample]
    assert not packed.samples.shards.is_open(2)
    with pytest.raises(FileNotFoundError, match="shard2"):
        packed[int(np.flatnonzero(shards == 2)[0])]


def test_a_shard_that_changed_is_refused_by_name_when_it_is_opened(tmp_path: Path) -> None:
    Corpus(tmp_path)
    packed = PackedDataset(None, tmp_path / "web.shards.json")
    lengths = packed_lengths(SIZES[2], 64, seed=2)[::-1]
    (tmp_path / "shard2.idx").unlink()
    write_documents(tmp_path / "again", random_documents(lengths, seed=2))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"again{suffix}").rename(tmp_path / f"shard2{suffix}")
    with pytest.raises(IndexMismatchError, match=r"shard2 has changed since .*web\.shards\.json"):
        [packed[i] for i in range(len(packed))]


def test_worker_processes_get_the_same_shards(corpus: Corpus) -> None:
    sharded, merged = corpus.both()
    [again] = pickle.loads(pickle.dumps([sharded]))
    for sample in range(0, len(merged), 11):
        assert torch.equal(again[sample]["tokens"], merged[sample]["tokens"])


def test_labels_of_shards_are_found_by_name(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    for seed, prefix in enumerate(prefixes):
        documents = random_documents(packed_lengths(30, 64, seed), seed)
        write_documents(Path(prefix), documents)
        chosen = [[t if t % 2 else -100 for t in document] for document in documents]
        chosen[0][0] = 70_001  # never a label, and too large for the tokens' dtype
        write_labels(Path(prefix), chosen)
    index = sharded(tmp_path / "chat.shards.json", prefixes)
    assert all(list(shard.columns) == ["labels"] for shard in index.shards)
    chosen = PackedDataset(None, index)
    every = PackedDataset(None, index, labels=None)
    check_token_ids(every, 70_001)
    with pytest.raises(ConfigError, match="holds token id 70001"):
        check_token_ids(chosen, 70_001)
    ids = np.arange(len(chosen))
    assert (chosen.count_labels(ids) < every.count_labels(ids)).all()
    labels = chosen[0]["labels"]
    assert (labels[labels >= 0] % 2 == 1).all() and (labels >= 0).any()


# --- Manifests and resumed runs ---------------------------------------------------------------


def test_shards_added_later_join_only_by_a_stage(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    manifest = str(tmp_path / "web.shards.json")

    def run(*sources: Source, stages: tuple[Stage, ...] = ()) -> Schedule:
        packed = open_blend(BlendConfig(sources=sources, stages=stages))
        return Schedule(packed, tokens_per_step=STEP_TOKENS)

    state = run(Source(index=manifest, weight=1.0)).state_dict(7)
    later = write_documents(tmp_path / "later", random_documents(packed_lengths(50, 64, 8)))
    sharded(tmp_path / "web.shards.json", [later.prefix])
    with pytest.raises(ResumeError, match=r"of 5 shards.* and is .* of 6 shards"):
        run(Source(index=manifest, weight=1.0)).check_state(state)
    old = Source(index=manifest, weight=1.0, name="web", shards=(0, 5))
    new = Source(index=manifest, weight=0.0, name="new", shards=(5, 6))
    join = Stage(from_step=7, weights={"web": 3, "new": 1})
    goes_on = run(old, new, stages=(join,))
    [change] = goes_on.check_state(state)
    assert change.startswith("from step 7 on weights was")
    before = run(old)
    for step in range(7):
        assert goes_on.step(step).sample_ids.tolist() == before.step(step).sample_ids.tolist()
    first = len(PackedDataset(None, corpus.index))
    assert any((goes_on.step(step).sample_ids >= first).any() for step in range(7, 12))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefix": "a", "index": "a.shards.json"}, "needs a prefix, or a shard manifest"),
        ({"index": "a.samples"}, "needs a prefix, or a shard manifest"),
        ({}, "needs a prefix, or a shard manifest"),
        ({"prefix": "a", "index": "a.samples", "shards": (0, 1)}, r"\[first, end\] of a shard"),
        ({"index": "a.shards.json", "shards": (1,)}, r"\[first, end\] of a shard manifest"),
    ],
)
def test_a_shard_manifest_names_its_documents(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Source(**given)


def test_mismatched_documents_and_samples_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="names the documents of its shards"):
        PackedDataset(corpus.dataset, corpus.index)
    with pytest.raises(ConfigError, match="does not name its documents; give a prefix"):
        PackedDataset(None, corpus.merged)


def test_other_loss_weights_of_a_shard_are_refused_until_it_is_packed_again(tmp_path: Path) -> None:
    documents = random_documents(packed_lengths(40, 64, 0), 0)
    write_documents(tmp_path / "a", documents)
    manifest = str(tmp_path / "web.shards.json")

    def weigh(weight: float) -> None:
        write_weights(tmp_path / "a", [[weight] * len(d) for d in documents], overwrite=True)

    def packed() -> PackedDataset:
        return PackedDataset(None, sharded(manifest, [tmp_path / "a"]))

    weigh(0.5)
    first = packed()
    assert set(first[0]["loss_mask"].unique().tolist()) == {0.0, 0.5}
    weigh(2.0)
    with pytest.raises(IndexMismatchError, match=r"column weights of .*a has changed .* again"):
        PackedDataset(None, manifest)[0]
    again = packed()
    assert set(again[0]["loss_mask"].unique().tolist()) == {0.0, 2.0}
    assert first.samples.token_weights != again.samples.token_weights != [None]


# ---- Arranged sources: the samples of the source, stored in the order of the draws


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return three datasets with documents longer than the largest bucket, one with labels, another
    one with loss weights."""
    folder = tmp_path_factory.mktemp("source")
    for seed, name in enumerate("abc"):
        documents = random_documents(packed_lengths(150, 64, seed), seed)
        write_documents(folder / name, documents)
        if name == "b":
            write_weights(folder / "b", [[t % 5 / 4 for t in d] for d in documents])
    chosen = [[t if t % 2 else -100 for t in document] for document in documents]
    write_labels(folder / "c", chosen)
    manifest = str(folder / "web.shards.json")
    index = sharded(manifest, [folder / name for name in "abc"])
    assert [list(shard.columns) for shard in index.shards] == [[], ["weights"], ["labels"]]
    return manifest


def arranged(source: str, output: Path, **how: Any) -> Arranger:
    options = {name: how.pop(name) for name in ("seed", "overwrite") if name in how}
    arranger = plan_arrangement(source, str(output), shard_bytes=3000, **options)
    arrange(arranger, lambda _: None, **how)
    return arranger


def test_samples_are_those_of_the_source_with_their_labels(source: str, tmp_path: Path) -> None:
    arranger = arranged(source, tmp_path / "new.shards.json", seed=1)
    arranged_data, source_data = (
        PackedDataset(None, path) for path in (tmp_path / "new.shards.json", source)
    )
    assert len(arranged_data) == len(source_data) > 200 and arranger.num_shards > 3
    chunks = [ids for n in range(arranger.num_shards) for _, ids in arranger._chunks(n)]
    order, offsets = np.concatenate(chunks), source_data.samples.indices[0].bucket_sample_offsets
    order = order[np.argsort(np.searchsorted(offsets, order, side="right"), kind="stable")]
    assert sorted(order.tolist()) == list(range(len(source_data))) != order.tolist()
    cut, weights = (
        0,
        {
            float(w)
            for sample in range(len(arranged_data))
            for w in arranged_data[sample]["loss_mask"]
        },
    )
    assert weights == {0, 0.25, 0.5, 0.75, 1}
    for sample in range(len(arranged_data)):
        actual, wanted = arranged_data[sample], source_data[int(order[sample])]
        for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
            assert torch.equal(actual[name], wanted[name]), (sample, name)
        cut += int(actual["labels"][actual["cu_seqlens"][1] - 1] != -100)
    assert cut > 5, "documents that go on in another sample are among them"


def test_the_first_epoch_reads_every_bucket_sequentially(source: str, tmp_path: Path) -> None:
    arranged(source, tmp_path / "new.shards.json")
    packed = PackedDataset(None, tmp_path / "new.shards.json")
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS, seed=3)
    offsets = packed.samples.indices[0].bucket_sample_offsets.tolist()
    read: dict[int, list[int]] = {capacity: [] for capacity in BUCKETS}
    for step in range(schedule.num_steps(2)):
        for draw in schedule.step(step).draws:
            read[draw.capacity] += draw.sample_ids.tolist()
    for b, capacity in enumerate(BUCKETS):
        size, drawn = offsets[b + 1] - offsets[b], read[capacity]
        assert drawn[:size] == list(range(offsets[b], offsets[b + 1]))
        later = drawn[size : 2 * size]
        assert sorted(later) == drawn[:size] != later, "the second epoch is a shuffle"
    shards = packed.samples.shards
    for shard in range(len(shards)):
        segments = shards.index(shard).segment_document
        assert segments.tolist() == list(range(len(segments))), "and so are its tokens"
    sample = int(schedule.step(0).sample_ids[0])
    steps_of_sample = schedule.steps_of(sample, schedule.num_steps(3))
    assert len(steps_of_sample) == 3 and all(
        sample in schedule.step(i).sample_ids for i in steps_of_sample
    )


def test_parts_and_a_stopped_build_write_the_same_bytes(source: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    arranged(source, tmp_path / "a" / "new.shards.json", seed=4)
    manifest = tmp_path / "b" / "new.shards.json"
    arranger = arranged(source, manifest, seed=4, part=(1, 2))
    assert not manifest.exists()
    # like a build that was killed before its last file
    (arranger.folder / "000003.samples").unlink()
    kept = (arranger.folder / "000001.bin").stat().st_mtime_ns
    arrange(pickle.loads(pickle.dumps(arranger)), lambda _: None)  # as in a worker process
    assert (arranger.folder / "000001.bin").stat().st_mtime_ns == kept
    for path in sorted((tmp_path / "a").rglob("*")):
        if path.is_file():
            other = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == other.read_bytes(), path.name
    for shard in load_shards(manifest).shards:
        assert not [f for f in verify(shard.prefix) if f.severity == "error"]


def test_existing_shards_are_replaced_only_with_overwrite(source: str, tmp_path: Path) -> None:
    output = tmp_path / "new.shards.json"
    arranged(source, output)
    arranged(source, output)  # the shard is complete
    with pytest.raises(ConfigError, match="another source"):
        arranged(source, output, seed=9)
    output.unlink()
    with pytest.raises(ConfigError, match="000000 exists and was made differently"):
        arranged(source, output, seed=9)
    arranged(source, output, seed=9, overwrite=True)
    index = load_shards(output)
    assert index.arranged is not None and index.arranged.seed == 9
    assert index.fingerprint.endswith("shards, arranged")
    with pytest.raises(
        ConfigError, match="is an arranged source: add datasets to the source it was"
    ):
        plan_packing(str(output), [], {"buckets": BUCKETS})
    with pytest.raises(ConfigError, match="must be another"):
        plan_arrangement(source, source)
    with pytest.raises(ConfigError, match="use positions: segment"):
        PackedDataset(None, output, positions="document")


def test_arranging_loses_groups_with_an_error(tmp_path: Path) -> None:
    documents = random_documents(packed_lengths(40, 30))
    write_documents(tmp_path / "a", documents)
    write_documents(tmp_path / "a.groups", [[i // 4] for i in range(len(documents))], "int32")
    manifest, output = str(tmp_path / "web.shards.json"), tmp_path / "new.shards.json"
    sharded(manifest, [tmp_path / "a"], groups=True)
    assert PackedDataset(None, manifest, attention="group").samples.groups_of(0)
    arranged(manifest, output)
    for sources in ([output], [output, manifest]):
        with pytest.raises(ConfigError, match=r"new.shards.json lost its groups"):
            PackedDataset([None] * len(sources), sources, attention="group")


def test_metadata_that_is_still_true_is_kept(tmp_path: Path) -> None:
    """Facts that all meta files share are kept, such as the tokenizer, but not the end token or the
    command."""
    metadata = {
        "tokenizer": {"digest": "t"},
        "licence": "mit",
        "document_end_token": 0,
        "plan": "p",
    }
    for name, more in (("a", {}), ("b", {"licence": "other"})):
        about = {"vocab_size": 300, "metadata": {**metadata, "command": name, **more}}
        with IndexedDatasetBuilder(tmp_path / name, np.uint16, **about) as builder:
            for _ in range(40):
                builder.add_document([*range(1, 20), 0])
    manifest = str(tmp_path / "web.shards.json")
    sharded(manifest, [tmp_path / name for name in "ab"])
    arranged(manifest, tmp_path / "new.shards.json")
    index = load_shards(tmp_path / "new.shards.json")
    meta = IndexedDataset(index.shards[0].prefix).meta
    assert meta is not None and own_metadata(meta).keys() == {"tokenizer", "arranged"}
    assert meta["tokenizer"] == metadata["tokenizer"] and meta["vocab_size"] == 300
    assert not any(map(has_errors, verify_shard(index, 0).values()))


def test_the_command_and_a_loader_over_what_it_wrote(source: str, tmp_path: Path) -> None:
    output = tmp_path / "new.shards.json"
    command = ["arrange", source, "--output", output, "--workers", "1", "--json"]
    done = build(*command, "--bytes-per-shard", "20K")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    done = build(*command, "--bytes-per-shard", "0")
    assert (done.returncode, "--bytes-per-shard is 0" in done.stderr) == (2, True)
    assert facts["num_samples"] == load_shards(source).num_samples and facts["num_shards"] == 2
    packed = PackedDataset(None, output)
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS)
    loader = build_loader(packed, schedule, **of_rank(weighted_loss=True))
    num_tokens = IndexedDataset(load_shards(output).shards[0].prefix).num_tokens
    assert sum(batch["tokens"].numel() for batch in loader) >= num_tokens

"""Fill-in-the-middle in a run: ranks, workers, hosts, resumes, and invalid settings.

tests/data/test_gather.py compares single documents with the definition in tests/reference/fim.py.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import fim as definition
from torch.utils.data import DataLoader

from megapack.config import from_dict
from megapack.data import (
    BlendConfig,
    BucketBatchSampler,
    PackedDataset,
    Schedule,
    Source,
    Stage,
    check_token_ids,
    open_blend,
    plan_run,
)
from megapack.data.fim import Fim, FimConfig, Sentinels, character_tables, open_fim
from megapack.data.sampler import weigh_step
from megapack.errors import ConfigError, ResumeError
from megapack.packing import pack
from megapack.storage import IndexedDataset
from megapack.storage.merge import merge
from tests.data.corpora import (
    of_rank,
    packed_lengths,
    packed_shards,
    random_documents,
    small_loader,
    write_documents,
    write_labels,
    write_weights,
)

EOD, PRE, SUF, MID, END = 0, 125, 126, 127, 128
FIM = FimConfig(rate=0.6, sentinels=Sentinels(prefix=PRE, suffix=SUF, middle=MID, end=END), eod=EOD)
BUCKETS = [16, 32, 64]
SEED = 2


def corpus(prefix: Path, seed: int = 0, count: int = 150) -> IndexedDataset:
    """Write documents of which most end with EOD."""
    documents = random_documents(packed_lengths(count, 64, seed), seed)
    return write_documents(prefix, [[*d[:-1], EOD] if d[0] % 8 else d for d in documents])


def indexed(dataset: IndexedDataset, **options: Any) -> str:
    index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS, fim_room=4, **options)
    index.save(f"{dataset.prefix}.samples", source=dataset)
    return f"{dataset.prefix}.samples"


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> BlendConfig:
    """Return two sources, one with weights per token; a stage changes the rate of the other."""
    folder = tmp_path_factory.mktemp("fim")
    web, code = corpus(folder / "web"), corpus(folder / "code", 1)
    write_weights(folder / "code", [[t % 5 / 4 for t in d.tolist()] for d in documents_of(code)])
    sources = (
        Source(name="web", prefix=web.prefix, index=indexed(web), weight=1, fim_rate=0),
        Source(name="code", prefix=code.prefix, index=indexed(code), weight=2),
    )
    stages = (Stage(from_step=4, fim_rates={"web": 1.0}, skip_steps=20),)
    return BlendConfig(sources=sources, fim=FIM, stages=stages)


def documents_of(dataset: IndexedDataset) -> list[np.ndarray]:
    places = zip(dataset.document_offsets, dataset.document_lengths, strict=False)
    return [dataset.tokens[begin : begin + length] for begin, length in places]


def schedule_of(data: PackedDataset, **options: Any) -> Schedule:
    return Schedule(data, tokens_per_step=512, seed=SEED, **options)


def expected_documents(
    data: PackedDataset, step: Any, documents: list[list[np.ndarray]]
) -> list[list[int]]:
    """Return the tokens of every document of every source in a step or a draw."""
    fim = definition.Fim(PRE, SUF, MID, END, EOD, FIM.spm_rate, SEED)
    result = []
    for sample, epoch, rate in zip(
        step.sample_ids.tolist(),
        step.view.epochs.tolist(),
        step.view.fim_rates.tolist(),
        strict=True,
    ):
        source, segments = data.samples.segments(sample)
        for document, begin, length in segments:
            original = documents[source][document].tolist()
            key = definition.key_of(SEED, epoch, document)
            whole = 1 < length == len(original) <= max(BUCKETS) - 4
            shown = original[begin : begin + length]
            if whole and definition.unit(key, 0) < rate:
                shown = [token for token, *_ in definition.transform_document(original, fim, key)]
            result.append(shown)
    return result


def documents_in(batch: dict[str, Any]) -> list[list[int]]:
    ends, ids = batch["cu_seqlens"].tolist(), batch["dataset_ids"].tolist()
    tokens = batch["tokens"].flatten().tolist()
    return [tokens[b:e] for b, e, d in zip(ends[:-1], ends[1:], ids, strict=True) if d >= 0]


@pytest.mark.parametrize(
    ("loss", "cost_window"), [("token_mean", 4), ("sequence_mean", 1), ("longalign", 4)]
)
def test_ranks_see_documents_as_defined_and_exact_denominators(
    blend: BlendConfig, loss: str, cost_window: int
) -> None:
    """Cover several epochs, a stage with other rates, a skip, several numbers of ranks, and a later
    start."""
    data = open_blend(blend, loss=loss)
    schedule = schedule_of(data, cost_window=cost_window)
    turned, of_sources = 0, [documents_of(source.open(0)) for source in data.datasets]
    steps = [schedule.step(i) for i in range(8)]
    weights = [weigh_step(schedule, step, data.samples).label_weight for step in steps]
    for size, start in ((1, 0), (2, 2), (4, 0)):
        options = {"schedule": schedule, "start_step": start, "num_steps": 8 - start}
        seen: dict[int, list[list[int]]] = defaultdict(list)
        masks: dict[int, float] = defaultdict(float)
        for rank in range(size):
            batches = list(small_loader(data, rank, size, weighted_loss=True, **options))
            assert {batch["step"] for batch in batches} == set(range(start, 8))
            for batch in batches:
                step, mask = batch["step"], batch["loss_mask"]
                seen[step] += documents_in(batch)
                masks[step] += float(mask.double().sum())
                assert batch["num_step_label_tokens"] == steps[step].num_label_tokens
                assert batch["step_label_weight"] == weights[step]
                assert (mask > 0).sum() <= (batch["labels"] >= 0).sum()
        for step, documents in seen.items():
            expected = expected_documents(data, steps[step], of_sources)
            assert sorted(documents) == sorted(expected), (size, step)
            turned += sum(document[0] == PRE for document in documents)
            assert masks[step] == pytest.approx(weights[step], rel=1e-6)
    assert turned > 100
    assert schedule.step(7).view.epochs.max() > 0  # of a later epoch


def test_views_are_plain_without_rates(blend: BlendConfig) -> None:
    """Held-out documents are unchanged, too."""
    none = [replace(source, fim_rate=0.0) for source in blend.sources]
    data = open_blend(replace(blend, sources=tuple(none), stages=()))
    assert schedule_of(data).step(3).view.epochs is None
    assert "fim" not in schedule_of(data).identity()
    data = open_blend(blend)
    finite = Schedule(data, tokens_per_step=512, seed=5, finite=True)
    assert [finite.step(i).view.epochs for i in range(finite.num_steps())] == [
        None
    ] * finite.num_steps()


def test_worker_processes_and_single_samples_transform_alike(blend: BlendConfig) -> None:
    data = open_blend(blend)
    sampler = BucketBatchSampler(schedule_of(data), **of_rank(num_steps=6, weighted_loss=True))
    copy = pickle.loads(pickle.dumps(data))
    batches = list(sampler)
    loaded = DataLoader(data, batch_sampler=batches, num_workers=1, collate_fn=list)
    for batch, samples in zip(batches, loaded, strict=True):
        whole = copy.micro_batch(**batch.gathered_by)
        joined = torch.cat([sample["tokens"] for sample in samples])
        assert torch.equal(joined, whole["tokens"].flatten())


def test_shards_transform_like_the_merged_dataset(tmp_path: Path) -> None:
    """Documents are numbered through all shards."""
    parts = [corpus(tmp_path / f"part{i}", i, 40).prefix for i in range(3)]
    index = packed_shards(tmp_path / "all.shards.json", parts, buckets=BUCKETS, fim_room=4)
    sharded = PackedDataset(None, index, fim=FIM)
    merge([str(part) for part in parts], tmp_path / "merged")
    merged = [documents_of(IndexedDataset(tmp_path / "merged"))]
    for step in map(schedule_of(sharded).step, range(6)):
        for draw in step.draws:
            batch = sharded.micro_batch(draw.sample_ids, view=draw.view)
            assert documents_in(batch) == expected_documents(sharded, draw, merged)


def test_rates_of_taken_steps_cannot_change(blend: BlendConfig) -> None:
    def schedule(**changes: Any) -> Schedule:
        return schedule_of(open_blend(replace(blend, **changes)))

    sources = (blend.sources[0], replace(blend.sources[1], fim_rate=0.7))
    state = json.loads(json.dumps(schedule().state_dict(3)))
    assert schedule().check_state(state) == []
    with pytest.raises(ResumeError, match=r"train differently .*fim_rates was \[0.0, 0.6\] and is"):
        schedule(sources=sources).check_state(state)
    [change] = schedule(sources=sources).check_state(state, allow_change=["fim_rates"])[:1]
    assert "fill-in-the-middle at other rates" in change
    other = replace(FIM, sentinels=replace(FIM.sentinels, end=None))
    with pytest.raises(ResumeError, match=r"fim was .* and is"):
        schedule(fim=other).check_state(state)
    [later, *_] = schedule(stages=(Stage(from_step=3, fim_rates={"code": 0.1}),)).check_state(state)
    assert "from step 3 on" in later and "fim_rates" in later
    # A run without fill-in-the-middle may begin it now.
    bare = tuple(replace(source, fim_rate=0.0) for source in blend.sources)
    begun = schedule(sources=bare, stages=()).state_dict(3)
    joins = (Stage(from_step=3, fim_rates={"code": 0.5}),)
    [joined] = schedule(sources=bare, stages=joins).check_state(begun)
    assert "fim_rates" in joined
    plan = str(plan_run(schedule(sources=bare, stages=joins), 5))
    assert plan.count("fill-in-the-middle, share of documents: code 0.5\n") == 1


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rate": 1.5}, "rate is 1.5"),
        ({"spm_rate": -1}, "spm_rate is -1"),
        ({"cuts": "byte"}, "cuts is 'byte'; it must be one of token, character"),
        ({"cuts": "character"}, "cuts are between characters, and fim.tokenizer is null"),
        ({"sentinels": {"prefix": "<PRE>", "suffix": 1, "middle": 2}}, "'<PRE>' is a text"),
        ({"sentinels": {"prefix": 1, "suffix": 2}}, "missing key 'middle'"),
    ],
)
def test_invalid_sections_name_the_problem(tree: dict[str, Any], message: str) -> None:
    valid = {"sentinels": {"prefix": 1, "suffix": 2, "middle": 3}}
    with pytest.raises(ConfigError, match=message):
        from_dict(FimConfig, {**valid, **tree}, where="fim")


def test_sentinels_are_one_token_each(tmp_path: Path) -> None:
    def opened(tokenizer: str = "bytes", eod: Any = "none", **sentinels: Any) -> Fim:
        tokens = Sentinels(**{"prefix": 1, "suffix": 2, "middle": 3, **sentinels})
        return open_fim(FimConfig(sentinels=tokens, tokenizer=tokenizer, eod=eod), [])

    assert opened(prefix="<bos>", end="<pad>").sentinels == [257, 2, 3, 258]
    assert opened(eod=None).eod == 256
    for given, message in (
        ({"prefix": "<PRE>"}, "prefix is '<PRE>', which is not one token of bytes"),
        ({"suffix": 300}, "suffix is 300; it must be at least 0 and below 259"),
        ({"middle": 2}, "middle and suffix are both token 2"),
        ({"prefix": "<eod>", "eod": None}, "eod and prefix are both token 256"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(**given)
    bare = FimConfig(sentinels=Sentinels(prefix=1, suffix=2, middle=3))
    with pytest.raises(ConfigError, match="which token ends documents"):
        open_fim(bare, [write_documents(tmp_path / "d", [[1, 2]])])


def test_unsuitable_sources_are_refused(tmp_path: Path) -> None:
    dataset = corpus(tmp_path / "d")
    roomless = pack(dataset.document_lengths, "bucket", buckets=BUCKETS)
    with pytest.raises(ConfigError, match=r"room for 0 sentinels .* pack it with --fim-room 4"):
        PackedDataset(dataset, roomless, fim=FIM)
    PackedDataset(dataset, roomless, fim=FIM, fim_rates=[0.0])
    index = indexed(dataset)
    labels = [[max(1, t) for t in d.tolist()] for d in documents_of(dataset)]
    write_labels(tmp_path / "d", labels)
    dataset = IndexedDataset(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"has labels that were chosen .* labels: none"):
        PackedDataset(dataset, index, fim=FIM)
    data = PackedDataset(dataset, index, fim=FIM, labels=None)
    check_token_ids(data, 129)
    with pytest.raises(ConfigError, match="fim writes token id 128"):
        check_token_ids(data, 128)
    with pytest.raises(ConfigError, match=r"fim is not configured: .*\.\.\.} in the manifest"):
        schedule_of(PackedDataset(dataset, index, labels=None, fim_rates=[0.5]))
    stages = [Stage(from_step=1, fim_rates={"other": 0.5})]
    with pytest.raises(ConfigError, match="gives a rate of fill-in-the-middle to 'other'"):
        schedule_of(PackedDataset(dataset, index, labels=None, fim=FIM, stages=stages))


def test_shards_with_chosen_labels_are_refused(tmp_path: Path) -> None:
    parts = [corpus(tmp_path / f"part{i}", i, 40) for i in range(2)]
    for part in parts:
        labels = [[max(1, t) for t in d.tolist()] for d in documents_of(part)]
        write_labels(Path(part.prefix), labels)
    prefixes = [part.prefix for part in parts]
    index = packed_shards(tmp_path / "all.shards.json", prefixes, buckets=BUCKETS, fim_room=4)
    with pytest.raises(ConfigError, match=r"has labels that were chosen .* labels: none"):
        PackedDataset(None, index, fim=FIM)


def test_character_tables_are_part_of_the_identity() -> None:
    """The identity covers the content of the tables, not only their size; their ids count for the
    largest id."""
    texts = [[b"a", b"b", b"ab"], [b"b", b"a", b"ab"]]
    one, other = (
        Fim(prefix=3, suffix=4, middle=5, tables=character_tables(vocabulary))
        for vocabulary in texts
    )
    assert one.identity() == Fim(prefix=3, suffix=4, middle=5, tables=one.tables).identity()
    assert one.identity() != other.identity()
    behind = character_tables([None] * 10 + texts[0])
    assert Fim(prefix=3, suffix=4, middle=5, tables=behind).largest_id == 11


def test_a_side_of_a_cut_may_take_three_tokens() -> None:
    """With one token on the other side, these are the most allowed."""
    _, first_cut, first_part, parts = character_tables([b"a", b"b", b"c", b"d", b"abcd"])
    assert first_cut.tolist() == [0, 0, 0, 0, 0, 3]
    cuts = [parts[first_part[i] : first_part[i + 1]].tolist() for i in range(6)]
    assert cuts == [[0], [1, 2, 3], [0, 1], [2, 3], [0, 1, 2], [3]]


def test_sides_of_a_cut_have_the_fewest_tokens() -> None:
    texts = [b"a", b"b", b"c", b"ab", b"abc", "ä".encode(), "ä".encode()[:1], None, b"cab", b"xy"]
    characters, first_cut, first_part, parts = map(list, character_tables(texts))
    assert characters == [1, 1, 1, 2, 3, 1, 1, 0, 3, 2]
    assert first_cut == [0, 0, 0, 0, 1, 3, 3, 3, 3, 5, 6]
    cuts = [parts[first_part[i] : first_part[i + 1]] for i in range(2 * 6)]
    assert cuts == [[0], [1], [0], [1, 2], [3], [2], [2], [3], [2, 0], [1], [], []]

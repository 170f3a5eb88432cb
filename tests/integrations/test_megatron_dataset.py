"""PackedGPTDataset through megatron-core's own builder: 1, 2 and 4 processes, blends, splits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import DataLoader

from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron.dataset import (
    PackedDatasetBuilder,
    PackedGPTDataset,
    context_parallel_alignment,
)
from megapack.storage.columns import ColumnSpec
from tests.data.corpora import random_rows, write_columns
from tests.integrations.harness import run_ranks
from tests.integrations.samples import Tokenizer, make_dataset

ROW = 64
BUCKETS = (16, 32, 64)
GLOBAL_BATCH = 8
VOCABULARY = 1000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("megatron")
    for name, count in (("web", 700), ("code", 300)):
        lengths = np.minimum(rng.lognormal(2.6, 0.9, count).astype(int) + 1, 150)
        make_dataset(folder, lengths.tolist(), name)
    packing = {"buckets": BUCKETS, "rows_per_block": GLOBAL_BATCH}
    mix = [{"prefix": "web", "weight": 0.7}, {"prefix": "code", "weight": 0.3}]
    for name, sources in (("web", [{"prefix": "web"}]), ("mix", mix)):
        (folder / f"{name}.json").write_text(json.dumps({"sources": sources, **packing}))
    return folder


def config(
    data_path: str | list[str], cache: Path | None = None, **changes: Any
) -> GPTDatasetConfig:
    paths = [data_path] if isinstance(data_path, str) else data_path
    no = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    options: dict[str, Any] = {
        **{"random_seed": 1234, "sequence_length": ROW, "blend": (paths, None)},
        **{"split": "90,10,0", "path_to_cache": None if cache is None else str(cache)},
        **dict.fromkeys(no, False),
        "tokenizer": Tokenizer(vocab_size=VOCABULARY, eod=0),
    }
    return GPTDatasetConfig(**{**options, **changes})


def build(settings: GPTDatasetConfig, sizes: list[int | None], builder: Any = None) -> list[Any]:
    chosen = builder or BlendedMegatronDatasetBuilder
    built: list[Any] = chosen(PackedGPTDataset, sizes, lambda: True, settings).build()
    return built


def taken(rows: int, consumed: int, micro_batch: int, rank: int, ranks: int) -> list[list[int]]:
    """By one rank under Megatron-LM's ``single`` sampler, which the package megatron-core lacks:
    micro step t of all ranks takes the next micro_batch x ranks numbers, rank r the r-th run of
    micro_batch; what is left at the end is dropped."""
    stride, first = micro_batch * ranks, consumed + rank * micro_batch
    begins = range(first, first + (rows - consumed) // stride * stride, stride)
    return [list(range(begin, begin + micro_batch)) for begin in begins]


@contextmanager
def batch_sizes(micro_batch: int = 1, ranks: int = 1, rampup: Any = None) -> Iterator[None]:
    """Megatron's micro batch calculator knows them meanwhile."""
    calculator.init_num_microbatches_calculator(0, rampup, GLOBAL_BATCH, micro_batch, ranks)
    try:
        yield
    finally:
        calculator.destroy_num_microbatches_calculator()


def test_row_has_the_keys_of_the_packed_sequence_path(corpus: Path, tmp_path: Path) -> None:
    train, valid, test = build(config(str(corpus / "web.json"), tmp_path), [400, 16, 0])
    assert (len(train), len(valid), test) == (400, 16, None)
    for number in range(0, 400, 7):
        row = train[number]
        kinds = {key: (value.dtype, tuple(value.shape)) for key, value in row.items()}
        assert kinds == {
            "tokens": (torch.int64, (ROW,)),
            "labels": (torch.int64, (ROW,)),
            "loss_mask": (torch.float32, (ROW,)),
            "position_ids": (torch.int64, (ROW,)),
            "cu_seqlens": (torch.int32, (ROW + 1,)),
            "max_seqlen": (torch.int32, ()),
        }
        assert int(row["labels"].min()) >= 0 and int(row["labels"].max()) < VOCABULARY
        ends = row["cu_seqlens"].unique_consecutive()[1:] - 1
        # Documents are shorter than what is cut, or cut with a known next token.
        assert float(row["loss_mask"].sum()) >= ROW - len(ends) - ROW // 4
    batch = next(iter(DataLoader(train, batch_size=4)))
    assert batch["tokens"].shape == (4, ROW)
    assert batch["cu_seqlens"].shape == (4, ROW + 1) and batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"].shape == (4,) and batch["max_seqlen"].dtype == torch.int32


def test_rows_carry_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_dataset(tmp_path, [20, 40, 7, 64, 100, 30] * 40, "web")
    spec = ColumnSpec(dtype="uint8", shape=(6, 2), fill=255)
    write_columns(tmp_path / "web", {"experts": (spec, random_rows(spec, dataset.num_tokens))})
    manifest = {"sources": [{"prefix": str(tmp_path / "web")}], "buckets": BUCKETS}
    manifest |= {"rows_per_block": GLOBAL_BATCH, "columns": ["experts"]}
    logging.getLogger("megapack").propagate = True
    with caplog.at_level(logging.WARNING):
        train, *_ = build(config(json.dumps(manifest), tmp_path), [40, 0, 0])
    assert "columns experts, which Megatron's own get_batch does not return" in caplog.text
    batch = next(iter(DataLoader(train, batch_size=4, num_workers=1)))
    assert batch["experts"].shape == (4, ROW, 6, 2) and batch["experts"].dtype == torch.uint8
    assert torch.equal(batch["experts"][2], train.rows[2]["experts"])


def test_padding_row_has_no_loss(corpus: Path, tmp_path: Path) -> None:
    train, _, _ = build(config(str(corpus / "web.json"), tmp_path), [16, 0, 0])
    assert float(train[None]["loss_mask"].sum()) == 0.0
    assert float(train[0]["loss_mask"].sum()) > 0.0


def test_default_is_one_epoch_and_splits_are_disjoint(corpus: Path, tmp_path: Path) -> None:
    train, valid, _ = build(config(str(corpus / "web.json"), tmp_path), [None, None, 0])
    indices = [part.rows.packed.samples.indices[0] for part in (train, valid)]
    documents = [set(index.segment_document.tolist()) for index in indices]
    assert not documents[0] & documents[1]
    assert len(documents[0]) == 630 and len(documents[1]) == 70
    for part, index in zip((train, valid), indices, strict=True):
        assert len(part) * ROW >= int(index.segment_length.sum())
        assert len(part) % GLOBAL_BATCH == 0
    samples = [sample for i in range(len(valid)) for sample in valid.rows.samples_of(i).tolist()]
    assert sorted(samples) == list(range(indices[1].num_samples)), "each once, in validation"


def test_validation_split_equals_that_of_the_stock_dataset(corpus: Path, tmp_path: Path) -> None:
    """So models of both can be compared on one text for any --split."""
    for split in ("90,10,0", "70,17,13"):
        settings, sizes = config(str(corpus / "web"), split=split), [40, 20, 0]
        stock = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
        ours = build(config(str(corpus / "web.json"), tmp_path, split=split), [None, None, 0])
        for theirs, part in zip(stock[:2], ours[:2], strict=True):
            documents = np.unique(part.rows.packed.samples.indices[0].segment_document)
            assert documents.tolist() == sorted(theirs.indices.tolist())


def test_both_sources_are_split_alike(corpus: Path, tmp_path: Path) -> None:
    _, valid, _ = build(config(str(corpus / "mix.json"), tmp_path), [80, 40, 0])
    indices = valid.rows.packed.samples.indices
    counts = [len(set(index.segment_document.tolist())) for index in indices]
    assert counts == [70, 30], "the last tenth of each, not the last tenth of their concatenation"


@pytest.mark.parametrize("weights", [[0.7, 0.3], None])
def test_weighted_data_path_becomes_one_blend(
    corpus: Path, tmp_path: Path, weights: list[float] | None
) -> None:
    paths = [str(corpus / "web"), str(corpus / "code")]
    settings = config(str(paths[0]), tmp_path, blend=(paths, weights))
    with batch_sizes():
        train, _, _ = build(settings, [400, 0, 0], PackedDatasetBuilder)
    assert type(train) is PackedGPTDataset and not isinstance(train, BlendedDataset)
    assert [d.prefix for d in train.rows.packed.datasets] == paths
    assert train.rows.packed.samples.mixture.weights == weights
    assert settings.blend == (paths, weights), "the caller's configuration is left alone"


def test_blend_on_top_of_rows_is_refused(corpus: Path, tmp_path: Path) -> None:
    paths = [str(corpus / "web.json"), str(corpus / "mix.json")]
    with pytest.raises(ConfigError, match="rows of different buckets in a micro step"):
        build(config(paths, tmp_path, blend=(paths, [0.5, 0.5])), [80, 0, 0])


def test_separate_paths_for_each_split(corpus: Path, tmp_path: Path) -> None:
    web, code = str(corpus / "web"), str(corpus / "code")
    per_split = [([web, code], [0.5, 0.5]), ([code], None), None]
    settings = config("unused", tmp_path, blend=None, split=None, blend_per_split=per_split)
    with batch_sizes():
        train, valid, test = build(settings, [80, 16, 0], PackedDatasetBuilder)
    assert len(train.rows.packed.datasets) == 2 and len(valid.rows.packed.datasets) == 1
    assert test is None


def test_block_is_the_global_batch_or_the_divisor_of_a_ramp_up(
    corpus: Path, tmp_path: Path
) -> None:
    for rampup, expected in ((None, 8), ([2, 2, 100], 2), ([4, 4, 100], 4)):
        with batch_sizes(1, 2, rampup):
            train, _, _ = build(config(str(corpus / "web"), tmp_path), [16, 0, 0])
        assert train.rows.options.rows_per_block == expected
        assert train.rows.options.cu_seqlens == "exact", "one row per micro batch"


def test_blocks_must_be_multiples_of_a_micro_step(corpus: Path, tmp_path: Path) -> None:
    sources = [{"prefix": str(corpus / "web")}]
    odd = json.dumps({"sources": sources, "buckets": [64], "rows_per_block": 2})
    refused = pytest.raises(ConfigError, match=r"rows_per_block is 2.*multiple of 4")
    with batch_sizes(2, 2), refused:
        build(config(odd, tmp_path), [16, 0, 0])
    with pytest.raises(ConfigError, match='set "rows_per_block"'):
        build(config(str(corpus / "web"), tmp_path), [16, 0, 0])


def test_context_parallelism_aligns_segments(corpus: Path, tmp_path: Path) -> None:
    settings = config(str(corpus / "web.json"), tmp_path, context_parallel_size=2)
    train, _, _ = build(settings, [40, 0, 0])
    for number in range(40):
        padded = train[number]["cu_seqlens_padded"]
        assert bool((padded % 4 == 0).all()) and int(padded.max()) == ROW


def test_context_parallelism_over_whole_rows_is_refused() -> None:
    """Megatron's RoPE and attention would take parts of a row for parts of its segments."""
    settings = SimpleNamespace(context_parallel_size=2, inter_document_masking=True)
    with pytest.raises(ConfigError, match=r"splits whole rows.*by --sft"):
        context_parallel_alignment(settings)
    settings.context_parallel_size = 1
    assert context_parallel_alignment(settings) == 1


def test_the_dataset_identity_follows_its_path(corpus: Path, tmp_path: Path) -> None:
    web, mix = (
        build(config(str(corpus / f"{name}.json"), tmp_path), [16, 0, 0])[0]
        for name in ("web", "mix")
    )
    assert web.unique_description_hash != mix.unique_description_hash


def _build_and_read(
    rank: int, world_size: int, data_path: str, cache: str, sizes: list[int]
) -> tuple[list[str], list[list[int]]]:
    """Return the rows that rank r reads in 10 micro steps of 2 rows, and their buckets."""
    parallel_state.initialize_model_parallel()
    with batch_sizes(2, world_size):
        train, _, _ = build(config(data_path, Path(cache)), sizes)
    mine = taken(len(train), 0, 2, parallel_state.get_data_parallel_rank(), world_size)[:10]
    loader = DataLoader(train, batch_sampler=mine, num_workers=0)
    digests = [str(hash(tuple(batch["tokens"].flatten().tolist()))) for batch in loader]
    buckets = [[train.bucket_of(i) for i in batch] for batch in mine]
    return digests, buckets


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_read_one_bucket_in_every_micro_step(
    corpus: Path, tmp_path: Path, free_port: int, world_size: int
) -> None:
    given = (str(corpus / "mix.json"), str(tmp_path), [400, 0, 0])
    answers = run_ranks(_build_and_read, world_size, free_port, *given)
    assert len(list(tmp_path.glob("*.samples"))) == 2, "one index per source, built once"
    for step in range(10):
        seen = {bucket for _, buckets in answers for bucket in buckets[step]}
        assert len(seen) == 1, f"micro step {step}"
    digests = [digest for found, _ in answers for digest in found]
    assert len(set(digests)) == len(digests), "no two micro batches are alike"
    assert len({tuple(b) for _, buckets in answers for b in buckets}) > 1, "several buckets"


@pytest.mark.parametrize(("before", "after"), [((1, 8), (2, 2)), ((4, 2), (1, 1))], ids=str)
def test_resume_on_other_ranks_continues_at_the_same_row(
    corpus: Path, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    settings = config(str(corpus / "web.json"), tmp_path)
    whole, _, _ = build(settings, [200, 0, 0])
    reference = [whole[i]["tokens"].tolist() for i in range(200)]
    assert len({str(row) for row in reference}) > 190, "rows are distinguishable"
    consumed = 5 * GLOBAL_BATCH
    read: list[list[int]] = []
    for (mbs, dp), begin, end in ((before, 0, consumed), (after, consumed, 200)):
        # Every rank of every launch opens the dataset anew, as a restarted process does.
        parts = [build(settings, [200, 0, 0])[0] for _ in range(dp)]
        of_ranks = [taken(200, begin, mbs, rank, dp) for rank in range(dp)]
        for batches in list(zip(*of_ranks, strict=True))[: (end - begin) // (mbs * dp)]:
            step = list(zip(parts, batches, strict=True))
            assert len({part.bucket_of(i) for part, batch in step for i in batch}) == 1
            read += [part[i]["tokens"].tolist() for part, batch in step for i in batch]
    assert read == reference

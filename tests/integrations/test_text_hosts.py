"""GPT-NeoX and Megatron-DeepSpeed: batches, refusals, and losses of documents, not of rows.

The hosts are restated (see hosts/README.md) and run in separate processes, since both are called
``megatron``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megapack.data.fim import FimConfig, Sentinels
from megapack.errors import ConfigError
from megapack.integrations.dialects import GPT_NEOX, GPT_NEOX_LABELS
from megapack.integrations.host import Rebinding
from megapack.integrations.hosts import gpt_neox, megatron_deepspeed
from megapack.integrations.hosts.megatron_deepspeed import build_train_valid_test_datasets
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import Manifest, Source
from megapack.integrations.rows.text_rows import (
    SIDE_KEYS,
    EvaluationLoss,
    TextRowDataset,
    build_text_rows,
    manifest_of_list,
    shared_rows,
    split_bounds,
    whole_sets,
)
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.integrations.samples import make_dataset

HOSTS = Path(__file__).parent / "hosts"
ROOT = Path(__file__).parents[2]
ROW = 64
OPTIONS = RowOptions(sequence_length=ROW, rows_per_block=8, seed=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(0).integers(2, 50, 600).tolist()
    return make_dataset(tmp_path_factory.mktemp("hosts"), lengths, "web")


FIM = FimConfig(sentinels=Sentinels(prefix=60_000, suffix=60_001, middle=60_002), eod="none")


def manifest(prefix: str, labels: str | None = None, fim: FimConfig | None = None) -> Manifest:
    source = Source(prefix=prefix)
    if labels is not None:
        source = gpt_neox.LabeledSource(prefix=prefix, label_path=labels)
    # Long documents are cut inside a row, not only at its end.
    return Manifest(sources=(source,), buckets=(16, 32), fim=fim)


def text_rows(source: Manifest, num_rows: int | None, **how: Any) -> TextRowDataset:
    how = {"split": (0.0, 1.0), "varlen": True, "dialect": GPT_NEOX, **how}
    rows = build_text_rows(source, OPTIONS, num_rows=num_rows, **how)
    assert rows is not None
    return rows


@pytest.mark.parametrize("fim", [None, FIM])
def test_text_and_label_shift_into_tokens_and_labels(
    corpus: IndexedDataset, fim: FimConfig | None
) -> None:
    source = manifest(corpus.prefix, fim=fim)
    rows = text_rows(source, 64, dialect=GPT_NEOX_LABELS, varlen=False)
    assert len(rows) == 64
    turned = sum(int((rows[number]["text"] == 60_000).sum()) for number in range(64))
    assert turned > 10 if fim else turned == 0
    for number in range(64):
        sample, row = rows[number], rows.rows[number]
        assert set(sample) == {"text", "label"}
        assert sample["text"].shape == sample["label"].shape == (ROW + 1,)
        assert sample["text"].dtype == sample["label"].dtype == torch.int64
        assert torch.equal(sample["text"][:-1], row["tokens"])
        assert torch.equal(sample["label"][1:], row["labels"])
        assert int(sample["text"].min()) >= 0 and int(sample["label"][0]) == -100


@pytest.mark.parametrize("fim", [None, FIM])
def test_text_without_labels_masks_labels_that_the_shift_gets_wrong(
    corpus: IndexedDataset, fim: FimConfig | None
) -> None:
    rows = text_rows(manifest(corpus.prefix, fim=fim), 64)
    wrong = 0
    for number in range(64):
        sample, row = rows[number], rows.rows[number]
        assert set(sample) == {"text", *SIDE_KEYS}
        assert all(value.dtype == torch.int64 for value in sample.values())
        bounds, positions, mask = (sample[key] for key in SIDE_KEYS)
        assert bounds.shape == (ROW + 1,) and mask.shape == positions.shape == (ROW,)
        shifted = sample["text"][1:]
        assert torch.equal(shifted[mask == 1], row["labels"][mask == 1])
        wrong += int(((row["loss_mask"] == 1) & (mask == 0)).sum())
    assert 32 < wrong < 128, "only segments that end inside their document lose their last label"


def test_attention_window_needs_varlen(corpus: IndexedDataset) -> None:
    cut = replace(manifest(corpus.prefix), attention_window=8)
    with pytest.raises(ConfigError, match=r"windows \[8\], and the host's attention treats a row"):
        text_rows(cut, 8, varlen=False)
    rows = text_rows(cut, 8)
    assert all(int(rows[i][SIDE_KEYS[0]].diff().max()) <= 8 for i in range(8))


def test_aligned_segments_are_refused(corpus: IndexedDataset, tmp_path: Path) -> None:
    aligned = json.dumps({"sources": [{"prefix": corpus.prefix}], "buckets": [64], "align": 4})
    train, _, _ = build_train_valid_test_datasets(
        *(aligned, "mmap", "1", [8, 0, 0], ROW, 1, True),
        rows_per_block=8,
        data_cache_path=str(tmp_path),
    )
    assert train is not None
    with pytest.raises(ConfigError, match="a batch of Megatron-DeepSpeed cannot describe"):
        train[0]


def test_given_labels_set_the_mask(corpus: IndexedDataset, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "labels", np.int32, allow_negative=True) as builder:
        for number in range(len(corpus)):
            tokens = corpus[number].astype(np.int64)
            builder.add_document(np.where(np.arange(len(tokens)) % 2, tokens, -100))
    source = manifest(corpus.prefix, labels=str(tmp_path / "labels"))
    rows = text_rows(source, 32, dialect=GPT_NEOX_LABELS, varlen=False)
    for number in range(32):
        row = rows.rows[number]
        predicts_odd = (row["position_ids"] % 2 == 0) & (row["loss_mask"] == 1)
        assert bool((row["labels"][predicts_odd] >= 0).all())
    kept = sum(float(rows.rows[number]["loss_mask"].mean()) for number in range(32)) / 32
    assert 0.4 < kept < 0.55


def test_finite_sets_have_every_token_once_per_repetition(
    corpus: IndexedDataset,
) -> None:
    large, small = (
        text_rows(manifest(corpus.prefix), None, split=split, times=2)
        for split in ((0.0, 0.5), (0.9, 1.0))
    )
    assert len(small.rows) < len(large.rows) == whole_sets((large, None, small)) * 8
    assert len(small) == len(large) == 2 * len(large.rows) == 2 * len(small.rows)
    expected = np.concatenate([corpus[i] for i in range(540, 600)])
    for offset in (0, len(small.rows)):
        found = torch.cat([small[offset + i]["text"][:-1] for i in range(len(small.rows))])
        assert sorted(found[found > 0].tolist()) == sorted(expected[expected > 0].tolist())
    assert not small[len(small) - 1][SIDE_KEYS[2]].any(), "the last rows are empty"
    with pytest.raises(IndexError):
        small[len(small)]


def test_finite_sets_without_a_loss_mask_are_refused() -> None:
    for host in (gpt_neox, megatron_deepspeed):
        with pytest.raises(ConfigError, match="full_validation is True and varlen is False"):
            host.install(varlen=False, full_validation=True)


def test_evaluation_loss_is_the_mean_over_all_labels() -> None:
    """The host takes the mean of the means of micro batches, of which one has no label."""
    generator = torch.Generator().manual_seed(0)
    losses = [torch.rand(128, generator=generator) for _ in range(3)]
    masks = [(torch.arange(128) < labels).float() for labels in (120, 80, 0)]
    evaluation = EvaluationLoss()

    def mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return evaluation.weigh((losses * mask).sum() / mask.sum(), mask)

    def evaluate() -> dict[str, float]:
        means = [float(mean(*pair)) for pair in zip(losses, masks, strict=True)]
        return {"loss": sum(means) / len(means)}

    def divide(found: dict[str, float], share: float) -> None:
        found["loss"] /= share

    expected = torch.cat(losses)[torch.cat(masks) > 0].mean()
    assert evaluation.wrap(evaluate, divide)()["loss"] == pytest.approx(float(expected))
    assert mean(losses[0], masks[0]) == losses[0][:120].mean(), "in training nothing is weighed"


def test_neox_wraps_losses_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses, mask = torch.arange(128.0), (torch.arange(128) < 80).float()
    training: Any = ModuleType("megatron.training")
    training.cross_entropy = lambda output, labels: (output * labels[1]).sum() / labels[1].sum()
    training.evaluate = lambda: {"lm_loss": training.cross_entropy(losses, (None, mask))}
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr(gpt_neox, "_rebinding", Rebinding("GPT-NeoX"))
    for _ in range(2):
        gpt_neox._weight_losses()
    assert float(training.evaluate()["lm_loss"]) == pytest.approx(39.5)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("969,30,1", [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]),
        ("1/1", [(0.0, 0.5), (0.5, 1.0), (1.0, 1.0)]),
        ("100", [(0.0, 1.0), (1.0, 1.0), (1.0, 1.0)]),
    ],
)
def test_splits_are_parsed_as_in_the_hosts(text: str, bounds: list[tuple[float, float]]) -> None:
    assert np.allclose(split_bounds(text), bounds)


def test_invalid_paths_splits_and_batch_sizes_are_refused() -> None:
    for text in ("0,0", "a,b", "-1,2"):
        with pytest.raises(ConfigError, match="split is"):
            split_bounds(text)
    for paths, message in ((["0.5", "a", "b"], "3 parts"), (["a", "b"], "alternate weights")):
        with pytest.raises(ConfigError, match=message):
            manifest_of_list(paths)
    with pytest.raises(ConfigError, match="return_doc_ids"):
        given = ("a", "mmap", "1", [1, 0, 0], 8, 1, True, None, None, None)
        build_train_valid_test_datasets(*given, True)
    assert shared_rows(64, None) == 64
    assert shared_rows(64, ["16", "8", "1000"]) == 8


# A model of one attention layer whose loss is compared with that of the documents one by one.
SHARED = """
import contextlib, sys
from types import SimpleNamespace
import torch
from megapack.integrations.rows import text_rows

prefix, = sys.argv[1:]

@contextlib.contextmanager
def refused(message):
    try:
        yield
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

def loss_of(model, attention, tokens, position_ids, labels, mask):
    x = model["embed"](tokens) + model["position"](position_ids)
    q, k, v = (layer(x).unflatten(-1, (2, 8)) for layer in (model["q"], model["k"], model["v"]))
    logits = model["head"](attention(q, k, v).flatten(2) + x)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()

def make_model():
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(16, 16) for name in "qkv"}
    layers |= {"embed": torch.nn.Embedding(1000, 16), "position": torch.nn.Embedding(64, 16)}
    return torch.nn.ModuleDict(layers | {"head": torch.nn.Linear(16, 1000)})

def plain(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

def check(attention, batch):
    bounds = text_rows.current().cu_seqlens.tolist()
    tokens, labels, mask, _, position_ids = batch
    assert tokens.shape == labels.shape == mask.shape == (2, 64), tokens.shape
    assert tokens.dtype == labels.dtype == torch.int64 and mask.dtype == torch.float32
    model = make_model()
    loss = loss_of(model, attention, tokens, position_ids, labels, mask)
    loss.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    flat = [t.flatten()[None] for t in (tokens, labels, mask)]
    for begin, end in zip(bounds, bounds[1:]):
        t, l, m = (x[:, begin:end] for x in flat)
        part = loss_of(model, plain, t, torch.arange(end - begin)[None], l, m)
        part.backward()
        total += float(part)
    assert abs(float(loss) - total) < 1e-4 * total, (float(loss), total)
    for a, b in zip(packed, [p.grad for p in model.parameters()]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return len(bounds) - 1
"""

NEOX = """
from megapack.integrations.hosts import gpt_neox
gpt_neox.install()
from megatron.data import data_utils
from megatron.training import flash_attention, get_batch

def arguments(mode="path"):
    paths = {"train_data_paths": None, "valid_data_paths": None, "train_label_data_paths": None}
    if mode == "paths":
        paths |= {"train_data_paths": [prefix, prefix], "valid_data_paths": [prefix],
                  "train_data_weights": [0.75, 0.25], "valid_data_weights": [1.0]}
    return SimpleNamespace(
        rank=0, world_size=1, batch_size=2, iteration=0,
        gradient_accumulation_steps=4, train_batch_size=8,
        train_iters=12, eval_iters=2, seq_length=64, seed=1, split="90,10,0", data_path=prefix,
        pipe_parallel_size=1, attention_config=["flash"], weight_by_num_documents=False, **paths)

for mode in ("path", "paths"):
    args = arguments(mode)
    train, valid, test = data_utils.build_train_valid_test_data_loaders(args)
    assert len(train.dataset) >= 96 and test is None and len(valid.dataset) >= 16
    iterator = iter(train)
    found = [check(flash_attention, get_batch(args, iterator)) for _ in range(8)]
    assert sum(found) > 4 * len(found), found

args.attention_config = ["flash", "global"]
with refused("needs flash in every layer"):
    data_utils.build_train_valid_test_data_loaders(args)
gpt_neox.uninstall()
with refused("call install() first"):
    gpt_neox.install()
try:
    data_utils.build_train_valid_test_data_loaders(args)
except AssertionError as error:
    assert "NeoX's own" in str(error)
else:
    raise ValueError("NeoX's own loaders were not asked for")
"""

MDS = """
import megatron
from megapack.integrations.hosts import megatron_deepspeed
megatron_deepspeed.install()
from megatron.model.transformer import flash_self_attention
from pretrain_gpt import get_batch, train_valid_test_datasets_provider

megatron.ARGS = SimpleNamespace(
    data_path=["0.5", prefix, "0.5", prefix], split="90,10,0", seq_length=64, seed=1,
    train_data_path=None, data_cache_path=None, global_batch_size=8, rampup_batch_size=None,
    pipeline_model_parallel_size=1, use_flash_attn_v2=True)
train, valid, test = train_valid_test_datasets_provider([96, 16, 0])
assert (len(train), len(valid), test) == (96, 16, None)
assert train.rows.options.rows_per_block == 8
iterator = iter(torch.utils.data.DataLoader(train, batch_size=2))
found = [check(flash_self_attention, get_batch(iterator)) for _ in range(8)]
assert sum(found) > 4 * len(found), found
for name, value, message in (
    ("use_flash_attn_v2", False, "--use-flash-attn-v2 is False: attention inside documents"),
    ("pipeline_model_parallel_size", 2, "one stage"),
):
    setattr(megatron.ARGS, name, value)
    with refused(message):
        train_valid_test_datasets_provider([96, 16, 0])
    megatron.ARGS.use_flash_attn_v2 = True
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("host", "program"), [("neox", NEOX), ("mds", MDS)], ids=["neox", "mds"])
def test_hosts_train_on_documents(corpus: IndexedDataset, host: str, program: str) -> None:
    paths = os.pathsep.join([str(HOSTS / host), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARED + program, corpus.prefix],
        check=False,
        capture_output=True,
        text=True,
        cwd=HOSTS / host,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr

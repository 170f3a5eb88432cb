"""Laws of fill-in-the-middle in the gather: larger rates, SPM and PSM, the inverse.

test_gather.py compares batches with the definition in tests/reference/fim.py; test_fim.py tests
whole runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import _core
from megapack.data import PackedDataset
from megapack.data.fim import Fim, character_tables
from megapack.data.steps import StepView
from megapack.packing import pack
from tests.data.corpora import index_of, random_documents, write_documents

PRE, SUF, MID, END, EOD = 200, 201, 202, 203, 0
# Tokens 1 to 119: letters, words, halves of a character and whole characters.
LETTERS = [bytes([c]) for c in range(97, 123)]
HALVES = [b"\xc3", b"\xa9", b"\xc3\xa9"]
WORDS = [a + b for a in LETTERS[:9] for b in LETTERS[:10]]
TEXTS = [None, *LETTERS, *HALVES, *WORDS]


def opened(folder: Path, documents: list[list[int]], **fim: Any) -> PackedDataset:
    """Open a dataset with every document in its own sample, with room."""
    lengths = [len(document) for document in documents]
    dataset = write_documents(folder / "docs", documents)
    index = index_of({256: [[(d, 0, n)] for d, n in enumerate(lengths)]}, lengths)
    index.parameters["fim_room"] = 16
    packed = PackedDataset(dataset, index)
    given = {"prefix": PRE, "suffix": SUF, "middle": MID, "eod": EOD, **fim}
    packed._connect([index], packed.samples.mixture, fim=Fim(**given))
    return packed


def draws(count: int, rate: float, epoch: int = 0) -> StepView:
    return StepView(epochs=np.full(count, epoch), fim_rates=np.full(count, float(rate)), seed=7)


def drawn(packed: PackedDataset, rate: float, epoch: int = 0) -> dict[int, tuple[int, int, int]]:
    """Return document -> (is SPM, cuts)."""
    ids = np.arange(len(packed))
    columns = packed._gatherer.fim_draws(ids, draws(len(ids), rate, epoch).core)
    return {d: choices for _, _, d, *choices in zip(*(c.tolist() for c in columns), strict=True)}


def rows(packed: PackedDataset, ids: list[int], given: StepView) -> list[list[int]]:
    """Return the tokens of samples of one document each, without padding."""
    batch = packed.micro_batch(ids, capacity=256, view=given)
    ends = batch["cu_seqlens"].reshape(-1).tolist()
    tokens = batch["tokens"].reshape(-1).tolist()
    return [tokens[a:b] for a, b in zip(ends[:-1:2], ends[1::2], strict=True)]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Write 4,000 documents of 41 tokens, 40 of them body."""
    documents = [[*d, EOD] for d in random_documents([40] * 4000)]
    return opened(tmp_path_factory.mktemp("many"), documents, spm_rate=0.3)


def test_a_larger_rate_transforms_the_same_documents_alike_and_more(many: PackedDataset) -> None:
    few, more = drawn(many, 0.2), drawn(many, 0.7)
    assert 0 < len(few) < len(more) and few.items() < more.items()
    assert drawn(many, 0) == {} and len(drawn(many, 1)) == len(many)


def test_shares_are_the_rates_within_sampling_error(many: PackedDataset) -> None:
    count, rate = len(many), 0.4
    first, second = drawn(many, rate), drawn(many, rate, epoch=1)
    both = len(first.keys() & second.keys())  # epochs are independent
    spm = sum(choices[0] for choices in first.values())
    for actual, total, share in (
        (len(first), count, rate),
        (len(second), count, rate),
        (both, count, rate**2),
        (spm, len(first), 0.3),
    ):
        assert abs(actual - total * share) < 4 * (total * share * (1 - share)) ** 0.5
    # Two cuts among 41 positions, uniform, then sorted.
    places = np.array([choices[1:] for choices in drawn(many, 1).values()])
    counts = np.bincount(places.reshape(-1), minlength=41)
    expected = 2 * count / 41
    assert len(counts) == 41 and (places[:, 0] <= places[:, 1]).all()
    assert ((counts - expected) ** 2 / expected).sum() < 40 + 4 * 80**0.5
    same = (places[:, 0] == places[:, 1]).sum()
    assert abs(same - count / 41) < 4 * (count / 41) ** 0.5


@pytest.mark.parametrize("cuts", ["token", "character"])
@pytest.mark.parametrize("end", [-1, END])
@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_inverse_restores_documents(cuts: str, end: int, spm_rate: float, tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 300).tolist()
    documents = random_documents(lengths, high=120)
    documents = [[*d[:-1], EOD] if i % 3 else d for i, d in enumerate(documents)]
    tables = character_tables(TEXTS) if cuts == "character" else None
    packed = opened(tmp_path, documents, end=end, spm_rate=spm_rate, tables=tables)
    fim = packed.samples.fim
    assert fim is not None
    ids = list(range(len(documents)))
    in_parts = 0
    for transformed, document in zip(rows(packed, ids, draws(len(ids), 1)), documents, strict=True):
        if len(document) == 1:
            assert transformed == document  # the middle is empty
            continue
        assert transformed[0] == PRE and all(
            transformed.count(token) == 1 for token in fim.sentinels
        )
        assert len(document) + len(fim.sentinels) <= len(transformed) <= len(document) + fim.room
        restored = fim.restore(transformed).tolist()
        assert text(restored) == text(document) and (restored[-1] == EOD) == (document[-1] == EOD)
        in_parts += restored != document
        if spm_rate:
            assert transformed[1] == SUF
    assert in_parts > 100 if cuts == "character" else in_parts == 0


def text(tokens: list[int]) -> bytes:
    return b"".join(TEXTS[token] or b"<>" for token in tokens)


SENTINELS = {"prefix": PRE, "suffix": SUF, "middle": MID, "spm_rate": 0.5}
ARRAYS = {"a token's": [1, 2], "cuts'": [0, 0, 1], "parts'": [0, 1, 2], "parts": [0, 1]}


def tables(**changed: list[int]) -> Any:
    return tuple(np.array(value, np.int64) for value in {**ARRAYS, **changed}.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.Fim(**{**SENTINELS, "prefix": -1}), "they must be three different tokens"),
        (lambda: _core.Fim(**{**SENTINELS, "middle": SUF}), "they must be three different tokens"),
        (lambda: _core.Fim(**{**SENTINELS, "spm_rate": 1.5}), "spm_rate is 1.5; it must be from 0"),
        (lambda: _core.Fim(**SENTINELS, tables=tables(parts=[0])), "do not fit each other"),
        (lambda: _core.Fim(**SENTINELS, tables=tables(parts=[0, -1])), "a part is token -1"),
        (lambda: _core.Fim(**SENTINELS, tables=tables(**{"cuts'": [0, 1, 1]})), "token 1 has 2 ch"),
        (lambda: _core.Fim(**SENTINELS, tables=tables(**{"a token's": [1, 70000]})), "70000 cha"),
    ],
)
def test_core_refuses_invalid_settings(call: Callable[[], Any], message: str) -> None:
    _core.Fim(**SENTINELS, tables=tables())
    with pytest.raises(ValueError, match=message):
        call()


def test_core_refuses_mismatched_epochs_and_rates(many: PackedDataset) -> None:
    ids = np.arange(2)
    gatherer = many._gatherer
    for epochs, rates, message in (
        (np.zeros(2, np.int64), None, "give epochs and fim_rates, or neither"),
        (np.zeros(1, np.int64), np.zeros(2), "1 epochs for 2 samples; give one for each"),
        (np.zeros(2, np.int64), np.array([0.5, 1.5]), "fim_rate is 1.5; it must be from 0 to 1"),
        (np.zeros(2, np.int64), np.array([0.5, np.nan]), "fim_rate is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            gatherer.count_labels(ids, StepView(epochs=epochs, fim_rates=rates).core)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("strategy", ["bucket", "concat", "best_fit_decreasing"])
def test_packing_leaves_enough_room(strategy: str, alignment: int, tmp_path: Path) -> None:
    """Every document with room in the index is transformed at rate 1, and all samples fit."""
    lengths = np.random.default_rng(2).integers(0, 70, 400)
    dataset = write_documents(tmp_path / "docs", random_documents(lengths.tolist()))
    buckets = [32, 64] if strategy == "bucket" else 64
    index = pack(lengths, strategy, buckets=buckets, fim_room=3, alignment=alignment)
    packed = PackedDataset(dataset, index, alignment=alignment)
    packed._connect([index], packed.samples.mixture, fim=Fim(prefix=PRE, suffix=SUF, middle=MID))
    num_transformed = 0
    for sample in range(len(packed)):
        tokens = packed.micro_batch([sample], view=draws(1, 1))["tokens"]
        num_transformed += int((tokens == PRE).sum())
    assert num_transformed == index.metrics()["num_documents_with_fim_room"] > 150

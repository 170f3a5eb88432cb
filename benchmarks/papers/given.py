"""Perplexity of held-out text with more context than its own document.

- ``behind``: scores files after earlier files of their folder, and the same files alone (recipe
  groups).
- ``middle``: scores the middles of documents, given the text around them (recipe fim).
- ``perplexity``: scores parts of streams, each token given all earlier tokens of its stream.

Example: a folder has files a, b and c of 900, 800 and 700 tokens, and a sample has 2,048. b is
scored after a; c does not fit and starts the next context, so it is not scored. Then b is scored
alone. Both scores leave out the first token of b, so the only difference is the context a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from papers.corpus import prepare
from papers.run import Run

from megapack.packing.groups import read_groups
from megapack.storage import IndexedDataset
from megapack.training.config import EngineConfig
from megapack.training.engine.world import World
from megapack.training.model.training_model import TrainingModel, on_device

Tokens = NDArray[np.int64]
FORWARD_TOKENS = 8192


@dataclass(frozen=True)
class Part:
    """Tokens ``[begin, end)`` of a stream; begin is at least 1."""

    stream: Tokens
    begin: int
    end: int


def behind(model: TrainingModel, here: World, config: EngineConfig, run: Run) -> dict[str, Any]:
    """Score held-out files that follow a file of their folder: a probe of a run.

    Returns:
        alone, behind: perplexities of the same tokens; files, tokens: number of scored ones.
    """
    corpus = next(iter(run.validate.values()))
    dataset = IndexedDataset(prepare(corpus).valid)
    bounds = dataset.document_offsets.tolist()
    ids = read_groups("auto", dataset.prefix, dataset.num_documents).tolist()
    alone, after = [], []
    context: Tokens = np.empty(0, np.int64)
    for i, group in enumerate(ids):
        document = dataset.tokens[bounds[i] : bounds[i + 1]].astype(np.int64)
        before = len(context)
        if i and group == ids[i - 1] and before + len(document) <= run.valid_bucket:
            context = np.append(context, document)
            alone.append(Part(document, 1, len(document)))
            after.append(Part(context, before + 1, len(context)))
        else:
            context = document
    return _scored(model, here, config, {"alone": alone, "behind": after})


def middle(model: TrainingModel, here: World, config: EngineConfig, run: Run) -> dict[str, Any]:
    """Score the middles of held-out documents, cut in three as in training: a probe of a run.

    Returns:
        prefix, text, PSM, SPM: perplexities of the same middles by context (``recipes/fim.py``
        explains them); files, tokens: number of scored ones.
    """
    assert run.fim is not None
    said = {name: np.array([token]) for name, token in run.fim["sentinels"].items()}
    before, after, inside = said["prefix"], said["suffix"], said["middle"]
    dataset = IndexedDataset(prepare(next(iter(run.validate.values()))).valid)
    draw = np.random.default_rng(0)
    parts: dict[str, list[Part]] = {}
    for begin, end in pairwise(dataset.document_offsets.tolist()):
        body = dataset.tokens[begin : end - 1].astype(np.int64)  # without its end-of-document token
        low, high = sorted(draw.integers(0, len(body) + 1, 2))
        if low in (0, high) or len(body) + len(said) > run.valid_bucket:
            continue
        prefix, wanted, suffix = body[:low], body[low:high], body[high:]
        given = {
            "prefix": [prefix],
            "text": [suffix, prefix],
            "PSM": [before, prefix, after, suffix, inside],
            "SPM": [before, after, suffix, inside, prefix],
        }
        for name, all_before in given.items():
            stream = np.concatenate([*all_before, wanted])
            parts.setdefault(name, []).append(Part(stream, len(stream) - len(wanted), len(stream)))
    return _scored(model, here, config, parts)


def _scored(
    model: TrainingModel, here: World, config: EngineConfig, parts: dict[str, list[Part]]
) -> dict[str, Any]:
    """Return the perplexity of the same tokens by context, and the numbers of files and tokens."""
    found: dict[str, Any] = {n: perplexity(model, here, config, of) for n, of in parts.items()}
    some = next(iter(parts.values()))
    return found | {"files": len(some), "tokens": sum(part.end - part.begin for part in some)}


def perplexity(
    model: TrainingModel, here: World, config: EngineConfig, parts: Sequence[Part]
) -> float:
    """Return the perplexity over all tokens of all parts."""
    total, room = 0.0, 0
    forwards: list[list[Part]] = []
    for part in parts:  # several streams share a forward
        room -= len(part.stream)
        if room < 0:
            forwards.append([])
            room = FORWARD_TOKENS - len(part.stream)
        forwards[-1].append(part)
    for some in forwards:
        loss, *_ = model(**on_device(_batch(some), here.device, config))
        total += float(loss)
    return math.exp(total / sum(part.end - part.begin for part in parts))


def _batch(parts: Sequence[Part]) -> dict[str, Any]:
    """Concatenate streams; each is a separate segment."""
    lengths = [len(part.stream) for part in parts]
    labels = [np.full(n, -100, np.int64) for n in lengths]
    for part, wanted in zip(parts, labels, strict=True):
        wanted[part.begin - 1 : part.end - 1] = part.stream[part.begin : part.end]
    return {
        "tokens": torch.from_numpy(np.concatenate([part.stream for part in parts]))[None],
        "labels": torch.from_numpy(np.concatenate(labels))[None],
        "position_ids": torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None],
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32),
        "dataset_ids": torch.zeros(len(parts), dtype=torch.int32),
        "max_seqlen": max(lengths),
        "capacity": sum(lengths),
    }

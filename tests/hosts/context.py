"""Rows that context-parallel ranks hold in parts, put together again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

ROW_KEYS = ("tokens", "position_ids", "labels", "loss_mask")


def joined(parts: list[dict[str, Any]], *, each_document: bool) -> dict[str, Any]:
    """One call of the model: its tensors over all ranks of the context-parallel group.

    Every piece (a segment, or the whole micro batch) is cut into 2 x size chunks, of which rank r
    holds numbers r and 2 x size - 1 - r, one piece after the other.
    """
    size = len(parts)
    if size == 1:
        return parts[0]
    whole = dict(parts[0])
    held = parts[0]["tokens"] if parts[0]["tokens"] is not None else parts[0]["labels"]
    bounds = parts[0]["cu_seqlens"].tolist() if each_document else [0, held.numel() * size]
    places = [_places(bounds, size, rank) for rank in range(size)]
    for key in ROW_KEYS:
        if parts[0][key] is None:
            continue
        row = torch.full((1, held.numel() * size), -1, dtype=parts[0][key].dtype)
        for part, place in zip(parts, places, strict=True):
            row[0, place] = part[key].flatten()
        whole[key] = row
    return whole


def _places(bounds: list[int], size: int, rank: int) -> list[int]:
    places: list[int] = []
    for begin, end in pairwise(bounds):
        chunk = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places += range(begin + number * chunk, begin + (number + 1) * chunk)
    return places


def wrongly_aligned(call: dict[str, Any], read: dict[str, Any], to: int) -> Iterator[str]:
    """Segments of a row that is cut document by document begin at multiples of ``to``."""
    padded = call["cu_seqlens_padded"]
    if padded is None or not torch.equal(padded, call["cu_seqlens"]):
        yield "attention is told other boundaries than those of the room between segments"
        return
    if (padded % to).any():
        yield f"boundaries {padded.tolist()} are no multiples of {to}"
    if "cu_seqlens_padded" not in read:
        yield "the dataset gives no cu_seqlens_padded"
        return
    lengths, rooms = (_lengths(read[name]) for name in ("cu_seqlens", "cu_seqlens_padded"))
    if rooms != [-(-length // to) * to for length in lengths]:
        yield f"segments of {lengths} tokens have room for {rooms}"
    if rooms != _lengths(padded):
        yield "the model is told other boundaries than the dataset's"


def _lengths(bounds: torch.Tensor) -> list[int]:
    lengths = bounds.diff(dim=-1).flatten().tolist()
    return [length for length in lengths if length]

"""Check of the real model on its real path: does it keep the documents of a micro batch apart?

``probe(forward, batch)`` runs a host's own forward six times without gradients: unchanged, with the
tokens of every other segment changed, with those of the rest changed, with one token of each
segment changed, and twice with the documents shorter or alone. Marked outputs must stay equal:

    segments       | a a a a | b b b | c c c c c |
    odd changed    | a a a a | X X X | c c c c c |     a and c
    even changed   | X X X X | b b b | X X X X X |     b
    middle changed | a a X a | b X b | c c X c c |     positions before an X
    cut in pieces  | a a|a a | b b|b | c c|c c|c |     the first piece of each
    one alone                          c c c           this beginning of a document

The first four see every boundary from both sides, each wrong by one or missing, an attention window
that is lost (segments are cut at windows), and a mask that is shifted: where a loss may not count,
it is 0, and elsewhere it is not. The last two see outputs that depend on the longest document of
the row, or on the row's length. Pieces have at most 64 tokens, or half of the longest segment.
``check_architecture`` asks more of a tiny copy of the model; this checks a host's real batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megapack.errors import ConfigError

# A position that must not notice a change may differ by so much of what the changed ones do: a
# mixture of experts sums in another order, and half precision rounds.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


_PIECE = 64  # tokens; no position threshold is as low


class SegmentPlaces(NamedTuple):
    """The segments of a micro batch, padding's too; all int64, one entry each."""

    begins: Tensor
    """First token, of all rows one behind the other."""
    lengths: Tensor
    rooms: Tensor
    """Tokens from one begin to the next: the length, but where segments are aligned."""

    @staticmethod
    def of(batch: Mapping[str, Any]) -> SegmentPlaces:
        """Those of ``cu_seqlens``, listed per row or not, their last value repeated or not."""
        rows, row = batch["tokens"].shape
        ends = batch["cu_seqlens"].long()
        places = batch.get("cu_seqlens_padded", ends).long()
        if ends.dim() == 1:
            ends, places, rows = ends[None], places[None], 1
        shift = torch.arange(rows).view(-1, 1) * row
        rooms = places.diff()
        begins = places[:, :-1] + shift
        there = rooms > 0
        return SegmentPlaces(begins[there], ends.diff()[there], rooms[there])

    def positions(self) -> Tensor:
        """Of every token, from the begin of its segment on, int64 (tokens,)."""
        first = self.begins.repeat_interleave(self.rooms)
        return torch.arange(len(first)) - first


def probe(
    forward: Callable[[dict[str, Any]], Tensor],
    batch: Mapping[str, Any],
    *,
    outputs: Literal["logits", "losses"] = "logits",
    counted: Callable[[Mapping[str, Any]], Tensor] | None = None,
    precision: torch.dtype | None = None,
    host: str = "the model",
    longest: Mapping[str, Any] | None = None,
    any_length: bool = False,
) -> float:
    """Refuse a forward in which documents of a micro batch depend on each other.

    Every rank calls it alike: the number of forwards does not depend on the batch. It is six, and
    seven with ``longest``.

    Args:
        forward: from a batch like this one to what the host makes of its tokens: logits or hidden
            states ``(..., width)``, or losses, one number for each token in the order of
            ``batch["tokens"]``, masked as the host masks them. Any float dtype and device. Called
            without gradients; modes (dropout off) are the caller's.
        batch: tokens, labels int64 and loss_mask float32 ``(rows, R)``, cu_seqlens int32 1-D or
            per row; on the CPU. It is not changed. Without a label, every token gets one for the
            probe: the next of its document, or else of its row.
        outputs: of ``forward``.
        counted: which losses of a batch count, bool ``(rows, R)``; None: those that ``loss_mask``
            names. For hosts that cannot be told all (``megapack.integrations.dialects``).
        precision: in which the model computes; None: that of the outputs.
        host: in the error.
        longest: another batch, with the longest documents; None: ``batch``. Its documents are cut.
        any_length: ``forward`` takes any number of tokens, so one document runs alone; else all
            documents are cut twice.

    Returns:
        Seconds.

    Raises:
        ConfigError: what leaked, from where to where; a document that depends on the length of
            others; a loss that counts and must not, or does not
            and must; outputs that do not depend on the tokens at all, or are no numbers.
    """
    began = time.perf_counter()
    batch = _with_labels(batch)
    tokens = batch["tokens"].flatten()
    of, middle, behind = _places(SegmentPlaces.of(batch), len(tokens))
    others = _others(tokens)
    dtypes = []

    def outputs_of(asked: dict[str, Any]) -> tuple[Tensor, Tensor]:
        counts = asked["loss_mask"] != 0 if counted is None else counted(asked)
        with torch.no_grad():
            made = forward(asked).detach()
        dtypes.append(made.dtype)
        return made.float().reshape(asked["tokens"].numel(), -1).cpu(), counts.flatten()

    def run(changed: Tensor | None) -> tuple[Tensor, Tensor]:
        asked = dict(batch)
        if changed is not None:
            asked["tokens"] = torch.where(changed, others, tokens).view_as(batch["tokens"])
        return outputs_of(asked)

    plain, counts = run(None)
    if outputs == "losses":
        _check_losses(plain[:, 0], counts, of, host)
    seen = []
    for changed in (of % 2 == 1, of % 2 == 0, middle):
        other, still = run(changed)
        same = other == plain  # also where both are infinite, as of ids that no token has
        difference = (other - plain).masked_fill(same, 0).abs().amax(dim=1)
        if not (difference.isfinite() | of.isnan()).all():
            raise ConfigError(
                f"{host} gives outputs that are not finite: whether documents of a batch see each "
                "other cannot be seen; look at its weights and its precision"
            )
        # Where the host cannot be told the same labels any more, losses change by themselves.
        must_not = ~(behind if changed is middle else changed) & ~of.isnan() & (counts == still)
        # A loss that does not count, as all of padding, is 0 whatever the tokens are.
        may = ~must_not & ~of.isnan() & (counts | (outputs == "logits"))
        seen.append((difference, must_not, may))
    tolerance = _TOLERANCE.get(precision or dtypes[0], 1e-3)
    scale = _check(seen, of=of, tolerance=tolerance, host=host)
    if longest is not None:
        batch = _with_labels(longest)
        plain, counts = outputs_of(dict(batch))
    segments = SegmentPlaces.of(batch)
    half = -(-int(segments.lengths.max()) // 2)
    parts = [_cut(batch, segments, min(half, _PIECE))]
    parts.append(_alone(batch, segments, half) if any_length else _cut(batch, segments, half))
    for part in parts:
        made, still = outputs_of(part.batch)
        same = counts[part.before] == still[part.after]
        _check_part(part, plain, made, same, rounding=tolerance * scale, host=host)
    return time.perf_counter() - began


def _with_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch with labels: its own, or made ones if every label is masked."""
    if (batch["loss_mask"] != 0).any():
        return batch
    tokens = batch["tokens"]
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = SegmentPlaces.of(batch).positions().view_as(tokens)
    ends = torch.nn.functional.pad(positions[:, 1:] == 0, (0, 1), value=True)
    inside = following.masked_fill(ends, -100)
    # Documents of one token each have none inside: a label of the next one is as good here.
    labels = inside if (inside >= 0).any() else following
    return {**batch, "labels": labels, "loss_mask": (labels >= 0).float()}


# ---- Documents in shorter rows, and alone


class _Part(NamedTuple):
    """A batch whose tokens ``after`` must have the outputs of the whole one's ``before``."""

    batch: dict[str, Any]
    before: Tensor
    after: Tensor
    what: str


def _cut(batch: Mapping[str, Any], segments: SegmentPlaces, most: int) -> _Part:
    """Cut every segment into pieces of at most so many tokens, with positions from 0 on."""
    padded = "cu_seqlens_padded" in batch
    align = int(np.gcd.reduce(segments.rooms.numpy())) if padded else 1
    most = -(-most // align) * align
    counts = -(-segments.rooms // most)
    number = torch.arange(len(counts)).repeat_interleave(counts)
    offset = (torch.arange(len(number)) - (counts.cumsum(0) - counts)[number]) * most
    pieces = SegmentPlaces(
        begins=segments.begins[number] + offset,
        lengths=(segments.lengths[number] - offset).clamp(0, most),
        rooms=(segments.rooms[number] - offset).clamp(max=most),
    )
    cut = dict(batch)
    for name, sizes in (("cu_seqlens", pieces.lengths), ("cu_seqlens_padded", pieces.rooms)):
        if name in batch:
            cut[name] = _ends(sizes, pieces.begins, batch)
    if "position_ids" in batch:
        cut["position_ids"] = pieces.positions().view_as(batch["position_ids"])
    if "dataset_ids" in batch and len(batch["dataset_ids"]) == len(counts):
        cut["dataset_ids"] = batch["dataset_ids"][number]
    if "max_seqlen" in batch:
        cut["max_seqlen"] = _longest(pieces.rooms, pieces.begins, batch)
    first = (offset == 0) & _begins_at_0(batch, segments)[number]
    inside = torch.cat([torch.arange(n) for n in pieces.lengths[first].tolist()] or [offset[:0]])
    places = pieces.begins[first].repeat_interleave(pieces.lengths[first]) + inside
    return _Part(cut, places, places, f"others in its row have at most {most} tokens")


def _alone(batch: Mapping[str, Any], segments: SegmentPlaces, most: int) -> _Part:
    """Return a batch of the first ``most`` tokens of the longest segment alone."""
    usable = segments.lengths.masked_fill(~_begins_at_0(batch, segments), 0)
    number = int(usable.argmax())
    before = int(segments.begins[number]) + torch.arange(most)
    shape = batch["tokens"].shape
    alone = {
        name: value.flatten(0, 1)[before][None]
        if isinstance(value, Tensor) and value.shape[:2] == shape
        else value
        for name, value in batch.items()
    }
    ends = torch.tensor([0, most], dtype=batch["cu_seqlens"].dtype)
    alone["cu_seqlens"] = ends if batch["cu_seqlens"].dim() == 1 else ends[None]
    if "position_ids" in batch:
        alone["position_ids"] = torch.arange(most)[None]
    if "dataset_ids" in batch and len(batch["dataset_ids"]) == len(usable):
        alone["dataset_ids"] = batch["dataset_ids"][number : number + 1]
    if "max_seqlen" in batch:
        alone["max_seqlen"] = most
    before = before if int(usable[number]) >= most else before[:0]
    return _Part(alone, before, torch.arange(len(before)), "it is alone")


def _begins_at_0(batch: Mapping[str, Any], segments: SegmentPlaces) -> Tensor:
    """Which segments count their positions from 0 on (not those behind an attention window)."""
    if "position_ids" not in batch:
        return torch.ones(len(segments.begins), dtype=torch.bool)
    begins: Tensor = batch["position_ids"].flatten()[segments.begins] == 0
    return begins


def _ends(sizes: Tensor, begins: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """List the ends of pieces as ``cu_seqlens`` of the batch lists them: in all, or per row."""
    given: Tensor = batch["cu_seqlens"]
    if given.dim() == 1:
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(given.dtype)
    rows, row = batch["tokens"].shape
    lists = [sizes[begins // row == i].cumsum(0) for i in range(rows)]
    most = max(map(len, lists))
    lists = [torch.cat([ends, ends[-1:].expand(most - len(ends))]) for ends in lists]
    return torch.nn.functional.pad(torch.stack(lists), (1, 0)).to(given.dtype)


def _longest(rooms: Tensor, begins: Tensor, batch: Mapping[str, Any]) -> Any:
    given = batch["max_seqlen"]
    if not isinstance(given, Tensor):
        return int(rooms.max())
    if given.dim() == 0:
        return rooms.max().to(given.dtype)
    rows, row = batch["tokens"].shape
    longest = [rooms[begins // row == i].max() for i in range(rows)]
    return torch.stack(longest).to(given.dtype)


def _check_part(
    part: _Part, plain: Tensor, made: Tensor, same: Tensor, *, rounding: float, host: str
) -> None:
    """Raise ConfigError if a token has other outputs in the part than in its row."""
    before, after = plain[part.before], made[part.after]
    difference = (after - before).masked_fill(after == before, 0).abs().amax(dim=1)
    wrong = same & ~(difference <= rounding)
    if wrong.any():
        i = int(difference.masked_fill(~same, 0).argmax())
        raise ConfigError(
            f"{host} gives token {int(part.before[i])} other outputs in its row than if "
            f"{part.what}: they differ by {float(difference[i]):.3g}, where at most {rounding:.3g} "
            f"is rounding, and so do {int(wrong.sum())} tokens. The model depends on the lengths "
            "of other documents (as rope_type longrope or dynamic), or on the length of the row. "
            "Pack into shorter buckets, or choose a rope_type that is the same at any length"
        )


# ---- Documents whose tokens change


def _places(segments: SegmentPlaces, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token its segment (float nan in the room of an aligned one), whether it is the
    middle one of it, and whether it is that or behind it."""
    of = torch.full((num_tokens,), torch.nan)
    middle, behind = torch.zeros(2, num_tokens, dtype=torch.bool)
    inside = torch.cat([torch.arange(n) for n in segments.lengths.tolist()])
    places = segments.begins.repeat_interleave(segments.lengths) + inside
    half = (segments.lengths // 2).repeat_interleave(segments.lengths)
    of[places] = torch.arange(len(segments.lengths)).repeat_interleave(segments.lengths).float()
    middle[places], behind[places] = inside == half, inside >= half
    return of, middle, behind


def _others(tokens: Tensor) -> Tensor:
    """Another id for each, between the smallest and the largest that occur (0 or 1 for one id)."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        low, high = (0, 1) if low <= 1 else (low - 1, low)
    return low + (tokens - low + 1) % (high - low + 1)


def _check_losses(losses: Tensor, counts: Tensor, of: Tensor, host: str) -> None:
    wrong = (losses != 0) != counts
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ConfigError(
            f"{host} {'counts' if losses[i] != 0 else 'leaves out'} the loss of token {i} (segment "
            f"{int(of[i])}), one of {int(wrong.sum())} of {len(losses)}, against the loss mask of "
            "the batch: is the mask, or are the labels, shifted once too often?"
        )


def _check(
    seen: Sequence[tuple[Tensor, Tensor, Tensor]], *, of: Tensor, tolerance: float, host: str
) -> float:
    """Check that each change moved only what it may, and something; return by how much."""
    moved = [float(difference[may].max()) if may.any() else None for difference, _, may in seen]
    if 0 in moved or not any(moved):
        raise ConfigError(
            f"{host} makes the same of other tokens: its outputs do not depend on the batch that "
            "it was given, so nothing could be seen"
        )
    for (difference, must_not, may), scale in zip(seen, moved, strict=True):
        # A change of padding alone shows nowhere: what another one moved is the measure.
        rounding = tolerance * (scale or max((one for one in moved if one), default=0.0))
        leaked = must_not & (difference > rounding)
        if leaked.any():
            i = int(difference.masked_fill(~must_not, 0).argmax())
            same = bool(may[of == of[i]].any())
            raise ConfigError(
                f"{host} lets token {i} (segment {int(of[i])}) see "
                f"{'what comes after it' if same else 'another document'}: it changed by "
                f"{float(difference[i]):.3g} where at most {rounding:.3g} is rounding, and "
                f"{int(leaked.sum())} tokens do so. The boundaries of the batch do not reach its "
                "attention as they are: check the attention backend, and what stands between the "
                "batch and the model"
            )
    return max(one for one in moved if one)

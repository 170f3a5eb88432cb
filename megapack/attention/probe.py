"""Whether a real model, on its real path, keeps the documents of a real micro batch apart.

``probe(forward, batch)`` runs a host's own forward four times without gradients: as it is, with the
tokens of every other segment changed, with those of the rest changed, and with one token of each
segment changed. What must not notice, must not change:

    segments      | a a a a | b b b | c c c c c |
    odd ones      | a a a a | X X X | c c c c c |     a and c stay as they were
    even ones     | X X X X | b b b | X X X X X |     b stays
    middle tokens | a a X a | b X b | c c X c c |     what stands before an X stays

Together they see every boundary from both sides, each wrong by one or missing, an attention window
that is lost (segments are cut at windows), and a mask that is shifted: where a loss may not count,
it is 0, and elsewhere it is not. ``check_architecture`` asks more of a tiny copy of the model;
this asks what a host makes of the batch on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megapack.errors import ConfigError

# A position that must not notice a change may differ by so much of what the changed ones do: a
# mixture of experts sums in another order, and half precision rounds.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


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
) -> float:
    """Refuse a forward in which documents of a micro batch see each other.

    Every rank calls it alike: the number of forwards does not depend on the batch.

    Args:
        forward: from a batch like this one to what the host makes of its tokens: logits or hidden
            states ``(..., width)``, or losses, one number for each token in the order of
            ``batch["tokens"]``, masked as the host masks them. Any float dtype and device. Called
            without gradients; modes (dropout off) are the caller's.
        batch: tokens, labels int64 and loss_mask float32 ``(rows, R)``, cu_seqlens int32 1-D or
            per row; on the CPU. It stays as it is.
        outputs: of ``forward``.
        counted: which losses of a batch count, bool ``(rows, R)``; None: those that ``loss_mask``
            names. For hosts that cannot be told all (``megapack.integrations.dialects``).
        precision: in which the model computes; None: that of the outputs.
        host: in the error.

    Returns:
        Seconds.

    Raises:
        ConfigError: what leaked, from where to where; a loss that counts and must not, or does not
            and must; outputs that do not depend on the tokens at all, or are no numbers.
    """
    began = time.perf_counter()
    tokens = batch["tokens"].flatten()
    of, middle, behind = _places(SegmentPlaces.of(batch), len(tokens))
    others = _others(tokens)
    dtypes = []

    def run(changed: Tensor | None) -> tuple[Tensor, Tensor]:
        asked = dict(batch)
        if changed is not None:
            asked["tokens"] = torch.where(changed, others, tokens).view_as(batch["tokens"])
        counts = asked["loss_mask"] != 0 if counted is None else counted(asked)
        with torch.no_grad():
            made = forward(asked).detach()
        dtypes.append(made.dtype)
        return made.float().reshape(len(tokens), -1).cpu(), counts.flatten()

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
    _check(seen, of=of, tolerance=_TOLERANCE.get(precision or dtypes[0], 1e-3), host=host)
    return time.perf_counter() - began


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
) -> None:
    """Whether after each change only what may has changed, and something has."""
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

"""Probe of a host's real model and batch: does a document of a batch depend on the others?

``probe(forward, batch)`` runs the host's forward pass six times without gradients: unchanged, with
the tokens of every other segment changed, with those of the remaining segments changed, with one
token of each segment changed, and twice with shorter or single documents. X marks changed tokens;
the last column lists the outputs that must not change:

    segments       | a a a a | b b b | c c c c c |
    odd changed    | a a a a | X X X | c c c c c |     a and c
    even changed   | X X X X | b b b | X X X X X |     b
    middle changed | a a X a | b X b | c c X c c |     positions before an X
    cut in pieces  | a a|a a | b b|b | c c|c c|c |     the first piece of each
    one alone                          c c c           this beginning of a document

The first four runs detect boundaries that are missing or off by one, an attention window that the
host ignores (megapack starts a new segment at a window), and a shifted mask: the loss of a masked
token must be 0, that of any other token must not. The last two runs detect outputs that depend on
the longest document of the row, or on the length of the row. Pieces have at most 64 tokens, or half
of the longest segment.

In a packed prefix tree, every node is a segment, and a token may change all tokens below it. "Odd"
and "even" number the branches of a parent; of the even ones, only leaves are changed. The last two
runs have the longest path without its branches, and its first half:

    nodes          | p p p p | a a a | b b b |    branches a and b of a prefix p
    odd changed    | p p p p | a a a | X X X |    p and a
    even changed   | p p p p | X X X | b b b |    p and b
    one alone      | p p p p   a a a |            this path

``check_architecture`` checks more, on a tiny copy of the model; the probe
checks the host's real model and batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megapack.attention.problem import TreeSegments
from megapack.errors import ConfigError

# Outputs at unchanged tokens may differ by this fraction of the largest difference at changed
# tokens, because a mixture of experts may sum in another order, and half precision rounds.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}

_PIECE = 64  # tokens; below all known position thresholds


class SegmentPlaces(NamedTuple):
    """Segments of a micro batch, including padding; int64 tensors with one entry per segment."""

    begins: Tensor  # first token, counted over all rows
    lengths: Tensor
    padded_lengths: Tensor  # tokens from one begin to the next: length plus alignment padding

    @staticmethod
    def of(batch: Mapping[str, Any]) -> SegmentPlaces:
        """Read ``cu_seqlens``, 1-D or one list per row, whose last value may repeat; or the nodes
        of trees, ``cu_seqlens_q``."""
        rows, row = batch["tokens"].shape
        ends = batch["cu_seqlens_q" if "kv_index" in batch else "cu_seqlens"].long()
        places = batch.get("cu_seqlens_padded", ends).long()
        if ends.dim() == 1:
            ends, places, rows = ends[None], places[None], 1
        shift = torch.arange(rows).view(-1, 1) * row
        padded_lengths = places.diff()
        begins = places[:, :-1] + shift
        not_empty = padded_lengths > 0
        return SegmentPlaces(begins[not_empty], ends.diff()[not_empty], padded_lengths[not_empty])

    def positions(self) -> Tensor:
        """Return the position of every token in its segment, int64 (tokens,)."""
        first = self.begins.repeat_interleave(self.padded_lengths)
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
    """Raise ConfigError if documents of a micro batch depend on each other; return the seconds
    taken.

    Every rank must call this function: it runs six forward passes, seven with ``longest``. Raises
    ConfigError if a token depends on another document or on later tokens; a document depends on the
    length of others; a loss is nonzero where the mask is 0, or 0 where it is not; outputs are not
    finite, or do not change when tokens change.

    Args:
        forward: maps a batch like this one to logits or hidden states ``(..., width)``, or to one
            loss per token in the order of ``batch["tokens"]``, 0 where the host masks it. Any float
            dtype and device. It runs without gradients; the caller sets modes (dropout off).
        batch: tokens, labels int64 and loss_mask float32 ``(rows, R)``, cu_seqlens int32 1-D or per
            row; on the CPU. If ``loss_mask`` is all 0, the probe uses the next token of the
            document as label, or of the row if every document has one token. Or a packed tree
            (``TreeBatch``), whose losses are those of predicting each token.
        outputs: result of ``forward``.
        counted: returns which losses of a batch count, bool ``(rows, R)``, for hosts that cannot
            represent every mask (``megapack.integrations.dialects``); None: those in ``loss_mask``.
        precision: dtype in which the model computes; None: that of the outputs.
        host: name for errors.
        longest: another batch, with the longest documents, to cut into pieces; None: ``batch``.
        any_length: whether ``forward`` takes any number of tokens. Then one document runs alone;
            else all documents are cut a second time.
    """
    began = time.perf_counter()
    batch = _with_labels(batch)
    tokens = batch["tokens"].flatten()
    segment_of_token, end, changed_tokens = _token_places(batch, len(tokens))
    replacements = _other_tokens(tokens)
    dtypes = []

    def run(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        counts = inputs[_weights(inputs)] != 0 if counted is None else counted(inputs)
        with torch.no_grad():
            result = forward(inputs).detach()
        dtypes.append(result.dtype)
        return result.float().reshape(inputs["tokens"].numel(), -1).cpu(), counts.flatten()

    def run_changed(changed: Tensor) -> tuple[Tensor, Tensor]:
        new_tokens = torch.where(changed, replacements, tokens).view_as(batch["tokens"])
        return run({**batch, "tokens": new_tokens})

    plain, counts = run(dict(batch))
    if outputs == "losses":
        _check_losses(plain[:, 0], counts, segment_of_token, host)
    changes = []
    for changed in changed_tokens:
        result, counts_now = run_changed(changed)
        equal = result == plain  # also True for equal infinities, such as logits of unused ids
        difference = (result - plain).masked_fill(equal, 0).abs().amax(dim=1)
        if not (difference.isfinite() | segment_of_token.isnan()).all():
            raise ConfigError(
                f"{host} gives outputs that are not finite, so the probe cannot tell whether "
                "documents attend to each other; check the model's weights and precision"
            )
        # Some hosts derive labels from tokens; their losses may change with the labels.
        unmoved = counts == counts_now
        unmoved &= ~_dependents(changed, end) & ~segment_of_token.isnan()
        # A masked loss (padding has no other) is 0 for any tokens, so it cannot change.
        movable = ~unmoved & ~segment_of_token.isnan() & (counts | (outputs == "logits"))
        changes.append(_Change(difference, unmoved, movable))
    tolerance = _TOLERANCE.get(precision or dtypes[0], 1e-3)
    scale = _check_changes(changes, segment_of_token, tolerance=tolerance, host=host)
    if longest is not None:
        batch = _with_labels(longest)
        plain, counts = run(dict(batch))
    for part in _paths(batch) if "kv_index" in batch else _pieces(batch, any_length):
        result, counts_now = run(part.batch)
        comparable = counts[part.before] == counts_now[part.after]
        rounding = tolerance * scale
        _check_part(part, plain, result, comparable, rounding=rounding, host=host)
    return time.perf_counter() - began


def _with_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch, with next tokens as labels if its loss mask is all 0."""
    if (batch[_weights(batch)] != 0).any():
        return batch
    tokens = batch["tokens"]
    if "kv_index" in batch:
        predicted = (batch["predecessors"] >= 0).view_as(tokens)
        return {**batch, _weights(batch): predicted.float()}
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = SegmentPlaces.of(batch).positions().view_as(tokens)
    ends = torch.nn.functional.pad(positions[:, 1:] == 0, (0, 1), value=True)
    inside = following.masked_fill(ends, -100)
    # If every document has one token, label it with the first token of the next document.
    labels = inside if (inside >= 0).any() else following
    return {**batch, "labels": labels, "loss_mask": (labels >= 0).float()}


def _weights(batch: Mapping[str, Any]) -> str:
    return "loss_mask" if "loss_mask" in batch else "loss_weights"


# ---- Documents in shorter rows, or alone


class _Part(NamedTuple):
    """Batch whose tokens ``after`` must have the outputs of the original's tokens ``before``."""

    batch: dict[str, Any]
    before: Tensor
    after: Tensor
    what: str
    cause: str = (
        "The model depends on the lengths of other documents (like rope_type longrope or dynamic), "
        "or on the length of the row. "
        "Pack into shorter buckets, or choose a rope_type that is the same at any length"
    )


def _pieces(batch: Mapping[str, Any], any_length: bool) -> Iterator[_Part]:
    segments = SegmentPlaces.of(batch)
    half = -(-int(segments.lengths.max()) // 2)
    yield _cut(batch, segments, min(half, _PIECE))
    yield _alone(batch, segments, half) if any_length else _cut(batch, segments, half)


def _paths(batch: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the longest path of a tree, and its first half, without branches. The remaining tokens
    of the row become roots that are no longer, because a host may need rows of equal length."""
    tokens, path_ends = batch["tokens"], batch["cu_seqlens_k"].long()
    last = int(path_ends.diff().argmax())
    longest = batch["kv_index"].long()[path_ends[last] : path_ends[last + 1]]
    row = torch.arange(tokens.numel())
    for path in (longest, longest[: -(-len(longest) // 2)]):
        order = torch.cat([path, row[~torch.isin(row, path)]])
        depths = row % len(path)
        ends = torch.cat([(depths == 0).nonzero()[:, 0], row[-1:] + 1]).int()
        part = {
            name: value.flatten(0, 1)[order].view_as(value)
            if isinstance(value, Tensor) and value.shape[:2] == tokens.shape
            else value
            for name, value in batch.items()
        }
        part |= {"position_ids": depths.view_as(tokens), "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        part |= {"kv_index": row.int(), "predecessors": torch.where(depths > 0, row - 1, -1)}
        part |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), len(path))
        cause = "The model does not attend to whole paths: check that kv_index and the depths as "
        cause += "position_ids reach every layer, and that no layer is recurrent"
        yield _Part(part, path, row[: len(path)], "its path is alone", cause)


def _cut(batch: Mapping[str, Any], segments: SegmentPlaces, most: int) -> _Part:
    """Cut every segment into pieces of at most ``most`` tokens, with positions from 0."""
    padded = "cu_seqlens_padded" in batch
    align = int(np.gcd.reduce(segments.padded_lengths.numpy())) if padded else 1
    most = -(-most // align) * align
    counts = -(-segments.padded_lengths // most)
    number = torch.arange(len(counts)).repeat_interleave(counts)
    offset = (torch.arange(len(number)) - (counts.cumsum(0) - counts)[number]) * most
    pieces = SegmentPlaces(
        begins=segments.begins[number] + offset,
        lengths=(segments.lengths[number] - offset).clamp(0, most),
        padded_lengths=(segments.padded_lengths[number] - offset).clamp(max=most),
    )
    cut = dict(batch)
    lists = {"cu_seqlens": pieces.lengths, "cu_seqlens_padded": pieces.padded_lengths}
    for name, sizes in lists.items():
        if name in batch:
            cut[name] = _ends(sizes, pieces.begins, batch)
    if "position_ids" in batch:
        cut["position_ids"] = pieces.positions().view_as(batch["position_ids"])
    if "dataset_ids" in batch and len(batch["dataset_ids"]) == len(counts):
        cut["dataset_ids"] = batch["dataset_ids"][number]
    if "max_seqlen" in batch:
        cut["max_seqlen"] = _longest(pieces.padded_lengths, pieces.begins, batch)
    first = (offset == 0) & _begins_at_0(batch, segments)[number]
    inside = torch.cat([torch.arange(n) for n in pieces.lengths[first].tolist()] or [offset[:0]])
    places = pieces.begins[first].repeat_interleave(pieces.lengths[first]) + inside
    return _Part(cut, places, places, f"others in its row have at most {most} tokens")


def _alone(batch: Mapping[str, Any], segments: SegmentPlaces, most: int) -> _Part:
    """Return a batch with the first ``most`` tokens of the longest segment alone."""
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
    """Return whether each segment starts at position 0 (after an attention window it does not)."""
    if "position_ids" not in batch:
        return torch.ones(len(segments.begins), dtype=torch.bool)
    begins: Tensor = batch["position_ids"].flatten()[segments.begins] == 0
    return begins


def _ends(sizes: Tensor, begins: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return cu_seqlens of pieces in the form of the batch: one list, or one per row."""
    template: Tensor = batch["cu_seqlens"]
    if template.dim() == 1:
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(template.dtype)
    rows, row = batch["tokens"].shape
    lists = [sizes[begins // row == i].cumsum(0) for i in range(rows)]
    most = max(map(len, lists))
    lists = [torch.cat([ends, ends[-1:].expand(most - len(ends))]) for ends in lists]
    return torch.nn.functional.pad(torch.stack(lists), (1, 0)).to(template.dtype)


def _longest(padded_lengths: Tensor, begins: Tensor, batch: Mapping[str, Any]) -> Any:
    """Return max_seqlen of pieces in the form of the batch: int, or tensor 0-d or per row."""
    template = batch["max_seqlen"]
    if not isinstance(template, Tensor):
        return int(padded_lengths.max())
    if template.dim() == 0:
        return padded_lengths.max().to(template.dtype)
    rows, row = batch["tokens"].shape
    longest = [padded_lengths[begins // row == i].max() for i in range(rows)]
    return torch.stack(longest).to(template.dtype)


def _check_part(
    part: _Part, plain: Tensor, result: Tensor, comparable: Tensor, *, rounding: float, host: str
) -> None:
    """Raise ConfigError if a token's outputs in the part differ from those in its row."""
    before, after = plain[part.before], result[part.after]
    difference = (after - before).masked_fill(after == before, 0).abs().amax(dim=1)
    wrong = comparable & ~(difference <= rounding)
    if wrong.any():
        i = int(difference.masked_fill(~comparable, 0).argmax())
        raise ConfigError(
            f"{host} gives token {int(part.before[i])} different outputs in its row than if "
            f"{part.what}: they differ by {float(difference[i]):.3g}, but rounding explains only "
            f"{rounding:.3g} ({int(wrong.sum())} tokens differ). {part.cause}"
        )


# ---- Documents whose tokens change


class _Change(NamedTuple):
    """Effect of changed tokens, per token."""

    difference: Tensor  # largest change of an output, float32
    unmoved: Tensor  # bool: the output must not change
    movable: Tensor  # bool: the output may change


def _token_places(
    batch: Mapping[str, Any], num_tokens: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return for every token its segment (float; NaN in alignment padding), the end of the tokens
    that may depend on it (they begin with it), and the tokens that the first three runs change."""
    segments = SegmentPlaces.of(batch)
    segment_of_token = torch.full((num_tokens,), torch.nan)
    end, number = torch.arange(num_tokens), torch.zeros(num_tokens, dtype=torch.int64)
    middle = torch.zeros(num_tokens, dtype=torch.bool)
    inside = torch.cat([torch.arange(n) for n in segments.lengths.tolist()])
    places = segments.begins.repeat_interleave(segments.lengths) + inside
    half = (segments.lengths // 2).repeat_interleave(segments.lengths)
    numbers = torch.arange(len(segments.lengths))
    segment_of_token[places] = numbers.repeat_interleave(segments.lengths).float()
    last = (segments.begins + segments.lengths).repeat_interleave(segments.lengths)
    middle[places], end[places] = inside == half, last
    leaf = torch.ones(num_tokens, dtype=torch.bool)
    if "kv_index" in batch:
        numbers = _branch_numbers(batch)
        _, end = TreeSegments.of(batch).spans(num_tokens)
        leaf = end == last
    number[places] = numbers.repeat_interleave(segments.lengths)
    used = ~segment_of_token.isnan()
    # A parent that is changed together with its branches would show nothing about them.
    odd, even = (used & (number % 2 == parity) for parity in (1, 0))
    return segment_of_token, end, (odd, even & leaf, middle & leaf)


def _branch_numbers(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of every node among the branches of its parent, int64 (nodes,)."""
    ends, path_ends = (batch[f"cu_seqlens_{name}"].tolist() for name in "qk")
    keys, counter, numbers = batch["kv_index"].tolist(), Counter[int](), []
    for node in range(len(ends) - 1):
        size = ends[node + 1] - ends[node]
        if size:
            above = path_ends[node + 1] - size
            parent = keys[above - 1] if above > path_ends[node] else -1
            numbers.append(counter[parent])
            counter[parent] += 1
    return torch.tensor(numbers)


def _dependents(changed: Tensor, end: Tensor) -> Tensor:
    """Return the tokens that may depend on a changed one: from each of these to its end."""
    rows = changed.nonzero().flatten()
    steps = torch.zeros(len(changed) + 1, dtype=torch.int64)
    steps[rows] = 1
    steps.index_add_(0, end[rows], torch.full_like(rows, -1))
    return steps.cumsum(0)[:-1] > 0


def _other_tokens(tokens: Tensor) -> Tensor:
    """Return a different id for each token, within the range of ids that occur (plus
    a neighbor if only one occurs)."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        low, high = (0, 1) if low <= 1 else (low - 1, low)
    return low + (tokens - low + 1) % (high - low + 1)


def _check_losses(losses: Tensor, counts: Tensor, segment_of_token: Tensor, host: str) -> None:
    wrong = (losses != 0) != counts
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ConfigError(
            f"{host} {'counts' if losses[i] != 0 else 'leaves out'} the loss of token {i} (segment "
            f"{int(segment_of_token[i])}), against the loss mask; this holds for "
            f"{int(wrong.sum())} of {len(losses)} tokens: check whether the mask or the labels are "
            "shifted twice"
        )


def _check_changes(
    changes: Sequence[_Change], segment_of_token: Tensor, *, tolerance: float, host: str
) -> float:
    """Check that each change affects outputs, and only allowed ones; return the largest effect."""
    moved = [
        float(change.difference[change.movable].max()) if change.movable.any() else None
        for change in changes
    ]
    if 0 in moved or not any(moved):
        raise ConfigError(
            f"{host} gives the same outputs when tokens change: its outputs do not depend on the "
            "batch that the probe passes, so the probe cannot check anything"
        )
    largest = max(move for move in moved if move)
    for change, move in zip(changes, moved, strict=True):
        # If only padding changed, no output moves: compare with the largest move of the other runs.
        rounding = tolerance * (move or largest)
        leaked = change.unmoved & (change.difference > rounding)
        if leaked.any():
            i = int(change.difference.masked_fill(~change.unmoved, 0).argmax())
            same = bool(change.movable[segment_of_token == segment_of_token[i]].any())
            raise ConfigError(
                f"{host} lets token {i} (segment {int(segment_of_token[i])}) see "
                f"{'what comes after it' if same else 'another document or branch'}: it changed by "
                f"{float(change.difference[i]):.3g}, but rounding explains at most {rounding:.3g} "
                f"({int(leaked.sum())} tokens are affected). The boundaries of the batch do not "
                "reach the attention unchanged: check the attention backend and the code before it"
            )
    return largest

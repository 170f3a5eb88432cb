"""Probe of a host's real model on a batch of megapack: ``check_rows`` raises an error, or passes.

``check_rows(forward, batch)`` runs the host's forward pass six times without gradients. X marks
changed tokens; the last column lists the outputs that must not change:

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
of the longest segment. ``check_architecture`` checks more, on a tiny copy of the model; the probe
checks the host's real model and batch.

In a packed prefix tree, every node is a segment, and a token may change all tokens below it. "Odd"
and "even" number the branches of a parent; of the even ones, only leaves are changed. The last two
runs have the longest path without its branches, and its first half:

    nodes          | p p p p | a a a | b b b |    branches a and b of a prefix p
    odd changed    | p p p p | a a a | X X X |    p and a
    even changed   | p p p p | X X X | b b b |    p and b
    one alone      | p p p p   a a a |            this path
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megapack.probe.boundaries import Documents, SegmentPlaces, alone
from megapack.probe.detector import Passes, Run, share
from megapack.probe.layers import largest_change
from megapack.probe.report import LeakError, merge

_PIECE = 64  # tokens; below all known position thresholds
_TREE_CAUSE = (
    "The model does not attend to whole paths: check that kv_index and the depths as position_ids "
    "reach every layer, and that no layer is recurrent"
)


def check_rows(
    forward: Callable[[dict[str, Any]], Tensor],
    batch: Mapping[str, Any],
    *,
    counted: Callable[[Mapping[str, Any]], Tensor] | None = None,
    host: str = "the model",
    longest: Mapping[str, Any] | None = None,
    any_length: bool = False,
) -> float:
    """Raise LeakError if documents of a micro batch depend on each other; return the seconds taken.

    Every rank must call this function: it runs six forward passes, seven with ``longest``. Raises
    LeakError if a token depends on another document or on later tokens; a document depends on the
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
        counted: returns which losses of a batch count, bool ``(rows, R)``, for hosts that cannot
            represent every mask (``megapack.integrations.dialects``); None: those in ``loss_mask``.
        host: name for errors.
        longest: another batch, with the longest documents, to cut into pieces; None: ``batch``.
        any_length: whether ``forward`` takes any number of tokens. Then one document runs alone;
            else all documents are cut a second time.
    """
    began = time.perf_counter()
    batch = _with_labels(batch)

    def counts_of(inputs: Mapping[str, Any]) -> Tensor:
        counts: Tensor = inputs[_weights(inputs)] != 0 if counted is None else counted(inputs)
        return counts.flatten()

    def call(_: Any, inputs: dict[str, Any]) -> Tensor:
        return forward(inputs).reshape(inputs["tokens"].numel(), -1)

    boundaries = "cu_seqlens_q" if "kv_index" in batch else "cu_seqlens"
    passes = Passes(forward, batch, boundaries=boundaries, call=call, name=host)
    with passes.recorder:
        problems = [one for one in _problems(passes, batch, counts_of, longest, any_length) if one]
    for rank in share(problems):
        if rank:
            raise LeakError(f"{host} {rank[0]}")
    return time.perf_counter() - began


def probed_labels(batch: Mapping[str, Any]) -> Tensor:
    """Return the labels that a probe reads: logits of a large vocabulary cost more than the model.

    Keeps those at the start, the middle (where a token is changed) and the end of every document,
    and each 64th in between. Keeps all in prefix trees, or if a document with labels would keep
    none.
    """
    labels: Tensor = batch["labels"].cpu()
    if "kv_index" in batch:
        return labels
    segments = SegmentPlaces.of(batch)
    of_token = segments.of_token(labels.numel())
    positions = segments.positions().flatten()
    lengths = segments.lengths[of_token]
    kept = (positions < 4) | (positions % 64 == 0) | (positions >= lengths - 3)
    kept |= (positions - lengths // 2).abs() <= 2
    few = labels.masked_fill(~kept.view_as(labels), -100)
    with_labels, kept_documents = ({*of_token[x.flatten() >= 0].tolist()} for x in (labels, few))
    return few if with_labels == kept_documents else labels


def _problems(
    passes: Passes, batch: dict[str, Any], counts_of: Any, longest: Any, any_length: bool
) -> Iterator[str | None]:
    """Run the passes of ``check_rows``; yield what is wrong on this rank. Raises LeakError if
    documents leak."""
    plain, counts = passes.run(batch), counts_of(batch)
    if plain.outputs[0].shape[1] == 1:
        yield _loss_problem(plain.outputs[0][:, 0], counts, passes.of_token)
    end, every_changed = _changed_tokens(batch)
    changes = []
    for changed in every_changed:
        one = {**batch, "tokens": passes.changed(changed)["tokens"]}
        # Some hosts derive labels from tokens; their losses may change with the labels.
        changes.append((_dependents(changed, end), passes.run(one), counts == counts_of(one)))
    passes.measure(plain, changes)
    every = [leak for change in changes[:2] for leak in passes.affected(plain, *change)]
    if leaks := merge(share(every)):
        # Other nodes of a tree may depend on the one that is changed.
        is_tree = "kv_index" in batch
        leaks = leaks if is_tree else passes.exact(leaks, plain)
        what = "another document or branch" if is_tree else "another document"
        head = f"{passes.name} lets token {leaks[0].first_position} see {what}"
        raise LeakError("\n".join([head, *map(str, leaks)]))
    dependents, run, same = changes[2]
    seen = run.difference(plain).masked_fill(dependents | ~same | (passes.of_token < 0), 0)
    if float(seen.max()) > passes.rounding:
        yield f"lets token {int(seen.argmax())} see what comes after it"
    if longest is not None:
        batch = _with_labels(longest)
        plain, counts = passes.run(batch, documents=_documents(batch)), counts_of(batch)
    for part in _parts(batch, any_length=any_length):
        comparable = counts[part.before] == counts_of(part.batch)[part.after]
        run = passes.run(part.batch, documents=_documents(part.batch))
        yield _part_problem(part, plain, run, comparable, rounding=passes.rounding)


def _documents(batch: Mapping[str, Any]) -> Documents:
    rows, row = batch["tokens"].shape
    return Documents(SegmentPlaces.of(batch).of_token(rows * row), rows, row)


def _with_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch, with next tokens as labels if its loss mask is all 0."""
    if (batch[_weights(batch)] != 0).any():
        return dict(batch)
    tokens = batch["tokens"]
    if "kv_index" in batch:
        predicted = (batch["predecessors"] >= 0).view_as(tokens)
        return {**batch, _weights(batch): predicted.float()}
    following = pad(tokens[:, 1:], (0, 1), value=-100)
    positions = SegmentPlaces.of(batch).positions().view_as(tokens)
    ends = pad(positions[:, 1:] == 0, (0, 1), value=True)
    inside = following.masked_fill(ends, -100)
    # If every document has one token, label it with the first token of the next document.
    labels = inside if (inside >= 0).any() else following
    return {**batch, "labels": labels, "loss_mask": (labels >= 0).float()}


def _weights(batch: Mapping[str, Any]) -> str:
    return "loss_mask" if "loss_mask" in batch else "loss_weights"


def _changed_tokens(batch: Mapping[str, Any]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return for every token the end of the range of tokens that may depend on it, int64
    (tokens,), and the tokens that three runs change."""
    segments = SegmentPlaces.of(batch)
    numbers = torch.arange(len(segments.begins))
    last = ends = segments.begins + segments.lengths
    if "kv_index" in batch:
        numbers, last = _branches(batch)
    of_token = segments.of_token(batch["tokens"].numel())
    used, inside = of_token >= 0, torch.arange(len(of_token))
    odd = used & (numbers[of_token] % 2 == 1)
    middle = used & (inside == (segments.begins + segments.lengths // 2)[of_token])
    # A parent that is changed together with its branches would show nothing about them.
    leaf = (last == ends)[of_token]
    return last[of_token].where(used, inside), (odd, used & ~odd & leaf, middle & leaf)


def _dependents(changed: Tensor, end: Tensor) -> Tensor:
    """Return the tokens that may depend on a changed one: from each of these to its end."""
    steps = torch.zeros(len(changed) + 1, dtype=torch.int64)
    steps[:-1] += changed
    steps.index_add_(0, end[changed], torch.full_like(end[changed], -1))
    return steps.cumsum(0)[:-1] > 0


def _loss_problem(losses: Tensor, counts: Tensor, of_token: Tensor) -> str | None:
    wrong = (losses != 0) != counts
    if not wrong.any():
        return None
    i = int(wrong.nonzero()[0])
    return (
        f"{'counts' if losses[i] != 0 else 'leaves out'} the loss of token {i} (document "
        f"{int(of_token[i])}), against the loss mask; this holds for {int(wrong.sum())} of "
        f"{len(losses)} tokens: check whether the mask or the labels are shifted twice"
    )


# ---- Documents in shorter rows, or alone


class _Part(NamedTuple):
    """Batch whose tokens ``after`` must have the outputs of the original's tokens ``before``."""

    batch: dict[str, Any]
    before: Tensor
    after: Tensor
    what: str
    cause: str = (
        "The model depends on the lengths of other documents (like rope_type longrope or dynamic), "
        "or on the length of the row. Pack into shorter buckets, or choose a rope_type that is the "
        "same at any length"
    )


def _parts(batch: Mapping[str, Any], *, any_length: bool) -> Iterator[_Part]:
    if "kv_index" in batch:
        for part, before, after in _paths(batch):
            yield _Part(part, before, after, "its path is alone", _TREE_CAUSE)
        return
    segments = SegmentPlaces.of(batch)
    half = -(-int(segments.lengths.max()) // 2)
    yield _cut(batch, segments, min(half, _PIECE))
    yield _alone(batch, segments, half) if any_length else _cut(batch, segments, half)


def _cut(batch: Mapping[str, Any], segments: SegmentPlaces, most: int) -> _Part:
    """Cut every segment into pieces of at most ``most`` tokens, with positions from 0."""
    padded = "cu_seqlens_padded" in batch
    align = math.gcd(*segments.padded_lengths.tolist()) if padded else 1
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
    made = alone(batch, _documents(batch), before)
    if "dataset_ids" in batch and len(batch["dataset_ids"]) == len(usable):
        made["dataset_ids"] = batch["dataset_ids"][number : number + 1]
    before = before if int(usable[number]) >= most else before[:0]
    return _Part(made, before, torch.arange(len(before)), "it is alone")


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
        return pad(sizes.cumsum(0), (1, 0)).to(template.dtype)
    rows, row = batch["tokens"].shape
    lists = [sizes[begins // row == i].cumsum(0) for i in range(rows)]
    most = max(map(len, lists))
    lists = [torch.cat([ends, ends[-1:].expand(most - len(ends))]) for ends in lists]
    return pad(torch.stack(lists), (1, 0)).to(template.dtype)


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


def _part_problem(
    part: _Part, plain: Run, run: Run, comparable: Tensor, *, rounding: float
) -> str | None:
    """Describe a token whose outputs in the part differ from those in its row."""
    before, after = plain.outputs[0][part.before], run.outputs[0][part.after]
    difference = largest_change(after, before)
    wrong = comparable & ~(difference <= rounding)
    if not wrong.any():
        return None
    i = int(difference.masked_fill(~comparable, 0).argmax())
    return (
        f"gives token {int(part.before[i])} other outputs in its row than when {part.what}: they "
        f"differ by {float(difference[i]):.3g}, but rounding explains only {rounding:.3g} "
        f"({int(wrong.sum())} tokens differ). {part.cause}"
    )


# ---- Packed prefix trees


def _branches(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return for every node its number among the branches of its parent, and the row at which the
    last path through it ends: two int64 (nodes,), without empty nodes."""
    ends, path_ends = (batch[f"cu_seqlens_{name}"].tolist() for name in "qk")
    keys, counter = batch["kv_index"].tolist(), Counter[int]()
    numbers: list[int] = []
    last: list[int] = []
    open_nodes: list[tuple[int, int]] = []  # node and the length of its path, from a root down
    for begin, end, path, path_end in zip(ends, ends[1:], path_ends, path_ends[1:], strict=False):
        if begin == end:
            continue
        above = path_end - path - (end - begin)
        while open_nodes and open_nodes[-1][1] > above:
            open_nodes.pop()
        open_nodes.append((len(numbers), path_end - path))
        parent = keys[path + above - 1] if above else -1
        numbers.append(counter[parent])
        counter[parent] += 1
        last.append(end)
        for node, _ in open_nodes:
            last[node] = end
    return torch.tensor(numbers), torch.tensor(last)


def _paths(batch: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """Yield the longest path of a tree, and its first half, without branches: batch, tokens of the
    original, tokens of the batch. The remaining tokens of the row become roots of at most that
    length, because a host may need rows of equal length."""
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
        yield part, path, row[: len(path)]

"""Check of the arguments of every model call against the documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.hosts.corpus import MASKED, NUM_WEB, WINDOW, Corpus

SPLITS = ("train", "valid", "test")


@dataclass
class Findings:
    """Counts of one run, over all ranks."""

    calls: int = 0
    reads: int = 0
    segments: int = 0
    attentions: int = 0
    """Calls of a layer's attention that were noted, where boundaries are handed to attention."""
    ahead: int = 0
    """Labels that count at all depths of multi-token prediction."""
    problems: list[str] = field(default_factory=list)
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens of every row of training that was read."""
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """Of the log, see losses.py."""
    splits: set[str] = field(default_factory=set)
    """Of which rows were read."""
    longest: dict[int, int] = field(default_factory=dict)
    """Longest segment of its micro batch, tokens."""

    def hold(self) -> None:
        """Raise AssertionError with the first problems."""
        assert not self.problems, "\n".join(self.problems[:20])


def load_ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]


def check_run(
    recorded: list[dict[str, Any]],
    corpus: Corpus,
    *,
    align: int = 1,
    workers: bool = False,
    shifted: bool = False,
) -> Findings:
    """Check all ranks' records of one run (``load_ranks``).

    Args:
        align: 2 x context-parallel size where documents are cut between ranks, not whole rows.
        workers: number of data loader workers: they read ahead, several of them in any order.
        shifted: the host makes labels by shifting its rows, so a segment that ends inside its
            document has no last label unless the row ends there, too.
    """
    found = Findings(calls=sum(len(rank["calls"]) for rank in recorded))
    ranks = [whole_rank(group, align, found) for group in _by(recorded, "context")]
    for number, rank in enumerate(ranks):
        for k, call in enumerate(rank["calls"]):
            if call["cu_seqlens"] is not None:
                found.segments += len(call["cu_seqlens"]) - 1
            found.attentions += len(call.get("attention", ()))
            problems = [*wrong(call, corpus.begins, align, shifted=shifted), *unlike_layers(call)]
            problems += wrong_ahead(call, found)
            if call.get("pads"):
                problems.append("boundaries with and without padding are two objects")
            found.problems += [f"rank {number}, call {k}: {problem}" for problem in problems]
    found.problems += alike(ranks)
    for at_stage in _by([rank for rank in ranks if rank["where"]["tensor"] == 0], "data"):
        if workers:
            for rank in at_stage:
                rank["reads"].sort(key=lambda read: read["rows"][0])
        found.problems += one_bucket_in_turn(at_stage, ahead=workers)
        for rank in at_stage:
            reads, calls = len(rank["reads"]), len(rank["calls"])
            found.reads += reads
            if reads < calls or (not workers and reads != calls):
                found.problems.append(f"{reads} reads, {calls} calls")
            remember_rows(rank, found)
    return found


def _by(ranks: list[dict[str, Any]], axis: str) -> list[list[dict[str, Any]]]:
    """Groups of ranks that differ in one axis, in its order."""
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for rank in sorted(ranks, key=lambda rank: rank["where"][axis]):
        others = tuple(at for name, at in sorted(rank["where"].items()) if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def whole_rank(group: list[dict[str, Any]], align: int, found: Findings) -> dict[str, Any]:
    """Return one rank of a context-parallel group, whose calls have the rows of all."""
    if len(group) == 1:
        return group[0]
    calls = list(zip(*(rank["calls"] for rank in group), strict=True))
    for k, parts in enumerate(calls):
        for key in ("cu_seqlens", "max_seqlen", "training"):
            if any(repr(part[key]) != repr(parts[0][key]) for part in parts):
                found.problems.append(f"call {k}: {key} differs in a context-parallel group")
    rows = [[read["rows"] for read in rank["reads"]] for rank in group]
    if any(of_rank != rows[0] for of_rank in rows):
        found.problems.append("ranks of a context-parallel group read other rows")
    whole = [joined(list(parts), each_document=align > 1) for parts in calls]
    if align > 1 and group[0]["reads"]:
        for k, (call, read) in enumerate(zip(whole, group[0]["reads"], strict=True)):
            found.problems += [f"call {k}: {p}" for p in wrongly_aligned(call, read, align)]
    return {**group[0], "calls": whole}


def unlike_layers(call: dict[str, Any]) -> Iterator[str]:
    """Check that all layers of a call, and their recomputation, get the same boundaries."""
    for bounds, longest in call.get("attention", ()):
        if bounds is None or call["cu_seqlens"] is None:
            yield "a layer had no boundaries"
        elif not torch.equal(bounds, call["cu_seqlens"]) or longest != call["max_seqlen"]:
            yield "layers had different boundaries"


def wrong(
    call: dict[str, Any], begins: NDArray[np.int64], align: int = 1, *, shifted: bool = False
) -> Iterator[str]:
    """Yield the faults of one call. Token ids are positions in the corpus, 0 is padding.

    A segment has less than ``align`` tokens of padding at its end.
    """
    if call["cu_seqlens"] is None:
        yield "no boundaries"
        return
    bounds = call["cu_seqlens"].tolist()
    lengths = np.diff(bounds)
    if call["cu_seqlens"].dtype != torch.int32 or bounds[0] != 0 or (lengths <= 0).any():
        yield f"cu_seqlens {bounds}"
        return
    if int(call["max_seqlen"]) != max(lengths):
        yield f"max_seqlen {call['max_seqlen']}, the longest segment has {max(lengths)}"
    tokens = _flat(call["tokens"])
    if tokens is None:
        return
    if len(tokens) != bounds[-1]:
        yield f"{len(tokens)} tokens, cu_seqlens end at {bounds[-1]}"
        return
    positions = _flat(call["position_ids"])
    follows = np.zeros(len(tokens), np.int64)  # the next token of the document, 0: none
    for begin, end in pairwise(bounds):
        text = tokens[begin:end]
        if not text.any():
            continue
        room = len(text) - len(np.trim_zeros(text, "b"))
        text, end = text[: len(text) - room], end - room  # noqa: PLW2901
        if room >= align:
            yield f"segment [{begin}, {end}) has {room} tokens of padding"
        document = int(np.searchsorted(begins, text[0], side="right")) - 1
        last = int(begins[document + 1]) - 1
        if not np.array_equal(text, np.arange(text[0], text[0] + len(text))) or text[-1] > last:
            yield f"segment [{begin}, {end}) is not a run of one document"
        follows[begin:end] = np.where(text < last, text + 1, 0)
        first = 0
        if positions is None:  # relative ones, counted by the host's attention
            continue
        if begin and tokens[begin - 1] and follows[begin - 1] == text[0]:  # cut by a window
            first = int(positions[begin - 1]) + 1
            if first % WINDOW:
                yield f"segment [{begin}, {end}) continues after {first} tokens"
        if not np.array_equal(positions[begin:end], np.arange(first, first + len(text))):
            yield f"position_ids of segment [{begin}, {end}) do not begin at {first}"
    if shifted:
        row_ends = np.arange(1, len(tokens) + 1) % call["tokens"].shape[-1] == 0
        follows[(np.append(tokens[1:], 0) != follows) & ~row_ends] = 0
    mask, labels = _flat(call["loss_mask"]), _flat(call["labels"])
    if mask is not None and not np.array_equal(mask, (follows > 0).astype(np.float32)):
        yield "loss_mask is not 1 just where the document continues"
    if labels is not None and not np.array_equal(labels[follows > 0], follows[follows > 0]):
        yield "labels are not the next tokens of the documents"


def wrong_ahead(call: dict[str, Any], found: Findings) -> Iterator[str]:
    """Check multi-token prediction: at depth k, a token has the label of the k-th token after it,
    if that is in its segment. ``wrong`` checks labels and masks themselves."""
    rolled = [_flat(tensor) for tensor in call.get("ahead", ())]
    pairs = [(a, b) for a, b in pairwise(rolled) if b.dtype == np.float32]
    if call["labels"] is None or not pairs:
        return
    labels, mask = _flat(call["labels"]), _flat(call["loss_mask"])
    told = np.where(mask > 0, labels, 0)
    for depth, (labels, mask) in enumerate(pairs, start=1):
        expected = np.zeros_like(told)
        for begin, end in pairwise(call["cu_seqlens"].tolist()):
            expected[begin : max(begin, end - depth)] = told[begin + depth : end]
        counts = expected > 0
        found.ahead += int(counts.sum())
        if not np.array_equal(mask > 0, counts):
            yield f"depth {depth}: the mask is not 1 just where the segment continues"
        elif not np.array_equal(labels[counts], expected[counts]):
            yield f"depth {depth}: labels are not the tokens ahead"


def _flat(tensor: torch.Tensor | None) -> NDArray[Any] | None:
    return None if tensor is None else tensor.flatten().numpy()


def alike(ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Check that tensor-parallel ranks and pipeline stages see the same micro batch."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        groups.setdefault(rank["where"]["data"], []).append(rank)
    for number, (first, *others) in groups.items():
        for other in others:
            if len(first["calls"]) != len(other["calls"]):
                yield f"data-parallel rank {number}: stages have other numbers of calls"
            for k, (a, b) in enumerate(zip(first["calls"], other["calls"], strict=False)):
                for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
                    x, y = _flat(a[key]), _flat(b[key])
                    if x is not None and y is not None and not np.array_equal(x, y):
                        yield f"data-parallel rank {number}, call {k}: {key} differs in its group"


def one_bucket_in_turn(ranks: list[dict[str, Any]], *, ahead: bool = False) -> Iterator[str]:
    """Check that all ranks read one bucket in a micro step, and rows are consecutive over ranks.

    Args:
        ahead: one rank may have read further ahead than another.
    """
    for split in SPLITS:
        reads = [[read for read in rank["reads"] if read["split"] == split] for rank in ranks]
        if len({len(part) for part in reads}) != 1 and not ahead:
            yield f"{split}: ranks read {[len(part) for part in reads]} times"
        expected: int | None = None
        for k, step in enumerate(zip(*reads, strict=False)):
            buckets = {bucket for read in step for bucket in read["buckets"]}
            if len(buckets) != 1:
                yield f"{split}, micro step {k}: buckets {sorted(buckets)}"
            rows = [row for read in step for row in read["rows"]]
            begin = rows[0] if expected is None else expected
            if rows != list(range(begin, begin + len(rows))):
                yield f"{split}, micro step {k}: rows {rows} after {expected}"
            expected = rows[-1] + 1


def remember_rows(rank: dict[str, Any], found: Findings) -> None:
    training = [read for read in rank["reads"] if read["split"] == "train"]
    found.splits |= {read["split"] for read in rank["reads"]}
    calls = [call for call in rank["calls"] if call["training"]]
    if len(training) < len(calls):
        found.problems.append(f"{len(training)} reads and {len(calls)} calls of training")
    for read, call in zip(training, calls, strict=False):
        if call["tokens"] is None:
            continue
        rows = call["tokens"].reshape(len(read["rows"]), -1).tolist()
        for number, row in zip(read["rows"], rows, strict=True):
            if found.rows.setdefault(number, tuple(row)) != tuple(row):
                found.problems.append(f"row {number} was read with two contents")
            found.longest[number] = int(call["max_seqlen"])


def compare(known: dict[int, tuple[int, ...]], found: Findings, *, at_least: int) -> None:
    """Check that a row number stands for the same row in every run of the same data."""
    shared = known.keys() & found.rows.keys()
    assert all(known[number] == found.rows[number] for number in shared)
    assert not known or len(shared) >= at_least, "the runs have rows in common"
    known.update(found.rows)


def evaluated_labels(recorded: list[dict[str, Any]]) -> list[int]:
    """Return all labels of all ranks' calls without training, sorted."""
    calls = [call for rank in recorded for call in rank["calls"] if not call["training"]]
    counted = [call["labels"][call["loss_mask"] > 0].flatten() for call in calls]
    return sorted(torch.cat(counted).tolist())


def check_evaluation(
    recorded: list[dict[str, Any]], corpus: Corpus, sets: list[range], *, shifted: bool = False
) -> tuple[Findings, list[float]]:
    """Check evaluations in which every document of every set counts equally.

    Args:
        recorded: records of every rank; those of the last pipeline stage have losses.
        sets: numbers of the documents of each set, in the order in which they are evaluated,
            without documents of which an evaluation has no token.
        shifted: see ``check_run``; then count every token, because some labels are dropped.

    Returns:
        Findings, and the mean loss of each set, evaluation after evaluation.
    """
    found = Findings(calls=sum(len(rank["calls"]) for rank in recorded))
    evaluations: dict[int, list[dict[str, Any]]] = {}
    for rank in recorded:
        steps = list(accumulate(call["training"] for call in rank["calls"]))
        for step, call in zip(steps, rank["calls"], strict=True):
            found.segments += len(call["cu_seqlens"]) - 1
            found.problems += wrong(call, corpus.begins, shifted=shifted)
            if not call["training"] and "losses" in call:
                evaluations.setdefault(step, []).append(call)
    means = []
    for calls in evaluations.values():
        masks, labels, losses, counted = (
            torch.cat([call[key].flatten() for call in calls]).double().numpy()
            for key in ("loss_mask", "labels", "losses", "tokens" if shifted else "labels")
        )
        for documents in sets:
            begins = corpus.begins[documents.start : documents.stop + 1]
            mine = (masks > 0) & (begins[0] < labels) & (labels < begins[-1])
            if shifted and not mine.any():
                continue
            num_tokens = begins[-1] - begins[0]
            inside = (begins[0] <= counted) & (counted < begins[-1]) if shifted else mine
            times = np.bincount(counted[inside].astype(int) - begins[0], minlength=num_tokens)
            expected = np.ones(num_tokens, int)
            if not shifted:
                expected[begins[:-1] - begins[0]] = 0  # nothing predicts the first of a document
            if not times.max() or not np.array_equal(times, times.max() * expected):
                found.problems.append(f"{documents}: labels count {np.unique(times)} times")
            means.append(float((losses * masks)[mine].mean()))
    return found, means


def check_program(found: Findings, corpus: Corpus, global_batch: int) -> None:
    """Check program.json: two steps have a window, one has little code, two exclude documents."""
    steps: list[dict[str, Any]] = [{"documents": set(), "longest": 0} for _ in range(4)]
    for number, row in found.rows.items():
        step = steps[number // global_batch]
        tokens = np.array([token for token in row if token])
        step["documents"] |= set((np.searchsorted(corpus.begins, tokens, "right") - 1).tolist())
        step["longest"] = max(step["longest"], found.longest[number])
    shares = [np.mean([document >= NUM_WEB for document in step["documents"]]) for step in steps]
    assert shares[0] < 0.5 < min(shares[1:])
    assert all((step["longest"] <= WINDOW) == (i < 2) for i, step in enumerate(steps))
    assert all(bool(step["documents"] & set(MASKED)) == (i < 2) for i, step in enumerate(steps))


# ---- Rows of which context-parallel ranks hold parts, joined again -------------------------------

ROW_KEYS = ("tokens", "position_ids", "labels", "loss_mask")


def joined(parts: list[dict[str, Any]], *, each_document: bool) -> dict[str, Any]:
    """One call of the model: its tensors over all ranks of the context-parallel group.

    Every piece (a segment, or the whole micro batch) is cut into 2 x size chunks, of which rank r
    holds numbers r and 2 x size - 1 - r, one piece after the other.
    """
    size, whole = len(parts), dict(parts[0])
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
        yield "attention got other boundaries than those of the padded segments"
        return
    if (padded % to).any():
        yield f"boundaries {padded.tolist()} are not multiples of {to}"
    if "cu_seqlens_padded" not in read:
        yield "the dataset gives no cu_seqlens_padded"
        return
    lengths, rooms = (_lengths(read[name]) for name in ("cu_seqlens", "cu_seqlens_padded"))
    if rooms != [-(-length // to) * to for length in lengths]:
        yield f"segments of {lengths} tokens have room for {rooms}"
    if rooms != _lengths(padded):
        yield "the model got other boundaries than the dataset's"


def _lengths(bounds: torch.Tensor) -> list[int]:
    lengths = bounds.diff(dim=-1).flatten().tolist()
    return [length for length in lengths if length]

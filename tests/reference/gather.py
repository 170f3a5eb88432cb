"""Micro batches in plain Python: the definition of the C++ gather."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

NO_LABEL = -100

Segment = tuple[int, int, int]  # document, begin, length


@dataclass(frozen=True)
class Column:
    """Rows per token of every document; ``fill``: a row for places without one."""

    rows: list[list[bytes]]
    fill: bytes
    of: str = "token"


@dataclass
class Batch:
    """Rows joined to one list; cu_seqlens of the whole and of every row."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    loss_mask: list[float] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of attention segments, without padding
    rooms: list[int] = field(default_factory=list)  # with the padding that aligns the next one
    columns: dict[str, list[bytes]] = field(default_factory=dict)

    def write(self, tokens: list[int], labels: list[int], first: int, mask: list[float]) -> None:
        self.tokens += tokens
        self.labels += labels
        self.loss_mask += mask
        self.position_ids += range(first, first + len(tokens))

    def cu_seqlens(self, which: str = "lengths") -> list[int]:
        result = [0]
        for length in getattr(self, which):
            result.append(result[-1] + length)
        return result

    def cu_seqlens_of_rows(self, row_tokens: int, which: str = "lengths") -> list[list[int]]:
        rows: list[list[int]] = []
        at = 0
        for length, room in zip(getattr(self, which), self.rooms, strict=True):
            if at % row_tokens == 0:
                rows.append([0])
            rows[-1].append(rows[-1][-1] + length)
            at += room
        return rows


@dataclass(frozen=True)
class Rules:
    positions: str = "segment"
    attention: str = "document"
    label_boundary: str = "document"
    alignment: int = 1
    pad_token: int = 0
    loss: str = "token_mean"


def gather(
    documents: list[list[int]],
    samples: list[list[Segment]],
    *,
    num_rows: int,
    row_tokens: int,
    capacity: int,
    chosen: list[list[int]] | None = None,
    joined: set[tuple[int, int]] = frozenset(),
    weights: list[list[float]] | None = None,
    factors: list[float] | None = None,
    window: int | None = None,
    columns: dict[str, Column] | None = None,
    **rules: str | int,
) -> Batch:
    """Lay samples out in rows, ``row_tokens // capacity`` equal slots in each.

    Args:
        documents: the tokens of every document.
        samples: the segments of every sample, for the slots in order; missing ones are padding.
        chosen: per document, a label for every token (not shifted), negative for no label.
        joined: (sample, segment) pairs that continue the group of the segment before. With
            attention ``group``, both are one attention segment, and the last token of the previous
            document predicts the first of the next one (``label_boundary`` "document" then stops
            labels only at groups).
        weights: per document, the factor on the loss of predicting each of its tokens.
        factors: factor of every sample on its loss mask.
        window: attention window, tokens; None: no limit.
        columns: a column ``of`` the token has the token's row; one of the target has the row of the
            token that is the label, whether or not a label is chosen.
        rules: see Rules. Unless loss is "token_mean", the weights of a sequence (a segment) are
            divided by their sum.
    """
    batch, how = Batch(columns={name: [] for name in columns or {}}), Rules(**rules)
    slots = row_tokens // capacity
    slot = row_tokens // slots // how.alignment * how.alignment
    for i in range(num_rows * slots):
        last_of_row = (i + 1) % slots == 0
        room = row_tokens - (slots - 1) * slot if last_of_row else slot
        used = 0
        if i < len(samples):
            used = _write_sample(
                batch,
                documents,
                samples[i],
                how,
                chosen=chosen or documents,
                joined={s for sample, s in joined if sample == i},
                weights=weights or [[1.0] * len(document) for document in documents],
                factor=factors[i] if factors else 1.0,
                columns=columns or {},
            )
        if used < room:
            first = used if how.positions == "sample" else 0
            padding = room - used
            batch.write([how.pad_token] * padding, [NO_LABEL] * padding, first, [0.0] * padding)
            batch.lengths.append(padding)
            batch.rooms.append(padding)
            for name, column in (columns or {}).items():
                batch.columns[name] += [column.fill] * padding
    if window is not None:
        batch.lengths = [piece for n in batch.lengths for piece in pieces(n, window)]
        batch.rooms = [piece for n in batch.rooms for piece in pieces(n, window)]
    return batch


def pieces(length: int, window: int) -> list[int]:
    """Cut attention segments at multiples of a window from their begin."""
    return [min(window, length - begin) for begin in range(0, length, window)]


def _write_sample(
    batch: Batch,
    documents: list[list[int]],
    sample: list[Segment],
    how: Rules,
    *,
    chosen: list[list[int]],
    joined: set[int],
    weights: list[list[float]],
    factor: float,
    columns: dict[str, Column],
) -> int:
    used, groups = 0, how.attention == "group"
    # Attention segments: [first token, tokens, tokens with their padding].
    begin_of_run = tokens_of_run = 0
    for s, (document, begin, length) in enumerate(sample):
        last = s + 1 == len(sample)
        in_group = groups and s + 1 in joined
        goes_on = not last and (how.attention == "sample" or in_group)
        end = begin + length
        wanted = chosen[document][begin + 1 : end + 1]  # may end inside the document
        weighed = weights[document][begin + 1 : end + 1]
        crosses = not last and (how.label_boundary == "sample" or in_group)
        following = sample[s + 1] if crosses else None
        if len(wanted) < length:
            wanted.append(NO_LABEL if following is None else chosen[following[0]][following[1]])
            weighed.append(0.0 if following is None else weights[following[0]][following[1]])
        weighed = [w if label >= 0 else 0.0 for w, label in zip(weighed, wanted, strict=True)]
        fill = 0 if goes_on else -(used + length) % how.alignment
        of_segment = used - begin_of_run if groups else 0
        first = {"segment": of_segment, "document": begin, "sample": used}[how.positions]
        tokens = documents[document][begin:end] + [how.pad_token] * fill
        labels = [label if label >= 0 else NO_LABEL for label in wanted] + [NO_LABEL] * fill
        batch.write(tokens, labels, first, loss_mask_of(weighed, factor, how.loss) + [0.0] * fill)
        for name, column in columns.items():
            rows, first = column.rows, 1 if column.of == "target" else 0
            placed = rows[document][begin + first : end + first]
            if len(placed) < length:
                placed.append(
                    column.fill if following is None else rows[following[0]][following[1]]
                )
            batch.columns[name] += placed + [column.fill] * fill
        used += length + fill
        tokens_of_run += length
        if not goes_on:
            batch.lengths.append(tokens_of_run)
            batch.rooms.append(used - begin_of_run)
            begin_of_run, tokens_of_run = used, 0
    return used


def loss_mask_of(weights: list[float], factor: float, loss: str) -> list[float]:
    """Return the loss mask of a sequence in float32; tokens without a label have weight 0."""
    total = sum(map(Fraction, weights))
    if loss != "token_mean":
        factor = float(np.float32(factor)) / float(total) if total else 0.0
    return [float(np.float32(w) * np.float32(factor)) for w in weights]


def denominator_of(
    sequences: list[tuple[float, list[float]]], loss: str
) -> tuple[Fraction, Fraction]:
    """Return the loss denominator of a step, and the unit of its loss masks.

    Args:
        sequences: sequences of the step: for each, its source's factor and its labels' weights.
    """
    num_labels = sum(
        (Fraction(f) * Fraction(w) for f, label_weights in sequences for w in label_weights),
        Fraction(0),
    )
    num_sequences = sum(
        (Fraction(f) for f, label_weights in sequences if sum(label_weights) > 0), Fraction(0)
    )
    unit = num_labels / num_sequences if loss == "longalign" and num_sequences else Fraction(1)
    return num_sequences if loss == "sequence_mean" else num_labels, unit

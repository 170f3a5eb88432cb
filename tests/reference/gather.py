"""What a micro batch is, in plain Python: the definition the C++ gather is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_LABEL = -100

Segment = tuple[int, int, int]  # document, begin, length


@dataclass
class Batch:
    """Rows joined to one list; cu_seqlens of the whole and of every row."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    loss_mask: list[float] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of attention segments, without padding
    rooms: list[int] = field(default_factory=list)  # with the padding that aligns the next one

    def write(self, tokens: list[int], labels: list[int], positions: list[int]) -> None:
        self.tokens += tokens
        self.labels += labels
        self.loss_mask += [float(label != NO_LABEL) for label in labels]
        self.position_ids += positions

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


def gather(
    documents: list[list[int]],
    samples: list[list[Segment]],
    *,
    num_rows: int,
    row_tokens: int,
    capacity: int,
    positions: str = "segment",
    attention: str = "document",
    label_boundary: str = "document",
    alignment: int = 1,
    pad_token: int = 0,
    chosen: list[list[int]] | None = None,
    joined: set[tuple[int, int]] = frozenset(),
) -> Batch:
    """Lay samples out in rows, ``row_tokens // capacity`` equal slots in each.

    Args:
        documents: the tokens of every document.
        samples: the segments of every sample, for the slots in order; missing ones are padding.
        chosen: per document, a label for every token (not shifted), negative where it has none.
        joined: (sample, segment) that goes on in the group of the segment before it. With
            attention ``group`` both are one attention segment; the last token of the document
            before predicts its first, unless labels stop at documents in words
            (``label_boundary``), which for attention ``group`` means at groups.
    """
    batch = Batch()
    slots = row_tokens // capacity
    slot = row_tokens // slots // alignment * alignment
    for i in range(num_rows * slots):
        last_of_row = (i + 1) % slots == 0
        room = row_tokens - (slots - 1) * slot if last_of_row else slot
        used = 0
        if i < len(samples):
            used = _write_sample(
                batch,
                documents,
                samples[i],
                positions=positions,
                attention=attention,
                label_boundary=label_boundary,
                alignment=alignment,
                pad_token=pad_token,
                chosen=chosen or documents,
                joined={s for sample, s in joined if sample == i},
            )
        if used < room:
            first = used if positions == "sample" else 0
            padding = room - used
            batch.write(
                [pad_token] * padding, [NO_LABEL] * padding, list(range(first, first + padding))
            )
            batch.lengths.append(padding)
            batch.rooms.append(padding)
    return batch


def _write_sample(
    batch: Batch,
    documents: list[list[int]],
    sample: list[Segment],
    *,
    positions: str,
    attention: str,
    label_boundary: str,
    alignment: int,
    pad_token: int,
    chosen: list[list[int]],
    joined: set[int],
) -> int:
    used = 0
    # What attends to itself: [first token, tokens, tokens with their room].
    begin_of_run = tokens_of_run = 0
    for s, (document, begin, length) in enumerate(sample):
        last = s + 1 == len(sample)
        goes_on = not last and (attention == "sample" or (attention == "group" and s + 1 in joined))
        end = begin + length
        wanted = chosen[document][begin + 1 : end + 1]  # may stop at the document's end
        if len(wanted) < length:
            in_group = attention == "group" and s + 1 in joined
            crosses = not last and (label_boundary == "sample" or in_group)
            following = sample[s + 1] if crosses else None
            wanted.append(NO_LABEL if following is None else chosen[following[0]][following[1]])
        fill = 0
        if not goes_on:
            fill = -(used + length) % alignment
        room = length + fill
        of_segment = used - begin_of_run if attention == "group" else 0
        first = {"segment": of_segment, "document": begin, "sample": used}[positions]
        batch.write(
            documents[document][begin:end] + [pad_token] * fill,
            [label if label >= 0 else NO_LABEL for label in wanted] + [NO_LABEL] * fill,
            list(range(first, first + room)),
        )
        used += room
        tokens_of_run += length
        if not goes_on:
            batch.lengths.append(tokens_of_run)
            batch.rooms.append(used - begin_of_run)
            begin_of_run, tokens_of_run = used, 0
    return used

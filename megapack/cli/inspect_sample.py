"""One sample as a person reads it: where documents begin and end, and which tokens are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from megapack.cli.report import Screen
from megapack.packing import SampleIndex
from megapack.storage import IndexedDataset
from megapack.storage.labels import open_labels
from megapack.units import counted

__all__ = ["SegmentView", "print_sample", "view_sample"]

COLOURS = ("cyan", "green", "yellow", "magenta", "blue")
MASKED = "bold red reverse"
ELISION = 400  # characters shown of the beginning and of the end of a segment


@dataclass(frozen=True)
class SegmentView:
    """A segment with what training makes of it; positions and offsets in tokens."""

    document: int
    begin: int
    end: int
    document_length: int
    sample_offset: int
    token_ids: list[int]
    has_label: list[bool]  # of every token: is the loss of predicting its successor counted?

    @property
    def ends_document(self) -> bool:
        return self.end == self.document_length

    @property
    def num_labels(self) -> int:
        return sum(self.has_label)

    def labelled(self) -> str:
        if all(self.has_label):
            return "every token has a label"
        if self.num_labels == len(self.token_ids) - 1 and self.ends_document:
            return "last token has no label"
        return f"{self.num_labels:,} of {len(self.token_ids):,} tokens have a label"

    def extent(self) -> str:
        if self.begin == 0 and self.ends_document:
            return "whole document"
        continued = "" if self.ends_document else ", goes on elsewhere"
        return f"tokens [{self.begin:,}, {self.end:,}) of {self.document_length:,}{continued}"


def view_sample(
    dataset: IndexedDataset,
    index: SampleIndex,
    sample: int,
    segments: Sequence[tuple[int, int, int]] | None = None,
) -> list[SegmentView]:
    """The segments of a sample, with the labels of ``<prefix>.labels`` where that stands.

    Args:
        dataset, index: the sample's.
        sample: its number.
        segments: of it, those (document, begin, length) to show; None: all.

    Raises:
        IndexError: there is no such sample.
        IndexMismatchError: the index or the labels are of another dataset.
    """
    index.check_source(dataset)
    chosen = (open_labels(dataset) or dataset).tokens
    segments = index.sample(sample)[1] if segments is None else segments
    offsets, lengths = dataset.document_offsets, dataset.document_lengths
    views: list[SegmentView] = []
    for document, begin, length in segments:
        first, end = int(offsets[document]), begin + length
        start = first + begin
        document_length = int(lengths[document])
        # A token's label is its successor in the document; the last one has none.
        labels = chosen[start + 1 : first + min(end + 1, document_length)]
        views.append(
            SegmentView(
                document=document,
                begin=begin,
                end=end,
                document_length=document_length,
                sample_offset=sum(len(view.token_ids) for view in views),
                token_ids=dataset.tokens[start : start + length].tolist(),
                has_label=(labels >= 0).tolist() + [False] * (length - len(labels)),
            )
        )
    return views


def print_sample(
    console: Screen,
    index: SampleIndex,
    sample: int,
    segments: list[SegmentView],
    decode: Callable[[Sequence[int]], str] | None,
    *,
    full: bool = False,
) -> None:
    """Segments in turn, each in its colour; tokens without a label stand in reverse red."""
    bucket, _ = index.sample(sample)
    capacity = int(index.bucket_capacity[bucket])
    used = sum(len(view.token_ids) for view in segments)
    cu_seqlens = [view.sample_offset for view in segments] + [used]
    if used < capacity:
        cu_seqlens.append(capacity)
    console.write_line(
        f"sample {sample:,} of bucket {bucket} (capacity {capacity:,}): "
        f"{counted(len(segments), 'segment')}, {counted(used, 'token')}, "
        f"{capacity - used:,} padding, "
        f"{counted(sum(view.num_labels for view in segments), 'label')}",
        style="bold",
    )
    console.write_line(f"cu_seqlens {cu_seqlens}")
    for number, view in enumerate(segments):
        colour = COLOURS[number % len(COLOURS)]
        console.write_line(
            f"--- segment {number}: document {view.document:,}, {view.extent()}; sample positions "
            f"[{cu_seqlens[number]:,}, {cu_seqlens[number + 1]:,}), position_ids 0.."
            f"{len(view.token_ids) - 1:,}; {view.labelled()}",
            style=f"bold {colour}",
        )
        console.print(_body(view, decode, colour, full=full), soft_wrap=True)
    if used < capacity:
        console.write_line(f"--- padding: {capacity - used:,} tokens, no labels", style=MASKED)


def _body(
    view: SegmentView,
    decode: Callable[[Sequence[int]], str] | None,
    colour: str,
    *,
    full: bool,
) -> Text:
    """Runs of tokens with and without a label; only whole runs can be decoded."""
    show = decode or (lambda ids: " ".join(map(str, ids)) + " ")
    body = Text()
    for has_label, run in groupby(
        zip(view.has_label, view.token_ids, strict=True), key=lambda token: token[0]
    ):
        text = show([token_id for _, token_id in run])
        body.append(_shorten(text, full=full), style=colour if has_label else MASKED)
    return body


def _shorten(text: str, *, full: bool) -> str:
    if full or len(text) <= 2 * ELISION:
        return text
    hidden = len(text) - 2 * ELISION
    return (
        f"{text[:ELISION]}\n  ... {hidden:,} characters (--full shows them) ...\n{text[-ELISION:]}"
    )

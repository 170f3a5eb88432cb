"""One sample as a person reads it: where documents begin and end, and which tokens are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from megapack.packing import SampleIndex
from megapack.storage import IndexedDataset

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

    @property
    def ends_document(self) -> bool:
        return self.end == self.document_length

    @property
    def num_labels(self) -> int:
        """The last token of a document predicts nothing; every other one its successor."""
        return len(self.token_ids) - self.ends_document

    def extent(self) -> str:
        if self.begin == 0 and self.ends_document:
            return "whole document"
        continued = "" if self.ends_document else ", goes on elsewhere"
        return f"tokens [{self.begin:,}, {self.end:,}) of {self.document_length:,}{continued}"


def view_sample(dataset: IndexedDataset, index: SampleIndex, sample: int) -> list[SegmentView]:
    """The segments of a sample. Raises IndexError, IndexMismatchError (another dataset)."""
    index.check_source(dataset)
    _, segments = index.sample(sample)
    offsets, lengths = dataset.document_offsets, dataset.document_lengths
    views: list[SegmentView] = []
    for document, begin, length in segments:
        start = int(offsets[document]) + begin
        views.append(
            SegmentView(
                document=document,
                begin=begin,
                end=begin + length,
                document_length=int(lengths[document]),
                sample_offset=sum(len(view.token_ids) for view in views),
                token_ids=dataset.tokens[start : start + length].tolist(),
            )
        )
    return views


def print_sample(
    console: Console,
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
    console.print(
        f"sample {sample:,} of bucket {bucket} (capacity {capacity:,}): "
        f"{len(segments)} segments, {used:,} tokens, {capacity - used:,} padding, "
        f"{sum(view.num_labels for view in segments):,} labels",
        style="bold",
    )
    console.print(f"cu_seqlens {cu_seqlens}", highlight=False)
    for number, view in enumerate(segments):
        colour = COLOURS[number % len(COLOURS)]
        masked = "last token has no label" if view.ends_document else "every token has a label"
        console.print(
            f"--- segment {number}: document {view.document:,}, {view.extent()}; sample positions "
            f"[{cu_seqlens[number]:,}, {cu_seqlens[number + 1]:,}), position_ids 0.."
            f"{len(view.token_ids) - 1:,}; {masked}",
            style=f"bold {colour}",
        )
        console.print(_body(view, decode, colour, full=full), highlight=False, soft_wrap=True)
    if used < capacity:
        console.print(f"--- padding: {capacity - used:,} tokens, no labels", style=MASKED)


def _body(
    view: SegmentView,
    decode: Callable[[Sequence[int]], str] | None,
    colour: str,
    *,
    full: bool,
) -> Text:
    show = decode or (lambda ids: " ".join(map(str, ids)) + " ")
    body = Text(_shorten(show(view.token_ids[: view.num_labels]), full=full), style=colour)
    if view.ends_document:
        body.append(show(view.token_ids[view.num_labels :]), style=MASKED)
    return body


def _shorten(text: str, *, full: bool) -> str:
    if full or len(text) <= 2 * ELISION:
        return text
    hidden = len(text) - 2 * ELISION
    return (
        f"{text[:ELISION]}\n  ... {hidden:,} characters (--full shows them) ...\n{text[-ELISION:]}"
    )

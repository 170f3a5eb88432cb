"""Show the content of datasets, .samples files and shard manifests.

For a dataset (prefix or .idx, of megapack or another tool) it shows counts, data type and lengths
of documents; for a .samples file the packing options and the metrics of the packing; for a shard
manifest the totals of its datasets, with --shards also each dataset.

--sample I shows one sample as training gets it: its text, where documents begin and end, which
tokens have no label (in the column labels) and the loss weights of the others (in the column
weights). Other columns are listed token by token: a target column at the position that predicts its
token, and only the first values of wide rows. --fim shows documents as fill-in-the-middle reorders
them.

examples:
  megapack-build inspect data/train
  megapack-build inspect data/train.samples
  megapack-build inspect data/train.samples --sample 17 --tokenizer tokenizer.model
  megapack-build inspect data/train.samples --sample 17 --fim blend.yaml --epoch 2
  megapack-build inspect data/train.samples --json
  megapack-build inspect web.shards.json --shards
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from megapack import _core
from megapack.cli.arguments import add_flags, add_shared, refuse_without
from megapack.cli.column import describe_column
from megapack.cli.datasets import named_files
from megapack.cli.output import Screen, note, print_result, print_table
from megapack.cli.pack import describe_shards, print_composition, print_shards
from megapack.config import check_range, to_dict
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.sample_index import IDX_CHECKSUMS
from megapack.packing.sharded import ShardedIndex, load_shards
from megapack.packing.verify import prefix_of_samples
from megapack.storage import IndexedDataset
from megapack.storage.columns import INTERPRETED, LABELS, WEIGHTS, Column, ColumnSpec
from megapack.storage.dataset import check_converted
from megapack.units import counted

if TYPE_CHECKING:
    from megapack.data import PackedDataset
    from megapack.data.steps import StepView

Decode = Callable[[Sequence[int]], str]


def decoder(name: str, dataset: IndexedDataset, token_ids: Sequence[int]) -> Decode:
    """Return a function from token ids to text. Raises ConfigError for another tokenizer."""
    from megapack.tokenization.tokenizers.encoders import open_reference  # noqa: PLC0415
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

    files = TokenizerFiles.open(name)
    recorded = (dataset.meta or {}).get("tokenizer") or {}
    origin = f"; its metadata names {recorded['name']}" if "name" in recorded else ""
    if recorded.get("vocab_size", files.vocab_size) != files.vocab_size:
        raise ConfigError(
            f"{dataset.prefix} was not made by {name} ({files.vocab_size:,} ids): its metadata "
            f"names {recorded.get('name')} ({recorded['vocab_size']:,} ids); give that as "
            "--tokenizer"
        )
    if max(token_ids, default=0) >= files.vocab_size:
        raise ConfigError(
            f"{dataset.prefix} was not made by {name}: token id {max(token_ids)} is not one of "
            f"its {files.vocab_size:,} ids{origin}; give the tokenizer that made it"
        )
    if recorded.get("digest", files.digest) != files.digest:
        note(f"{name} is not the file that made {dataset.prefix}{origin}")
    return open_reference(files).decode


# ---- One sample: where documents begin and end, and which tokens are trained ---------------------

COLOURS = ("cyan", "green", "yellow", "magenta", "blue")
MASKED = "bold red reverse"
COLUMN_LINES = 8  # tokens of the beginning and of the end of a segment whose columns are shown
COLUMN_VALUES = 8  # numbers of a row that are shown
ELISION = 400  # characters shown of the beginning and of the end of a segment


@dataclass(frozen=True)
class SegmentView:
    """Segment as training gets it; positions and offsets in tokens."""

    document: int
    begin: int
    end: int
    document_length: int
    sample_offset: int
    token_ids: list[int]
    has_label: list[bool]  # per token: does predicting its successor count in the loss?
    weights: list[float] | None  # loss weight per token, where the dataset has weights
    # Per column: name, type, and rows from the segment's first token on, or for columns of targets
    # from its successor on. Positions after the last row have the fill value.
    columns: list[tuple[str, ColumnSpec, NDArray[Any]]]
    group: int  # number of its group in the sample; without groups every segment is one
    parent: int | None = None  # in prefix trees, the segment that it continues; -1: none
    num_ends: int = 0  # in prefix trees, documents whose last segment this is
    fim: str = ""  # how fill-in-the-middle reorders the document; empty: not at all

    @property
    def num_labels(self) -> int:
        return sum(self.has_label)

    def describe(self) -> str:
        if self.fim:
            return f"whole document of {self.document_length:,} tokens, as {self.fim}"
        if self.parent is not None:
            place = f"continues segment {self.parent}" if self.parent >= 0 else "a root"
            ends = counted(self.num_ends, "document")
            return f"tokens [{self.begin:,}, {self.end:,}), {place}, the end of {ends}"
        is_end = self.end == self.document_length
        if self.begin == 0 and is_end:
            return "whole document"
        continued = "" if is_end else ", continues elsewhere"
        return f"tokens [{self.begin:,}, {self.end:,}) of {self.document_length:,}{continued}"

    def describe_labels(self) -> str:
        if all(self.has_label):
            text = "every token has a label"
        elif self.num_labels == len(self.token_ids) - 1 and self.end == self.document_length:
            text = "last token has no label"
        else:
            text = f"{self.num_labels:,} of {len(self.token_ids):,} tokens have a label"
        if self.weights is None:
            return text
        labels = zip(self.weights, self.has_label, strict=True)
        weights = [weight for weight, is_label in labels if is_label]
        span = f" of {min(weights):g} to {max(weights):g}" if weights else ""
        return f"{text}, loss weights{span}, together {sum(weights):g}"


def view_sample(
    dataset: IndexedDataset,
    index: SampleIndex,
    sample: int,
    segments: Sequence[tuple[int, int, int]] | None = None,
) -> list[SegmentView]:
    """Return the segments of a sample, or those given as (document, begin, length), with labels,
    loss weights and other columns. Raises IndexError if the sample does not exist, and
    IndexMismatchError if the index belongs to another dataset."""
    index.check_source(dataset)
    check_converted(dataset.prefix, dataset.columns)
    columns = dataset.columns
    label_tokens = columns[LABELS].rows if LABELS in columns else dataset.tokens
    all_segments = index.sample(sample)[1]
    groups = dict(zip(all_segments, index.groups_of(sample), strict=True))
    views: list[SegmentView] = []
    for document, begin, length in all_segments if segments is None else segments:
        first, end = int(dataset.document_offsets[document]), begin + length
        start = first + begin
        document_length = int(dataset.document_lengths[document])
        # A token's label is its successor in the document; the last token has none.
        label_range = slice(start + 1, first + min(end + 1, document_length))
        labels, weights = label_tokens[label_range], None
        if WEIGHTS in columns:
            weights = columns[WEIGHTS].rows[label_range].astype(float).tolist()
            weights += [0.0] * (length - len(labels))
        views.append(
            SegmentView(
                document=document,
                begin=begin,
                end=end,
                document_length=document_length,
                sample_offset=sum(len(view.token_ids) for view in views),
                token_ids=dataset.tokens[start : start + length].tolist(),
                has_label=(labels >= 0).tolist() + [False] * (length - len(labels)),
                weights=weights,
                columns=[
                    (name, column.spec, column.rows[_positions(column, start, label_range)])
                    for name, column in columns.items()
                    if name not in INTERPRETED
                ],
                group=groups[document, begin, length],
            )
        )
    return _in_tree(views, dataset, index, sample) if index.has_trees else views


def _in_tree(
    views: list[SegmentView], dataset: IndexedDataset, index: SampleIndex, sample: int
) -> list[SegmentView]:
    """Return all segments of a prefix tree with what its documents give their tokens: labels and
    sums of loss weights, at the predicted token."""
    assert index.segment_parent is not None
    first = int(index.sample_segment_offsets[sample])
    parents = index.segment_parent[first : first + len(views)].tolist()
    columns, num_ends = dataset.columns, [0] * len(views)
    labels = columns[LABELS].rows if LABELS in columns else dataset.tokens
    sums = [np.zeros(len(view.token_ids)) for view in views]
    labelled = [np.zeros(len(view.token_ids), np.bool_) for view in views]
    for document, last in index.documents_of(sample):
        num_ends[last] += 1
        node = last
        while node >= 0:
            start = int(dataset.document_offsets[document]) + views[node].begin
            tokens = slice(start, start + len(views[node].token_ids))
            has_label = np.asarray(labels[tokens] >= 0)
            has_label[:1] &= views[node].begin > 0  # nothing predicts a document's first token
            labelled[node] |= has_label
            sums[node] += has_label * (columns[WEIGHTS].rows[tokens] if WEIGHTS in columns else 1)
            node = parents[node]
    return [
        replace(view, parent=parents[i], num_ends=num_ends[i], has_label=labelled[i].tolist(),
                weights=sums[i].tolist())
        for i, view in enumerate(views)
    ]  # fmt: skip


def _positions(column: Column, start: int, label_range: slice) -> slice:
    return label_range if column.spec.of == "target" else slice(start, label_range.stop)


def apply_fim(
    views: list[SegmentView], data: PackedDataset, sample: int, step_view: StepView
) -> list[SegmentView]:
    """Return segments as fill-in-the-middle reorders them. ``views`` are all segments of the sample
    without those of excluded documents; ``data`` has fim and attention inside documents; ``sample``
    is its id there; ``step_view`` is the view of this one sample, without an attention window."""
    batch = data.micro_batch([sample], view=step_view)
    draws = {draw.segment: str(draw) for draw in data.fim_draws([sample], step_view)}
    tokens, mask = (batch[name][0].tolist() for name in ("tokens", "loss_mask"))
    bounds, labels = batch["cu_seqlens"].tolist(), (batch["labels"][0] >= 0).tolist()
    result = []
    for number, view in enumerate(views):
        tokens_of_view = slice(bounds[number], bounds[number + 1])
        changes: dict[str, Any] = {"sample_offset": bounds[number]}
        if number in draws:
            changes |= {"token_ids": tokens[tokens_of_view], "has_label": labels[tokens_of_view]}
            changes["weights"] = None if view.weights is None else mask[tokens_of_view]
        result.append(replace(view, **changes, fim=draws.get(number, "")))
    return result


def print_sample(
    console: Screen,
    index: SampleIndex,
    sample: int,
    segments: list[SegmentView],
    decode: Decode | None,
    *,
    full: bool = False,
) -> None:
    """Print the segments one after the other, those of a group in one colour. Tokens without a
    label are in reverse red; a loss weight other than 1 follows its run of tokens."""
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
    if index.segment_second is not None:
        begin, end = index.sample_segment_offsets[sample : sample + 2].tolist()
        held = int(np.asarray(index.segment_second[begin:end]).sum())
        room = index.parameters["second_capacity"][bucket]
        console.write_line(f"second size {held:,} of {room:,}, {room - held:,} padding")
    first_segments: dict[int, int] = {}  # group -> its first segment
    for number, view in enumerate(segments):
        first_segments.setdefault(view.group, number)
    if len(first_segments) < len(segments):
        starts = [segments[number].sample_offset for number in first_segments.values()]
        console.write_line(
            f"cu_seqlens {starts + cu_seqlens[len(segments) :]} with attention: group"
        )
    for number, view in enumerate(segments):
        colour = COLOURS[list(first_segments).index(view.group) % len(COLOURS)]
        depth = 0 if view.parent is None else view.begin
        first = first_segments[view.group]
        group = "" if first == number else f", in the group of segment {first}"
        console.write_line(
            f"--- segment {number}: document {view.document:,}{group}, {view.describe()}; sample "
            f"positions [{cu_seqlens[number]:,}, {cu_seqlens[number + 1]:,}), position_ids "
            f"{depth:,}..{depth + len(view.token_ids) - 1:,}; {view.describe_labels()}",
            style=f"bold {colour}",
        )
        console.print(_text_of_segment(view, decode, colour, full=full), soft_wrap=True)
        _print_columns(console, view, decode, full=full)
    if used < capacity:
        console.write_line(f"--- padding: {capacity - used:,} tokens, no labels", style=MASKED)


def _text_of_segment(view: SegmentView, decode: Decode | None, colour: str, *, full: bool) -> Text:
    show = decode or (lambda ids: " ".join(map(str, ids)) + " ")
    body = Text()
    weights = view.weights or [1.0] * len(view.token_ids)
    for (has_label, weight), run in groupby(
        zip(view.has_label, weights, view.token_ids, strict=True), key=lambda token: token[:2]
    ):
        text = show([token_id for _, _, token_id in run])
        hidden = len(text) - 2 * ELISION
        if hidden > 0 and not full:
            elided = f"\n  ... {hidden:,} characters (--full shows them) ...\n"
            text = f"{text[:ELISION]}{elided}{text[-ELISION:]}"
        body.append(text, style=colour if has_label else MASKED)
        if has_label and weight != 1:
            body.append(f"<{weight:g}>", style="dim")
    return body


def _print_columns(
    console: Screen, view: SegmentView, decode: Decode | None, *, full: bool
) -> None:
    """Print the columns of a segment, a line per token; of long segments both ends."""
    if not view.columns:
        return
    if view.fim:
        console.write_line("(columns are not shown for reordered documents)")
        return
    length = len(view.token_ids)
    num_hidden = 0 if full else max(0, length - 2 * COLUMN_LINES)
    shown = [i for i in range(length) if i < COLUMN_LINES or i >= COLUMN_LINES + num_hidden]
    table: dict[str, Callable[[int], Any]] = {
        "position": str,
        "token": lambda i: repr(decode(view.token_ids[i : i + 1])) if decode else view.token_ids[i],
    }
    for name, spec, rows in view.columns:
        table[name] = lambda i, spec=spec, rows=rows: _row_text(spec, rows, i)  # type: ignore[misc]
    for part in (shown[:COLUMN_LINES], shown[COLUMN_LINES:]) if num_hidden else (shown,):
        print_table(table, part)
        if num_hidden and part[0] == 0:
            console.write_line(f"... {counted(num_hidden, 'token')} (--full shows them) ...")


def _row_text(spec: ColumnSpec, rows: NDArray[Any], position: int) -> str:
    """Return a token's row: short ones whole, else the shape and the first values."""
    if position < len(rows):
        values = spec.numbers(rows[position : position + 1]).reshape(-1)
    else:
        values = np.full(math.prod(spec.shape), spec.fill)
    words = [f"{value:g}" for value in values[:COLUMN_VALUES].tolist()]
    if not spec.shape:
        return words[0]
    if values.size <= COLUMN_VALUES:
        return f"[{' '.join(words)}]"
    return f"{list(spec.shape)} {' '.join(words)} ..."


# ---- Options -------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefixes",
        nargs="*",
        action="extend",
        metavar="PREFIX",
        default=argparse.SUPPRESS,
        help="datasets (prefixes, .idx files, directories of them), .samples files, or shard "
        "manifests",
    )
    parser.add_argument(
        "--data-prefix",
        nargs="+",
        action="extend",
        dest="prefixes",
        default=[],
        metavar="PREFIX",
        help="same as PREFIX; with a .samples file, its dataset (default: where it was when "
        "packed)",
    )
    parser.add_argument("--sample", type=int, metavar="I", help="show sample I of a .samples file")
    add_shared(parser, "--tokenizer", help="shows --sample as text instead of token ids")
    parser.add_argument(
        "--fim",
        metavar="MANIFEST",
        help="show --sample after fill-in-the-middle, with the section fim of this blend manifest",
    )
    parser.add_argument(
        "--epoch",
        type=int,
        default=0,
        metavar="E",
        help="epoch for --fim, which reorders other documents in every epoch (default: 0)",
    )
    add_shared(parser, "--seed", help="for --fim; give the seed of the run")
    add_flags(
        parser,
        shards="list every dataset of a shard manifest",
        full="show the whole text of segments, without ellipses",
    )
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> None:
    prefixes, names, manifests = named_files(args.prefixes)
    if not names and not prefixes and not manifests:
        raise ConfigError(
            "nothing to inspect; name a dataset (PREFIX), a .samples file or a shard manifest"
        )
    if args.fim is None:
        refuse_without("--fim MANIFEST", epoch=args.epoch or None, seed=args.seed or None)
    check_range("inspect", at_least=0, below=1 << 63, **{"--epoch": args.epoch})
    if args.sample is None:
        refuse_without("--sample I", fim=args.fim, tokenizer=args.tokenizer, full=args.full)
    if not manifests:
        refuse_without("a shard manifest", shards=args.shards)
    if args.sample is not None:
        if args.json:
            raise ConfigError("--json describes files, and --sample shows text: leave out one")
        if len(names) != 1 or len(prefixes) > 1 or manifests:
            raise ConfigError(
                f"--sample needs one .samples file and at most one dataset, not "
                f"{' '.join(args.prefixes)}"
            )
        _show_sample(names[0], prefixes, args)
        return
    sources = [load_shards(name) for name in manifests]
    indices = {name: SampleIndex.load(name) for name in names}
    datasets = [describe_dataset(IndexedDataset(prefix)) for prefix in prefixes]

    def show() -> None:
        for source in sources:
            print_shards(source, each=args.shards)
        for name, index in indices.items():
            _print_index(name, index)
        for facts in datasets:
            _print_dataset(facts)

    facts = [_describe_source(index, each=args.shards) for index in sources]
    facts += [describe_index(name, index) for name, index in indices.items()] + datasets
    print_result(args, facts[0] if len(facts) == 1 else facts, show)


def _show_sample(path: str, prefixes: list[str], args: argparse.Namespace) -> None:
    index = SampleIndex.load(path)
    if not 0 <= args.sample < index.num_samples:
        raise ConfigError(
            f"--sample {args.sample}: {path} has {counted(index.num_samples, 'sample')}, counted "
            "from 0"
        )
    dataset = IndexedDataset(prefixes[0] if prefixes else prefix_of_samples(path, index))
    segments = view_sample(dataset, index, args.sample)
    if args.fim is not None:
        from megapack.data import PackedDataset, load_blend  # noqa: PLC0415 (torch)
        from megapack.data.steps import StepView  # noqa: PLC0415

        fim = load_blend(args.fim).fim
        if fim is None:
            raise ConfigError(f"--fim {args.fim}: the manifest has no section fim; add one")
        data = PackedDataset(dataset, index, fim=fim)
        epochs, rates = np.array([args.epoch]), np.array([fim.rate])
        view = StepView(epochs=epochs, fim_rates=rates, seed=args.seed)
        segments = apply_fim(segments, data, args.sample, view)
    decode = None
    if args.tokenizer is not None:
        decode = decoder(args.tokenizer, dataset, [i for view in segments for i in view.token_ids])
    print_sample(Screen(), index, args.sample, segments, decode, full=args.full)


# ---- Facts about files, as JSON and as text ------------------------------------------------------

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
BAR = 40  # characters of the longest bar


def _describe_source(index: ShardedIndex, *, each: bool) -> dict[str, Any]:
    facts = describe_shards(index)
    facts |= {"strategy": index.strategy, "parameters": index.parameters, "seed": index.seed}
    facts["arranged"] = None if index.arranged is None else vars(index.arranged)
    return facts | ({"shards": [to_dict(shard) for shard in index.shards]} if each else {})


def describe_dataset(dataset: IndexedDataset) -> dict[str, Any]:
    """Return facts about a dataset as JSON values; lengths in tokens per document."""
    lengths, counts = _distinct_lengths(dataset.document_lengths)
    ends, quantiles = np.cumsum(counts), []
    for q in QUANTILES if len(ends) else ():
        rank, fraction = divmod((int(ends[-1]) - 1) * q, 1)  # between two documents by length
        neighbors = lengths[np.searchsorted(ends, [rank, rank + (fraction > 0)], "right")]
        quantiles.append(int(np.quantile(neighbors, fraction).round()))
    num_doublings = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {
        "prefix": str(dataset.prefix),
        "dtype": dataset.dtype.name,
        "num_sequences": len(dataset),
        "num_documents": dataset.num_documents,
        "num_empty_documents": int(counts[lengths == 0].sum()),
        "num_tokens": int(dataset.num_tokens),
        "mean_length": float(lengths @ counts / ends[-1]) if len(ends) else 0.0,
        "length_quantiles": {f"{q:g}": v for q, v in zip(QUANTILES, quantiles, strict=False)},
        "documents_up_to_power_of_two": {
            str(2**k): int(n) for k, n in enumerate(np.bincount(num_doublings, counts))
        },
        "fingerprint": dataset.fingerprint,
        "columns": [describe_column(dataset.prefix, each) for each in dataset.columns.values()],
        "meta": dataset.meta,
    }


def _distinct_lengths(lengths: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct document lengths, ascending, and the number of documents of each."""
    longest = int(lengths.max(initial=0))
    if longest >= 1 << 24:  # a histogram would be larger than the index
        distinct, numbers = np.unique(lengths, return_counts=True)
        return distinct.astype(np.int64), numbers
    core_lengths = _core.DocumentLengths(lengths, capacity=longest + 1)
    counts, _ = _core.length_histogram(core_lengths, longest + 1, 1)
    counts[0] = len(lengths) - counts.sum()  # the core skips empty documents
    present = np.flatnonzero(counts)
    return present, counts[present]


def describe_index(path: str, index: SampleIndex) -> dict[str, Any]:
    source = {key: value for key, value in (index.source or {}).items() if key != IDX_CHECKSUMS}
    return {
        "path": path,
        "strategy": index.strategy,
        "parameters": index.parameters,
        "seed": index.seed,
        "decisions": index.decisions,
        "bucket_capacity": index.bucket_capacity.tolist(),
        "fingerprint": index.fingerprint,
        "source": source or None,
        "metrics": index.metrics(),
    }


def _print_dataset(facts: dict[str, Any]) -> None:
    console = Screen()
    console.write_line(f"{facts['prefix']}: {facts['dtype']} tokens", style="bold")
    console.write_line(
        f"{counted(facts['num_documents'], 'document')} ({facts['num_empty_documents']:,} empty) "
        f"in {counted(facts['num_sequences'], 'sequence')}, "
        f"{counted(facts['num_tokens'], 'token')}, "
        f"{facts['mean_length']:,.1f} per document"
    )
    meta = facts["meta"]
    if meta is None:
        console.write_line("no .meta.json: not built by megapack, or moved without it")
    else:
        for key, value in meta.items():
            if isinstance(value, (str, int)) and key not in facts:
                console.write_line(f"{key}: {value}")
    for column in facts["columns"]:
        shape = column["shape"] or ""
        console.write_line(
            f"column {column['name']}: {column['dtype']}{shape}, of {column['of']}, fill "
            f"{column['fill']}, {column['bytes']:,} bytes"
        )
    console.write_line("document lengths")
    columns: dict[str, Any] = {
        "quantile": lambda row: f"{float(row[0]):.0%}",
        "tokens": lambda row: f"{row[1]:,}",
    }
    print_table(columns, facts["length_quantiles"].items())
    counts = facts["documents_up_to_power_of_two"]
    for upper, count in counts.items():
        if count:
            bar = "#" * max(1, round(BAR * count / max(counts.values())))
            console.write_line(f"{'<= ' + format(int(upper), ','):>14} {bar:{BAR}} {count:,}")


def _print_index(path: str, index: SampleIndex) -> None:
    console = Screen()
    dataset = (index.source or {}).get("prefix", "bare lengths")
    console.write_line(f"{path}: {index.strategy} of {dataset}", style="bold")
    parameters = ", ".join(f"{k}={v}" for k, v in sorted(index.parameters.items()))
    console.write_line(f"seed={index.seed}, {parameters}")
    print_composition(index)

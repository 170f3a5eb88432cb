"""Look inside the files megapack makes (and those other tools made).

An .idx (or the prefix of a dataset) shows what is stored and how long the documents are; a
.samples file shows how it was packed and what the packing is worth; a shard manifest shows what
its datasets hold together, with --shards also each. With --sample, one sample
is shown as training sees it: its text, where documents begin and end, which tokens have no label
(PREFIX.labels, where it stands, decides that) and with which weight the others count
(PREFIX.weights); with --fim, how documents are told with their middle at the end.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from megapack.cli.arguments import add_shared, refuse_without
from megapack.cli.datasets import named_files
from megapack.cli.output import Screen, note, print_table, printed_as_json
from megapack.cli.pack import describe_shards, print_composition, print_shards
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.sample_index import IDX_CHECKSUMS
from megapack.packing.sharded import ShardedIndex, load_shards
from megapack.packing.verify import prefix_of_samples
from megapack.storage import IndexedDataset
from megapack.storage.dataset import open_labels, open_weights
from megapack.units import counted

if TYPE_CHECKING:
    from megapack.data import PackedDataset
    from megapack.data.steps import StepView

# ---- Token ids to text, by the tokenizer that made a dataset and no other -----------------------


def decoder(
    name: str, dataset: IndexedDataset, token_ids: Sequence[int]
) -> Callable[[Sequence[int]], str]:
    """Ids to text. Raises ConfigError if this cannot be the tokenizer that made the dataset."""
    from megapack.tokenization.tokenizers.encoders import open_reference  # noqa: PLC0415
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

    files = TokenizerFiles.open(name)
    named = (dataset.meta or {}).get("tokenizer") or {}
    told = f"; its metadata names {named['name']}" if "name" in named else ""
    if named.get("vocab_size", files.vocab_size) != files.vocab_size:
        raise ConfigError(
            f"{dataset.prefix} was not made by {name} ({files.vocab_size:,} ids): its metadata "
            f"names {named.get('name')} ({named['vocab_size']:,} ids); give that as --tokenizer"
        )
    if max(token_ids, default=0) >= files.vocab_size:
        raise ConfigError(
            f"{dataset.prefix} was not made by {name}: token id {max(token_ids)} is not one of "
            f"its {files.vocab_size:,} ids{told}; give the tokenizer that made it"
        )
    if named.get("digest", files.digest) != files.digest:
        note(f"{name} is not the file that made {dataset.prefix}{told}")
    return open_reference(files).decode


# ---- One sample as a person reads it: where documents begin and end, and which tokens are trained

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
    weights: list[float] | None  # with which weight, where there are loss weights
    group: int  # number of its group in the sample; of its own without groups
    fim: str = ""  # how the document is turned round, if it is

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

    def weighed(self) -> str:
        """What its labels weigh, for its head line."""
        if self.weights is None:
            return ""
        own = [w for w, is_label in zip(self.weights, self.has_label, strict=True) if is_label]
        span = f" of {min(own):g} to {max(own):g}" if own else ""
        return f", loss weights{span}, together {sum(own):g}"

    def extent(self) -> str:
        if self.fim:
            return f"whole document of {self.document_length:,} tokens, told as {self.fim}"
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
    chosen, weights = (open_labels(dataset) or dataset).tokens, open_weights(dataset)
    everything = index.sample(sample)[1]
    segments = everything if segments is None else segments
    groups = dict(zip(everything, index.groups_of(sample), strict=True))
    offsets, lengths = dataset.document_offsets, dataset.document_lengths
    views: list[SegmentView] = []
    for document, begin, length in segments:
        first, end = int(offsets[document]), begin + length
        start = first + begin
        document_length = int(lengths[document])
        # A token's label is its successor in the document; the last one has none.
        of_labels = slice(start + 1, first + min(end + 1, document_length))
        labels, weighed = chosen[of_labels], None
        if weights is not None:
            weighed = weights.tokens[of_labels].view(np.float16).astype(float).tolist()
            weighed += [0.0] * (length - len(labels))
        views.append(
            SegmentView(
                document=document,
                begin=begin,
                end=end,
                document_length=document_length,
                sample_offset=sum(len(view.token_ids) for view in views),
                token_ids=dataset.tokens[start : start + length].tolist(),
                has_label=(labels >= 0).tolist() + [False] * (length - len(labels)),
                weights=weighed,
                group=groups[document, begin, length],
            )
        )
    return views


def turned_round(
    views: list[SegmentView],
    data: PackedDataset,
    sample: int,
    step_view: StepView,
) -> list[SegmentView]:
    """The segments of a sample, with those documents as they are told that are turned round.

    Args:
        views: all segments of the sample but those of masked documents.
        data: of the sample, with fim; documents attend to themselves.
        sample: its id there.
        step_view: of this one sample, without an attention window.
    """
    batch = data.micro_batch([sample], view=step_view)
    draws = {draw.segment: str(draw) for draw in data.fim_draws([sample], step_view)}
    tokens, mask = (batch[name][0].tolist() for name in ("tokens", "loss_mask"))
    bounds, labels = batch["cu_seqlens"].tolist(), (batch["labels"][0] >= 0).tolist()
    found = []
    for number, view in enumerate(views):
        own = slice(bounds[number], bounds[number + 1])
        told: dict[str, Any] = {"sample_offset": own.start}
        if number in draws:
            weights = None if view.weights is None else mask[own]
            told |= {"token_ids": tokens[own], "has_label": labels[own], "weights": weights}
        found.append(replace(view, **told, fim=draws.get(number, "")))
    return found


def print_sample(
    console: Screen,
    index: SampleIndex,
    sample: int,
    segments: list[SegmentView],
    decode: Callable[[Sequence[int]], str] | None,
    *,
    full: bool = False,
) -> None:
    """Segments in turn, those of a group in its colour; tokens without a label stand in reverse
    red. A run of tokens that have another loss weight than 1 is followed by it."""
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
    first_of: dict[int, int] = {}  # group -> its first segment
    for number, view in enumerate(segments):
        first_of.setdefault(view.group, number)
    if len(first_of) < len(segments):
        of_groups = [segments[number].sample_offset for number in first_of.values()]
        ends = cu_seqlens[len(segments) :]
        console.write_line(f"cu_seqlens {of_groups + ends} with attention: group")
    for number, view in enumerate(segments):
        colour = COLOURS[list(first_of).index(view.group) % len(COLOURS)]
        first = first_of[view.group]
        group = "" if first == number else f", in the group of segment {first}"
        console.write_line(
            f"--- segment {number}: document {view.document:,}{group}, {view.extent()}; sample "
            f"positions [{cu_seqlens[number]:,}, {cu_seqlens[number + 1]:,}), position_ids 0.."
            f"{len(view.token_ids) - 1:,}; {view.labelled()}{view.weighed()}",
            style=f"bold {colour}",
        )
        console.print(_body(view, decode, colour, full=full), soft_wrap=True)
    if used < capacity:
        console.write_line(f"--- padding: {capacity - used:,} tokens, no labels", style=MASKED)


def _body(
    view: SegmentView, decode: Callable[[Sequence[int]], str] | None, colour: str, *, full: bool
) -> Text:
    """Runs of tokens with and without a label, of one weight; only whole runs can be decoded."""
    show = decode or (lambda ids: " ".join(map(str, ids)) + " ")
    body = Text()
    weights = view.weights or [1.0] * len(view.token_ids)
    for (has_label, weight), run in groupby(
        zip(view.has_label, weights, view.token_ids, strict=True), key=lambda token: token[:2]
    ):
        text = show([token_id for _, _, token_id in run])
        body.append(_shorten(text, full=full), style=colour if has_label else MASKED)
        if has_label and weight != 1:
            body.append(f"<{weight:g}>", style="dim")
    return body


def _shorten(text: str, *, full: bool) -> str:
    if full or len(text) <= 2 * ELISION:
        return text
    hidden = len(text) - 2 * ELISION
    return (
        f"{text[:ELISION]}\n  ... {hidden:,} characters (--full shows them) ...\n{text[-ELISION:]}"
    )


QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
BAR = 40  # characters of the longest bar


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
        help="the same; beside a .samples file its dataset (default: where it lay when packed)",
    )
    parser.add_argument("--sample", type=int, metavar="I", help="show sample I of a .samples file")
    add_shared(parser, "--tokenizer", help="turns ids into text")
    parser.add_argument(
        "--fim",
        metavar="MANIFEST",
        help="of --sample: turn documents round as the manifest's section fim says, at its rate",
    )
    parser.add_argument(
        "--epoch", type=int, default=0, metavar="E", help="of --fim: as pass E does"
    )
    add_shared(parser, "--seed", help="of --fim: that of the run")
    parser.add_argument("--shards", action="store_true", help="list those of a shard manifest")
    parser.add_argument("--full", action="store_true", help="do not shorten the text of segments")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    console = Screen()
    prefixes, names, manifests = named_files(args.prefixes)
    if not names and not prefixes and not manifests:
        raise ConfigError(
            "nothing to inspect; name a dataset (PREFIX), a .samples file or a shard manifest"
        )
    if args.fim is None:
        refuse_without("--fim MANIFEST", epoch=args.epoch or None, seed=args.seed or None)
    if not 0 <= args.epoch < 1 << 63:
        raise ConfigError(f"--epoch {args.epoch}: passes are counted from 0, in 63 bits")
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
        _show_sample(console, names[0], prefixes, args)
        return 0
    sources = [load_shards(name) for name in manifests]
    indices = {name: SampleIndex.load(name) for name in names}
    datasets = [describe_dataset(IndexedDataset(prefix)) for prefix in prefixes]
    if args.json:
        facts = [_describe_source(index, each=args.shards) for index in sources]
        facts += [describe_index(name, index) for name, index in indices.items()]
        facts += datasets
        printed_as_json(args, facts[0] if len(facts) == 1 else facts)
        return 0
    for source in sources:
        print_shards(source, each=args.shards)
    for name, index in indices.items():
        _print_index(console, name, index)
    for described in datasets:
        _print_dataset(console, described)
    return 0


def _show_sample(console: Screen, path: str, prefixes: list[str], args: argparse.Namespace) -> None:
    index = SampleIndex.load(path)
    if not 0 <= args.sample < index.num_samples:
        raise ConfigError(
            f"--sample {args.sample}: {path} has {counted(index.num_samples, 'sample')}, counted "
            "from 0"
        )
    dataset = IndexedDataset(prefixes[0] if prefixes else prefix_of_samples(path, index))
    segments = view_sample(dataset, index, args.sample)
    if args.fim is not None:
        segments = _turned_round(args, dataset, index, segments)
    decode = None
    if args.tokenizer is not None:
        decode = decoder(args.tokenizer, dataset, [i for view in segments for i in view.token_ids])
    print_sample(console, index, args.sample, segments, decode, full=args.full)


def _turned_round(
    args: argparse.Namespace,
    dataset: IndexedDataset,
    index: SampleIndex,
    segments: list[SegmentView],
) -> list[SegmentView]:
    from megapack.data import PackedDataset, load_blend  # noqa: PLC0415 (torch)
    from megapack.data.steps import StepView  # noqa: PLC0415

    fim = load_blend(args.fim).fim
    if fim is None:
        raise ConfigError(f"--fim {args.fim}: the manifest has no section fim")
    data = PackedDataset(dataset, index, fim=fim)
    epochs, rates = np.array([args.epoch]), np.array([fim.rate])
    view = StepView(epochs=epochs, fim_rates=rates, seed=args.seed)
    return turned_round(segments, data, args.sample, view)


def _describe_source(index: ShardedIndex, *, each: bool) -> dict[str, Any]:
    about = {"strategy": index.strategy, "parameters": index.parameters, "seed": index.seed}
    facts = {**describe_shards(index), **about}
    facts["arranged"] = None if index.arranged is None else vars(index.arranged)
    return facts | ({"shards": [vars(shard) for shard in index.shards]} if each else {})


def describe_dataset(dataset: IndexedDataset) -> dict[str, Any]:
    """Facts about a dataset as JSON values; lengths in tokens per document."""
    lengths = dataset.document_lengths
    quantiles = np.quantile(lengths, QUANTILES).round().astype(int) if lengths.size else []
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)).tolist()
    return {
        "prefix": str(dataset.prefix),
        "dtype": dataset.dtype.name,
        "num_sequences": len(dataset),
        "num_documents": dataset.num_documents,
        "num_empty_documents": int((lengths == 0).sum()),
        "num_tokens": int(dataset.num_tokens),
        "mean_length": float(lengths.mean()) if lengths.size else 0.0,
        "length_quantiles": {f"{q:g}": int(v) for q, v in zip(QUANTILES, quantiles, strict=False)},
        "documents_up_to_power_of_two": {str(2**k): n for k, n in enumerate(counts)},
        "fingerprint": dataset.fingerprint,
        "meta": dataset.meta,
    }


def describe_index(path: str, index: SampleIndex) -> dict[str, Any]:
    """Facts about a .samples file as JSON values."""
    source = {key: of for key, of in (index.source or {}).items() if key != IDX_CHECKSUMS}
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


def _print_dataset(console: Screen, facts: dict[str, Any]) -> None:
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
    quantiles = facts["length_quantiles"].items()
    console.write_line("document lengths")
    print_table(("quantile", "tokens"), [(f"{float(q):.0%}", f"{n:,}") for q, n in quantiles])
    _print_histogram(console, facts["documents_up_to_power_of_two"])


def _print_histogram(console: Screen, counts: dict[str, int]) -> None:
    tallest = max(counts.values(), default=0)
    for upper, count in counts.items():
        if count:
            bar = "#" * max(1, round(BAR * count / tallest))
            console.write_line(f"{'<= ' + format(int(upper), ','):>14} {bar:{BAR}} {count:,}")


def _print_index(console: Screen, path: str, index: SampleIndex) -> None:
    dataset = (index.source or {}).get("prefix", "bare lengths")
    console.write_line(f"{path}: {index.strategy} of {dataset}", style="bold")
    chosen = ", ".join(f"{k}={v}" for k, v in sorted(index.parameters.items()))
    console.write_line(f"seed={index.seed}, {chosen}")
    print_composition(index)

"""PackedDataset: samples of an index, gathered from documents by one C++ call per micro batch.

``open_blend`` opens the sources of a manifest as one dataset.

    packed = PackedDataset("docs", "docs.samples")
    packed[7]["tokens"].shape                       # -> (2048,), the capacity of sample 7
    packed.micro_batch([7, 9])["tokens"].shape      # -> (1, 4096), one stream
    PackedDataset("docs", "docs.samples", columns=["experts"])[7]["experts"].shape  # -> (2048, 8)
"""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.calls import checked_call, without_none
from megapack.data.batch import (
    Batch,
    BatchLayout,
    Bounds,
    Buffers,
    Framework,
    allocate,
    check_targets,
    cut_bounds,
    longest_position,
    mtp_targets,
    per_token,
    tree_entries,
    wrapper,
)
from megapack.data.blend import BlendConfig, Mixture, Stage
from megapack.data.documents import (
    DatasetDocuments,
    Documents,
    Index,
    RemoteReads,
    Used,
    carried_columns,
    open_sources,
)
from megapack.data.exclusions import Exclusions
from megapack.data.fim import Fim, FimConfig, FimDraw, check_fim, open_fim
from megapack.data.picture import Sample
from megapack.data.sample_order import Scores
from megapack.data.sources import (
    LabelTotals,
    SampleSource,
    check_has_groups,
    check_tree_options,
    check_tree_run,
)
from megapack.data.steps import PLAIN, Attention, Loss, StepView
from megapack.errors import ArgumentError, ConfigError, FormatError
from megapack.packing.sharded import SourceIndex
from megapack.storage import IndexedDataset
from megapack.storage.columns import INTERPRETED, LABELS, WEIGHTS
from megapack.units import checked_integer, counted

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    _Dataset = Dataset[Batch]
else:  # torch's DataLoader accepts any class with these methods, and numpy users may lack torch
    _Dataset = object

Ids = NDArray[np.int64]


@lru_cache(maxsize=64)  # its checks would take a quarter of the time of one sample
def _one_stream(num_tokens: int) -> BatchLayout:
    return BatchLayout(micro_batch_tokens=num_tokens)


class SampleSegments(NamedTuple):
    """Segments of samples: int64 arrays with one entry per segment."""

    sample: Ids
    """Position of its sample."""
    shard: Ids
    begin: Ids
    """First token, counted in the .bin of the shard."""
    length: Ids
    continues: Ids
    """1 if its document has a next token, else 0."""


class PackedDataset(_Dataset):
    """Samples and micro batches of documents on disk and an index over them.

    ``dataset[i]`` is one sample of its bucket's capacity; ``dataset.micro_batch(ids)`` a micro
    batch, assembled by one C++ call without the GIL, directly from the mapped files.

    Args:
        dataset: the documents, or their prefix; None for a shard manifest, which names them;
            several for a blend.
        index: the samples, or the path of a .samples file or a shard manifest; one per dataset.
        positions: where position_ids restart: at every ``segment``, at every ``document`` (a
            segment continues its document's count), or at every ``sample``.
        attention: segments of cu_seqlens. ``document``: those of the documents; ``sample``: the
            whole sample (the classic concatenation); ``group``: adjacent documents of a group are
            one segment, in which positions continue and the last token of a document predicts the
            first of the next one (sources without groups: like ``document``). ``tree``: the nodes
            of prefix trees (``--strategy tree``), which attend to their paths.
        label_boundary: ``document``: the last token of a document (with attention ``group``: of the
            group's documents in the sample) has no label; ``sample``: its label is the first token
            of the next segment, as in the classic concatenation.
        labels: ``auto``: the column ``labels`` has the labels (chat: only the assistant's tokens),
            not shifted, negative for no label; without the column, and with None, they are the next
            tokens. For a blend also a list, one entry per dataset.
        token_weights: ``auto``: the column ``weights`` has factors on the loss of predicting each
            token; without it, and with None, they are 1. Also a list, as above.
        pad_token: token of the padding.
        alignment: segments start at multiples of this (2 x context parallel size), and the batch
            has ``cu_seqlens_padded``. Pack the samples with a multiple of this ``alignment``;
            otherwise rows must be longer than the capacity.
        num_mtp_targets: targets of multi-token prediction per position, in addition to its label
            (``megapack.data.batch.mtp_targets``).
        framework: ``torch``: batches of tensors; ``numpy``: of numpy arrays, for JAX and others;
            torch is then neither imported nor needed.
        mixture: settings of a blend and its run.
        weights .. fim_rates: fields that replace those of ``mixture``; None: as there. Names
            default to the prefixes.
        columns: names of the columns that batches carry (``megapack.storage.columns``); or name ->
            ``require`` (as in a list) or ``fill``: tokens of sources without the column get its
            fill value.

    Attributes:
        datasets: documents of every source.
        framework: as given.
        columns: types of the columns that batches carry.
        samples: facts about all samples.
        remote_reads: prefetches documents from object stores.

    Raises:
        IndexMismatchError: the index was made for other documents.
        FormatError, OSError: a file is damaged or missing.
    """

    @checked_call
    def __init__(
        self,
        dataset: Documents | Sequence[Documents],
        index: Index | Sequence[Index],
        *,
        positions: Literal["segment", "document", "sample"] = "segment",
        attention: Attention = "document",
        label_boundary: Literal["document", "sample"] = "document",
        labels: Used | Sequence[Used] = "auto",
        token_weights: Used | Sequence[Used] = "auto",
        pad_token: int = 0,
        alignment: int = 1,
        num_mtp_targets: int = 0,
        framework: Framework = "torch",
        mixture: Mixture | None = None,
        weights: Sequence[float | None] | None = None,
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] | None = None,
        decided: Sequence[Stage] | None = None,
        scores: Sequence[Scores | None] | None = None,
        max_epochs: float | Sequence[float | None] | None = None,
        run_tokens: int | None = None,
        loss_weights: Sequence[float] | None = None,
        loss: Loss | None = None,
        attention_window: int | None = None,
        fim: FimConfig | None = None,
        fim_rates: Sequence[float | None] | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        of_mixture = {field.name for field in fields(Mixture)} - {"held_out"}  # only manifests say
        settings = without_none(locals(), of_mixture)
        if attention == "group" and positions == "document":
            raise ConfigError(
                "positions: document restarts positions inside a group, attention: group continues "
                "them; choose positions: segment (which restarts with every group) or sample"
            )
        checked_integer("pad_token", pad_token, -(1 << 63), (1 << 63) - 1)
        checked_integer("alignment", alignment, 1, (1 << 31) - 1)
        checked_integer("num_mtp_targets", num_mtp_targets, 0, 64)
        in_groups = attention == "group" and label_boundary == "document"
        self._options: dict[str, Any] = {
            "positions": positions,
            "attention": attention,
            "label_boundary": "group" if in_groups else label_boundary,
            "alignment": alignment,
            "pad_token": pad_token,
            "num_mtp_targets": num_mtp_targets,
        }
        if attention == "tree":
            check_tree_options(self._options)
        check_targets(num_mtp_targets, self._options)
        self.framework = framework
        self.datasets, indices = open_sources(
            dataset, index, labels, token_weights, positions=positions
        )
        if attention == "group":
            check_has_groups(indices)
        mixture = replace(mixture or Mixture(), **settings)
        self._connect(indices, mixture.of([item.prefix for item in self.datasets]))

    def _connect(
        self,
        indices: list[SourceIndex],
        mixture: Mixture,
        exclusions: Exclusions | None = None,
        fim: Fim | None = None,
    ) -> None:
        """Set up everything that a pickled dataset does not carry."""
        if fim is None and mixture.fim is not None:
            fim = open_fim(mixture.fim, self.datasets)
            sources = (mixture.names or (), mixture.largest_fim_rates, self.datasets, indices)
            check_fim(fim, zip(*sources, strict=True))
        self.columns = carried_columns(mixture.columns, self.datasets)
        self.samples = SampleSource(
            indices,
            mixture,
            exclusions=exclusions,
            attention=self._options["attention"],
            counter=self._count_labels,
            token_weights=[source.weights_identity for source in self.datasets],
            fim=fim,
            columns=self.columns,
        )
        mixture.check_alignment(self._options["alignment"])
        if self.samples.attention == "tree":
            check_tree_run(self.samples)
        shards = self.samples.shards
        rules = {key: v for key, v in self._options.items() if key != "num_mtp_targets"}
        self._gatherer = _core.Gatherer(
            first_ids=shards.first_ids,
            shards=shards.shards,
            first_samples=shards.first_samples,
            sources=shards.sources,
            loss=self.samples.mixture.loss,
            fim=None if fim is None else fim.core(),
            columns=[(spec.of == "target", spec.fill_row) for spec in self.columns.values()],
            **rules,
        )
        self._max_cu_seqlens: dict[tuple[BatchLayout, int], int] = {}
        self._opening = threading.Lock()
        self._documents: dict[int, IndexedDataset] = {}
        is_remote = any(source.is_remote for source in self.datasets)
        self.remote_reads = RemoteReads(self._gatherer, self._open_for, expected=is_remote)
        self._remote_labels = RemoteReads(self._gatherer, self._open_for, expected=is_remote)
        for shard in filter(shards.is_open, range(len(shards))):
            self.documents(shard)

    def __getstate__(self) -> dict[str, Any]:
        samples = self.samples
        connection = (samples.indices, samples.mixture, samples.exclusions, samples.fim)
        names = ("_options", "framework", "datasets")
        state = {name: getattr(self, name) for name in names} | {"connection": connection}
        return {**state, "columns": self._column_identities()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("_options", "framework", "datasets"):
            setattr(self, name, state[name])
        self._connect(*state["connection"])
        if self._column_identities() != state["columns"]:
            raise FormatError(
                f"{self!r}: a column was added, replaced or removed after the dataset was opened; "
                "start the run again"
            )

    def _column_identities(self) -> list[dict[str, str]]:
        """Return identities of the columns in use; shard manifests record those of shards."""
        names = (*INTERPRETED, *self.columns)
        datasets = [source for source in self.datasets if isinstance(source, DatasetDocuments)]
        opened = [source.open_columns(source.dataset, names) for source in datasets]
        return [{name: column.entry.identity for name, column in each.items()} for each in opened]

    def __len__(self) -> int:
        """Return the number of samples of all buckets and datasets."""
        return self.samples.num_samples

    def longest_position(self, row_tokens: int | None = None) -> int:
        """Return the maximum number of positions of a document or of padding; see
        ``batch.longest_position``."""
        positions = self._options["positions"]
        return longest_position(self.samples.indices, positions=positions, row_tokens=row_tokens)

    def __repr__(self) -> str:
        names = textwrap.shorten(", ".join(source.prefix for source in self.datasets), 80)
        return f"PackedDataset({counted(len(self), 'sample')} of {names})"

    def __getitem__(self, i: int) -> Batch:
        """Return one sample, ``micro_batch`` without the dimension of rows: tokens, labels,
        position_ids int64 (capacity,); loss_mask float32 (capacity,); columns (capacity, *shape);
        cu_seqlens int32 (segments + 1,); max_seqlen int."""
        return self._sample(i)

    def _sample(self, i: int, view: StepView = PLAIN) -> Batch:
        if not hasattr(i, "__index__"):
            raise ArgumentError(
                f"PackedDataset: index is {i!r:.200}; give one integer at a time, as in "
                "[dataset[i] for i in range(3)]"
            )
        sample = i.__index__()
        if sample < 0:
            sample += len(self)
        batch = self.micro_batch([sample], view=view)
        for name in per_token(batch):
            batch[name] = batch[name][0]
        return Sample(batch)

    def __getitems__(self, samples: Sequence[int]) -> list[Batch]:
        """Return one batch per sample. torch's DataLoader passes the items of its batch sampler."""
        view = replace(getattr(samples, "view", PLAIN), window=None, loss_weight=None)
        views = view.each(len(samples))
        return [self._sample(i, v) for i, v in zip(samples, views, strict=True)]

    def micro_batch(
        self,
        sample_ids: ArrayLike,
        *,
        layout: BatchLayout | None = None,
        capacity: int | None = None,
        out: Buffers | None = None,
        pin_memory: bool = False,
        view: StepView = PLAIN,
    ) -> Batch:
        """Gather samples of one bucket.

        Args:
            sample_ids: ids of samples of one capacity, in the order of the batch.
            layout: shape of the batch; None: one stream of exactly these samples.
            capacity: tokens per sample; None: look it up.
            out: buffers of ``allocate(num_tokens, columns=self.columns)`` to write into; the
                tensors of the batch are views of them. None: new ones.
            pin_memory: new tensors in page-locked memory.
            view: requirements of the step (``MicroBatch.view``): its window cuts the segments of
                cu_seqlens, also padding, at multiples of the window's length.

        Returns:
            ``tokens, labels, position_ids`` int64 and ``loss_mask`` float32 in the layout's shape.
            The mask is 0 without a label, else the view's ``loss_weight`` of the sample times the
            weight of the token, divided by the sum of these weights in the sequence unless
            ``loss`` is token_mean;
            columns under their names, in the layout's shape and that of a row. A column of
            ``target`` has the row of the token whose id is the label, or would be without chosen
            labels; padding and tokens inserted by fill-in-the-middle have the fill value;
            ``cu_seqlens`` int32, in which the padding of a sample is its last segment (with
            alignment also ``cu_seqlens_padded``); ``dataset_ids`` int32, dataset of every segment,
            -1 for padding; ``max_seqlen`` int, longest segment with its padding. With
            num_mtp_targets also ``mtp_labels`` int64 and ``mtp_loss_mask`` float32, (rows, tokens,
            num_mtp_targets).

            With attention ``tree``, labels and loss_mask belong to the predicted token instead of
            the one before it, ``predecessors`` int64 (tokens,): the label is the token, or -100 if
            no document has it; the mask is the sum over the documents of its path. position_ids
            are depths. ``cu_seqlens_q`` (cu_seqlens), ``cu_seqlens_k``, ``kv_index`` int32,
            ``max_seqlen_q``, ``max_seqlen_k`` int: nodes and paths (``TreeBatch``).

        Raises:
            IndexError: a sample does not exist.
            FormatError: the index points outside the documents.
            ValueError: the samples do not fit the layout, or a factor is not finite.
            ConfigError: ``out`` was allocated for other columns.
            TypeError: sample_ids are not integers.
            FormatError, ConfigError, OSError: remote tokens cannot be fetched
                (``RemoteObject.read``).
        """
        array = np.asarray(sample_ids)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"sample_ids are {array.dtype.name} ({array.flat[0]}); give integers")
        ids = np.ascontiguousarray(array, np.int64)
        if len(ids) == 0 and (capacity is None or layout is None):
            raise ValueError("an empty micro batch needs the capacity of its bucket and a layout")
        if capacity is None:
            capacity = self.samples.capacity_of(int(ids[0]))
        if layout is None:
            layout = _one_stream(capacity * len(ids))
        rows, row_tokens = layout.rows(capacity)
        buffers = out or self.allocate(layout.micro_batch_tokens, pin_memory=pin_memory)
        if (self.columns or buffers.columns) and buffers.columns != self.columns:
            raise ConfigError(
                f"the buffers have columns {list(buffers.columns)} and the data has "
                f"{list(self.columns)}: make them with dataset.allocate(num_tokens)"
            )
        if self.samples.attention == "tree" and (layout.kind, layout.cu_seqlens) != _OF_TREES:
            raise ConfigError(
                f"layout is {layout.kind} with cu_seqlens {layout.cu_seqlens}, and a batch of "
                "prefix trees is one stream whose paths differ in length: use stream and exact"
            )
        entries = 0  # not padded
        if layout.cu_seqlens == "padded":
            entries = layout.num_cu_seqlens or self.max_cu_seqlens(layout, capacity, view.window)
        self._open_for(ids)
        arrays, per_row = buffers.arrays, layout.cu_seqlens_per_row
        entries_of_gather = 0 if view.window else entries  # cut_bounds pads
        shape = _core.BatchShape(rows, row_tokens, capacity, per_row, entries_of_gather)

        def gather() -> Any:  # positional arguments: keywords cost a microsecond
            return self._gatherer.gather(
                ids,
                view.core,
                shape,
                arrays["tokens"],
                arrays["labels"],
                arrays["loss_mask"],
                arrays["position_ids"],
                *buffers.column_arrays,
            )

        bounds = self.remote_reads.read(ids, gather)
        if view.window:
            num_rows = rows if per_row else 1
            bounds = cut_bounds(Bounds(*bounds), view.window, num_rows=num_rows, entries=entries)
        cu_seqlens, cu_seqlens_padded, dataset_ids, max_seqlen, trees = bounds
        stream = layout.kind == "stream"
        batch: Batch = {**buffers.shaped((1, rows * row_tokens) if stream else (rows, row_tokens))}
        others: Batch = {"cu_seqlens": layout.listed(cu_seqlens, rows)}
        if cu_seqlens_padded is not None:
            others["cu_seqlens_padded"] = layout.listed(cu_seqlens_padded, rows)
        others["dataset_ids"] = dataset_ids
        others["max_seqlen"] = max_seqlen
        if trees is not None:
            others |= tree_entries(Bounds(*bounds))
        if num_targets := self._options["num_mtp_targets"]:
            attention = self._options["attention"]
            others |= mtp_targets(batch | others, num_targets, attention=attention)
        wrap = wrapper(self.framework)
        for name, value in others.items():
            batch[name] = value if isinstance(value, int) else wrap(value)
        return batch

    def allocate(self, num_tokens: int, *, pin_memory: bool = False) -> Buffers:
        """Return new buffers for micro batches of ``num_tokens`` tokens, with columns."""
        return allocate(
            num_tokens, columns=self.columns, pin_memory=pin_memory, framework=self.framework
        )

    def max_cu_seqlens(self, layout: BatchLayout, capacity: int, window: int | None = None) -> int:
        """Return an upper bound on the entries of cu_seqlens in any micro batch of a bucket."""
        key = (layout, capacity)
        if key not in self._max_cu_seqlens:
            whole = self._options["attention"] == "sample"
            indices = self.samples.indices
            self._max_cu_seqlens[key] = layout.most_entries(indices, capacity, whole=whole)
        tokens = layout.row_tokens if layout.cu_seqlens_per_row else None
        cuts = (tokens or layout.micro_batch_tokens) // window if window else 0
        return self._max_cu_seqlens[key] + cuts

    def prefetch(self, sample_ids: ArrayLike) -> int:
        """Ask the system to read the documents of these samples in the background. Returns the
        number of bytes, in whole pages. Raises as ``micro_batch`` does."""
        ids = np.ascontiguousarray(sample_ids, np.int64)
        self._open_for(ids)
        return self._gatherer.read_ahead(ids)

    def disable_readahead(self) -> None:
        """Turn off the system's own read-ahead around requested pages, for this process."""
        self._gatherer.disable_readahead()

    def count_labels(self, sample_ids: ArrayLike, view: StepView = PLAIN) -> Ids:
        """Return how many tokens of every sample have a label, int64; see ``micro_batch``."""
        return self.samples.count_labels(np.ascontiguousarray(sample_ids, np.int64), view)

    def _count_labels(self, ids: Ids, view: StepView) -> LabelTotals:
        self._open_for(ids)
        count = partial(self._gatherer.count_labels, ids, view.core)
        # Fill-in-the-middle needs the tokens of a document to count its labels.
        reads = self._remote_labels if view.epochs is None else self.remote_reads
        return LabelTotals(*reads.read(ids, count))

    def fim_draws(self, sample_ids: ArrayLike, view: StepView) -> list[FimDraw]:
        """Return the documents of some samples that fill-in-the-middle transforms, in order."""
        ids = np.ascontiguousarray(sample_ids, np.int64)
        self._open_for(ids)
        draws = partial(self._gatherer.fim_draws, ids, view.core)
        rows = zip(*(column.tolist() for column in self.remote_reads.read(ids, draws)), strict=True)
        return [FimDraw(*row) for row in rows]

    def segments(self, sample_ids: ArrayLike) -> SampleSegments:
        """Return the segments of samples, in order. Raises as ``micro_batch`` does."""
        ids = np.ascontiguousarray(sample_ids, np.int64)
        self._open_for(ids)
        return SampleSegments(*self._gatherer.segments(ids))

    def documents(self, shard: int) -> IndexedDataset:
        """Return the documents of a shard (``samples.shard_of``); open them on first use. Raises
        IndexMismatchError if they are not the packed ones, FormatError or OSError for a file."""
        with self._opening:
            if shard not in self._documents:
                self._documents[shard] = self._open(shard)
            return self._documents[shard]

    def _open_for(self, ids: Ids) -> None:
        if self._gatherer.num_closed:
            for shard in self._gatherer.closed(ids).tolist():
                self.documents(shard)

    def _open(self, shard: int) -> IndexedDataset:
        shards = self.samples.shards
        source = int(shards.sources[shard])
        documents = self.datasets[source]
        dataset = documents.open(shards.number_in_source(shard))
        columns = documents.open_columns(dataset, (*INTERPRETED, *self.columns))
        labels, weights = columns.get(LABELS), columns.get(WEIGHTS)
        carried = map(columns.get, self.columns)
        index = shards.index(shard)
        if index.source:  # every process compares the .idx that it reads with the checksums
            index.check_source(dataset)
        first = int(shards.first_documents[shard])
        end = first + dataset.num_documents
        excluded, excluded_by = self.samples.exclusions.of_documents(source, first, end)
        joined = None if index.segment_joined is None else np.asarray(index.segment_joined)
        trees: Any = (index.segment_parent, index.segment_end_offsets, index.end_document)
        self._gatherer.open(
            shard,
            tokens=dataset.mapped_tokens,
            labels=None if labels is None else labels.mapped_bytes.view(labels.rows.dtype),
            weights=None if weights is None else weights.mapped_bytes.view(np.uint16),
            index_bytes=dataset.index_bytes,
            index_name=f"{dataset.prefix}.idx",
            sample_segment_offsets=index.sample_segment_offsets,
            segment_document=index.segment_document,
            segment_begin=index.segment_begin,
            segment_length=index.segment_length,
            excluded=excluded,
            excluded_by=excluded_by,
            segment_joined=joined if self.samples.attention == "group" else None,
            first_document=first,
            fim_longest=-1 if self.samples.fim is None else index.fim_longest,
            columns=[None if column is None else column.mapped_bytes for column in carried],
            trees=trees if index.has_trees else None,
        )
        rows = {name: column.rows for name, column in columns.items()}
        self.remote_reads.add(shard, dataset.tokens, *rows.values())
        self._remote_labels.add(shard, *(rows[name] for name in INTERPRETED if name in rows))
        return dataset


# ---- Prefix trees

_OF_TREES = ("stream", "exact")  # layout of a batch


@checked_call
def open_blend(
    blend: BlendConfig,
    datasets: Sequence[Documents] | None = None,
    indices: Sequence[Index] | None = None,
    *,
    positions: Literal["segment", "document", "sample"] = "segment",
    attention: Attention = "document",
    label_boundary: Literal["document", "sample"] = "document",
    pad_token: int = 0,
    alignment: int = 1,
    num_mtp_targets: int = 0,
    framework: Framework = "torch",
    decided: Sequence[Stage] = (),
    loss: Loss | None = None,
) -> PackedDataset:
    """Return the sources of a manifest as one dataset.

    Args:
        blend: the manifest.
        datasets, indices: one per source, if they are open; None: open those of the manifest.
        positions .. loss: see ``PackedDataset``.

    Raises:
        ConfigError: a source has no index.
    """
    sources = blend.sources
    if indices is None:
        for source in sources:
            if source.index is None:
                raise ConfigError(
                    f"source {source.title!r} has no index; make one with megapack-build pack"
                )
        indices = [source.open_index() for source in sources]
    return PackedDataset(
        [source.prefix for source in sources] if datasets is None else datasets,
        indices,
        mixture=blend.mixture,
        labels=[None if source.labels == "none" else "auto" for source in sources],
        token_weights=[None if source.token_weights == "none" else "auto" for source in sources],
        positions=positions,
        attention=attention,
        label_boundary=label_boundary,
        pad_token=pad_token,
        alignment=alignment,
        num_mtp_targets=num_mtp_targets,
        framework=framework,
        decided=decided,
        loss=loss,
    )

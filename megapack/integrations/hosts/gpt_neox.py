"""GPT-NeoX: packed rows for data_path and train_data_paths, attention within documents.

    # train_packed.py, next to train.py; launch with: python deepy.py train_packed.py <configs>
    import runpy
    from megapack.integrations.hosts import gpt_neox
    gpt_neox.install()
    runpy.run_path("train.py", run_name="__main__")

NeoX reads rows in order, so with blocks of ``train_batch_size`` rows all ranks have the same
bucket. It resumes from a count of micro batches, so a run may continue on a different number of
ranks with the same ``train_batch_size``. Limitations: docs/guides/gpt_neox.md.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megapack.data.blend import Source
from megapack.data.documents import DatasetDocuments, SourceDocuments, largest_id
from megapack.errors import ConfigError, IndexMismatchError
from megapack.integrations.dialects import GPT_NEOX, GPT_NEOX_LABELS
from megapack.integrations.host import Rebinding, check_options
from megapack.integrations.rows import text_rows as segments
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import Manifest, is_manifest
from megapack.integrations.rows.text_rows import (
    SPLITS,
    TextRowDataset,
    build_text_rows,
    split_bounds,
)
from megapack.packing.sharded import PackedColumn
from megapack.storage import IndexedDataset
from megapack.storage.columns import LABELS, Column, ColumnEntry

__all__ = ["NeoXProvider", "install", "uninstall"]

_rebinding = Rebinding("GPT-NeoX")

# The function that builds loaders has one of these names, depending on the release.
LOADERS = ("build_train_valid_test_data_loaders", "build_train_valid_test_data_iterators")


class LabeledDocuments(DatasetDocuments):
    """Documents whose labels are a dataset with one label for each token; negative: no loss. Raises
    IndexMismatchError if the datasets have different numbers of tokens."""

    def __init__(self, dataset: IndexedDataset, labels: IndexedDataset) -> None:
        super().__init__(dataset, ignored=[LABELS])
        self.labels = labels
        if labels.num_tokens != dataset.num_tokens:
            raise IndexMismatchError(
                f"labels {labels.prefix} have {labels.num_tokens} tokens and {dataset.prefix} has "
                f"{dataset.num_tokens}; give the labels of these documents"
            )
        entry = self._column.entry
        packed = PackedColumn(spec=entry.spec, identity=entry.identity)
        self.columns = [(self.prefix, {**self.columns[0][1], LABELS: packed})]

    def open_columns(self, shard: IndexedDataset, names: Iterable[str]) -> dict[str, Column]:
        names = list(names)
        columns = super().open_columns(shard, names)
        return {**columns, LABELS: self._column} if LABELS in names else columns

    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        of_labels = (self.labels.prefix, largest_id(self.labels))
        return max(super().largest_token_id(at_least), of_labels, key=lambda item: item[1])

    @property
    def _column(self) -> Column:  # not cached: it would be pickled with its values
        tokens = self.labels.mapped_tokens
        entry = ColumnEntry(
            dtype=tokens.dtype.name,
            shape=(),
            fill=-100 if tokens.dtype.kind == "i" else 0,
            of="target",
            range=None,  # unknown: see largest_token_id
            bytes=tokens.nbytes,
            xxh3_128=tuple(map(str, self.labels.content_digest)),
        )
        return Column(LABELS, entry, self.labels.tokens, tokens.view(np.uint8))


@dataclass(frozen=True, kw_only=True)
class LabeledSource(Source):
    """Source with the labels of ``train_label_data_paths``."""

    label_path: str

    def open_documents(self) -> SourceDocuments:
        """Return the source's documents with their labels, memory-mapped."""
        assert self.prefix is not None
        return LabeledDocuments(IndexedDataset(self.prefix), IndexedDataset(self.label_path))


class NeoXProvider:
    """Replacements for functions of ``megatron.data.data_utils``; arguments as for ``install``."""

    def __init__(self, *, varlen: bool = True, full_validation: bool = False) -> None:
        self.varlen, self.full_validation = varlen, full_validation
        self.neox_args: Any = None
        self.eval_iters = 0

    def wrap_loaders(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``build_train_valid_test_data_loaders(neox_args)``: check and keep its arguments."""

        @functools.wraps(stock)
        def build(neox_args: Any, *args: Any, **kwargs: Any) -> Any:
            if self.varlen:
                segments.require_one_stage(neox_args.pipe_parallel_size)
                kinds = sorted(set(neox_args.attention_config or ["global"]))
                reason = (
                    "attention inside documents needs flash in every layer "
                    '("attention_config": [[["flash"], "all"]]), or install(varlen=False)'
                )
                check_options({"attention_config": (kinds, ["flash"], reason)})
            by_documents = getattr(neox_args, "weight_by_num_documents", None)
            per_character = self.full_validation and neox_args.char_level_ppl
            check_options({
                "weight_by_num_documents": (by_documents, None, "train_data_weights has weights"),
                "char_level_ppl": (per_character, None, "full_validation weights the loss"),
            })  # fmt: skip
            self.neox_args = neox_args
            loaders = stock(neox_args, *args, **kwargs)
            if self.full_validation:
                neox_args.eval_iters = segments.of_first_rank(self.eval_iters)
                _weight_losses()
            return loaders

        return build

    def build_train_valid_test_datasets(
        self,
        data_prefix: str,
        *,
        splits_string: str,
        train_valid_test_num_samples: Sequence[int | None],
        seq_length: int,
        seed: int,
        train_valid_test_epochs: Sequence[int | None] = (None, None, None),
        **host: Any,
    ) -> tuple[TextRowDataset | None, ...]:
        """Return train, valid and test rows of one ``data_path``; ignore other arguments."""
        del host
        manifests, rows = [Manifest.read(data_prefix)] * 3, train_valid_test_num_samples
        splits = zip(
            manifests, split_bounds(splits_string), rows, train_valid_test_epochs, strict=True
        )
        return self._build(splits, seq_length, seed)

    def build_weighted_datasets(
        self,
        neox_args: Any,
        train_num_samples: Sequence[int | None],
        valid_num_samples: Sequence[int | None],
        test_num_samples: Sequence[int | None],
        *epochs_or_weights: Any,
        **host: Any,
    ) -> tuple[list[TextRowDataset], ...]:
        """Return one dataset per split, which blends the split's paths by their weights."""
        del host
        self.neox_args = neox_args
        manifests = [_manifest_of(neox_args, name) for name in SPLITS]
        samples = (train_num_samples, valid_num_samples, test_num_samples)
        num_rows = [None if None in part else sum(int(n or 0) for n in part) for part in samples]
        num_epochs = [_epochs(epochs_or_weights, number) for number in range(3)]
        splits = zip(manifests, [(0.0, 1.0)] * 3, num_rows, num_epochs, strict=True)
        datasets = self._build(splits, neox_args.seq_length, neox_args.seed, with_labels=True)
        return tuple([] if rows is None else [rows] for rows in datasets)

    def _build(
        self, splits: Iterable[Any], seq_length: int, seed: int, *, with_labels: bool = False
    ) -> tuple[TextRowDataset | None, ...]:
        """Return rows of train, valid and test. ``splits``: manifest or None, fractions of
        documents, numbers of rows and epochs; with_labels adds ``label`` if a source is a
        ``LabeledSource``."""
        datasets: list[TextRowDataset | None] = []
        for manifest, split, num_rows, num_epochs in splits:
            if manifest is None:
                datasets.append(None)
                continue
            block = getattr(self.neox_args, "train_batch_size", None) or manifest.rows_per_block
            if block is None:
                raise ConfigError('train_batch_size is unknown: set "rows_per_block" in manifest')
            labeled = any(isinstance(source, LabeledSource) for source in manifest.sources)
            dataset = build_text_rows(
                manifest,
                RowOptions(sequence_length=seq_length, rows_per_block=int(block), seed=seed),
                GPT_NEOX_LABELS if with_labels and labeled else GPT_NEOX,
                split=split,
                num_rows=num_rows,
                num_epochs=num_epochs,
                varlen=self.varlen,
                times=1 if self.full_validation and datasets else None,
            )
            datasets.append(dataset)
        if self.full_validation:
            self.eval_iters = segments.whole_sets(datasets[1:])
        return tuple(datasets)


def evaluate_from_first_row(stock: Any) -> Callable[..., Any]:
    """Wrap ``shift_and_wrap_data_loaders``: start every evaluation at the first row. After a
    resume, NeoX would start at a later row and repeat only the rows from there on."""

    @functools.wraps(stock)
    def shift(neox_args: Any, data_loaders: Any, *args: Any, **kwargs: Any) -> Any:
        iterators = stock(neox_args, data_loaders, *args, **kwargs)
        loaders = [data_loaders[name] for name in SPLITS[1:]]
        return iterators[0], *(None if one is None else _repeat(one) for one in loaders)

    return shift


def _repeat(loader: Any) -> Iterator[Any]:
    while True:
        loader.batch_sampler.start_iter = 0
        yield from loader


def _weight_losses() -> None:
    """Wrap the loss function of a micro batch, and the evaluation that averages losses."""
    training = importlib.import_module("megatron.training")
    evaluation, cross_entropy = segments.evaluation, training.cross_entropy
    if hasattr(training.evaluate, "__wrapped__"):  # already done, by an earlier build of loaders
        return

    @functools.wraps(cross_entropy)
    def weighted(output: Any, labels: Any, **options: Any) -> Any:
        return evaluation.weigh(cross_entropy(output, labels, **options), labels[1])

    def divide(losses: dict[str, Any], share: float) -> None:
        losses["lm_loss"] /= share
        losses["lm_loss_ppl"] = math.exp(losses["lm_loss"])

    _rebinding.replace(training, "cross_entropy", weighted)
    _rebinding.replace(training, "evaluate", evaluation.wrap(training.evaluate, divide))


def blendable(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``BlendableDataset(datasets, weights)``: do not blend our dataset again."""

    @functools.wraps(stock, updated=())
    def build(datasets: Sequence[Any], weights: Sequence[float]) -> Any:
        if len(datasets) == 1 and isinstance(datasets[0], TextRowDataset):
            return datasets[0]
        return stock(datasets, weights)

    return build


def install(*, varlen: bool = True, full_validation: bool = False) -> None:
    """Replace NeoX's functions; call it before ``megatron.training`` is imported.

    Raises ConfigError if this is not GPT-NeoX, if its training module is imported already, and for
    full_validation without varlen.

    Args:
        varlen: attention, positions and loss mask per segment (needs flash attention and one
            pipeline stage); without it documents of a row attend to each other, as in stock NeoX.
        full_validation: an evaluation reads every document of its set once and ignores
            ``eval_iters`` (unless it is 0: no evaluation); its loss is the mean over all labels.
    """
    if _rebinding:
        return
    segments.require_loss_mask(varlen=varlen, full_validation=full_validation)
    if "megatron.training" in sys.modules:
        raise ConfigError(
            "megatron.training is imported already and has bound NeoX's functions; "
            "call install() first"
        )
    data_utils = importlib.import_module("megatron.data.data_utils")
    provider = NeoXProvider(varlen=varlen, full_validation=full_validation)
    loaders = next((n for n in LOADERS if hasattr(data_utils, n)), None)
    if loaders is None:
        raise ConfigError("megatron.data.data_utils builds no loaders; is this GPT-NeoX?")
    _rebinding.replace(data_utils, loaders, provider.wrap_loaders(getattr(data_utils, loaders)))
    if full_validation:
        shift = "shift_and_wrap_data_loaders"
        wrapped = evaluate_from_first_row(getattr(data_utils, shift, None))
        _rebinding.replace(data_utils, shift, wrapped)
    for name in ("build_train_valid_test_datasets", "build_weighted_datasets"):
        _rebinding.replace(data_utils, name, getattr(provider, name))
    _rebinding.replace(data_utils, "BlendableDataset", blendable(data_utils.BlendableDataset))
    if varlen:
        segments.hand_over_boundaries(_rebinding, "megatron.mpu")


def uninstall() -> None:
    """Restore NeoX's functions."""
    _rebinding.undo()
    segments.clear()


def _manifest_of(neox_args: Any, split: str) -> Manifest | None:
    paths = getattr(neox_args, f"{split}_data_paths", None)
    if not paths:
        return None
    if len(paths) == 1 and is_manifest(paths[0]):
        return Manifest.read(paths[0])
    weights = getattr(neox_args, f"{split}_data_weights", None) or [None] * len(paths)
    labels = getattr(neox_args, f"{split}_label_data_paths", None) or [None] * len(paths)
    return Manifest(
        sources=tuple(
            LabeledSource(prefix=path, weight=weight, label_path=label)
            if label
            else Source(prefix=path, weight=weight)
            for path, weight, label in zip(paths, weights, labels, strict=True)
        )
    )


def _epochs(epochs_or_weights: Sequence[Any], number: int) -> int | None:
    """Return the epochs of one split; None if a release passes lists of weights here."""
    value = epochs_or_weights[number] if number < len(epochs_or_weights) else None
    return value if isinstance(value, int) else None

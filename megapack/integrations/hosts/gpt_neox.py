"""GPT-NeoX: packed rows behind data_path and train_data_paths, attention inside documents.

    # train_packed.py, beside train.py; launch with: python deepy.py train_packed.py <configs>
    import runpy
    from megapack.integrations.hosts import gpt_neox
    gpt_neox.install()
    runpy.run_path("train.py", run_name="__main__")

NeoX reads rows sequentially and resumes by counting micro batches; so blocks of
``train_batch_size`` rows keep one bucket on all ranks, and a run continues with another number of
ranks as long as ``train_batch_size`` stays. docs/guides/gpt_neox.md has the limits.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megapack.errors import ConfigError
from megapack.integrations.dialects import GPT_NEOX, GPT_NEOX_LABELS
from megapack.integrations.host import Rebinding, check_options
from megapack.integrations.rows import text_rows as segments
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import Manifest, Source, is_manifest
from megapack.integrations.rows.text_rows import (
    SPLITS,
    TextRowDataset,
    build_text_rows,
    split_bounds,
)

__all__ = ["NeoXProvider", "install", "uninstall"]

_rebinding = Rebinding("GPT-NeoX")

# As releases name what builds loaders from the arguments.
LOADERS = ("build_train_valid_test_data_loaders", "build_train_valid_test_data_iterators")


class NeoXProvider:
    """The functions of ``megatron.data.data_utils`` that make datasets.

    Args:
        varlen: attention, positions and loss mask by segment (needs flash attention and one
            pipeline stage); without it documents of a row see each other, as in stock NeoX.
        full_validation: validation and test sets are evaluated as a whole.
    """

    def __init__(self, *, varlen: bool = True, full_validation: bool = False) -> None:
        self.varlen, self.full_validation = varlen, full_validation
        self.neox_args: Any = None
        self.eval_iters = 0

    def remember(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``build_train_valid_test_data_loaders(neox_args)`` that keeps the arguments for us."""

        @functools.wraps(stock)
        def build(neox_args: Any, *args: Any, **kwargs: Any) -> Any:
            if self.varlen:
                segments.require_one_stage(neox_args.pipe_parallel_size)
                check_options({"attention_config": _flash(neox_args.attention_config)})
            weighed = getattr(neox_args, "weight_by_num_documents", None)
            per_character = self.full_validation and neox_args.char_level_ppl
            check_options({
                "weight_by_num_documents": (weighed, None, "train_data_weights has the weights"),
                "char_level_ppl": (per_character, None, "full_validation weighs the loss"),
            })  # fmt: skip
            self.neox_args = neox_args
            loaders = stock(neox_args, *args, **kwargs)
            if self.full_validation:
                neox_args.eval_iters = segments.of_first_rank(self.eval_iters)
                _weigh_losses()
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
        """Train, valid and test rows of one ``data_path``. NeoX's other arguments do not apply."""
        del host
        return self._built(
            [Manifest.read(data_prefix)] * 3,
            split_bounds(splits_string),
            train_valid_test_num_samples,
            train_valid_test_epochs,
            seq_length,
            seed,
        )

    def build_weighted_datasets(
        self,
        neox_args: Any,
        train_num_samples: Sequence[int | None],
        valid_num_samples: Sequence[int | None],
        test_num_samples: Sequence[int | None],
        *epochs_or_weights: Any,
        **host: Any,
    ) -> tuple[list[TextRowDataset], ...]:
        """One dataset for each of train, valid and test, their paths and weights blended inside."""
        del host
        self.neox_args = neox_args
        wanted = (train_num_samples, valid_num_samples, test_num_samples)
        built = self._built(
            [_manifest_of(neox_args, name) for name in SPLITS],
            [(0.0, 1.0)] * 3,
            [None if None in part else sum(int(n or 0) for n in part) for part in wanted],
            [_epochs(epochs_or_weights, number) for number in range(3)],
            neox_args.seq_length,
            neox_args.seed,
            with_labels=True,
        )
        return tuple([] if rows is None else [rows] for rows in built)

    def _built(
        self,
        manifests: Sequence[Manifest | None],
        bounds: Sequence[tuple[float, float]],
        num_rows: Sequence[int | None],
        num_epochs: Sequence[int | None],
        seq_length: int,
        seed: int,
        *,
        with_labels: bool = False,
    ) -> tuple[TextRowDataset | None, ...]:
        """Rows of train, valid and test, with ``label`` where a source names some."""
        built: list[TextRowDataset | None] = []
        for manifest, split, rows, epochs in zip(
            manifests, bounds, num_rows, num_epochs, strict=True
        ):
            if manifest is None:
                built.append(None)
                continue
            whole = self.full_validation and bool(built)
            block = getattr(self.neox_args, "train_batch_size", None) or manifest.rows_per_block
            if block is None:
                raise ConfigError(
                    'train_batch_size is not known here; give "rows_per_block" in the manifest'
                )
            named = any(source.labels not in ("auto", "none") for source in manifest.sources)
            one = build_text_rows(
                manifest,
                RowOptions(sequence_length=seq_length, rows_per_block=int(block), seed=seed),
                GPT_NEOX_LABELS if with_labels and named else GPT_NEOX,
                split=split,
                num_rows=rows,
                num_epochs=epochs,
                varlen=self.varlen,
                times=1 if whole else None,
            )
            built.append(one)
        if self.full_validation:
            self.eval_iters = segments.whole_sets(built[1:])
        return tuple(built)


def from_the_first_row(stock: Any) -> Callable[..., Any]:
    """``shift_and_wrap_data_loaders`` whose evaluations begin with the first row.

    A resumed run of NeoX begins with another row, and repeats what is behind it.
    """

    @functools.wraps(stock)
    def shift(neox_args: Any, data_loaders: Any, *args: Any, **kwargs: Any) -> Any:
        iterators = stock(neox_args, data_loaders, *args, **kwargs)
        return iterators[0], *(_again(data_loaders[name]) for name in SPLITS[1:])

    return shift


def _again(loader: Any) -> Iterator[Any] | None:
    if loader is None:
        return None

    def forever() -> Iterator[Any]:
        while True:
            loader.batch_sampler.start_iter = 0
            yield from loader

    return forever()


def _weigh_losses() -> None:
    """Rebind the loss of a micro batch, and the evaluation that takes the mean of them."""
    training = importlib.import_module("megatron.training")
    evaluation, cross_entropy = segments.evaluation, training.cross_entropy
    if hasattr(training.evaluate, "__wrapped__"):  # loaders of this process are built once more
        return

    @functools.wraps(cross_entropy)
    def weighed(output: Any, labels: Any, **options: Any) -> Any:
        return evaluation.weigh(cross_entropy(output, labels, **options), labels[1])

    def divide(found: dict[str, Any], share: float) -> None:
        found["lm_loss"] /= share
        found["lm_loss_ppl"] = math.exp(found["lm_loss"])

    _rebinding.replace(training, "cross_entropy", weighed)
    _rebinding.replace(training, "evaluate", evaluation.wrap(training.evaluate, divide))


def blendable(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``BlendableDataset(datasets, weights)``: ours are blended already."""

    @functools.wraps(stock, updated=())
    def build(datasets: Sequence[Any], weights: Sequence[float]) -> Any:
        if len(datasets) == 1 and isinstance(datasets[0], TextRowDataset):
            return datasets[0]
        return stock(datasets, weights)

    return build


def install(*, varlen: bool = True, full_validation: bool = False) -> None:
    """Rebind NeoX's names; call it before ``megatron.training`` is imported.

    Args:
        varlen: see ``NeoXProvider``.
        full_validation: an evaluation goes once through all documents of its set, whatever
            ``eval_iters`` (unless 0, which evaluates nothing), and its loss is the mean over all
            their labels.

    Raises:
        ConfigError: this is not GPT-NeoX, its training module is already imported, or
            full_validation without varlen.
    """
    if _rebinding:
        return
    segments.require_loss_mask(varlen=varlen, full_validation=full_validation)
    if "megatron.training" in sys.modules:
        raise ConfigError(
            "megatron.training is imported already and keeps the names that install() replaces; "
            "call install() first"
        )
    data_utils = importlib.import_module("megatron.data.data_utils")
    provider = NeoXProvider(varlen=varlen, full_validation=full_validation)
    loaders = next((n for n in LOADERS if hasattr(data_utils, n)), None)
    if loaders is None:
        raise ConfigError("megatron.data.data_utils builds no loaders; is this GPT-NeoX?")
    _rebinding.replace(data_utils, loaders, provider.remember(getattr(data_utils, loaders)))
    if full_validation:
        shift = "shift_and_wrap_data_loaders"
        wrapped = from_the_first_row(getattr(data_utils, shift, None))
        _rebinding.replace(data_utils, shift, wrapped)
    for name in ("build_train_valid_test_datasets", "build_weighted_datasets"):
        _rebinding.replace(data_utils, name, getattr(provider, name))
    _rebinding.replace(data_utils, "BlendableDataset", blendable(data_utils.BlendableDataset))
    if varlen:
        segments.hand_over_boundaries(_rebinding, "megatron.mpu")


def uninstall() -> None:
    """Give NeoX its own names back."""
    _rebinding.undo()
    segments.clear()


def _manifest_of(neox_args: Any, split: str) -> Manifest | None:
    """``train_data_paths``, their weights and their label paths as a manifest."""
    paths = getattr(neox_args, f"{split}_data_paths", None)
    if not paths:
        return None
    if len(paths) == 1 and is_manifest(paths[0]):
        return Manifest.read(paths[0])
    weights = getattr(neox_args, f"{split}_data_weights", None) or [None] * len(paths)
    labels = getattr(neox_args, f"{split}_label_data_paths", None) or [None] * len(paths)
    return Manifest(
        sources=tuple(
            Source(prefix=path, weight=weight, labels=label or "auto")
            for path, weight, label in zip(paths, weights, labels, strict=True)
        )
    )


def _epochs(epochs_or_weights: Sequence[Any], number: int) -> int | None:
    """NeoX passes train, valid and test epochs here (older releases: lists of weights)."""
    value = epochs_or_weights[number] if number < len(epochs_or_weights) else None
    return value if isinstance(value, int) else None


def _flash(attention_config: Sequence[str] | None) -> tuple[Any, Any, str]:
    kinds = sorted(set(attention_config or ["global"]))
    reason = (
        "attention inside documents needs flash in every layer "
        '("attention_config": [[["flash"], "all"]]), or install(varlen=False)'
    )
    return kinds, ["flash"], reason

"""Megatron-DeepSpeed: packed rows for --data-path, attention within documents.

    # pretrain_packed.py, next to pretrain_gpt.py; launch it instead, with the same arguments
    import runpy
    from megapack.integrations.hosts import megatron_deepspeed
    megatron_deepspeed.install()
    runpy.run_path("pretrain_gpt.py", run_name="__main__")

Megatron's loader ``single`` reads consecutive rows and resumes by consumed_train_samples.
docs/guides/megatron_deepspeed.md lists the limitations.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError
from megapack.integrations.dialects import MEGATRON_DEEPSPEED
from megapack.integrations.host import Rebinding, check_options
from megapack.integrations.rows import text_rows as segments
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.text_rows import TextRowDataset

__all__ = ["build_train_valid_test_datasets", "install", "uninstall"]

_rebinding = Rebinding("Megatron-DeepSpeed")

Datasets = tuple[TextRowDataset | None, TextRowDataset | None, TextRowDataset | None]


def build_train_valid_test_datasets(
    data_prefix: str | Sequence[str] | None,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Sequence[int | None],
    seq_length: int,
    seed: int,
    skip_warmup: bool,
    train_data_prefix: Sequence[str] | None = None,
    valid_data_prefix: Sequence[str] | None = None,
    test_data_prefix: Sequence[str] | None = None,
    return_doc_ids: bool = False,
    *,
    data_cache_path: str | None = None,
    varlen: bool = True,
    rows_per_block: int | None = None,
    full_validation: bool = False,
) -> Datasets:
    """Replace Megatron-DeepSpeed's function of this name. Raises ConfigError for return_doc_ids, or
    for options that exclude each other.

    Args:
        data_prefix: prefix, manifest, or weight prefix weight prefix ..., split by splits_string;
            or None, with train_data_prefix, valid_data_prefix, test_data_prefix.
        train_valid_test_num_samples: rows of each split; None: one epoch.
        data_cache_path: directory of the sample index; None: in the first source's folder.
        varlen: add keys for boundaries, positions and loss mask.
        rows_per_block: None: the manifest's, else the global batch size of ``get_args()``.
        full_validation: every evaluation reads the whole validation and test sets.
    """
    del data_impl, skip_warmup
    check_options({"return_doc_ids": (return_doc_ids, None, "a packed row has many documents")})
    if data_prefix is not None:
        bounds = segments.split_bounds(splits_string or "1")
        paths: list[Any] = [data_prefix] * 3
    else:
        bounds = [(0.0, 1.0)] * 3
        paths = [train_data_prefix, valid_data_prefix, test_data_prefix]
    evaluations: list[int | None] = [None] * 3
    if full_validation:  # at most one evaluation after every step and one at the end
        evaluations[1:] = [importlib.import_module("megatron").get_args().train_iters + 1] * 2
    parts: list[TextRowDataset | None] = []
    splits = zip(paths, bounds, train_valid_test_num_samples, evaluations, strict=True)
    for path, split, num_rows, times in splits:
        manifest = None if path is None else segments.manifest_of_list(path)
        if manifest is None:
            parts.append(None)
            continue
        block = None if times else rows_per_block or manifest.rows_per_block
        sizes: Any = {"sequence_length": seq_length, "rows_per_block": block or _global_batch()}
        rows = segments.build_text_rows(
            manifest,
            RowOptions(**sizes, seed=seed),
            MEGATRON_DEEPSPEED,
            split=split,
            num_rows=num_rows,
            cache_directory=data_cache_path,
            varlen=varlen,
            times=times,
        )
        parts.append(rows)
    train, valid, test = parts
    if full_validation:
        segments.whole_sets((valid, test))
    return train, valid, test


def _global_batch() -> int:
    args = importlib.import_module("megatron").get_args()
    return segments.shared_rows(args.global_batch_size, getattr(args, "rampup_batch_size", None))


def install(*, varlen: bool = True, full_validation: bool = False) -> None:
    """Replace Megatron-DeepSpeed's functions; call it before ``pretrain_gpt.py`` runs.

    Raises ConfigError if the installed deepspeed lacks a module that Megatron-DeepSpeed imports, a
    name to replace is missing, or for full_validation without varlen.

    Args:
        varlen: attention, positions and loss mask per segment (needs ``--use-flash-attn-v2`` and
            one pipeline stage). Without it, documents of a row attend to each other, and the last
            token of a document predicts the first of the next, as in the stock code.
        full_validation: an evaluation reads every document of its set once and ignores
            ``--eval-iters`` (unless it is 0: no evaluation); its loss is the mean over all labels.
    """
    if _rebinding:
        return
    segments.require_loss_mask(varlen=varlen, full_validation=full_validation)
    _require_compression()
    gpt_dataset = importlib.import_module("megatron.data.gpt_dataset")

    def build(*args: Any, **kwargs: Any) -> Datasets:
        if varlen:
            host = importlib.import_module("megatron").get_args()
            segments.require_one_stage(host.pipeline_model_parallel_size)
            reason = "attention inside documents needs it, or install(varlen=False)"
            check_options({"--use-flash-attn-v2": (host.use_flash_attn_v2, True, reason)})
        return build_train_valid_test_datasets(
            *args, varlen=varlen, full_validation=full_validation, **kwargs
        )

    _rebinding.replace(gpt_dataset, "build_train_valid_test_datasets", build)
    if varlen:
        # Importing any module of the host imports its model, which binds flash-attn's function, so
        # replace it there, too.
        segments.hand_over_boundaries(
            _rebinding, "megatron.core.tensor_parallel", "megatron.model.transformer"
        )
    if full_validation:
        _evaluate_whole_sets()


def _evaluate_whole_sets() -> None:
    """Replace the functions that count evaluation steps, compute losses and average them."""
    training = importlib.import_module("megatron.training")
    utils = importlib.import_module("megatron.utils")
    model = importlib.import_module("megatron.model.gpt_model")
    evaluation = segments.evaluation
    stock_loaders = training.build_train_valid_test_data_loaders
    averaged = utils.average_losses_across_data_parallel_group
    cross_entropy = model.CrossEntropy

    @functools.wraps(stock_loaders)
    def build_loaders(*args: Any, **kwargs: Any) -> Any:
        host = importlib.import_module("megatron").get_args()
        reason = "an evaluation with full_validation needs one batch size"
        check_options({"--rampup-batch-size": (host.rampup_batch_size, None, reason)})
        loaders = stock_loaders(*args, **kwargs)
        parts = [None if loader is None else loader.dataset for loader in loaders[1:]]
        host.eval_iters = segments.of_first_rank(segments.whole_sets(parts))
        return loaders

    @functools.wraps(averaged)
    def average_losses(losses: Sequence[Any]) -> Any:
        batch = segments.current()
        if batch is not None:
            losses = [evaluation.weigh(loss, batch.loss_mask) for loss in losses]
        return averaged(losses)

    @functools.wraps(cross_entropy)
    def weighted(output: Any, labels: Any) -> Any:
        return evaluation.weigh(cross_entropy(output, labels), labels[1])

    def divide(losses: tuple[dict[str, Any], Any], share: float) -> None:
        losses[0]["lm loss"] /= share

    _rebinding.replace(training, stock_loaders.__name__, build_loaders)
    _rebinding.replace(training, "evaluate", evaluation.wrap(training.evaluate, divide))
    _rebinding.replace(utils, averaged.__name__, average_losses)
    _rebinding.replace(model, "CrossEntropy", weighted)


def _require_compression() -> None:
    """Raise ConfigError if deepspeed lacks the module that megatron/training.py imports."""
    missing = "deepspeed.compression.compress"
    training = importlib.util.find_spec("megatron.training")
    if training is None or training.origin is None:
        return
    if missing in Path(training.origin).read_text() and importlib.util.find_spec(missing) is None:
        installed = importlib.import_module("deepspeed").__version__
        raise ConfigError(
            f"{training.origin} imports {missing}, which deepspeed {installed} no longer has "
            "(deepspeedai/DeepSpeed#8490 removed it): install deepspeed 0.19.0"
        )


def uninstall() -> None:
    """Restore Megatron-DeepSpeed's functions."""
    _rebinding.undo()
    segments.clear()

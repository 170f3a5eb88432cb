"""A MegatronDataset of packed rows, and a builder that folds weighted --data-path lists into it.

``PackedGPTDataset`` replaces GPTDataset: same constructor, same batch keys, plus cu_seqlens and
max_seqlen for Megatron's packed-sequence path. megatron-core's own builder builds it.

For several paths Megatron's BlendedDataset interleaves single samples, so in one micro step ranks
would have rows of different buckets. ``PackedDatasetBuilder`` turns the list into one manifest,
whose blend keeps every block of rows in one bucket.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray
from torch import Tensor

from megapack.data.documents import SourceDocuments
from megapack.errors import ConfigError
from megapack.integrations.dialects import MEGATRON, MEGATRON_BRIDGE, Dialect, check_columns, emit
from megapack.integrations.hosts.megatron import host
from megapack.integrations.hosts.megatron.host import HOST, BatchSizes, batch_sizes, version
from megapack.integrations.hosts.megatron.probe import watch_first_call
from megapack.integrations.rows.dataset import GatheredRows, RowDataset, RowOptions
from megapack.integrations.rows.open_rows import Manifest, open_documents, open_rows

logger = logging.getLogger(__name__)

# Units that --split divides: parts per million of every source's documents, so that a split cuts
# all sources of a blend in the same proportion.
SPLIT_UNITS = 1_000_000


class PackedSources:
    """Documents of a data path, memory-mapped."""

    def __init__(self, data_path: str) -> None:
        self.manifest = Manifest.read(data_path)
        self.datasets: list[SourceDocuments] = open_documents(self.manifest)


class PackedGPTDataset(GatheredRows, MegatronDataset):  # type: ignore[misc]  # no stubs
    """Rows of ``config.sequence_length`` tokens in blocks of one bucket.

    The constructor is MegatronDataset's, with a GPTDatasetConfig of any release from 0.16. Raises
    ConfigError if blocks are not whole micro steps, if Megatron itself would blend the paths, or if
    options conflict.

    Args:
        dataset: ``build_low_level_dataset(dataset_path, config)``; the path is a prefix, a manifest
            file or JSON (``megapack.integrations.rows.open_rows``).
        indices: the split, consecutive units of ``SPLIT_UNITS``; None: all of it.
        num_samples: number of rows. None: in training one epoch; in validation and test
            (``--full-validation``) every document once, then rows without loss.
    """

    dialect: ClassVar[Dialect] = MEGATRON
    """Dialect of the boundaries; ``install_bridge()`` changes it."""

    def __init__(
        self,
        dataset: PackedSources,
        dataset_path: str | None,
        indices: NDArray[np.int32] | None,
        num_samples: int | None,
        index_split: Split,
        config: Any,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        _refuse_outer_blend(config, index_split)
        self._register()
        self.rows: RowDataset | None = None
        if num_samples != 0:
            evaluation = index_split is not Split.train
            finite = evaluation and num_samples is None
            sizes = batch_sizes(evaluation=evaluation)
            if self.dialect is MEGATRON_BRIDGE and sizes and sizes.micro_batch_size != 1:
                raise ConfigError(
                    f"micro_batch_size is {sizes.micro_batch_size}; Megatron-Bridge supports one "
                    "packed row per micro batch: set it to 1, and raise seq_length"
                )
            self.rows = open_rows(
                dataset.manifest,
                dataset.datasets,
                row_options(dataset.manifest, config, sizes, finite=finite),
                split=_fractions(indices),
                num_rows=num_samples,
                finite=finite,
                cache_directory=config.path_to_cache,
            )
            if carried := self.rows.packed.columns:
                check_columns(carried, self.dialect)
                logger.warning(
                    "data_iterator yields columns %s, which Megatron's own get_batch does not "
                    "return: read them in your forward step",
                    ", ".join(carried),
                )
            block = self.rows.options.rows_per_block
            if sizes is not None and block % sizes.rows_per_micro_step:
                raise ConfigError(
                    f"rows_per_block is {block}, but micro_batch_size x data_parallel_size is "
                    f"{sizes.rows_per_micro_step}: micro steps would straddle blocks of different "
                    f"buckets. Choose a multiple of {sizes.rows_per_micro_step}"
                )
            watch_first_call()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: PackedSources) -> int:
        del low_level_dataset
        return SPLIT_UNITS

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> PackedSources:
        """Open the sources. Megatron calls this on every rank that builds, before any barrier."""
        del config
        return PackedSources(dataset_path)

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def __getitem__(self, i: int | None) -> dict[str, Tensor]:
        """Return one row for Megatron's packed-sequence path; ``None``: a row without loss.

        Returns:
            tokens, labels, position_ids int64 and loss_mask float32 ``(sequence_length,)``; labels
                are 0 where loss_mask is 0; cu_seqlens int32, max_seqlen 0-d int32 (and
                cu_seqlens_padded with context parallelism); columns ``(sequence_length, *shape)``.
        """
        row = {key: value[0] for key, value in self.micro_batch([i or 0]).items()}
        if i is None:
            row["loss_mask"] = torch.zeros_like(row["loss_mask"])
        return row

    def micro_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        assert self.rows is not None, "an empty split has no rows"
        return emit(self.rows.micro_batch(numbers), self.dialect)

    def bucket_of(self, i: int) -> int:
        assert self.rows is not None, "an empty split has no rows"
        return self.rows.bucket_of(i)


def _fractions(indices: NDArray[np.int32] | None) -> tuple[float, float]:
    if indices is None:
        return 0.0, 1.0
    if len(indices) == 0:
        return 0.0, 0.0
    return int(indices[0]) / SPLIT_UNITS, (int(indices[-1]) + 1) / SPLIT_UNITS


def row_options(
    manifest: Manifest, config: Any, sizes: BatchSizes | None, *, finite: bool = False
) -> RowOptions:
    """Return row options from Megatron's configuration and the batch sizes of a split."""
    # Use small blocks for a finite set, because empty rows fill its last block.
    micro_step = sizes.rows_per_micro_step if finite and sizes is not None else None
    return RowOptions(
        sequence_length=config.sequence_length,
        rows_per_block=micro_step or manifest.rows_per_block or _rows_per_block(sizes),
        seed=config.random_seed,
        align=context_parallel_alignment(config),
        cu_seqlens=_cu_seqlens_format(manifest, sizes),
    )


def context_parallel_alignment(config: Any) -> int:
    """Return the alignment of segments in tokens: 2 x context_parallel_size, 1 without it. Raises
    ConfigError with inter-document masking, where Megatron splits whole rows over ranks, but its
    RoPE assumes that it splits every segment."""
    cp_size = getattr(config, "context_parallel_size", None) or 1
    if cp_size == 1:
        return 1
    if getattr(config, "inter_document_masking", False):
        raise ConfigError(
            f"context_parallel_size is {cp_size}: inter-document masking splits whole rows over "
            f"ranks, but RoPE of {HOST} assumes that each document is split. Replace "
            "--dataloader-inter-document-masking by --sft, which splits each document"
        )
    return 2 * int(cp_size)


def _rows_per_block(sizes: BatchSizes | None) -> int:
    if sizes is None or sizes.shared is None:
        problem = "is not initialized" if sizes is None else "is of an unknown kind"
        raise ConfigError(
            f"the batch sizes of this run are unknown (the micro batch calculator of {HOST} "
            f'{problem}); set "rows_per_block" in the manifest to a multiple of micro_batch_size x '
            "data_parallel_size"
        )
    return sizes.shared


def _cu_seqlens_format(manifest: Manifest, sizes: BatchSizes | None) -> Any:
    # Every release supports exact boundaries with one row per micro batch; those of several rows
    # must have one shape to be stacked.
    if manifest.cu_seqlens != "auto":
        return manifest.cu_seqlens
    if sizes is not None and sizes.micro_batch_size == 1:
        return "exact"
    if sizes is not None and version() == (0, 18):
        raise ConfigError(
            f"micro_batch_size is {sizes.micro_batch_size}; {HOST} supports one packed row per "
            "micro batch: set --micro-batch-size 1 and --eval-micro-batch-size 1"
        )
    return "padded"


def _refuse_outer_blend(config: Any, index_split: Split) -> None:
    """Raise ConfigError if Megatron would blend data paths, which mixes buckets in a micro step."""
    blend = config.blend
    if config.blend_per_split is not None:
        several_sets = bool(getattr(config, "multiple_validation_sets", False))
        blend = config.blend_per_split[index_split.value]
        if several_sets and index_split is Split.valid:
            return
    if blend is not None and len(blend[0]) > 1:
        raise ConfigError(
            f"Megatron's blend of {len(blend[0])} data paths would give ranks rows of different "
            "buckets in a micro step. "
            "Put the sources and their weights into one manifest, or build with "
            "megapack.integrations.hosts.megatron.PackedDatasetBuilder (install() does)"
        )


Blend = tuple[Sequence[str], Sequence[float] | None]


class PackedDatasetBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]  # no stubs
    """BlendedMegatronDatasetBuilder that folds blends of packed datasets into one manifest. Raises
    ConfigError for flags with which training would misread rows."""

    needs_boundary_flag: ClassVar[bool] = False
    """True if Megatron's own get_batch must read the boundaries; ``install()`` sets it."""

    def __init__(
        self,
        cls: type[Any],
        sizes: list[int | None],
        is_built_on_rank: Callable[[], bool],
        config: Any,
        *more: Any,
        **options: Any,
    ) -> None:
        if isinstance(cls, type) and issubclass(cls, PackedGPTDataset):
            _check_flags(host.script_arguments(), boundaries=self.needs_boundary_flag)
            if cls.dialect is MEGATRON_BRIDGE:
                loader = getattr(config, "dataloader_type", None) or "single"
                if loader != "single":
                    raise ConfigError(f"dataset.dataloader_type is {loader}: set 'single'")
                # Otherwise Bridge's middle pipeline stages read no boundaries.
                config.enable_in_batch_packing = True
            config = fold_blends(config)
        super().__init__(cls, sizes, is_built_on_rank, config, *more, **options)


def _check_flags(args: Any | None, *, boundaries: bool) -> None:
    """Refuse all flags with which Megatron would silently train on wrong rows."""
    if args is None or not dist.is_initialized():  # this process does not train
        return
    problems = list(_wrong_flags(args, boundaries=boundaries))
    if problems:
        raise ConfigError(". ".join(problems))
    if dist.get_rank() == 0 and not getattr(args, "calculate_per_token_loss", True):
        print(  # noqa: T201 - Megatron prints its log
            "megapack: without --calculate-per-token-loss a label in a micro batch with few labels "
            "weighs more than one in a micro batch with many; set that flag for packed rows",
            flush=True,
        )


def _wrong_flags(args: Any, *, boundaries: bool) -> Iterator[str]:
    loader = {
        "cyclic": "would mix buckets in a micro step; rows are ordered already",
        "external": "expects iterators from the script, but megapack provides a dataset",
    }.get(getattr(args, "dataloader_type", None) or "")
    if loader is not None:
        yield f"--dataloader-type {args.dataloader_type} {loader}: set --dataloader-type single"
    if getattr(args, "hybrid_context_parallel", False):
        yield (
            "--hybrid-context-parallel assigns every document of a global batch to a number of "
            "ranks, but rows cannot be split up: use --context-parallel-size with --sft"
        )
    stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
    virtual = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    sft, middle = getattr(args, "sft", False), stages > 1 and stages * virtual > 2
    if middle and not sft and getattr(args, "dataloader_inter_document_masking", False):
        yield (
            f"--dataloader-inter-document-masking of {HOST} gives no data to middle pipeline "
            "stages (also virtual ones): replace it with --sft"
        )
        return
    flags = ["sft"]
    if version() >= (0, 19) and not middle:
        flags.append("dataloader_inter_document_masking")
    if boundaries and not any(getattr(args, flag, False) for flag in flags):
        options = " or ".join(f"--{flag.replace('_', '-')}" for flag in reversed(flags))
        yield (
            f"get_batch of {HOST} drops cu_seqlens without {options}: attention would cross "
            f"documents. Add {options}, or run with --own-get-batch no if the script reads "
            "boundaries itself"
        )


def fold_blends(config: Any) -> Any:
    """Return a copy of a dataset config in which every blend of several prefixes is one manifest,
    but several validation sets (``multiple_validation_sets``) stay separate."""
    folded = copy.copy(config)
    if config.blend is not None:
        folded.blend = _fold(config.blend)
    if config.blend_per_split is not None:
        folded.blend_per_split = [
            blend
            if blend is None or (config.multiple_validation_sets and split is Split.valid)
            else _fold(blend)
            for split, blend in zip(Split, config.blend_per_split, strict=True)
        ]
    return folded


def _fold(blend: Blend) -> Blend:
    prefixes, weights = blend
    if len(prefixes) == 1:
        return list(prefixes), None
    return [Manifest.of_blend(prefixes, weights).to_json()], None

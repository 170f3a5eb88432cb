"""A run's data: its section of the configuration, and the one function that opens it.

    open_run(config).sampler(rank=3, num_ranks=64).micro_batches(1200)

are the micro batches that rank 3 of 64 trains on in step 1,200. Training, its dry run, its exports
and ``megapack-build trace`` open a run by this function, so that none of them can say something
else than another: everything that decides what a rank sees is taken from the configuration here.
Nothing in this file needs torch before data are opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megapack.config import check_positive, check_range
from megapack.data.blend import BlendConfig, load_blend
from megapack.data.program import ScheduleConfig, StepConfig, check_group
from megapack.data.report import check_epochs
from megapack.data.schedule import Schedule
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex, is_shard_manifest

if TYPE_CHECKING:
    from megapack.data.dataset import PackedDataset
    from megapack.data.sampler import BucketBatchSampler


@dataclass(frozen=True, kw_only=True)
class DataConfig(StepConfig):
    """Documents, samples, and how many tokens make a step."""

    prefix: str | None = None
    """Training documents, a path without .bin/.idx."""
    index: str | None = None
    """Their samples, made by ``megapack-build pack``: a .samples file, or a shard manifest (many
    datasets), which names the documents, so that there is no prefix."""
    blend: str | None = None
    """A manifest of several datasets (``megapack.data.blend``), instead of prefix and index."""
    valid_prefix: str | None = None
    """Held-out documents, for the one figure of the run; null: those of the blend's sources, if
    they have any (``valid_prefix`` in the manifest), which are scored one by one in any case."""
    valid_index: str | None = None
    """Their samples; null packs them on the fly, see ``evaluation.buckets``."""
    micro_batch_tokens: int
    """Tokens of one forward of one rank: capacity x samples, the same in every bucket."""
    positions: Literal["segment", "document", "sample"] = "segment"
    """Where position ids restart."""
    attention: Literal["document", "sample"] = "document"
    """Reach of attention: its own document, or the whole sample (the baseline)."""
    label_boundary: Literal["document", "sample"] = "document"
    """Whether the last token of a document predicts the next document's first (the baseline)."""
    uneven: Literal["error", "pad"] = "error"
    """When ranks do not divide the micro batches of a step: stop, or give some an empty one."""
    verify: bool = True
    """Read the .samples files once per node at start and compare their checksums."""
    check_ranks_every: int = 100
    """Steps between comparisons of what the ranks are about to train on; 0 never compares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("data", micro_batch_tokens=self.micro_batch_tokens)
        check_range("data", at_least=0, check_ranks_every=self.check_ranks_every)
        self.check_ranks(1)
        sharded = self.index is not None and is_shard_manifest(self.index)
        alone = self.index is not None and (self.prefix is None) == sharded
        neither = self.prefix is None and self.index is None
        if not (neither if self.blend else alone):
            raise ConfigError(
                "data: give prefix and index (a shard manifest needs no prefix), or blend, and not "
                "both"
            )
        if self.valid_index is not None and self.valid_prefix is None:
            raise ConfigError(
                "data: valid_index is given and valid_prefix is not; give the documents that it is "
                "an index of, too"
            )

    def check_ranks(self, num_ranks: int, sequence_parallel_size: int = 1) -> None:
        """Refuse ranks that cannot share a step; stages may change it, which ``sampler`` checks.

        Raises:
            ConfigError: naming sizes that would do.
        """
        check_group(sequence_parallel_size, num_ranks)
        self.check_micro_batches(num_ranks, self.micro_batch_tokens, self.uneven, "data: ")

    def schedule(self, seed: int) -> ScheduleConfig:
        """The settings that decide the content of steps."""
        names = [field.name for field in dataclasses.fields(StepConfig)]
        return ScheduleConfig(seed=seed, **{name: getattr(self, name) for name in names})


class HasSequenceParallelSize(Protocol):
    """The part of an engine's configuration that decides who gets which samples."""

    @property
    def sequence_parallel_size(self) -> int: ...


class RunConfig(Protocol):
    """The part of a configuration (``megapack.training.config``) that decides what ranks see."""

    @property
    def seed(self) -> int: ...
    @property
    def num_steps(self) -> int | None: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def engine(self) -> HasSequenceParallelSize: ...


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The steps of a run and how they are dealt, known from lengths alone."""

    schedule: Schedule
    num_steps: int
    """Steps of the whole run."""
    dealing: dict[str, Any]
    """How a step is dealt: arguments of ``BucketBatchSampler`` and ``build_loader``."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every sample was seen once."""
        return self.schedule.num_steps(1)

    def sampler(self, rank: int, num_ranks: int, *, num_steps: int = 0) -> BucketBatchSampler:
        """The sampler that deals the run's steps to a rank.

        Raises:
            ConfigError: ranks and micro batches of some stage do not fit.
        """
        from megapack.data.sampler import BucketBatchSampler  # noqa: PLC0415

        return BucketBatchSampler(
            self.schedule,
            data_parallel_rank=rank,
            data_parallel_size=num_ranks,
            num_steps=num_steps,
            **self.dealing,
        )


@dataclass(frozen=True, kw_only=True)
class OpenRun(PlannedRun):
    """A run and its training data."""

    data: PackedDataset
    blend: BlendConfig | None
    """The manifest of ``data.blend``."""


def open_run(config: RunConfig) -> OpenRun:
    """Open the training data of a run and plan its steps.

    Raises:
        ConfigError: sizes do not fit, or the run would repeat a source too often.
        IndexMismatchError: an index of other documents.
        FormatError, OSError: a file is damaged or missing.
    """
    from megapack.data.dataset import PackedDataset, open_blend  # noqa: PLC0415

    section = config.data
    options: dict[str, Any] = {
        "positions": section.positions,
        "attention": section.attention,
        "label_boundary": section.label_boundary,
    }
    if section.blend is not None:
        blend = load_blend(section.blend)
        data = open_blend(blend, **options)
    else:
        assert section.index is not None  # DataConfig checked it
        blend, data = None, PackedDataset(section.prefix, section.index, **options)
    return OpenRun(**plan_steps(config, data).__dict__, data=data, blend=blend)


def plan_steps(config: RunConfig, samples: PackedDataset | Sequence[SourceIndex]) -> PlannedRun:
    """The steps of a run over some samples.

    Args:
        config: the run; its data are not opened.
        samples: what it draws from.

    Raises:
        ConfigError: sizes do not fit, or the run would repeat a source too often.
    """
    schedule = Schedule(samples, config.data.schedule(config.seed))
    num_steps = config.num_steps or schedule.num_steps(config.num_epochs)
    check_epochs(schedule, num_steps)
    return PlannedRun(
        schedule=schedule,
        num_steps=num_steps,
        dealing={
            "micro_batch_tokens": config.data.micro_batch_tokens,
            "uneven": config.data.uneven,
            "sequence_parallel_size": config.engine.sequence_parallel_size,
            "weighted_loss": True,  # training multiplies losses by loss_mask
        },
    )

"""Data of a run: the section of its configuration, and ``OpenRun``, which opens the data.

    OpenRun(config).sampler(rank=3, num_ranks=64).micro_batches(1200)

returns the micro batches of rank 3 of 64 in step 1,200. Training, its dry run, its exports and
``megapack-build trace`` all open a run with this class, so they cannot disagree. The configuration
and the run's own decisions (``Decision``) decide what a rank sees. Decisions are stages like those
of a manifest, stored in ``decisions.json`` in the run's directory:

    {"num_epochs": 1, "num_steps": 2000, "decisions": [
      {"by": "autopilot", "step": 412, "reason": "loss 7.9 at step 409, ...",
       "stage": {"from_step": 407, "skip_steps": 8}, "state": {}, "void": false}]}

This file imports torch only when data are opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megapack.config import check_positive, check_range, to_dict
from megapack.data.blend import Stage, load_blend
from megapack.data.fim import FimConfig
from megapack.data.report import check_epochs
from megapack.data.schedule import Schedule
from megapack.data.steps import (
    Attention,
    Loss,
    ScheduleConfig,
    StepConfig,
    check_group,
    check_micro_batches,
)
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex, is_shard_manifest, load_index
from megapack.records import read_record
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.files import atomic_write
from megapack.storage.index_file import IndexFile, path_of, prefix_of

if TYPE_CHECKING:
    from megapack.data.dataset import PackedDataset
    from megapack.data.sampler import BucketBatchSampler


@dataclass(frozen=True, kw_only=True)
class DataConfig(StepConfig):
    """Documents, samples, and sizes of steps."""

    prefix: str | None = None
    """Training documents, a path without .bin/.idx."""
    index: str | None = None
    """Their samples, made by ``megapack-build pack``: a .samples file, or a shard manifest (many
    datasets), which names the documents instead of ``prefix``."""
    blend: str | None = None
    """A manifest of several datasets (``megapack.data.blend``), instead of prefix and index."""
    valid_prefix: str | None = None
    """Held-out documents, for the one validation loss of the run; null: those of the blend's
    sources (``valid_prefix`` in the manifest), each of which also has its own loss."""
    valid_index: str | None = None
    """Their samples; null packs them on the fly, see ``evaluation.buckets``."""
    micro_batch_tokens: int
    """Tokens of one forward of one rank: capacity x samples, the same in every bucket."""
    positions: Literal["segment", "document", "sample"] = "segment"
    """Where position ids restart."""
    attention: Attention = "document"
    """Reach of attention: the token's document, also earlier documents of its group (data packed
    with ``--groups``), the whole sample (the baseline), or, in prefix trees, all tokens on its path
    (data packed with ``--strategy tree``)."""
    label_boundary: Literal["document", "sample"] = "document"
    """``sample``: the last token of a document predicts the next one's first (the baseline)."""
    loss: Loss = "token_mean"
    """Mean over all label tokens of a step (``token_mean``), or mean of the means of its sequences
    (the part of a document in a sample): ``sequence_mean`` and ``longalign``, which have the same
    gradients and differ in the unit of the weights (``megapack.data.sampler``)."""
    fim: FimConfig | None = None
    """Fill-in-the-middle of prefix and index; the manifest of a blend has its own."""
    columns: tuple[str, ...] | dict[str, str] = ()
    """Columns of prefix and index that batches carry; the manifest of a blend has its own."""
    pad_last: bool = False
    """If the micro batches of a step are not a multiple of the ranks: give the remaining ranks an
    empty micro batch. false: refuse such sizes. Unlike torch's ``drop_last``, it drops nothing."""
    verify: bool = True
    """Read the .samples files, and up to 1 GiB of tokens and columns, once per node at start, and
    compare their checksums."""
    check_ranks_every: int = 100
    """Steps between comparisons of the ranks' next batches; 0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("data", micro_batch_tokens=self.micro_batch_tokens)
        check_range("data", at_least=0, check_ranks_every=self.check_ranks_every)
        self.check_ranks(1)
        is_sharded = self.index is not None and is_shard_manifest(self.index)
        is_single = self.index is not None and (self.prefix is None) == is_sharded
        is_empty = self.prefix is None and self.index is None
        if not (is_empty if self.blend else is_single):
            raise ConfigError(
                "data: give prefix and index (a shard manifest needs no prefix) or blend, not both"
            )
        for name in ("fim", "columns"):
            if self.blend and getattr(self, name):
                raise ConfigError(
                    f"data: {name} is for prefix and index; a blend has it in its manifest"
                )
        if self.valid_index is not None and self.valid_prefix is None:
            raise ConfigError("data: valid_index is given, but not valid_prefix: give that, too")

    @property
    def _draw_unit(self) -> int:
        return max(1, self.micro_batch_tokens)

    def check_files(self, *, held_out: bool = False) -> None:
        """Raise FileNotFoundError, with a remedy, if the samples or documents of the run do not
        exist; ``held_out``: check ``valid_prefix``, too."""
        name = self.blend or self.index
        assert name is not None  # __post_init__ checked it
        if not (is_remote(name) or Path(name).exists()):
            remedy = "give the full path with --set"
            if self.prefix and not IndexedDataset.exists(self.prefix):
                remedy = "name your data, --set data.prefix=PREFIX --set data.index=PREFIX.samples"
            elif self.prefix and Path(f"{self.prefix}.samples").exists():
                remedy = f"add --set data.index={self.prefix}.samples"
            raise FileNotFoundError(
                f"there is no {name} (data.{'blend' if self.blend else 'index'}); relative "
                f"paths begin at the current directory, {Path.cwd()}: change the directory, or "
                f"{remedy}"
            )
        for prefix in (self.prefix, self.valid_prefix if held_out else None):
            if prefix and not is_remote(prefix):
                IndexFile(path_of(prefix_of(prefix), ".idx"))

    def check_ranks(self, num_ranks: int, sequence_parallel_size: int = 1) -> None:
        """Raise ConfigError, which names sizes that fit, if the ranks cannot share a step. If the
        samples are on this machine, the sizes fit them, too; ``sampler`` checks later stages."""
        check_group(sequence_parallel_size, num_ranks)
        if self.micro_batch_problem(num_ranks, self.micro_batch_tokens, self.pad_last) is None:
            return
        samples: dict[int, int] = {}
        if capacities := self._local_capacities():
            samples = dict(zip(capacities, self.samples_per_draw(capacities), strict=True))

        def problem(num_ranks: int, tokens: int, pad_last: bool) -> str | None:
            text = self.micro_batch_problem(num_ranks, tokens, pad_last)
            text = text or self.whole_samples_problem(samples, tokens, sequence_parallel_size)
            return text and f"data: {text}"

        check_micro_batches(
            problem,
            [self],
            num_ranks=num_ranks,
            sequence_parallel_size=sequence_parallel_size,
            tokens=self.micro_batch_tokens,
            pad_last=self.pad_last,
        )

    def _local_capacities(self) -> list[int]:
        """Return the bucket capacities of all samples that can be read here, ascending."""
        capacities: set[int] = set()
        with contextlib.suppress(OSError, ValueError):  # opening the run reports what is wrong
            names = [self.index]
            if self.blend and not is_remote(self.blend):
                names = [source.index for source in load_blend(self.blend).sources]
            for name in names:
                if name is not None and not is_remote(name):
                    capacities.update(load_index(name).bucket_capacity.tolist())
        return sorted(capacities)

    def schedule(self, seed: int) -> ScheduleConfig:
        """Return the settings that decide the content of steps."""
        names = [field.name for field in dataclasses.fields(StepConfig)]
        return ScheduleConfig(seed=seed, **{name: getattr(self, name) for name in names})


# ---- Decisions of the run


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A stage that the run itself appended, by a rule of its configuration."""

    by: str  # the rule: ``autopilot`` or ``mixing``
    step: int  # steps taken before the decision
    reason: str  # a sentence with the figures that led to it
    stage: Stage
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the rule for its next decision; JSON."""
    void: bool = False  # a later decision took back the steps that led to this one

    @property
    def begin(self) -> int:
        assert self.stage.from_step is not None, "a run decides by step"
        return self.stage.from_step

    @property
    def tree(self) -> dict[str, Any]:
        """The decision as JSON, without default fields of the stage."""
        stage = {name: value for name, value in to_dict(self.stage).items() if value}
        return {**to_dict(self), "stage": stage}


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """All decisions of a run in order, and its length without skips, which keep learning rates."""

    num_epochs: int
    num_steps: int
    decisions: tuple[Decision, ...] = ()

    @property
    def stages(self) -> list[Stage]:
        """Stages of all decisions in order, also of void ones: a skip skips the draws of the run as
        it was at the decision (``megapack.data.program.resolve``)."""
        return [decision.stage for decision in self.decisions]

    def with_new(self, decision: Decision) -> Decisions:
        """Return the decisions with a new one, which voids weights of the steps it takes back."""

        def updated(old: Decision) -> Decision:
            is_taken_back = old.by == "mixing" and old.step > decision.begin
            return dataclasses.replace(old, void=old.void or is_taken_back)

        return dataclasses.replace(self, decisions=(*map(updated, self.decisions), decision))

    def number(self, by: str) -> int:
        return sum(decision.by == by and not decision.void for decision in self.decisions)

    def write(self, run_dir: str | Path) -> None:
        with atomic_write(Path(run_dir) / DECISIONS, "w") as file:
            json.dump(self.tree, file, indent=1)

    @property
    def tree(self) -> dict[str, Any]:
        return {**to_dict(self), "decisions": [decision.tree for decision in self.decisions]}


DECISIONS = "decisions.json"
_LOST_DECISIONS = (
    "restore it, or remove it: the run then takes the decisions in its newest checkpoint"
)


def read_decisions(run_dir: str | Path) -> Decisions | None:
    """Read the decisions in a run's directory; None: there are none. Raises ConfigError if the file
    is damaged, OSError if it cannot be read."""
    path = Path(run_dir) / DECISIONS
    if not path.exists():
        return None
    return read_record(Decisions, path, remedy=_LOST_DECISIONS, error=ConfigError)


# ---- A run, planned and opened


class RunConfig(Protocol):
    """Part of a configuration (``megapack.training.config``) that decides the samples of a rank."""

    @property
    def run_dir(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_steps(self) -> int | None: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def engine(self) -> Any: ...  # its sequence_parallel_size


# Fields of DataConfig that decide or are compared with the order of samples.
ORDER_FIELDS = (*(field.name for field in dataclasses.fields(StepConfig)), "loss", "fim")


class PlannedRun:
    """Steps of a run over samples (lengths are enough), and their assignment to ranks.

    Args:
        config: configuration of the run; its data are not opened.
        decided: decisions of the run, already part of the samples' mixture.

    Attributes:
        num_steps: steps of the whole run.
        dealing: assignment to ranks: arguments of ``BucketBatchSampler`` and ``build_loader``.

    Raises ConfigError if sizes do not fit, or the run would repeat a source too often.
    """

    def __init__(
        self,
        config: RunConfig,
        samples: PackedDataset | Sequence[SourceIndex],
        decided: Decisions | None = None,
    ) -> None:
        self.schedule = Schedule(samples, config.data.schedule(config.seed))
        self.num_steps = config.num_steps or self.schedule.num_steps(config.num_epochs)
        if config.num_steps is None and decided and decided.num_epochs == config.num_epochs:
            self.num_steps = decided.num_steps
        check_epochs(self.schedule, self.num_steps)
        self.dealing: dict[str, Any] = {
            "micro_batch_tokens": config.data.micro_batch_tokens,
            "pad_last": config.data.pad_last,
            "sequence_parallel_size": config.engine.sequence_parallel_size,
            "weighted_loss": True,  # training multiplies losses by loss_mask
        }

    @property
    def steps_per_epoch(self) -> int:
        return self.schedule.num_steps(1)

    def sampler(self, rank: int, num_ranks: int) -> BucketBatchSampler:
        """Return the sampler of a rank. Raises ConfigError if a stage does not fit the ranks."""
        from megapack.data.sampler import BucketBatchSampler  # noqa: PLC0415

        return BucketBatchSampler(
            self.schedule,
            data_parallel_rank=rank,
            data_parallel_size=num_ranks,
            num_steps=0,
            **self.dealing,
        )


class OpenRun(PlannedRun):
    """A run and its training data, which it opens. Raises the errors of ``PlannedRun`` and
    ``PackedDataset``.

    Args:
        decided: decisions of the run; None: read them from its directory.

    Attributes:
        data: training data.
        blend: the manifest of ``data.blend``, or None.
        decisions: decisions of the run so far.
    """

    def __init__(self, config: RunConfig, decided: Decisions | None = None) -> None:
        from megapack.data.dataset import PackedDataset, open_blend  # noqa: PLC0415

        section = config.data
        section.check_files()
        name = section.blend or section.index
        assert name is not None  # DataConfig checked it
        self.decisions = decided or read_decisions(config.run_dir)
        options: dict[str, Any] = {
            "decided": () if self.decisions is None else self.decisions.stages,
            "positions": section.positions,
            "attention": section.attention,
            "label_boundary": section.label_boundary,
            "loss": section.loss,
        }
        self.blend = None if section.blend is None else load_blend(section.blend)
        if self.blend is None:
            options |= {"fim": section.fim, "columns": section.columns}
            self.data = PackedDataset(section.prefix, name, **options)
        else:
            self.data = open_blend(self.blend, **options)
        super().__init__(config, self.data, self.decisions)

    def file_stamps(self) -> dict[str, tuple[int, ...] | None]:
        """Return (inode, size, mtime) of every local file of the run; None for a missing file."""
        paths = [
            f"{prefix}.{suffix}"
            for source in self.data.datasets
            for prefix, columns in source.columns
            for suffix in ("bin", "idx", *(f"{name}.col" for name in columns))
        ]
        paths += [str(index.path) for index in self.schedule.samples.indices if index.path]
        stamps: dict[str, tuple[int, ...] | None] = {}
        for path in paths:
            try:
                stat = Path(path).stat()
            except OSError:
                stamps[path] = None
            else:
                stamps[path] = stat.st_ino, stat.st_size, stat.st_mtime_ns
        return stamps

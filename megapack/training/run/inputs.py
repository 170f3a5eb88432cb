"""What a run reads: its documents, their samples, and the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megapack.data import PackedDataset, Schedule, check_token_ids, load_blend
from megapack.data.blend import BlendConfig
from megapack.data.report import check_epochs
from megapack.errors import ConfigError, FormatError, MegapackError
from megapack.packing import SampleIndex, pack
from megapack.packing.extents import longest_reach, longest_segment
from megapack.packing.shards import SourceIndex
from megapack.storage import IndexedDataset
from megapack.training.config import DataConfig, PretrainConfig
from megapack.training.model.positions import position_limit
from megapack.training.run.world import World

__all__ = [
    "Inputs",
    "PlannedSteps",
    "check_inputs",
    "open_inputs",
    "open_validation",
    "open_validation_of_sources",
    "plan_steps",
    "verify_samples",
]


@dataclass(frozen=True, kw_only=True)
class PlannedSteps:
    """The steps of a run, which are known from lengths alone."""

    schedule: Schedule
    num_steps: int
    """Of the whole run."""
    steps_per_epoch: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Inputs(PlannedSteps):
    """Open files of a run."""

    data: PackedDataset
    valid: PackedDataset | None
    """Of ``data.valid_prefix``."""
    valid_sources: dict[str, PackedDataset] = field(default_factory=dict)
    """Held-out documents of the blend's sources, by name, of those that have some."""

    @property
    def held_out(self) -> list[PackedDataset]:
        """All validation data."""
        return [*([] if self.valid is None else [self.valid]), *self.valid_sources.values()]

    def fingerprints(self) -> dict[str, Any]:
        """Identities of documents and samples, for the run directory."""
        return {
            "documents": [dataset.fingerprint for dataset in self.data.datasets],
            "samples": list(self.schedule.samples.fingerprints),
        }


def open_inputs(config: PretrainConfig) -> Inputs:
    """Open training and validation data and compute the length of the run.

    Raises:
        ConfigError: sizes that do not fit, or an unknown vocabulary.
        IndexMismatchError: an index of other documents.
        FormatError, OSError: a file is damaged or missing.
    """
    blend = None if config.data.blend is None else load_blend(config.data.blend)
    data = _open_training_data(config.data, blend)
    steps = plan_steps(config, data, _vocab_size(config, data))
    how: dict[str, Any] = {
        "buckets": config.evaluation.buckets or steps.schedule.capacities,
        "positions": "document" if config.data.positions == "document" else "segment",
    }
    prefix, index = config.data.valid_prefix, config.data.valid_index
    return Inputs(
        **steps.__dict__,
        data=data,
        valid=None if prefix is None else open_validation(prefix, index, **how),
        valid_sources={} if blend is None else open_validation_of_sources(blend, **how),
    )


def plan_steps(
    config: PretrainConfig, samples: PackedDataset | SampleIndex, vocab_size: int
) -> PlannedSteps:
    """The steps of a run over some samples.

    Raises:
        ConfigError: sizes do not fit, or the run would repeat a source too often.
    """
    schedule = Schedule(
        samples,
        tokens_per_step=config.data.tokens_per_step,
        seed=config.seed,
        order=config.data.order,
        num_cycles=config.data.num_cycles,
        mix=config.data.mix,
        micro_step_tokens=config.data.micro_step_tokens,
        row_tokens=config.data.row_tokens,
        cost_window=config.data.cost_window,
    )
    num_steps = config.num_steps or schedule.num_steps(config.num_epochs)
    check_epochs(schedule, num_steps)
    return PlannedSteps(
        schedule=schedule,
        num_steps=num_steps,
        steps_per_epoch=schedule.num_steps(1),
        vocab_size=vocab_size,
    )


def _open_training_data(config: DataConfig, blend: BlendConfig | None) -> PackedDataset:
    options: dict[str, Any] = {
        "positions": config.positions,
        "attention": config.attention,
        "labels": config.labels,
    }
    if blend is not None:
        return blend.open(**options)
    assert config.index is not None  # DataConfig checked it
    return PackedDataset(config.prefix, config.index, **options)


def _vocab_size(config: PretrainConfig, data: PackedDataset) -> int:
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    sizes = [dataset.vocab_size for dataset in data.datasets]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) and config.model.pretrained is None:
        nameless = data.datasets[sizes.index(None)].prefix
        raise ConfigError(
            f"{nameless}.meta.json does not tell the size of the vocabulary; set model.vocab_size"
        )
    return max(known, default=1)


def verify_samples(inputs: Inputs, world: World) -> None:
    """Read every .samples file once per host and compare its checksums; collective.

    Those of shards are opened when they are drawn from, and compared with their manifest then.

    Raises:
        FormatError: a file is damaged or cannot be read; on all ranks.
    """
    problem = None
    if world.rank == world.gather(world.host).index(world.host):
        try:
            for data in (inputs.data, *inputs.held_out):
                for index in data.samples.indices:
                    if isinstance(index, SampleIndex):
                        index.verify()
        except (MegapackError, OSError) as error:
            problem = str(error)
    world.fail_together(problem, "samples", FormatError)


def check_inputs(steps: PlannedSteps, architecture: Any, positions: str) -> None:
    """Refuse data that a model cannot take; of steps without files, lengths that it cannot.

    Args:
        steps: of ``open_inputs`` or ``plan_steps``.
        architecture: of ``model_configuration``.
        positions: of the training data (``data.positions``).

    Raises:
        ConfigError: a document is longer than the positions of the model, or a token id is beyond
            its vocabulary.
    """
    _check_positions(steps.schedule.samples.indices, architecture, positions, "the training data")
    if not isinstance(steps, Inputs):
        return
    for data in steps.held_out:
        valid = "document" if positions == "document" else "segment"
        _check_positions(data.samples.indices, architecture, valid, str(data))
    for data in (steps.data, *steps.held_out):
        check_token_ids(data, architecture.vocab_size)


def _check_positions(
    indices: Sequence[SourceIndex], architecture: Any, positions: str, what: str
) -> None:
    longest = max((_longest_position(index, positions) for index in indices), default=0)
    bucket = max(int(index.bucket_capacity.max()) for index in indices)
    limit = position_limit(architecture, max(longest, bucket))
    if limit is not None and longest > limit.tokens:
        cut = " with data.positions=segment" if positions == "document" else ""
        raise ConfigError(
            f"model: {limit.source} is {limit.tokens}, and {what} need {longest} positions "
            f"(data.positions: {positions}; largest bucket {bucket}); pack into buckets of at most "
            f"{limit.tokens}{cut}, or {limit.remedy}"
        )


def _longest_position(index: SourceIndex, positions: str) -> int:
    """One more than the highest position id of an index."""
    if positions == "sample":
        return int(index.bucket_capacity.max())
    return longest_reach(index) if positions == "document" else longest_segment(index)


def open_validation(
    prefix: str,
    index: str | None,
    *,
    buckets: Sequence[int],
    positions: Literal["segment", "document"] = "segment",
) -> PackedDataset:
    """Held-out documents with their samples, packed here when there is no index.

    Args:
        prefix: of the documents.
        index: their .samples file.
        buckets: capacities to pack into, without an index.
        positions: as in training; a document is always scored alone.

    Raises:
        ConfigError: the index repeats or drops tokens, so it does not score each token once.
    """
    dataset = IndexedDataset(prefix)
    if index is not None:
        samples = SampleIndex.load(index)
    else:
        samples = pack(dataset.document_lengths, "bucket", buckets=list(buckets))
    metrics = samples.metrics()
    for name in ("repeated_tokens", "dropped_tokens"):
        if metrics[name]:
            raise ConfigError(
                f"{index}: strategy {samples.strategy!r} has {metrics[name]:,} {name}; evaluate "
                "with an index that places every token once (strategy bucket)"
            )
    return PackedDataset(dataset, samples, positions=positions)


def open_validation_of_sources(blend: BlendConfig, **how: Any) -> dict[str, PackedDataset]:
    """Held-out documents by source, of the sources that have some; ``how`` and errors as above.

    Raises:
        ConfigError: two of them have one name.
    """
    result: dict[str, PackedDataset] = {}
    for source in blend.sources:
        if source.valid_prefix is not None:
            name = source.title
            if name in result:
                raise ConfigError(
                    f"two sources with held-out documents are named {name!r}; give each its name"
                )
            result[name] = open_validation(source.valid_prefix, source.valid_index, **how)
    return result

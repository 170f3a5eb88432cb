"""Inputs of a run: open them, check that they fit together, and record what determines the run.

``Inputs`` opens the data, ``check_run`` checks a run before its ranks connect, ``open_validation``
opens held-out documents, ``steps_from_lengths`` plans a run before its corpus exists, and
``run_record`` lists everything that determines a run, for checkpoints.

    read_lengths("lognormal:999,603,1e6", seed=0)  # -> a million lengths, 999 tokens on average
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack.config import to_dict
from megapack.data import PackedDataset, PackedLoader, build_loader, check_token_ids
from megapack.data.batch import longest_position
from megapack.data.blend import BlendConfig
from megapack.data.report import check_labels
from megapack.data.resume import content_digests, flatten, is_within, model_record, tokenizer_digest
from megapack.data.run import ORDER_FIELDS, Decisions, OpenRun, PlannedRun
from megapack.errors import ConfigError, FormatError, MegapackError
from megapack.packing import SampleIndex, pack
from megapack.packing.sharded import SourceIndex
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.columns import Column
from megapack.storage.dataset import read_lengths_file
from megapack.storage.index_file import path_of
from megapack.storage.metadata import damaged_file, meta_path
from megapack.training.command import data_errors
from megapack.training.config import DistillConfig, PretrainConfig
from megapack.training.engine.deepspeed_config import check_deepspeed
from megapack.training.engine.directory import FileFacts
from megapack.training.engine.world import World
from megapack.training.model.architecture import (
    check_checkpoint,
    model_configuration,
    position_limit,
)
from megapack.training.model.flops import num_experts
from megapack.training.model.opening import check_document_positions, check_routes
from megapack.training.presets import PRESETS, VOCABULARIES


class Inputs(OpenRun):
    """Opened data of a run, and its steps. Raises the errors of ``OpenRun``.

    Args:
        decided: decisions of the run; None: read them from its directory.

    Attributes:
        vocab_size: vocabulary size of the model.
        valid: held-out documents of ``data.valid_prefix``, or None.
        valid_sources: held-out documents of the blend's sources, by name.
    """

    def __init__(self, config: PretrainConfig, decided: Decisions | None = None) -> None:
        self.config = config
        with data_errors(config.data):
            super().__init__(config, decided)
            options: dict[str, Any] = {
                "buckets": config.evaluation.buckets or self.schedule.capacities,
                "positions": _valid_positions(config.data.positions),
            }
            prefix, index = config.data.valid_prefix, config.data.valid_index
            self.vocab_size = vocabulary_size(config, self)
            self.valid = None if prefix is None else open_validation(prefix, index, **options)
            self.valid_sources = (
                {} if self.blend is None else open_validation_of_sources(self.blend, **options)
            )

    @property
    def held_out(self) -> list[PackedDataset]:
        return [*([] if self.valid is None else [self.valid]), *self.valid_sources.values()]

    def loader(
        self, config: PretrainConfig, world: World, start: int, num_steps: int
    ) -> PackedLoader:
        return build_loader(
            self.data,
            self.schedule,
            data_parallel_rank=world.rank,
            data_parallel_size=world.size,
            start_step=start,
            num_steps=num_steps,
            **self.dealing,
            cu_seqlens="padded" if config.engine.compile else "exact",
            pin_memory=world.device.type == "cuda",
            device=world.device,
            check_ranks_every=config.data.check_ranks_every,
        )

    def fingerprints(self) -> dict[str, Any]:
        return {
            "documents": [dataset.fingerprint for dataset in self.data.datasets],
            "samples": list(self.schedule.samples.fingerprints),
        }

    def recorded_files(self) -> dict[str, FileFacts]:
        """Return the facts of the local files that determine the data, by absolute path: samples,
        manifests, lists, scores, and meta files, which have the checksums of the other files. For
        a dataset without a meta file, its .bin and .idx, unless they are too large to hash now."""
        paths: set[str | Path | None] = {self.config.data.blend}
        for data in (self.data, *self.held_out):
            paths |= {index.path for index in data.samples.indices}
            for prefix in local_prefixes(data):
                pair = [path_of(prefix, suffix) for suffix in (".bin", ".idx")]
                has_meta = meta_path(prefix).exists()
                small = [path for path in pair if path.stat().st_size <= _VERIFIED_BYTES]
                paths |= {meta_path(prefix)} if has_meta else {*small}
        if self.blend is not None:
            paths |= {source.scores for source in self.blend.sources}
            paths |= {p for stage in self.blend.stages for p in (stage.exclude or {}).values()}
        local = sorted(str(Path(p).absolute()) for p in paths if p and not is_remote(p))
        with ThreadPoolExecutor(16) as pool:  # a source may have tens of thousands of meta files
            return dict(zip(local, pool.map(FileFacts.of, map(Path, local)), strict=True))


def _valid_positions(positions: str) -> Literal["segment", "document"]:
    # Held-out documents are scored alone, so "sample" does not apply.
    return "document" if positions == "document" else "segment"


def vocabulary_size(config: PretrainConfig, run: PlannedRun) -> int:
    """Return the configured vocabulary size, else the data's; 1 if only the model knows it. Without
    data, that of the model's family (``VOCABULARIES``). Raises ConfigError if it is unknown."""
    model = config.model
    if model.vocab_size is not None:
        return model.vocab_size
    datasets = run.data.datasets if isinstance(run, OpenRun) else []
    known = {dataset.prefix: dataset.vocab_size for dataset in datasets}
    if not known and not model.has_vocabulary:
        keys = PRESETS[model.preset] if model.preset else model.config
        assert isinstance(keys, dict)  # a file has a vocabulary
        if keys["model_type"] not in VOCABULARIES:
            raise ConfigError(
                "without data the vocabulary size is unknown; set model.vocab_size, as in --set "
                "model.vocab_size=32000"
            )
        return VOCABULARIES[keys["model_type"]]
    if not model.has_vocabulary and None in known.values():
        unnamed = next(prefix for prefix, size in known.items() if size is None)
        raise ConfigError(
            f"{unnamed}.meta.json does not contain the vocabulary size; set model.vocab_size"
        )
    return max((size for size in known.values() if size is not None), default=1)


def verify_samples(inputs: Inputs, world: World) -> None:
    """Verify the checksums of every .samples file and, as far as reading 1 GiB suffices, of local
    datasets that have a meta file, once per host; collective. Raises FormatError on all ranks.
    Shards are compared with their manifest later, when the first sample is drawn from them."""
    problem = None
    if world.is_first_of_host():
        try:
            verify_files(inputs)
        except (MegapackError, OSError) as error:
            problem = str(error)
    world.fail_together(problem, "data", FormatError)


def local_prefixes(data: PackedDataset) -> list[str]:
    prefixes = (prefix for source in data.datasets for prefix, _ in source.columns)
    return [prefix for prefix in prefixes if not is_remote(prefix)]


_VERIFIED_BYTES = 1 << 30  # of tokens and columns, of all sources together


def verify_files(inputs: Inputs) -> None:
    """Verify the files of ``verify_samples`` on this rank. Raises FormatError."""
    for data in (inputs.data, *inputs.held_out):
        for index in data.samples.indices:
            for shard in index.open_shards:
                if shard is not None:
                    shard.verify()
        local = local_prefixes(data)
        for prefix in local:
            path = damaged_file(prefix, _VERIFIED_BYTES // len(local))
            if path is not None:
                raise FormatError(
                    f"{path} does not have the checksum of its .meta.json: restore it, or delete "
                    "the meta file if the dataset was rewritten"
                )


def check_run(config: PretrainConfig, run: PlannedRun, num_ranks: int) -> Any:
    """Check a run before its ranks connect; return the transformers configuration of its model.

    For a run planned by ``steps_from_lengths``, which has no data, only lengths are checked. Raises
    ConfigError for what does not fit together, FormatError if a damaged .samples file is the cause.
    """
    run.sampler(0, num_ranks)
    check_deepspeed(config)
    vocab_size = run.vocab_size if isinstance(run, Inputs) else vocabulary_size(config, run)
    architecture = model_configuration(config.model, vocab_size)
    check_checkpoint(config.model, architecture)
    if config.data.attention == "tree":
        _check_trees(config, architecture)
    if config.optimizer.kind == "muon" and num_experts(architecture) is not None:
        raise ConfigError(
            f"optimizer: kind is muon and {architecture.model_type!r} has experts, whose matrices "
            "are stacked; DeepSpeed's Muon needs single matrices: set optimizer.kind to adamw"
        )
    if config.model.replay_routes and isinstance(run, Inputs):
        check_routes(architecture, run.data.columns)
    positions = config.data.positions
    try:
        indices, room = run.schedule.samples.indices, run.schedule.samples.fim_room
        row = run.schedule.config.row_tokens
        what = "the training data"
        longest = _check_positions(
            indices, architecture, positions, what, room=room, row_tokens=row
        )
        if isinstance(run, Inputs):
            check_labels(run.schedule, run.num_steps)
            valid = _valid_positions(positions)
            for data in run.held_out:
                found = _check_positions(data.samples.indices, architecture, valid, str(data))
                longest = max(longest, found)
        # Building and running tiny models takes most of this time, so all data share one check.
        check_document_positions(architecture, longest)
        if isinstance(run, Inputs):
            for data in (run.data, *run.held_out):
                check_token_ids(data, architecture.vocab_size)
            if config.distill is not None:
                check_teacher(config.distill, run.data, architecture.vocab_size)
    except ConfigError:
        if isinstance(run, Inputs):
            verify_files(run)  # a damaged index may be the cause
        raise
    return architecture


def _check_trees(config: PretrainConfig, architecture: Any) -> None:
    """Raise ConfigError for settings of a run that prefix trees do not have."""
    balances = bool(getattr(architecture, "output_router_logits", False))
    unsupported = {
        "engine.compile": (config.engine.compile, "the number of keys differs in every batch"),
        "model.overrides.output_router_logits": (
            balances,
            "the load-balancing loss would count a shared token once",
        ),
        "distill": (config.distill is not None, "documents may differ in a teacher's columns"),
    }
    for name, (is_set, reason) in unsupported.items():
        if is_set:
            raise ConfigError(f"{name} is set with data.attention: tree; {reason}: leave it out")


def check_teacher(distill: DistillConfig, data: PackedDataset, vocab_size: int) -> None:
    """Check that the batches carry a teacher's columns, and that their ids are the model's: reads
    some rows of every open shard. Raises ConfigError."""
    names = (distill.ids, distill.logits)
    if missing := [name for name in names if name not in data.columns]:
        raise ConfigError(
            f"distill: the data do not carry column {missing[0]}; write it (megapack-teacher), and "
            f"set data.columns: [{', '.join(names)}] (of a blend: columns in its manifest)"
        )
    ids, logits = (data.columns[name] for name in names)
    problem = None
    if "int" not in ids.dtype or "float" not in logits.dtype:
        problem = "ids are integers and logits are floats"
    elif len(ids.shape) != 1 or ids.shape != logits.shape:
        problem = "both have the same shape [k]"
    elif (ids.of, logits.of) != ("target", "target"):
        problem = "both are of: target, since they belong to the token that they predict"
    elif logits.fill <= 0:
        problem = "the fill value of logits is above 0, which marks tokens without a teacher"
    if problem is not None:
        columns = f"{names[0]} is {ids} and {names[1]} is {logits}"
        raise ConfigError(f"distill: column {columns}; {problem}: write them with megapack-teacher")
    for source in data.datasets:
        for shard in range(0, source.num_shards, max(1, source.num_shards // _SAMPLED)):
            opened = source.open_columns(source.open(shard), names)
            if all(name in opened for name in names):
                _check_ids(opened[names[0]], opened[names[1]], vocab_size, source.prefix)


_SAMPLED = 64  # shards of a source, stretches of a shard


def _check_ids(ids: Column, logits: Column, vocab_size: int, prefix: str) -> None:
    limits = ids.entry.limits or (0, -1)
    if not 0 <= limits[0] <= limits[1] + 1 <= vocab_size:
        raise ConfigError(
            f"distill: column {ids.name} of {prefix} has ids from {limits[0]} to {limits[1]}, and "
            f"the model has {vocab_size} ids; write it with a teacher of the same tokenizer"
        )
    for begin in np.linspace(0, len(ids.rows), _SAMPLED, endpoint=False).astype(int).tolist():
        rows = np.sort(np.asarray(ids.rows[begin : begin + 16]).astype(np.int64), axis=1)
        numbers = logits.spec.numbers(np.asarray(logits.rows[begin : begin + 16]))
        rows = rows[numbers[:, 0] <= 0]  # others have no teacher
        if (np.diff(rows, axis=1) == 0).any():
            raise ConfigError(
                f"distill: column {ids.name} of {prefix} repeats an id in a row: write it with "
                "megapack-teacher"
            )


def _check_positions(
    indices: Sequence[SourceIndex],
    architecture: Any,
    positions: str,
    what: str,
    *,
    room: int = 0,
    row_tokens: int | None = None,
) -> int:
    """Check that the model has enough positions, and return the largest number of positions of a
    document or of padding; ``room``: tokens that fill-in-the-middle may add to a document, within
    its bucket."""
    bucket = max(int(index.bucket_capacity.max()) for index in indices)
    in_documents = positions == "document"
    reaches = [i.longest_reach if in_documents else i.longest_segment for i in indices]
    grouped = any(index.has_groups for index in indices)  # a group may be one segment
    longest = max(reaches, default=0)
    longest = min(longest + room, max(longest, bucket))
    longest = bucket if positions == "sample" or grouped else longest
    limit = position_limit(architecture, max(longest, bucket))
    if limit is not None and longest > limit.tokens:
        cut = " with data.positions=segment" if positions == "document" else ""
        raise ConfigError(
            f"model: {limit.source} is {limit.tokens}, and {what} need {longest} positions "
            f"(data.positions: {positions}; largest bucket {bucket}); pack into buckets of at most "
            f"{limit.tokens}{cut}, or {limit.remedy}"
        )
    return longest_position(indices, positions=positions, row_tokens=row_tokens)


def open_validation(
    prefix: str,
    index: str | None,
    *,
    buckets: Sequence[int],
    positions: Literal["segment", "document"] = "segment",
) -> PackedDataset:
    """Open held-out documents and their samples; without an index, pack them into ``buckets``. Each
    document is scored alone, for any ``positions``. Raises ConfigError if the index repeats or
    drops tokens, or no token can be scored."""
    dataset = IndexedDataset(prefix)
    if index is None:
        samples = pack(dataset.document_lengths, "bucket", buckets=list(buckets))
    else:
        samples = SampleIndex.load(index)
    metrics = samples.metrics()
    for name in ("repeated_tokens", "dropped_tokens"):
        if metrics[name]:
            raise ConfigError(
                f"{index}: strategy {samples.strategy!r} has {metrics[name]:,} {name}; evaluate "
                "with an index that places every token once (strategy bucket)"
            )
    data = PackedDataset(dataset, samples, positions=positions)
    parts = (np.arange(at, min(at + 256, len(samples))) for at in range(0, len(samples), 256))
    if not any(data.count_labels(part).any() for part in parts):
        raise ConfigError(
            f"{prefix}: none of its {len(dataset):,} held-out documents has a token with a label: "
            "they are empty, of one token each, or masked; give others to have a validation loss"
        )
    return data


def open_validation_of_sources(blend: BlendConfig, **how: Any) -> dict[str, PackedDataset]:
    """Open the held-out documents of the blend's sources, by name; ``how``: as in
    ``open_validation``. Raises ConfigError if two of the sources have the same name."""
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


_LAW = "lognormal:"


def steps_from_lengths(
    config: PretrainConfig, source: str, buckets: Sequence[int] | None
) -> PlannedRun:
    """Plan the run for document lengths (``read_lengths``), without opening its data. The documents
    are packed by strategy bucket into ``buckets``; None: the powers of two from 1,024 to 16,384
    that divide a micro batch. Raises ConfigError if sizes do not fit, or the run trains on prefix
    trees, which depend on tokens."""
    if config.data.attention == "tree":
        raise ConfigError(
            "data.attention is tree, and the trees depend on tokens: pack the data (--strategy "
            "tree), and leave --lengths out"
        )
    largest = config.data.micro_batch_tokens
    usual = [2**k for k in range(10, 15) if largest % 2**k == 0] or [largest]
    index = pack(read_lengths(source, config.seed), "bucket", buckets=list(buckets or usual))
    return PlannedRun(config, [index])


def read_lengths(source: str, seed: int) -> NDArray[Any]:
    """Return the lengths of documents in tokens, from a .npy file of integers, or random ones from
    ``lognormal:MEAN,MEDIAN,DOCUMENTS`` (FineWeb-Edu: mean 999, median 603). Raises ConfigError if
    the distribution is invalid, DataError or OSError for the file."""
    if source.startswith(_LAW):
        try:
            mean, median, count = map(float, source.removeprefix(_LAW).split(","))
        except ValueError:
            raise ConfigError(f"{source!r} is not {_LAW}MEAN,MEDIAN,DOCUMENTS") from None
        if not (1 <= median <= mean < math.inf and 1 <= count < math.inf):
            raise ConfigError(
                f"{source!r}: mean, median and number of documents must be 1 or more and finite, "
                "and the mean at least the median"
            )
        sigma = math.sqrt(2 * math.log(mean / median))
        values = np.random.default_rng(seed).lognormal(math.log(median), sigma, round(count))
        return np.maximum(np.rint(values), 1).astype(np.int64)
    return read_lengths_file(source)


# ---- The record of a run -------------------------------------------------------------------------
# A resume compares every key of the configuration that is not in NO_EFFECT, also new keys.

# Keys, or sections, that do not determine what a step computes, and why:
_LENGTH = "may change; the learning rate depends on it, and a jump is reported"
_ORDER = "compared as the order of samples, stage by stage (megapack.data.resume)"
_RESOLVED = "the resolved model, tokenizer or data are compared"
_OUTPUT = "affects output and checks, not training"
_LAYOUT = "divides the same computation among ranks, memory or time"
NO_EFFECT = {
    **dict.fromkeys(("run_dir", "stop_at", "logging", "evaluation", "checkpoint"), _OUTPUT),
    **dict.fromkeys(("num_steps", "num_epochs"), _LENGTH),
    **dict.fromkeys(("seed", *(f"data.{name}" for name in ORDER_FIELDS)), _ORDER),
    **dict.fromkeys(("model.preset", "model.pretrained", "model.config"), _RESOLVED),
    **dict.fromkeys(("model.overrides", "model.allow_missing", "model.tokenizer"), _RESOLVED),
    **dict.fromkeys(("model.vocab_size", "model.vocab_multiple"), _RESOLVED),
    **dict.fromkeys(("model.attention_backend", "data.prefix"), _RESOLVED),
    **dict.fromkeys(("data.index", "data.blend"), _RESOLVED),
    **dict.fromkeys(("data.valid_prefix", "data.valid_index", "model.probe"), _OUTPUT),
    **dict.fromkeys(("data.verify", "data.check_ranks_every", "optimizer.max_skipped"), _OUTPUT),
    **dict.fromkeys(("data.micro_batch_tokens", "data.pad_last", "engine.zero_stage"), _LAYOUT),
    **dict.fromkeys(("engine.activation_checkpointing", "engine.offload_activations"), _LAYOUT),
    **dict.fromkeys(("engine.sequence_parallel_size", "engine.timeout_minutes"), _LAYOUT),
    **dict.fromkeys(("engine.heartbeat_timeout_seconds", "engine.hang_timeout_seconds"), _LAYOUT),
}


def run_record(
    config: PretrainConfig,
    inputs: Inputs,
    architecture: Any,
    *,
    tokenizer: Any = None,
    attention: str | None = None,
) -> dict[str, Any]:
    """Return everything that determines a run, except the order of its samples, as JSON values.

    Keys of the model and the data are replaced by their values: fields of the transformers
    configuration, the attention backend (None: not known yet, so not compared), digests of the
    tokenizer and of the data's bytes.
    """
    flat = flatten(to_dict(config))
    record = {key: value for key, value in flat.items() if not is_within(key, NO_EFFECT)}
    record |= model_record(architecture)
    if attention is not None:
        record["model.attention_backend"] = attention
    record["model.tokenizer"] = None if tokenizer is None else tokenizer_digest(tokenizer)
    record["data.content"] = content_digests(inputs.data)
    resolved: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return resolved

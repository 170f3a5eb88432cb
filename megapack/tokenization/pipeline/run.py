"""Build a dataset: plan it, build its shards, join them. A killed build can be continued; the bytes
of the result do not depend on the number of workers or machines.

- preview: plan a build without running it; build: run it; Progress: callbacks of a running build
- assemble: finished shards -> the output datasets, in the order of the corpus

    build(BuildConfig(inputs=("x.jsonl",), tokenizer="bytes", output_prefix="out"), progress)
    # -> out.bin, out.idx, out.meta.json, out.manifest.json; run again: state "complete"
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megapack.errors import DataError, MegapackError
from megapack.executors import Counted, prepare_processes, run_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.index_file import GROUPS, path_of, read_header
from megapack.storage.index_writer import dataset_files
from megapack.storage.merge import merge
from megapack.storage.remote.copies import local_output
from megapack.tokenization.corpus.documents import SPLIT_NAMES, ordered_split
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.readers import MIN_SHARD_BYTES
from megapack.tokenization.corpus.streams import InputFile
from megapack.tokenization.pipeline.plan import BuildConfig, Plan, make_plan
from megapack.tokenization.pipeline.worker import ShardWorker, open_coder
from megapack.tokenization.pipeline.workspace import (
    Estimate,
    ShardRecord,
    Totals,
    Workspace,
    check_space,
    directory_bytes,
    estimate_build,
    free_bytes,
    shard_prefix,
)
from megapack.tokenization.tokenizers.coding import Coder
from megapack.tokenization.tokenizers.encoders import Encoder


class Progress(Protocol):
    """Callbacks of a running build."""

    def note(self, text: str) -> None:
        """Print a sentence for the user."""

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        """Start: ``num_bytes`` of text to read, about ``disk_bytes`` of shards to write."""

    def advance(self, more: Counted) -> None:
        """Add finished documents, bytes of text and tokens."""

    def join(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` parts of the result are copied."""

    def stop(self) -> None:
        """Stop: all shards are done, or the build failed."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    plan: Plan
    prefixes: Mapping[str, str]  # stream -> prefix; see ``BuildConfig.outputs``
    totals: Totals
    # part: shards not joined; complete: nothing to do, the result existed
    state: Literal["built", "part", "complete"]
    records: Sequence[ShardRecord] = ()  # of this run's shards

    @property
    def num_shards(self) -> int:
        return len(self.records)

    @property
    def num_shards_kept(self) -> int:
        return sum(record.kept for record in self.records)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A plan, and the state of its files."""

    plan: Plan
    prefixes: Mapping[str, str]  # as of ``BuildResult``
    estimate: Estimate
    num_missing: int  # shards that are not finished
    finished: bool  # the result is complete
    other_plans: Sequence[str]  # sentences about shards of other plans


def preview(config: BuildConfig, progress: Progress) -> Preview:
    """Plan a build, look at its files, and write nothing. Raises like ``build``."""
    plan, encoder = make_plan(config, _inputs(config, progress), progress.note)
    workspace = Workspace(plan)
    return Preview(
        plan=plan,
        prefixes=config.outputs,
        estimate=_estimate(plan, open_coder(plan, encoder=encoder), progress.note),
        finished=workspace.finished() is not None,
        num_missing=len(workspace.missing()),
        other_plans=workspace.other_plans(),
    )


def build(config: BuildConfig, progress: Progress) -> BuildResult:
    """Tokenize a corpus into ``<output_prefix>.bin/.idx`` (+ .meta.json, .manifest.json).

    Shards are built in ``<output_prefix>.build/<digest of the plan>/``. A stopped run leaves
    finished shards there; the next run of the same plan continues. A remote output is built in the
    local cache and uploaded when complete.

    Raises:
        ConfigError: the options contradict each other; another dataset has the output's name; a
            machine has other tokenizer files or libraries than the plan.
        DataError: a faulty document (with on_error "fail"); no documents.
        LockedError: another process runs this build.
        MegapackError: a package is missing; the disk is too small.
        OSError: a file cannot be read or written; finished shards are kept.
    """
    outputs = config.outputs.values()
    with local_output(config.output_prefix, outputs, overwrite=config.overwrite) as local:
        local_config = dataclasses.replace(config, output_prefix=local)
        result = _build(local_config, progress, command=config.command())
    return dataclasses.replace(result, prefixes=config.outputs)


def _build(config: BuildConfig, progress: Progress, *, command: str) -> BuildResult:
    """Build local files; ``command`` is the command in their meta files."""
    inputs = _inputs(config, progress)
    several = sum(file.size for file in inputs) > (config.shard_bytes or MIN_SHARD_BYTES)
    if config.workers > 1 and config.executor == "local" and several:
        prepare_processes([ShardWorker.__module__, *config.packages])
    plan, encoder = make_plan(config, inputs, progress.note)
    workspace = Workspace(plan)
    workspace.root.parent.mkdir(parents=True, exist_ok=True)
    result = functools.partial(BuildResult, plan=plan, prefixes=config.outputs)
    totals = workspace.finished()
    if totals is not None:
        workspace.remove_leftovers()
        return result(totals=totals, state="complete")
    with workspace.locked(progress.note):
        totals = workspace.finished()  # again: another process may have finished it meanwhile
        if totals is not None:
            return result(totals=totals, state="complete")
        try:
            records = _build_shards(plan, encoder, workspace, progress)
            totals = Totals.of_records(records)
            if config.part is not None:
                return result(totals=totals, state="part", records=records)
            if not totals.num_documents:
                skipped = "; ".join(totals.fault_lines()) or "the files are empty"
                raise DataError(f"the corpus has no documents ({skipped})")
            counts = [record.counted.documents for record in records]
            assemble(plan, workspace, counts, progress.join, command=command)
        finally:
            progress.stop()
        workspace.finish(totals)
    return result(totals=totals, state="built", records=records)


def _inputs(config: BuildConfig, progress: Progress) -> list[InputFile]:
    return find_inputs(
        config.inputs,
        suffixes=config.suffixes,
        format=config.format,
        max_bytes=config.max_input_bytes,
        note=progress.note,
    )


def _build_shards(
    plan: Plan, encoder: Encoder | None, workspace: Workspace, progress: Progress
) -> list[ShardRecord]:
    config = plan.config
    indices = config.indices(len(plan.shards))
    missing = [index for index in workspace.missing() if index in indices]
    if config.finish and missing:
        raise MegapackError(
            f"shard {missing[0]} is not finished, and --finish only joins finished shards: "
            f"{len(missing)} of {len(plan.shards)} are missing. Run the missing parts (with the "
            "same options and inputs), or leave out --finish to build them here"
        )
    worker = ShardWorker(
        plan=plan,
        directory=workspace.directory,
        limits=config.limits(indices),
        finish_only=config.finish,
        encoder=encoder,
    )
    disk_bytes = 0
    if missing:
        total_disk_bytes = _estimate(plan, worker.coder, progress.note).num_bytes
        total_bytes = plan.num_bytes(range(len(plan.shards)))
        disk_bytes = round(total_disk_bytes * plan.num_bytes(missing) / max(1, total_bytes))
        to_join = total_disk_bytes if config.part is None else 0
        check_space(workspace.root.parent, disk_bytes, to_join=to_join, note=progress.note)
    progress.start(plan.num_bytes(indices), len(indices), disk_bytes)
    if config.executor == "ray" or config.processes(indices) > 1:
        worker = dataclasses.replace(worker, encoder=None)  # each process loads the tokenizer
    return run_shards(
        worker,
        indices,
        progress.advance,
        executor=config.executor,
        num_processes=config.processes(indices),
        ray_address=config.ray_address,
        remedy="fewer --workers or smaller --block-bytes",
    )


def _estimate(plan: Plan, coder: Coder, note: Callable[[str], None]) -> Estimate:
    """Estimate the result; report splits that may stay empty, which ``assemble`` refuses."""
    estimated = estimate_build(plan, coder)
    if plan.split is None or plan.split_while_writing:
        return estimated
    ranges = ordered_split(plan.split, estimated.num_documents)
    for name, weight, documents in zip(SPLIT_NAMES, plan.split, ranges, strict=True):
        if weight and not documents:
            note(
                f"the {name} split may get none of about {estimated.num_documents:,} documents, "
                "which would end the build with an error: give it a larger share in --split"
            )
    return estimated


def assemble(
    plan: Plan,
    workspace: Workspace,
    documents_of_shard: Sequence[int],
    progress: Callable[[int, int], None],
    *,
    command: str,
) -> None:
    """Join all shards, ``documents_of_shard`` documents in each.

    If the disk cannot hold two copies, each shard's tokens are deleted after they are copied; a run
    that is stopped then has to build these shards again. ``progress`` is called with (shards
    copied, shards to copy), summed over outputs. ``command`` is the command line for the meta
    files. Raises DataError if a split would be empty, and OSError if a file cannot be written.
    """
    directory, outputs = workspace.directory, plan.config.outputs
    shards = [shard_prefix(directory, i) for i in range(len(documents_of_shard))]
    remove = directory_bytes(directory) > free_bytes(directory)
    done = 0

    def copied(dataset: str, *, used_up: bool = True) -> None:
        nonlocal done
        done += 1
        progress(done, len(shards) * len(outputs))
        if remove and used_up:
            for path in dataset_files(dataset):
                if path.suffix in (".bin", ".col"):
                    path.unlink()

    ranges: dict[str, range] = {}  # documents of each split; {}: shards are joined whole
    if plan.split is not None and not plan.split_while_writing:
        splits = ordered_split(plan.split, sum(documents_of_shard))
        ranges = {f"_{name}": split for name, split in zip(SPLIT_NAMES, splits, strict=True)}
    for stream, output in outputs.items():  # check all before writing one
        if ranges:
            num_documents = len(ranges[stream.removesuffix(GROUPS)])
        else:
            headers = (read_header(path_of(shard + stream, ".idx")) for shard in shards)
            num_documents = sum(header.num_documents for header in headers)
        if not num_documents:
            name = Path(output).name
            raise DataError(f"{name} would have no documents; give it a larger share in --split")
    workspace.mark_incomplete()
    for stream, output in outputs.items():
        stored = plan.stored(stream)
        stored["metadata"]["command"] = command
        if not ranges:
            datasets = [shard + stream for shard in shards]
            following = iter(datasets)
            merge(
                datasets,
                output,
                metadata=stored["metadata"],
                overwrite=True,
                progress=lambda *_: copied(next(following)),  # noqa: B023
            )
            continue
        with IndexedDatasetBuilder(output, **stored, overwrite=True) as builder:
            begin = 0
            split = stream.removesuffix(GROUPS)
            split_range = ranges[split]
            for shard, count in zip(shards, documents_of_shard, strict=True):
                dataset = shard + stream.removeprefix(split)
                low, high = max(split_range.start - begin, 0), min(split_range.stop - begin, count)
                _append(builder, dataset, low, high, count)
                copied(dataset, used_up=low < high == count)
                begin += count


def _append(builder: IndexedDatasetBuilder, prefix: str, low: int, high: int, count: int) -> None:
    """Append documents ``[low, high)`` of the ``count`` of a dataset."""
    if low == 0 and high == count:
        builder.add_index(prefix)
    elif low < high:
        dataset = IndexedDataset(prefix)
        bounds = dataset.document_offsets[low : high + 1]
        tokens = dataset.tokens[bounds[0] : bounds[-1]]
        columns = {n: c.rows[bounds[0] : bounds[-1]] for n, c in dataset.columns.items()}
        builder.add_documents(tokens, bounds - bounds[0], columns=columns)

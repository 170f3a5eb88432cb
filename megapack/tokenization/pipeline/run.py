"""The build: plan, shards, one dataset. Crash-safe, and the same bytes whoever does the work.

- preview: what a build would do; build: do it; Progress: what a build tells while it runs
- assemble: finished shards -> the datasets that were asked for, in the order of the corpus

    build(BuildConfig(inputs=("x.jsonl",), tokenizer="bytes", output_prefix="out"), progress)
    # -> out.bin, out.idx, out.meta.json, out.manifest.json; run again: state "found"
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from megapack.errors import DataError, MegapackError
from megapack.executors import Counted, prepare_processes, run_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.index_file import WEIGHTS, path_of, read_header
from megapack.storage.merge import merge
from megapack.storage.remote.copies import local_output
from megapack.tokenization.corpus.documents import SPLIT_NAMES, ordered_split
from megapack.tokenization.corpus.inputs import InputFile, find_inputs
from megapack.tokenization.corpus.readers import MIN_SHARD_BYTES
from megapack.tokenization.pipeline.plan import BuildConfig, Plan, ending_of, make_plan
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
from megapack.tokenization.tokenizers.encoders import Limits


class Progress(Protocol):
    """Callbacks of a build while it runs."""

    def note(self, text: str) -> None:
        """Something worth a line, said once."""

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        """``num_bytes`` of text, about, are to be read, and shards of ``disk_bytes`` written."""

    def advance(self, more: Counted) -> None:
        """More documents, bytes of text and tokens are done."""

    def join(self, done: int, total: int) -> None:
        """``done`` of ``total`` parts of the result are copied."""

    def stop(self) -> None:
        """All shards are done, or the build failed."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """Result of a build, made now or found."""

    plan: Plan
    prefixes: Mapping[str, str]  # stream -> prefix; see ``BuildConfig.outputs``
    totals: Totals
    state: Literal["built", "part", "found"]  # part: other machines' shards are missing
    records: Sequence[ShardRecord] = ()  # of this run's shards

    @property
    def num_shards(self) -> int:
        """Shards of the build."""
        return len(self.records)

    @property
    def num_shards_kept(self) -> int:
        """Shards that an earlier run had finished."""
        return sum(record.kept for record in self.records)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A build's plan, before anything is done."""

    plan: Plan
    prefixes: Mapping[str, str]  # as of ``BuildResult``
    estimate: Estimate
    num_missing: int  # of the plan's shards
    finished: bool  # the result stands there already
    left_behind: Sequence[str]  # by other plans


def preview(config: BuildConfig, progress: Progress) -> Preview:
    """Plan a build and look at what is there; write nothing. Raises as ``build`` before it runs."""
    plan = make_plan(config, _inputs(config, progress), progress.note)
    workspace = Workspace(plan)
    return Preview(
        plan=plan,
        prefixes=config.outputs,
        estimate=_estimated(plan, open_coder(plan), progress.note),
        finished=workspace.finished() is not None,
        num_missing=len(workspace.missing()),
        left_behind=workspace.left_behind(),
    )


def build(config: BuildConfig, progress: Progress) -> BuildResult:
    """Tokenize a corpus into ``<output_prefix>.bin/.idx`` (+ .meta.json, .manifest.json).

    Shards are built in ``<output_prefix>.build/<digest of the plan>/``; a run that was stopped
    leaves the finished ones there, and the next run of the same plan goes on behind them. What
    shall stand at an address is built in the cache, and uploaded when it is complete.

    Raises:
        ConfigError: options that cannot be; another dataset has the output's name; a machine
            has other tokenizer files or libraries than the plan.
        DataError: a document that may not pass (with on_error "fail"); no documents at all.
        LockedError: another process is at this build.
        MegapackError: a package is missing, or room on the disk.
        OSError: a file cannot be read or written; finished shards are kept.
    """
    outputs = config.outputs.values()
    with local_output(config.output_prefix, outputs, overwrite=config.overwrite) as local:
        here = dataclasses.replace(config, output_prefix=local)
        result = _build(here, progress, command=config.command())
    return dataclasses.replace(result, prefixes=config.outputs)


def _build(config: BuildConfig, progress: Progress, *, command: str) -> BuildResult:
    """Into local files; ``command`` is what their meta files say of it."""
    inputs = _inputs(config, progress)
    several = sum(file.size for file in inputs) > (config.shard_bytes or MIN_SHARD_BYTES)
    if config.workers > 1 and config.executor == "local" and several:
        packages = ["gigatoken", "awkward"] if config.backend in ("auto", "gigatoken") else []
        prepare_processes([ShardWorker.__module__, *packages])
    plan = make_plan(config, inputs, progress.note)
    workspace = Workspace(plan)
    workspace.root.parent.mkdir(parents=True, exist_ok=True)
    result = functools.partial(BuildResult, plan=plan, prefixes=config.outputs)
    totals = workspace.finished()
    if totals is not None:
        workspace.found()
        return result(totals=totals, state="found")
    with workspace.locked(progress.note):
        totals = workspace.finished()  # another process may have finished since, this or another
        if totals is not None:
            return result(totals=totals, state="found")
        try:
            records = _build_shards(plan, workspace, progress)
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


def _build_shards(plan: Plan, workspace: Workspace, progress: Progress) -> list[ShardRecord]:
    config = plan.config
    i, n = config.part or (0, 1)
    indices = range(i, len(plan.shards), n)
    missing = [index for index in workspace.missing() if index in indices]
    if config.finish and missing:
        raise MegapackError(
            f"shard {missing[0]} is not finished; --finish joins shards that all are, and of this "
            f"plan {len(missing)} of {len(plan.shards)} are missing: run the missing parts (with "
            "the same options and inputs), or leave out --finish to build them here"
        )
    num_processes = min(config.workers, max(1, len(indices)))
    worker = ShardWorker(
        plan=plan,
        directory=workspace.directory,
        # More workers than shards: the spare ones work inside of a shard.
        limits=Limits(config.workers // num_processes, config.worker_memory),
        finish_only=config.finish,
    )
    disk_bytes = 0
    if missing:
        whole = _estimated(plan, worker.coder, progress.note).num_bytes
        everything = plan.num_bytes(range(len(plan.shards)))
        disk_bytes = round(whole * plan.num_bytes(missing) / max(1, everything))
        to_join = whole if config.part is None else 0
        check_space(workspace.root.parent, disk_bytes, to_join=to_join, note=progress.note)
    progress.start(plan.num_bytes(indices), len(indices), disk_bytes)
    if config.executor == "ray" or num_processes > 1:
        worker = dataclasses.replace(worker)  # without the coder, which every process loads itself
    return run_shards(
        worker,
        indices,
        progress.advance,
        executor=config.executor,
        num_processes=num_processes,
        ray_address=config.ray_address,
        remedy="fewer --workers or smaller --block-bytes",
    )


def _estimated(plan: Plan, coder: Coder, note: Callable[[str], None]) -> Estimate:
    """Call ``estimate_build``; pass ``note`` warnings of splits that ``assemble`` would refuse."""
    found = estimate_build(plan, coder)
    if plan.split is None or plan.split_while_writing:
        return found
    cut = ordered_split(plan.split, found.num_documents)
    for name, weight, documents in zip(SPLIT_NAMES, plan.split, cut, strict=True):
        if weight and not documents:
            few = f"of about {found.num_documents:,} documents the {name} split may have none"
            note(f"{few}, and is refused then: give it a larger --split")
    return found


def assemble(
    plan: Plan,
    workspace: Workspace,
    documents_of_shard: Sequence[int],
    progress: Callable[[int, int], None],
    *,
    command: str,
) -> None:
    """Join all shards. Where the disk has no room for two copies, a shard's tokens are removed as
    soon as they are copied; a run that is stopped then has to build those again.

    Args:
        documents_of_shard: of every shard of the plan.
        progress: called with (shards copied, shards to copy), counted for every output.
        command: that builds the same datasets, for their meta files.

    Raises:
        DataError: a split would be empty.
        OSError: a file cannot be written.
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
            path_of(dataset, ".bin").unlink()

    ranges: dict[str, range] = {}  # of documents; none where shards are joined whole
    if plan.split is not None and not plan.split_while_writing:
        cut = ordered_split(plan.split, sum(documents_of_shard))
        ranges = {f"_{name}": documents for name, documents in zip(SPLIT_NAMES, cut, strict=True)}
    for stream, output in outputs.items():  # all of them, or none
        if ranges:
            num_documents = len(ranges[stream.removesuffix(ending_of(stream))])
        else:
            headers = (read_header(path_of(shard + stream, ".idx")) for shard in shards)
            num_documents = sum(header.num_documents for header in headers)
        if not num_documents:
            name = Path(output).name
            raise DataError(f"{name} would have no documents; give it a larger --split")
    workspace.join()
    for stream, output in outputs.items():
        end = ending_of(stream)
        stored = plan.stored(end)
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
            wanted = ranges[stream.removesuffix(end)]
            for shard, count in zip(shards, documents_of_shard, strict=True):
                dataset = shard + end
                low, high = max(wanted.start - begin, 0), min(wanted.stop - begin, count)
                _append(builder, dataset, low, high, count)
                copied(dataset, used_up=low < high == count)
                begin += count


def _append(builder: IndexedDatasetBuilder, prefix: str, low: int, high: int, count: int) -> None:
    """Documents ``[low, high)`` of the ``count`` of a dataset."""
    if low == 0 and high == count:
        builder.add_index(prefix)
    elif low < high:
        dataset = IndexedDataset(prefix)
        bounds = dataset.document_offsets[low : high + 1]
        tokens = dataset.tokens[bounds[0] : bounds[-1]]
        if prefix.endswith(WEIGHTS):
            tokens = tokens.view(np.float16)
        builder.add_documents(tokens, bounds - bounds[0])

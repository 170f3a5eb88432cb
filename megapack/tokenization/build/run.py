"""The build: plan, shards, one dataset. Crash-safe, and the same bytes whoever does the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from megapack.errors import DataError, MegapackError
from megapack.tokenization.build.assemble import assemble, output_prefixes
from megapack.tokenization.build.config import BuildConfig
from megapack.tokenization.build.executors import prepare_processes, run_here, run_processes
from megapack.tokenization.build.plan import Plan, make_plan
from megapack.tokenization.build.ray_executor import run_ray
from megapack.tokenization.build.record import ShardRecord, Totals
from megapack.tokenization.build.space import Estimate, check_space, estimate
from megapack.tokenization.build.worker import Counted, Execution, Worker, open_coder
from megapack.tokenization.build.workspace import Workspace
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.pieces import InputFile
from megapack.tokenization.corpus.shards import MIN_SHARD_BYTES
from megapack.tokenization.tokenizers.encoders import Limits

__all__ = ["BuildResult", "Preview", "Progress", "build", "preview"]


class Progress(Protocol):
    """What a build tells while it runs."""

    def note(self, text: str) -> None:
        """Something worth a line, said once."""

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        """``num_bytes`` of text, about, are to be read, and shards of ``disk_bytes`` written."""

    def advance(self, more: Counted) -> None:
        """More documents, bytes of text and tokens are done."""

    def join(self, done: int, total: int) -> None:
        """Of ``total`` parts of the result ``done`` are copied."""

    def stop(self) -> None:
        """All shards are done, or the build failed."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a build made, or found made."""

    plan: Plan
    prefixes: Mapping[str, str]  # stream -> prefix; see ``output_prefixes``
    totals: Totals
    num_shards: int  # of this run
    num_shards_kept: int  # of those, finished by an earlier run
    state: Literal["built", "part", "found"]  # part: other machines' shards are missing


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a build would do."""

    plan: Plan
    prefixes: Mapping[str, str]  # as of ``BuildResult``
    estimate: Estimate
    num_missing: int  # of the plan's shards
    finished: bool  # the result stands there already
    left_behind: Sequence[str]  # by other plans


def preview(config: BuildConfig, progress: Progress) -> Preview:
    """Plan a build and look at what is there; write nothing. Raises as ``build`` before it runs."""
    plan = make_plan(config, _inputs(config, progress), progress.note)
    outputs = output_prefixes(config)
    workspace = Workspace(config, plan, tuple(outputs.values()))
    return Preview(
        plan=plan,
        prefixes=outputs,
        estimate=estimate(plan, open_coder(plan)),
        finished=workspace.finished() is not None,
        num_missing=len(workspace.missing()),
        left_behind=workspace.left_behind(),
    )


def build(config: BuildConfig, progress: Progress) -> BuildResult:
    """Tokenize a corpus into ``<output_prefix>.bin/.idx`` (+ .meta.json, .manifest.json).

    Shards are built in ``<output_prefix>.build/<digest of the plan>/``; a run that was stopped
    leaves the finished ones there, and the next run of the same plan goes on behind them.

    Raises:
        ConfigError: options that cannot be; another dataset has the output's name; a machine has
            other tokenizer files or libraries than the plan.
        DataError: a document that may not pass (with on_error "fail"); no documents at all.
        LockedError: another process is at this build.
        MegapackError: a package is missing, or room on the disk.
        OSError: a file cannot be read or written; finished shards are kept.
    """
    inputs = _inputs(config, progress)
    several = sum(file.size for file in inputs) > (config.shard_bytes or MIN_SHARD_BYTES)
    if config.workers > 1 and config.executor == "local" and several:
        prepare_processes(config.backend)
    plan = make_plan(config, inputs, progress.note)
    outputs = output_prefixes(config)
    workspace = Workspace(config, plan, tuple(outputs.values()))
    workspace.root.parent.mkdir(parents=True, exist_ok=True)
    totals = workspace.finished()
    if totals is not None:
        workspace.found()
        return _result(plan, outputs, totals, [], "found")
    with workspace.locked(progress.note):
        try:
            records = _run(plan, workspace, config, progress)
            totals = Totals.of_records(records)
            if config.shard is not None:
                return _result(plan, outputs, totals, records, "part")
            if not totals.num_documents:
                skipped = "; ".join(totals.fault_lines()) or "the files are empty"
                raise DataError(f"the corpus has no documents ({skipped})")
            assemble(
                plan,
                workspace,
                outputs,
                [record.num_documents for record in records],
                metadata={"command": config.command()},
                progress=progress.join,
            )
        finally:
            progress.stop()
        workspace.finish(totals)
    return _result(plan, outputs, totals, records, "built")


def _inputs(config: BuildConfig, progress: Progress) -> list[InputFile]:
    return find_inputs(
        config.inputs,
        suffixes=config.suffixes,
        format=config.format,
        max_bytes=config.max_input_bytes,
        note=progress.note,
    )


def _run(
    plan: Plan, workspace: Workspace, config: BuildConfig, progress: Progress
) -> list[ShardRecord]:
    i, n = config.shard or (0, 1)
    indices = range(i, len(plan.shards), n)
    missing = [index for index in workspace.missing() if index % n == i]
    if config.finish and missing:
        raise MegapackError(
            f"shard {missing[0]} is not finished; --finish joins shards that all are, and of this "
            f"plan {len(missing)} of {len(plan.shards)} are missing: run the missing parts (with "
            "the same options and inputs), or leave out --finish to build them here"
        )
    workers = min(config.workers, max(1, len(indices)))
    execution = Execution(
        plan=plan,
        directory=str(workspace.directory),
        # More workers than shards: the spare ones work inside of a shard.
        limits=Limits(config.workers // workers, config.worker_memory),
        finish_only=config.finish,
    )
    worker = Worker(execution)
    disk_bytes = 0
    if missing:
        whole = estimate(plan, worker.coder).num_bytes
        disk_bytes = round(whole * plan.num_bytes(missing) / max(1, plan.num_bytes()))
        to_join = whole if config.shard is None else 0
        check_space(workspace.root.parent, disk_bytes, to_join=to_join, note=progress.note)
    progress.start(plan.num_bytes(indices), len(indices), disk_bytes)
    if config.executor == "ray":
        return run_ray(execution, indices, progress.advance, address=config.ray_address)
    if workers == 1:
        return run_here(worker, indices, progress.advance)
    return run_processes(execution, indices, progress.advance, workers=workers)


def _result(
    plan: Plan,
    prefixes: Mapping[str, str],
    totals: Totals,
    records: Sequence[ShardRecord],
    state: Literal["built", "part", "found"],
) -> BuildResult:
    return BuildResult(
        plan=plan,
        prefixes=prefixes,
        totals=totals,
        num_shards=len(records),
        num_shards_kept=sum(record.kept for record in records),
        state=state,
    )

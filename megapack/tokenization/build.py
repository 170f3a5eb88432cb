"""The build: plan, shards, one dataset. Crash-safe, and the same bytes whoever does the work."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from megapack.errors import DataError
from megapack.tokenization.assemble import assemble, output_prefixes
from megapack.tokenization.config import BuildConfig
from megapack.tokenization.executors import prepare_processes, run_here, run_processes
from megapack.tokenization.job import (
    Job,
    SpecialTokens,
    describe_tokenizer,
    make_job,
    read_options,
)
from megapack.tokenization.manifest import describe_inputs, write_manifest
from megapack.tokenization.plan import Shard, default_shard_bytes, plan_shards
from megapack.tokenization.probe import choose_backend
from megapack.tokenization.ray_executor import run_ray
from megapack.tokenization.record import ShardRecord, Totals
from megapack.tokenization.shard import Counted
from megapack.tokenization.sources import find_inputs
from megapack.tokenization.tokenizer import TokenizerFiles
from megapack.tokenization.workspace import finished_build, manifest_path, work_directory

__all__ = ["BuildResult", "Progress", "build"]


class Progress(Protocol):
    """What a build tells while it runs."""

    def note(self, text: str) -> None:
        """Something worth a line, said once."""

    def start(self, num_bytes: int, num_shards: int) -> None:
        """``num_bytes`` of text, about, are to be read."""

    def advance(self, counted: Counted) -> None:
        """More documents, bytes of text and tokens are done."""

    def stop(self) -> None:
        """All shards are done, or the build failed."""


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a build made, or found made."""

    prefixes: Mapping[str, str]  # stream -> prefix; see ``output_prefixes``
    totals: Totals
    num_shards: int  # of this run
    num_shards_kept: int  # of those, finished by an earlier run
    state: Literal["built", "part", "found"]  # part: other machines' shards are missing
    dtype: str
    tokenizer: TokenizerFiles
    backend: str
    special: SpecialTokens


@dataclass(frozen=True, kw_only=True)
class _Plan:
    shards: list[Shard]
    job: Job
    special: SpecialTokens
    manifest: dict[str, Any]


def build(config: BuildConfig, progress: Progress) -> BuildResult:
    """Tokenize a corpus into ``<output_prefix>.bin/.idx`` (+ .meta.json, .manifest.json).

    Shards are built in ``<output_prefix>.build/``; a run that was stopped leaves the finished ones
    there, and the next run with the same inputs and options goes on behind them.

    Raises:
        ConfigError: options that cannot be; inputs or options differ from those of the shards that
            are there already.
        DataError: a document that may not pass (with on_error "fail"); no documents at all.
        OSError: a file cannot be read or written; finished shards are kept.
    """
    if config.workers > 1 and config.executor == "local":
        prepare_processes(config.backend)
    plan = _make_plan(config, progress)
    outputs = output_prefixes(config)
    before = finished_build(config, list(outputs.values()), plan.manifest)
    work = Path(plan.job.work_dir)
    if before is not None:
        _remove_shards(work, config)  # a run may have been killed before it did
        return _result(plan, outputs, Totals.of_manifest(before), [], "found")
    with work_directory(work, config, plan.manifest):
        i, n = config.shard or (0, 1)
        shards = plan.shards[i::n]
        progress.start(sum(shard.num_bytes for shard in shards), len(shards))
        try:
            records = _run(plan.job, shards, config, progress)
        finally:
            progress.stop()
        totals = Totals.of_records(records)
        if config.shard is not None:
            return _result(plan, outputs, totals, records, "part")
        if not totals.num_documents:
            skipped = "; ".join(totals.fault_lines()) or "the files are empty"
            raise DataError(f"the corpus has no documents ({skipped})")
        assemble(plan.job, config, [record.num_documents for record in records])
        # Last: where it stands, the build is complete.
        write_manifest(manifest_path(config), {**plan.manifest, **asdict(totals)})
    _remove_shards(work, config)
    return _result(plan, outputs, totals, records, "built")


def _remove_shards(work: Path, config: BuildConfig) -> None:
    if not config.keep_shards:
        shutil.rmtree(work, ignore_errors=True)


def _make_plan(config: BuildConfig, progress: Progress) -> _Plan:
    files = find_inputs(
        config.inputs,
        suffixes=config.suffixes,
        format=config.format,
        max_bytes=config.max_input_bytes,
        note=progress.note,
    )
    tokenizer = TokenizerFiles.open(config.tokenizer)
    special = SpecialTokens(
        bos=tokenizer.special_token("bos", config.bos_token) if config.prepends else None,
        eod=tokenizer.special_token("eod", config.eod_token) if config.appends else None,
    )
    read = read_options(config)
    shard_bytes = config.shard_bytes
    if shard_bytes is None:
        shard_bytes = default_shard_bytes(files)
    shards = plan_shards(files, shard_bytes=shard_bytes, json_key=read.json_key)
    backend = choose_backend(tokenizer, config.backend, shards, read, progress.note)
    i, n = config.shard or (0, 1)
    job = make_job(config, tokenizer, special, backend=backend, num_shards=len(shards[i::n]))
    manifest = {
        "options": config.identity(),
        "tokenizer": describe_tokenizer(tokenizer),
        "backend": backend,
        "shard_bytes": shard_bytes,
        "num_shards": len(shards),
        "inputs": describe_inputs(files),
    }
    return _Plan(shards=shards, job=job, special=special, manifest=manifest)


def _run(
    job: Job, shards: Sequence[Shard], config: BuildConfig, progress: Progress
) -> list[ShardRecord]:
    if config.executor == "ray":
        return run_ray(job, shards, progress.advance, address=config.ray_address)
    workers = min(config.workers, max(1, len(shards)))
    if workers == 1:
        return run_here(job, shards, progress.advance)
    return run_processes(job, shards, progress.advance, workers=workers)


def _result(
    plan: _Plan,
    prefixes: Mapping[str, str],
    totals: Totals,
    records: Sequence[ShardRecord],
    state: Literal["built", "part", "found"],
) -> BuildResult:
    return BuildResult(
        prefixes=prefixes,
        totals=totals,
        num_shards=len(records),
        num_shards_kept=sum(record.kept for record in records),
        state=state,
        dtype=plan.job.storage.dtype,
        tokenizer=plan.job.tokenizer,
        backend=plan.job.backend,
        special=plan.special,
    )

"""The build: plan, shards, one dataset. Crash-safe, and the same bytes whoever does the work."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megapack.errors import ConfigError, DataError
from megapack.storage import IndexedDataset
from megapack.tokenization.assemble import concatenate
from megapack.tokenization.config import BuildConfig
from megapack.tokenization.executors import run_here, run_processes
from megapack.tokenization.faults import Faults
from megapack.tokenization.manifest import (
    describe_inputs,
    differences,
    read_manifest,
    write_manifest,
)
from megapack.tokenization.plan import Shard, default_shard_bytes, plan_shards
from megapack.tokenization.probe import choose_backend
from megapack.tokenization.readers import ReadOptions
from megapack.tokenization.shard import Counted, Job, ShardRecord, shard_prefix
from megapack.tokenization.sources import InputFile, find_inputs
from megapack.tokenization.tokenizer import SpecialToken, TokenizerFiles

__all__ = ["BuildResult", "Progress", "build"]

# Megatron's rule: every host of the .bin/.idx format reads vocabularies below this as uint16.
_UINT16_VOCABULARY = 65500


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
    """What a build made."""

    prefix: str
    num_documents: int
    num_tokens: int
    num_text_bytes: int
    num_shards: int
    num_shards_kept: int  # finished by an earlier run
    finished: bool  # False: other machines' shards are missing
    dtype: str
    tokenizer: TokenizerFiles
    backend: str
    bos: SpecialToken | None
    eod: SpecialToken | None
    faults: Faults


@dataclass(frozen=True, kw_only=True)
class _Plan:
    files: list[InputFile]
    shards: list[Shard]
    job: Job
    bos: SpecialToken | None
    eod: SpecialToken | None
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
    plan = _make_plan(config, progress)
    work = Path(plan.job.work_dir)
    with _entered(work, plan, config):
        i, n = config.shard or (0, 1)
        mine = plan.shards[i::n]
        progress.start(sum(shard.num_bytes for shard in mine), len(mine))
        try:
            records = _run(plan.job, mine, config, progress)
        finally:
            progress.stop()
        result = _result(plan, records, config)
        if config.shard is None:
            _assemble(plan, result, config)
    if config.shard is None and not config.keep_shards:
        shutil.rmtree(work)
    return result


def _make_plan(config: BuildConfig, progress: Progress) -> _Plan:
    files = find_inputs(
        config.inputs,
        suffixes=config.suffixes,
        format=config.format,
        max_bytes=config.max_input_bytes,
    )
    tokenizer = TokenizerFiles.open(config.tokenizer)
    bos = tokenizer.special_token("bos", config.bos_token) if config.prepends else None
    eod = tokenizer.special_token("eod", config.eod_token) if config.appends else None
    shard_bytes = config.shard_bytes or default_shard_bytes(files)
    shards = plan_shards(files, shard_bytes=shard_bytes, json_key=config.json_key)
    read = ReadOptions(
        json_key=config.json_key,
        block_bytes=config.block_bytes,
        max_document_bytes=config.max_document_bytes,
    )
    backend = choose_backend(tokenizer, config.backend, shards, read, progress.note)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "uint16" if tokenizer.vocab_size < _UINT16_VOCABULARY else "int32"
    described = {
        "source": Path(tokenizer.source).name,
        "kind": tokenizer.kind,
        "digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
    }
    metadata: dict[str, Any] = {"tokenizer": described, "command": config.command()}
    if eod is not None:
        metadata["document_end_token"] = eod.id
    if bos is not None:
        metadata["document_begin_token"] = bos.id
    job = Job(
        work_dir=f"{config.output_prefix}.build",
        tokenizer=tokenizer,
        backend=backend,
        threads=max(1, config.workers // max(1, len(shards))),
        prefix=() if bos is None else (bos.id,),
        suffix=() if eod is None else (eod.id,),
        dtype=dtype,
        read=read,
        on_error=config.on_error,
        min_words=config.min_words,
        max_words=config.max_words,
        finish_only=config.finish,
        metadata=metadata,
    )
    manifest = {
        "options": config.identity(),
        "tokenizer": described,
        "backend": backend,
        "shard_bytes": shard_bytes,
        "num_shards": len(shards),
        "inputs": describe_inputs(files),
    }
    return _Plan(files=files, shards=shards, job=job, bos=bos, eod=eod, manifest=manifest)


@contextlib.contextmanager
def _entered(work: Path, plan: _Plan, config: BuildConfig) -> Iterator[None]:
    """The directory of shards, made or found to belong to this plan, and ours alone."""
    path = work / "manifest.json"
    if config.overwrite and config.shard is None and not config.finish:
        shutil.rmtree(work, ignore_errors=True)
    elif IndexedDataset.exists(config.output_prefix):
        raise ConfigError(f"{config.output_prefix}.bin/.idx exist; replace them with --overwrite")
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work, config.shard):
        before = read_manifest(path)
        changed = [] if before is None else differences(before, plan.manifest)
        if changed:
            shown = "\n  ".join(changed[:5])
            more = f"\n  ... and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise ConfigError(
                f"{work} holds shards of another build:\n  {shown}{more}\n"
                "Start over with --overwrite, or undo the change to go on"
            )
        if before is None:
            write_manifest(path, plan.manifest)
        yield


@contextlib.contextmanager
def _locked(work: Path, part: tuple[int, int] | None) -> Iterator[None]:
    """Two runs of one part would do the same work twice. The lock goes with its process."""
    name = "lock" if part is None else f"lock-{part[0]}-of-{part[1]}"
    with (work / name).open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is building in {work}; wait for it") from error
        except OSError:
            pass  # a file system without locks; temporary names keep concurrent runs harmless
        yield


def _run(
    job: Job, shards: Sequence[Shard], config: BuildConfig, progress: Progress
) -> list[ShardRecord]:
    workers = min(config.workers, max(1, len(shards)))
    if workers == 1:
        return run_here(job, shards, progress.advance)
    return run_processes(job, shards, progress.advance, workers=workers)


def _result(plan: _Plan, records: Sequence[ShardRecord], config: BuildConfig) -> BuildResult:
    faults = Faults(config.on_error)
    for record in records:
        faults.add(record.fault_counts, record.fault_places)
    return BuildResult(
        prefix=config.output_prefix,
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_text_bytes=sum(record.num_text_bytes for record in records),
        num_shards=len(records),
        num_shards_kept=sum(record.kept for record in records),
        finished=config.shard is None,
        dtype=plan.job.dtype,
        tokenizer=plan.job.tokenizer,
        backend=plan.job.backend,
        bos=plan.bos,
        eod=plan.eod,
        faults=faults,
    )


def _assemble(plan: _Plan, result: BuildResult, config: BuildConfig) -> None:
    if result.num_documents == 0:
        skipped = "; ".join(result.faults.lines()) or "the files are empty"
        raise DataError(f"the corpus has no documents: {skipped}")
    concatenate(
        [shard_prefix(plan.job.work_dir, shard.index) for shard in plan.shards],
        config.output_prefix,
        dtype=plan.job.dtype,
        vocab_size=plan.job.tokenizer.vocab_size,
        metadata=plan.job.metadata,
    )
    counts = {
        "num_documents": result.num_documents,
        "num_tokens": result.num_tokens,
        "num_text_bytes": result.num_text_bytes,
        "skipped": result.faults.counts,
    }
    write_manifest(Path(f"{config.output_prefix}.manifest.json"), {**plan.manifest, **counts})

"""Start of a run: check it, connect its ranks, build model and engine, train, export.

``start`` runs after ``megapack.training.pretrain`` has checked the configuration alone. Checks that
need the data, transformers or DeepSpeed run here, before ranks connect.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash

from megapack.attention import choose_backend
from megapack.config import from_dict, to_dict
from megapack.data.resume import ORDER_FIELDS, check_record, rate_change, refuse_damage
from megapack.data.run import Decisions, read_decisions
from megapack.errors import ConfigError, MegapackError, RankMismatchError, ResumeError, exit_code
from megapack.training.autopilot import find_rule
from megapack.training.config import CheckpointConfig, PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore, Resume
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.directory import (
    MANIFEST,
    CheckpointManifest,
    RunDirectory,
    tags_in,
    tokens_of,
)
from megapack.training.engine.engine import start_engine
from megapack.training.engine.export import end_token, export_model, tokenizer_of
from megapack.training.engine.inputs import Inputs, check_run, run_record, verify_samples
from megapack.training.engine.mirror import Mirror
from megapack.training.engine.world import World, connect_ranks
from megapack.training.model.architecture import attention_needs
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import compute_dtype, open_model
from megapack.training.monitoring.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.monitoring.signals import PREEMPTED, StopSignals
from megapack.training.trainer import Trainer
from megapack.units import counted

logger = logging.getLogger("megapack")


def start(config: PretrainConfig, num_ranks: int, profile: range | None) -> int:
    """Check, train and export; return the exit code. Raises only before ranks connect: later errors
    end the process."""
    show_log()
    logger.info("opening the data, and checking them and the model")
    run = RunDirectory(config.run_dir)
    inputs, architecture, tokenizer = check_start(config, run, num_ranks, profile)
    run.check_writable()
    if torch.cuda.is_available():
        run.record_flight()
    with connect_ranks(
        timeout_minutes=config.engine.timeout_minutes,
        sequence_parallel_size=config.engine.sequence_parallel_size,
    ) as world:
        heartbeat = Heartbeat(
            world,
            heartbeat_timeout=config.engine.heartbeat_timeout_seconds,
            hang_timeout=config.engine.hang_timeout_seconds,
            on_loss=run.fail,
        )
        with StopSignals() as signals, heartbeat:
            try:
                with run.held(world):
                    trainer = prepare(
                        config,
                        world,
                        inputs,
                        run=run,
                        architecture=architecture,
                        tokenizer=tokenizer,
                        profile=profile,
                    )
                    return train(trainer, signals, tokenizer)
            except (MegapackError, OSError) as error:
                leave(world, run, f"{type(error).__name__}: {error}", code=exit_code(error))
            except Exception as error:  # exit: the other ranks would wait for this one
                traceback.print_exc()
                # Errors of collectives are RuntimeErrors, and so are errors of the device.
                lost = heartbeat.explain() if isinstance(error, RuntimeError) else None
                message = lost or f"this rank failed: {type(error).__name__}: {error}"
                leave(world, run, message, code=LOST_CONTACT if lost else 1)
            except KeyboardInterrupt:
                leave(world, run, "interrupted before it could save", code=130)


def check_start(
    config: PretrainConfig, run: RunDirectory, num_ranks: int, profile: range | None = None
) -> tuple[Inputs, Any, Any]:
    """Open the inputs of a run and check that they fit together, before ranks connect. Returns the
    inputs, the transformers configuration of the model, and the tokenizer."""
    check_directory(config.checkpoint, run)
    inputs = Inputs(config)
    check_mixing(config, inputs)
    if config.evaluation.every is not None and not inputs.held_out:
        raise ConfigError(
            f"evaluation.every is {config.evaluation.every}, but there are no held-out documents; "
            "set data.valid_prefix (or that of a source of the blend), or evaluation.every=null"
        )
    if profile is not None and profile.stop > inputs.num_steps:
        raise ConfigError(
            f"--profile is {profile.start}:{profile.stop}; the run has {inputs.num_steps} steps"
        )
    architecture, tokenizer = check_run(config, inputs, num_ranks), tokenizer_of(config.model)
    if config.model.tokenizer is not None:
        check_tokenizer(config.model.tokenizer, tokenizer, inputs)
    return inputs, architecture, tokenizer


def check_tokenizer(name: str, tokenizer: Any, inputs: Inputs) -> None:
    """Check that the tokenizer to export has every id of the training data. Warns if the data were
    made with other tokenizer files. Raises ConfigError."""
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    for source in inputs.data.datasets:
        prefix, largest = source.largest_token_id(num_ids)
        if largest >= num_ids:
            raise ConfigError(
                f"model.tokenizer is {name!r}, whose ids are below {num_ids:,}, and {prefix} holds "
                f"token id {largest:,}: set model.tokenizer to the tokenizer that made {prefix} "
                f"(`megapack-build inspect {prefix}` prints its command)"
            )
    digests = _file_digests(Path(name))
    for source in inputs.data.datasets if digests else ():
        recorded = (source.meta or {}).get("tokenizer")  # absent in datasets of other programs
        if isinstance(recorded, dict) and recorded.get("digest", "") not in {"", *digests}:
            logger.warning(
                "%s was tokenized with other files than those of model.tokenizer, %s: check that "
                "%s (%s ids) gives the same ids; the model is exported with %s",
                source.prefix,
                name,
                recorded.get("name", "its tokenizer"),
                f"{recorded.get('vocab_size', 0):,}",
                name,
            )


def _file_digests(path: Path) -> set[str]:
    """Return xxh3-128 of each file that may define the tokenizer, as meta files record it."""
    if path.is_file():
        return {xxhash.xxh3_128_hexdigest(path.read_bytes())}
    found = {xxhash.xxh3_128_hexdigest(p.read_bytes()) for p in path.glob("*.model")}
    for names in (["tokenizer.json"], ["vocab.json", "merges.txt"]):
        if all((path / name).is_file() for name in names):
            found.add(xxhash.xxh3_128_hexdigest(b"".join((path / n).read_bytes() for n in names)))
    return found


def check_directory(section: CheckpointConfig, run: RunDirectory) -> None:
    """Check that the run may use or resume the checkpoints in its directory and its mirror. Raises
    ConfigError or ResumeError, and OSError if the mirror cannot be read."""
    tags, never_resumes = tags_in(run.checkpoints), section.resume == "never"
    if never_resumes and tags:
        raise ConfigError(
            f"{run.checkpoints} has checkpoints and checkpoint.resume is never; choose another "
            "run_dir, or remove them"
        )
    if section.branch_from is not None and not tags:
        check_branch(Path(section.branch_from), section.mirror)
    if section.mirror is None:
        return
    mirror = Mirror(section.mirror)
    mirror.check_owner(run)
    if never_resumes and (mirrored := mirror.tags()):
        raise ConfigError(
            f"{mirror.address} has {mirrored[-1]}, which this run would remove, and "
            "checkpoint.resume is never; choose another mirror, or remove its checkpoints"
        )


def check_branch(origin: Path, mirror: str | None) -> None:
    """Check that ``origin`` is a checkpoint, and that its run does not use the same mirror."""
    for folder in (origin / "checkpoints", origin):
        if tags := tags_in(folder):
            raise ConfigError(
                f"checkpoint.branch_from is {origin}, which is a run; name one of its checkpoints, "
                f"as in {folder / tags[-1]}"
            )
    CheckpointManifest.read(origin)
    section = RunDirectory(origin.absolute().parents[1]).settings().get("checkpoint", {})
    if mirror is not None and mirror.rstrip("/") == str(section.get("mirror")).rstrip("/"):
        raise ConfigError(
            f"checkpoint.mirror is {mirror}, which is the mirror of the run that this one branches "
            "from: this run would remove its checkpoints; give another address"
        )


def check_mixing(config: PretrainConfig, inputs: Inputs) -> None:
    """Raise ConfigError unless the mixing rule exists and the blend has two sources or more."""
    rule, names = config.mixing.rule, inputs.schedule.samples.names
    if rule is None:
        return
    find_rule(rule)
    if len(set(names)) < max(2, len(names)):
        raise ConfigError(
            f"mixing.rule is {rule!r}, but the blend has sources {', '.join(names)}: the rule "
            "needs at least two, each with its own name"
        )


def prepare(
    config: PretrainConfig,
    world: World,
    inputs: Inputs,
    *,
    run: RunDirectory,
    architecture: Any,
    tokenizer: Any,
    profile: range | None,
) -> Trainer:
    """Build model, engine and trainer, at the step where the run starts or resumes; collective."""
    check_ranks(config, world)
    if config.data.verify:
        logger.info("verifying checksums of the data (data.verify)")
        verify_samples(inputs, world)
    logger.info("%s; %s", inputs.data, counted(inputs.num_steps, "step"))
    mirror = config.checkpoint.mirror
    store = CheckpointStore(
        run.checkpoints,
        world,
        keep=config.checkpoint.keep,
        zero_stage=config.engine.stage,
        asynchronous=config.checkpoint.asynchronous,
        is_milestone=config.checkpoint.is_milestone,
        reach=config.autopilot.reach if config.autopilot.spikes else 0,
        mirror=None if mirror is None else Mirror(mirror, world.progress),
    )
    resume, resume_store = find_checkpoint(config, world, run, store)
    # Read them again: only now does this run hold the lock of the directory.
    decisions = world.on_first(lambda: read_decisions(config.run_dir))
    inputs = with_decisions(config, inputs, decisions, resume)
    dtype = compute_dtype(config.engine)
    backend = choose_backend(
        attention_needs(architecture, world.device, dtype), config.model.attention_backend
    )
    described = {"tokenizer": tokenizer, "attention": backend.name}
    record = world.on_first(lambda: run_record(config, inputs, architecture, **described))
    start_step, changes = find_start(
        config, inputs, resume, record, logs=world.is_first, is_branch=resume_store is not store
    )
    logger.info("building the model and its engine")
    model, attention = open_model(
        config.model,
        config.engine,
        architecture,
        device=world.device,
        seed=config.seed,
        trees=config.data.attention == "tree",
        zero_3=zero_3_configuration(config, world.size),
        distill=config.distill,
        sequence_group=world.sequence_group,
        progress=partial(world.progress.inside, "the weights of the model"),
    )
    logger.info("attention: %s, %s", attention.name, attention.reason)
    logger.info("model: %s", model.description)
    flops = ModelFlops.of(model, architecture)
    engine = start_engine(model, config, world)
    state: dict[str, Any] = {}
    if resume is not None:
        logger.info("loading %s", resume.tag)
        resume_store.load(engine, resume)
        state = resume.manifest.state

    def write_start() -> None:
        facts = {
            "step": start_step,
            "num_steps": inputs.num_steps,
            "world_size": world.size,
            "sources": inputs.schedule.samples.names,
            "attention": attention.__dict__,
            "parameters": model.num_parameters,
            "fingerprints": inputs.fingerprints(),
            "data_order": inputs.schedule.identity(),
            "data_order_changes": changes,
        }
        run.begin(config, facts)
        if store.mirror is not None:
            run.create_id()  # the mirror stores this id as its owner
        if inputs.decisions is not None:  # they may come from a checkpoint, without a file
            inputs.decisions.write(run.path)
        for problem in run.truncate_logs(inputs.schedule.tokens_before(start_step)):
            logger.warning("%s", problem)
        run.record("start", inputs.recorded_files())

    world.on_first(write_start)  # before any rank appends to the logs
    trainer = Trainer(
        config,
        world,
        inputs,
        engine=engine,
        run=run,
        store=store,
        find=partial(find_checkpoint, config, world, run, store),
        flops=flops,
        record=record,
        start=start_step,
        profile=profile,
    )
    trainer.restore_monitors(state, start_step)
    return trainer


def train(trainer: Trainer, signals: StopSignals, tokenizer: Any) -> int:
    """Train, export the model, and return the exit code."""
    world, run = trainer.world, trainer.run_dir
    reason = trainer.run(signals)
    if reason == "done" and trainer.config.checkpoint.export:
        logger.info("exporting the model")
        end = end_token(trainer.inputs.data.datasets)
        export_model(trainer.engine, run.model, world, tokenizer=tokenizer, end=end)
        logger.info("model for from_pretrained: %s", run.model)
        if (average := trainer.engine.weight_average) is not None:
            with average.in_model():
                export_model(trainer.engine, run.model_average, world, tokenizer=tokenizer, end=end)
            logger.info("average of the weights: %s", run.model_average)
    if world.is_first:
        run.end(reason)
    return PREEMPTED if reason == "signal" else 0


# Paths may differ between nodes. ``RankChecker`` compares the samples drawn from them.
_FILES = {"run_dir", "prefix", "index", "blend", "valid_prefix", "valid_index"}
_FILES |= {"pretrained", "config", "tokenizer"}


def check_ranks(config: PretrainConfig, world: World) -> None:
    """Raise RankMismatchError if the ranks have different configurations; collective."""
    values: dict[str, Any] = {}
    for section, tree in to_dict(config).items():
        for key, value in (tree if isinstance(tree, dict) else {section: tree}).items():
            if key not in _FILES or isinstance(value, dict):
                values[key if key == section else f"{section}.{key}"] = value
    first = world.on_first(lambda: values)
    differing = [
        f"{name} is {value!r} on {world.host}, {first.get(name)!r} on the first rank"
        for name, value in values.items()
        if value != first.get(name)
    ]
    what = "ranks disagree on the configuration. Start all ranks with the same files"
    world.fail_together("; ".join(differing[:3]) or None, what, RankMismatchError)


def find_checkpoint(
    config: PretrainConfig,
    world: World,
    run: RunDirectory,
    store: CheckpointStore,
    at_most: int | None = None,
) -> tuple[Resume | None, CheckpointStore]:
    """Return the newest good checkpoint of the run, else of its mirror, else of its trunk, and the
    store that loads it. A rollback skips checkpoints of more than ``at_most`` tokens."""
    section, is_rollback, resume = config.checkpoint, at_most is not None, None

    def is_before(tag: str) -> bool:
        return at_most is None or tokens_of(tag) <= at_most

    if section.resume == "auto" or is_rollback:
        fallback = section.fallback or is_rollback
        if tags_in(run.checkpoints):
            logger.info("checking the newest checkpoint (checkpoint.verify: %s)", section.verify)
        resume = store.find(verify=section.verify, fallback=fallback, among=is_before)
        if resume is None and (mirror := store.mirror) is not None:
            tag = world.on_first(lambda: mirror.restore(run.checkpoints, at_most))
            if tag is not None:
                logger.info("restored %s from %s", tag, mirror.address)
                resume = store.find(verify=section.verify, among=is_before)
    if resume is not None or section.branch_from is None:
        return resume, store
    origin = Path(section.branch_from).absolute()
    trunk = CheckpointStore(
        origin.parent, world, keep=1, zero_stage=config.engine.stage, scratch=run.checkpoints
    )
    resume = trunk.find(
        verify=section.verify, among=lambda tag: tag == origin.name and is_before(tag)
    )
    if resume is None and not is_rollback:
        raise ResumeError(f"checkpoint.branch_from: there is no checkpoint {origin}")
    world.on_first(lambda: run.copy_logs(origin.parents[1]))
    return resume, trunk


def with_decisions(
    config: PretrainConfig, inputs: Inputs, decisions: Decisions | None, resume: Resume | None
) -> Inputs:
    """Return the inputs with the run's decisions; without any, with those of the checkpoint."""
    tree = None if resume is None else resume.manifest.state.get("decisions")
    if decisions is None and tree is not None:
        decisions = from_dict(Decisions, tree, where="decisions of the checkpoint")
    return inputs if decisions == inputs.decisions else Inputs(config, decisions)


def check_newest(
    config: PretrainConfig, run: RunDirectory, inputs: Inputs, architecture: Any, tokenizer: Any
) -> None:
    """Check a dry run against the manifest of the checkpoint from which a start would resume."""
    tags, origin = tags_in(run.checkpoints), config.checkpoint.branch_from
    newest = run.checkpoints / tags[-1] if tags else origin and Path(origin)
    if newest and not config.checkpoint.fallback:
        manifest = CheckpointManifest.read(newest)
        resume = Resume(tag=newest.name, manifest=manifest, universal=False)
        inputs = with_decisions(config, inputs, inputs.decisions, resume)
        record = run_record(config, inputs, architecture, tokenizer=tokenizer)
        find_start(config, inputs, resume, record, is_branch=not tags)


def find_start(
    config: PretrainConfig,
    inputs: Inputs,
    resume: Resume | None,
    record: dict[str, Any],
    *,
    logs: bool = True,
    is_branch: bool = False,
) -> tuple[int, list[str]]:
    """Compare the run with the checkpoint that it resumes from, if there is one.

    Args:
        record: ``run_record`` of the run.
        logs: log the differences; True on one rank only.
        is_branch: the checkpoint belongs to the run that this one branches from.

    Returns the first step to train, and changes of the order of samples. Raises ResumeError if the
    checkpoint was written with different settings, or is beyond the last step.
    """
    if resume is None:
        return 0, []
    state, allowed = resume.manifest.state, config.checkpoint.allow_change
    allowed_of_order = [name for name in allowed if name in ORDER_FIELDS]
    with refuse_damage(f"the state in {MANIFEST} of {resume.tag}"):
        order_changes = inputs.schedule.check_state(state["data"], allowed_of_order)
        run_changes = check_record(record, state.get("run"), allowed, is_branch=is_branch)
        step = inputs.schedule.resume_step(state["data"], allowed_of_order)
        saved_rate = None if state.get("lr") is None else float(state["lr"])
    if logs:
        for change in run_changes:
            logger.warning("the run has changed: %s", change)
        for problem in resume.rejected:
            logger.warning("%s; falling back to %s", problem, resume.tag)
        for change in order_changes:
            logger.warning("the data order has changed: %s", change)
    if step > inputs.num_steps:
        raise ResumeError(
            f"{resume.tag} has {step} steps done, and num_steps of the run is {inputs.num_steps}; "
            f"set it to {step} or more, or export an earlier checkpoint (megapack-export --step)"
        )
    if logs and saved_rate is not None and step < inputs.num_steps:
        rate = config.learning_rate.at(step, num_steps=inputs.num_steps, peak=config.optimizer.lr)
        for change in rate_change(step, rate, saved_rate):
            logger.warning("%s", change)
    logger.info(
        "continuing at step %d from %s, written by %d ranks with ZeRO-%d",
        *(step, resume.tag, resume.manifest.world_size, resume.manifest.zero_stage),
    )
    return step, order_changes


def leave(world: World, run: RunDirectory, message: str, code: int) -> NoReturn:
    """Record the reason and end this process without waiting for other ranks (they may be gone)."""
    print(f"megapack: rank {world.rank} on {world.host}: {message}", file=sys.stderr, flush=True)
    run.fail(message)
    logging.shutdown()
    os._exit(code)


def show_log() -> None:
    """Log to stderr: the first rank from INFO on, the others from WARNING on."""
    rank = int(os.environ["RANK"])
    form = f"[rank {rank}] %(message)s" if rank else "[%(asctime)s] %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if rank else logging.INFO)
    logger.propagate = False

"""A start of a run: all of it checked, then its processes, its model, its engine and its loop.

Read from top to bottom. ``start`` begins after ``megapack.training.pretrain`` has checked the
configuration by itself; what needs the data, transformers or DeepSpeed to be checked is checked
before processes meet.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from megapack.attention import choose_backend
from megapack.config import from_dict, to_dict
from megapack.data.resume import ORDER_FIELDS, check_record
from megapack.data.run import Decisions, read_decisions
from megapack.errors import (
    ConfigError,
    MegapackError,
    RankMismatchError,
    ResumeError,
    exit_code,
)
from megapack.training.autopilot import find_rule
from megapack.training.config import CheckpointConfig, PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore, Resume
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.directory import RunDirectory, tags_in, tokens_of
from megapack.training.engine.engine import start_engine
from megapack.training.engine.export import end_token, export_model, tokenizer_of
from megapack.training.engine.inputs import (
    Inputs,
    check_run,
    open_inputs,
    run_record,
    verify_samples,
)
from megapack.training.engine.manifest import CheckpointManifest
from megapack.training.engine.mirror import Mirror
from megapack.training.engine.world import World, world
from megapack.training.model.architecture import attention_needs
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import compute_dtype, open_model
from megapack.training.monitoring.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.monitoring.signals import PREEMPTED, StopSignals
from megapack.training.trainer import Trainer

logger = logging.getLogger("megapack")


def start(config: PretrainConfig, num_ranks: int, profile: range | None) -> int:
    """Check, train, export; the exit code.

    Args:
        num_ranks: of the launcher.
        profile: steps to trace.

    Raises:
        MegapackError, OSError: before there are processes; later errors end this one.
    """
    show_log()
    run = RunDirectory(config.run_dir)
    inputs, architecture, tokenizer = check_start(config, run, num_ranks, profile)
    run.check_writable()
    if torch.cuda.is_available():
        run.record_flight()
    with world(
        timeout_minutes=config.engine.timeout_minutes,
        sequence_parallel_size=config.engine.sequence_parallel_size,
    ) as here:
        heart = Heartbeat(
            here,
            heartbeat_timeout=config.engine.heartbeat_timeout_seconds,
            hang_timeout=config.engine.hang_timeout_seconds,
            on_loss=run.fail,
        )
        with StopSignals() as signals, heart:
            try:
                with run.held(here):
                    trainer = prepare(
                        config,
                        here,
                        inputs,
                        run=run,
                        architecture=architecture,
                        tokenizer=tokenizer,
                        profile=profile,
                    )
                    return train(trainer, signals, tokenizer)
            except (MegapackError, OSError) as error:
                leave(here, run, f"{type(error).__name__}: {error}", code=exit_code(error))
            except Exception as error:  # a rank that fails must not leave the others waiting
                traceback.print_exc()
                # torch's errors of collectives are RuntimeErrors; so are a device's own.
                lost = heart.explain() if isinstance(error, RuntimeError) else None
                message = lost or f"this rank failed: {type(error).__name__}: {error}"
                leave(here, run, message, code=LOST_CONTACT if lost else 1)
            except KeyboardInterrupt:
                leave(here, run, "interrupted before it could save", code=130)


def check_start(
    config: PretrainConfig, run: RunDirectory, num_ranks: int, profile: range | None = None
) -> tuple[Inputs, Any, Any]:
    """Open what the run reads, and refuse what does not go together; no other rank is asked.

    Returns:
        Its data, the transformers configuration of its model, the tokenizer that goes along.
    """
    check_directory(config.checkpoint, run)
    inputs = open_inputs(config)
    check_mixing(config, inputs)
    if config.evaluation.every is not None and not inputs.held_out:
        raise ConfigError(
            f"evaluation.every is {config.evaluation.every} and there are no held-out documents; "
            "give data.valid_prefix (or that of a source of the blend), or set it to null"
        )
    if profile is not None and profile.stop > inputs.num_steps:
        raise ConfigError(
            f"--profile is {profile.start}:{profile.stop}; the run has {inputs.num_steps} steps"
        )
    return inputs, check_run(config, inputs, num_ranks), tokenizer_of(config.model)


def check_directory(section: CheckpointConfig, run: RunDirectory) -> None:
    """Refuse checkpoints that the run must not have, or must not go on from. Raises ConfigError,
    ResumeError; OSError: its mirror cannot be read."""
    own, anew = tags_in(run.checkpoints), section.resume == "never"
    if anew and own:
        raise ConfigError(
            f"{run.checkpoints} has checkpoints and checkpoint.resume is never; choose another "
            "run_dir, or remove them"
        )
    if section.branch_from is not None and not own:
        check_branch(Path(section.branch_from), section.mirror)
    if section.mirror is None:
        return
    mirror = Mirror(section.mirror)
    mirror.check_owner(run)
    if anew and (there := mirror.tags()):
        raise ConfigError(
            f"{mirror.address} has {there[-1]}, which this run would remove, and "
            "checkpoint.resume is never; choose another mirror, or remove what is there"
        )


def check_branch(origin: Path, mirror: str | None) -> None:
    """Refuse to begin where there is no checkpoint, or with the mirror of the trunk."""
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
            f"checkpoint.mirror is {mirror}, which is that of the run that this one branches from: "
            "its checkpoints there would be taken for this run's, and removed; give another address"
        )


def check_mixing(config: PretrainConfig, inputs: Inputs) -> None:
    """Refuse a rule that cannot be found, or that has nothing to weigh. Raises ConfigError."""
    rule, names = config.mixing.rule, inputs.schedule.samples.names
    if rule is None:
        return
    find_rule(rule)
    if len(set(names)) < max(2, len(names)):
        raise ConfigError(
            f"mixing.rule is {rule!r} and the blend has sources {', '.join(names)}: it needs at "
            "least two, each with a name of its own"
        )


def prepare(
    config: PretrainConfig,
    here: World,
    inputs: Inputs,
    *,
    run: RunDirectory,
    architecture: Any,
    tokenizer: Any,
    profile: range | None,
) -> Trainer:
    """Model, engine and loop, at the step at which the run begins; collective."""
    check_ranks(config, here)
    if config.data.verify:
        verify_samples(inputs, here)
    logger.info("%s; %s steps", inputs.data, f"{inputs.num_steps:,}")
    mirror = config.checkpoint.mirror
    store = CheckpointStore(
        run.checkpoints,
        here,
        keep=config.checkpoint.keep,
        zero_stage=config.engine.stage,
        asynchronous=config.checkpoint.asynchronous,
        is_milestone=config.checkpoint.is_milestone,
        reach=config.autopilot.reach if config.autopilot.spikes else 0,
        mirror=None if mirror is None else Mirror(mirror, here.progress),
    )
    found, home = find_checkpoint(config, here, run, store)
    decided = here.on_first(lambda: read_decisions(config.run_dir))  # now that nobody else writes
    inputs = with_decisions(config, inputs, decided, found)
    dtype = compute_dtype(config.engine)
    backend = choose_backend(
        attention_needs(architecture, here.device, dtype), config.model.attention_backend
    )
    record = here.on_first(
        lambda: run_record(
            config, inputs, architecture, tokenizer=tokenizer, attention=backend.name
        )
    )
    start_step, changes = find_start(
        config, inputs, found, record, tells=here.is_first, is_branch=home is not store
    )
    model, attention = open_model(
        config.model,
        config.engine,
        architecture,
        device=here.device,
        seed=config.seed,
        zero_3=zero_3_configuration(config, here.size),
        sequence_group=here.sequence_group,
        progress=partial(here.progress.inside, "the weights of the model"),
    )
    logger.info("attention: %s, %s", attention.name, attention.reason)
    logger.info("model: %s", model.description)
    flops = ModelFlops.of(model, architecture)
    engine = start_engine(model, config, here)
    state: dict[str, Any] = {}
    if found is not None:
        home.load(engine, found)
        state = found.manifest.state

    def write_start() -> None:
        facts = {
            "step": start_step,
            "num_steps": inputs.num_steps,
            "world_size": here.size,
            "sources": inputs.schedule.samples.names,
            "attention": attention.__dict__,
            "parameters": model.num_parameters,
            "fingerprints": inputs.fingerprints(),
            "data_order": inputs.schedule.identity(),
            "data_order_changes": changes,
        }
        run.begin(config, facts)
        if store.mirror is not None:
            run.own_id()  # started anew, it is not taken for the one that was faster to copy
        if inputs.decisions is not None:  # of a checkpoint, if the file was lost
            inputs.decisions.write(run.path)
        for problem in run.forget_after(inputs.schedule.tokens_before(start_step)):
            logger.warning("%s", problem)

    here.on_first(write_start)  # before any rank writes on
    trainer = Trainer(
        config,
        here,
        inputs,
        engine=engine,
        run=run,
        store=store,
        find=partial(find_checkpoint, config, here, run, store),
        flops=flops,
        record=record,
        start=start_step,
        profile=profile,
    )
    trainer.begin_again(state, start_step)
    return trainer


def train(trainer: Trainer, signals: StopSignals, tokenizer: Any) -> int:
    """The loop, and the model that it leaves; the exit code."""
    here, run = trainer.here, trainer.run_dir
    reason = trainer.run(signals)
    if reason == "done" and trainer.config.checkpoint.export:
        end = end_token(trainer.inputs.data.datasets)
        export_model(trainer.engine, run.model, here, tokenizer=tokenizer, end=end)
        logger.info("model for from_pretrained: %s", run.model)
        if (average := trainer.engine.weight_average) is not None:
            with average.in_model():
                export_model(trainer.engine, run.model_average, here, tokenizer=tokenizer, end=end)
            logger.info("average of its weights: %s", run.model_average)
    if here.is_first:
        run.end(reason)
    return PREEMPTED if reason == "signal" else 0


# Files, which nodes may have elsewhere; what is drawn from them ``RankChecker`` compares.
_FILES = {"run_dir", "prefix", "index", "blend", "valid_prefix", "valid_index"}
_FILES |= {"pretrained", "config", "tokenizer"}


def check_ranks(config: PretrainConfig, here: World) -> None:
    """Collective. Raises RankMismatchError: a rank has another configuration than the first one."""
    mine: dict[str, Any] = {}
    for section, tree in to_dict(config).items():
        for key, value in (tree if isinstance(tree, dict) else {section: tree}).items():
            if key not in _FILES or isinstance(value, dict):
                mine[key if key == section else f"{section}.{key}"] = value
    first = here.on_first(lambda: mine)
    differing = [
        f"{name} is {value!r} on {here.host}, {first.get(name)!r} on the first rank"
        for name, value in mine.items()
        if value != first.get(name)
    ]
    what = "ranks disagree on the configuration. Start all ranks with the same files"
    here.fail_together("; ".join(differing[:3]) or None, what, RankMismatchError)


def find_checkpoint(
    config: PretrainConfig,
    here: World,
    run: RunDirectory,
    store: CheckpointStore,
    at_most: int | None = None,
) -> tuple[Resume | None, CheckpointStore]:
    """The newest good checkpoint of the run, of its mirror or of its trunk, and where it lies;
    ``at_most``: of those after so many tokens, for a run that goes back."""
    section, back, found = config.checkpoint, at_most is not None, None

    def is_before(tag: str) -> bool:
        return at_most is None or tokens_of(tag) <= at_most

    if section.resume == "auto" or back:
        fallback = section.fallback or back
        found = store.find(verify=section.verify, fallback=fallback, among=is_before)
        if found is None and (mirror := store.mirror) is not None:
            tag = here.on_first(lambda: mirror.restore(run.checkpoints, at_most))
            if tag is not None:
                logger.info("restored %s from %s", tag, mirror.address)
                found = store.find(verify=section.verify, among=is_before)
    if found is not None or section.branch_from is None:
        return found, store
    origin = Path(section.branch_from).absolute()
    trunk = CheckpointStore(
        origin.parent, here, keep=1, zero_stage=config.engine.stage, scratch=run.checkpoints
    )
    found = trunk.find(
        verify=section.verify, among=lambda tag: tag == origin.name and is_before(tag)
    )
    if found is None and not back:
        raise ResumeError(f"checkpoint.branch_from: there is no checkpoint {origin}")
    here.on_first(lambda: run.take_logs(origin.parents[1]))
    return found, trunk


def with_decisions(
    config: PretrainConfig, inputs: Inputs, decided: Decisions | None, found: Resume | None
) -> Inputs:
    """The inputs with what the run decided, as its directory says now; where that knows nothing of
    it, a branch or a lost disk, as the checkpoint has it."""
    tree = None if found is None else found.manifest.state.get("decisions")
    if decided is None and tree is not None:
        decided = from_dict(Decisions, tree, where="decisions of the checkpoint")
    return inputs if decided == inputs.decisions else open_inputs(config, decided)


def check_newest(
    config: PretrainConfig, run: RunDirectory, inputs: Inputs, architecture: Any, tokenizer: Any
) -> None:
    """Check a dry run against the checkpoint that a real start would resume from; of its files only
    the manifest is read. Raises ResumeError."""
    tags, origin = tags_in(run.checkpoints), config.checkpoint.branch_from
    newest = run.checkpoints / tags[-1] if tags else origin and Path(origin)
    if newest and not config.checkpoint.fallback:
        manifest = CheckpointManifest.read(newest)
        found = Resume(tag=newest.name, manifest=manifest, universal=False)
        inputs = with_decisions(config, inputs, inputs.decisions, found)
        record = run_record(config, inputs, architecture, tokenizer=tokenizer)
        find_start(config, inputs, found, record, is_branch=not tags)


def find_start(
    config: PretrainConfig,
    inputs: Inputs,
    found: Resume | None,
    record: dict[str, Any],
    *,
    tells: bool = True,
    is_branch: bool = False,
) -> tuple[int, list[str]]:
    """Compare the run with the checkpoint that it resumes from.

    Args:
        config, inputs: of the run.
        found: the checkpoint, if there is one.
        record: ``run_record`` of the run.
        tells: log the differences (one rank does).
        is_branch: the checkpoint is another run's.

    Returns:
        The first step to take (0 without a checkpoint); the changes of the order of samples.

    Raises:
        ResumeError: the run is not the one that wrote the checkpoint, or is shorter.
    """
    if found is None:
        return 0, []
    saved, before = found.manifest.state["data"], found.manifest.state.get("run")
    allowed = config.checkpoint.allow_change
    of_order = [name for name in allowed if name in ORDER_FIELDS]
    changes = inputs.schedule.check_state(saved, of_order)
    others = check_record(record, before, allowed, is_branch=is_branch)
    if tells:
        for change in others:
            logger.warning("the run is changed: %s", change)
        for problem in found.rejected:
            logger.warning("%s; falling back to %s", problem, found.tag)
        for change in changes:
            logger.warning("the data order is changed: %s", change)
    step = inputs.schedule.resume_step(saved, of_order)
    if step > inputs.num_steps:
        raise ResumeError(
            f"{found.tag} has {step} steps done, and the run num_steps {inputs.num_steps}; set it "
            f"to {step} or more, or export an earlier checkpoint (megapack-export --step)"
        )
    rate_before = found.manifest.state.get("lr")
    if tells and rate_before is not None and step < inputs.num_steps:
        _report_rate(config, inputs.num_steps, step, rate_before)
    logger.info(
        "continuing at step %d from %s, written by %d ranks with ZeRO-%d",
        *(step, found.tag, found.manifest.world_size, found.manifest.zero_stage),
    )
    return step, changes


def _report_rate(config: PretrainConfig, num_steps: int, step: int, before: float) -> None:
    """Log a learning rate that is not the one that the checkpoint's run would have had."""
    now = config.learning_rate.at(step, num_steps=num_steps, peak=config.optimizer.lr)
    if not math.isclose(before, now, rel_tol=1e-9):
        logger.warning(
            "the learning rate of step %d is %.6g, and the checkpoint's run would have had %.6g: "
            "num_steps, optimizer.lr or learning_rate changed",
            *(step, now, before),
        )


def leave(here: World, run: RunDirectory, message: str, code: int) -> NoReturn:
    """End this process now: the others may be gone, and nothing may wait for them."""
    print(f"megapack: rank {here.rank} on {here.host}: {message}", file=sys.stderr, flush=True)
    run.fail(message)
    logging.shutdown()
    os._exit(code)


def show_log() -> None:
    """The first rank tells how the run gets on, the others what goes wrong."""
    rank = int(os.environ["RANK"])
    form = f"[rank {rank}] %(message)s" if rank else "[%(asctime)s] %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if rank else logging.INFO)
    logger.propagate = False

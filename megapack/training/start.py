"""A start of a run: all of it checked, then its processes, its model, its engine and its loop.

Read from top to bottom. ``start`` begins after ``megapack.training.pretrain`` has judged the
configuration by itself; what needs the data, transformers or DeepSpeed to be judged is judged
before processes meet.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from megapack.errors import ConfigError, MegapackError, exit_code
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore, Resume, tags_in
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.directory import RunDirectory
from megapack.training.engine.engine import start_engine
from megapack.training.engine.export import end_token, export_model, tokenizer_of
from megapack.training.engine.inputs import Inputs, check_run, open_inputs, verify_samples
from megapack.training.engine.world import World, world
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import open_model
from megapack.training.monitoring.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.monitoring.signals import PREEMPTED, StopSignals
from megapack.training.trainer import Trainer

__all__ = ["start"]

logger = logging.getLogger("megapack")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a run is made of, as far as it is known before its processes meet."""

    inputs: Inputs
    architecture: Any
    """The transformers configuration."""
    tokenizer: Any
    """What goes along with the exported model; None: nothing."""
    profile: range | None
    """Steps to trace."""


def start(config: PretrainConfig, num_ranks: int, profile: range | None) -> int:
    """Check, train, export; the exit code.

    Args:
        config: the run.
        num_ranks: of the launcher.
        profile: steps to trace.

    Raises:
        MegapackError, OSError: before there are processes; later errors end this one.
    """
    show_log()
    checked = check_start(config, num_ranks, profile)
    if torch.cuda.is_available():
        RunDirectory(config.run_dir).record_flight()
    with world(
        timeout_minutes=config.engine.timeout_minutes,
        sequence_parallel_size=config.engine.sequence_parallel_size,
    ) as here:
        run = RunDirectory(config.run_dir)
        heart = Heartbeat(
            here,
            silence=config.engine.silence_seconds,
            stall=config.engine.stall_seconds,
            on_loss=run.fail,
        )
        with StopSignals() as signals, heart:
            try:
                with run.held(here):
                    return train(config, here, run, signals, checked)
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


def check_start(config: PretrainConfig, num_ranks: int, profile: range | None) -> Checked:
    """Open what the run reads, and refuse what does not go together; no other rank is asked."""
    store = RunDirectory(config.run_dir).checkpoints
    if config.checkpoint.resume == "never" and tags_in(store):
        raise ConfigError(
            f"{store} has checkpoints and checkpoint.resume is never; choose another run_dir, or "
            "remove them"
        )
    inputs = open_inputs(config)
    if profile is not None and profile.stop > inputs.num_steps:
        raise ConfigError(
            f"--profile is {profile.start}:{profile.stop}; the run has {inputs.num_steps} steps"
        )
    architecture = check_run(config, inputs, num_ranks)
    return Checked(
        inputs=inputs,
        architecture=architecture,
        tokenizer=tokenizer_of(config.model),
        profile=profile,
    )


def train(
    config: PretrainConfig,
    here: World,
    run: RunDirectory,
    signals: StopSignals,
    checked: Checked,
) -> int:
    inputs, architecture = checked.inputs, checked.architecture
    if config.data.verify:
        verify_samples(inputs, here)
    logger.info("%s; %s steps", inputs.data, f"{inputs.num_steps:,}")
    store = CheckpointStore(
        run.checkpoints,
        here,
        keep=config.checkpoint.keep,
        zero_stage=config.engine.stage,
        asynchronous=config.checkpoint.asynchronous,
    )
    found, start_step, changes = find_start(config, here, inputs, store)
    model, attention = open_model(
        config.model,
        config.engine,
        architecture,
        device=here.device,
        seed=config.seed,
        zero_3=zero_3_configuration(config, here.size),
        sequence_group=here.sequence_group,
    )
    logger.info("attention: %s, %s", attention.name, attention.reason)
    logger.info("model: %s", model.description)

    flops = ModelFlops.of(model, architecture)
    engine = start_engine(model, config, here, universal=found is not None and found.universal)
    if found is not None:
        store.load(engine, found)
    if here.is_first:
        facts = {
            "step": start_step,
            "world_size": here.size,
            "attention": attention.__dict__,
            "parameters": model.num_parameters,
            "fingerprints": inputs.fingerprints(),
            "data_order": inputs.schedule.identity(),
            "data_order_changes": changes,
        }
        run.begin(config, facts)
        run.forget_after(inputs.schedule.tokens_before(start_step))

    trainer = Trainer(
        config,
        here,
        inputs,
        engine=engine,
        run=run,
        store=store,
        flops=flops,
        start=start_step,
        profile=checked.profile,
    )
    reason = trainer.run(signals)
    if reason == "done" and config.checkpoint.export:
        export_model(
            engine,
            run.model,
            here,
            tokenizer=checked.tokenizer,
            end=end_token(inputs.data.datasets),
        )
        logger.info("model for from_pretrained: %s", run.model)
    if here.is_first:
        run.end(reason)
    return PREEMPTED if reason == "signal" else 0


def find_start(
    config: PretrainConfig, here: World, inputs: Inputs, store: CheckpointStore
) -> tuple[Resume | None, int, list[str]]:
    """The newest good checkpoint, the first step to take after it (0 without one), and what is
    drawn otherwise than that checkpoint's run would have.

    Raises:
        ResumeError: the run would not see what the checkpoint's run would have seen.
    """
    if config.checkpoint.resume == "never":
        return None, 0, []
    found = store.find(verify=config.checkpoint.verify, fallback=config.checkpoint.fallback)
    if found is None:
        return None, 0, []
    saved = found.manifest.state["data"]
    allowed = config.checkpoint.allow_change
    changes = inputs.schedule.check_state(saved, allowed)
    if here.is_first:
        for problem in found.rejected:
            logger.warning("%s; falling back to %s", problem, found.tag)
        for change in changes:
            logger.warning("the data order is changed: %s", change)
    step = inputs.schedule.resume_step(saved, allowed)
    logger.info(
        "continuing at step %d from %s, written by %d ranks with ZeRO-%d",
        *(step, found.tag, found.manifest.world_size, found.manifest.zero_stage),
    )
    return found, step, changes


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

"""Pretrain or continue to pretrain a model on packed documents.

    megapack-pretrain --config demo_cpu
    megapack-pretrain --config x.yaml --dry-run --world-size 64
    torchrun --nproc-per-node 8 -m megapack.training.pretrain --config x.yaml --set seed=7
    deepspeed --hostfile hosts --module megapack.training.pretrain --config llama_1b_bucket_h100

``--config`` is a file, or the name of one in ``configs``. The same command continues a
run that stopped: from its newest checkpoint, on any number of ranks.
Exit codes: 0 done, or at stop_at; 75 stopped by a signal after saving (start again); 76 another
rank was lost; 1 an error that is printed; 2 an error of the configuration or the command line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from typing import Any, NoReturn

import torch

from megapack.errors import ConfigError, MegapackError, exit_code
from megapack.training.command import add_overrides, command_parser, run_command
from megapack.training.config import PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import open_model
from megapack.training.model.training_model import TrainingModel
from megapack.training.recipes import read_config
from megapack.training.run.checkpoint import CheckpointStore
from megapack.training.run.directory import RunDirectory
from megapack.training.run.engine import start_engine, zero_3_configuration
from megapack.training.run.export import end_token, export_model, tokenizer_of
from megapack.training.run.inputs import Inputs, check_inputs, open_inputs, verify_samples
from megapack.training.run.world import World, join, world
from megapack.training.trainer import Trainer
from megapack.training.watch.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.watch.profile import parse_steps
from megapack.training.watch.signals import PREEMPTED, StopSignals

logger = logging.getLogger("megapack")

LENGTHS = (
    "plan before there are data: a .npy file of tokens per document, or "
    "lognormal:MEAN,MEDIAN,DOCUMENTS (999,603,1e6 is like a million of FineWeb-Edu)"
)


def main() -> int:
    """The command; returns its exit code."""
    return run_command(pretrain, parse_arguments())


def pretrain(args: argparse.Namespace) -> int:
    config = read_config(args.config, args.set)
    if args.dry_run:
        options = ("world_size", "device", "lengths", "buckets", "gpu_price", "show_config")
        print(dry_run(config, **{name: getattr(args, name) for name in options}))
        return 0
    profile = None if args.profile is None else parse_steps(args.profile)
    join(args.local_rank)
    if torch.cuda.is_available():
        RunDirectory(config.run_dir).record_flight()
    with world(
        timeout_minutes=config.engine.timeout_minutes,
        sequence_parallel_size=config.engine.sequence_parallel_size,
    ) as here:
        show_log(here)
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
                    return train(config, here, run, signals, profile)
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


def train(
    config: PretrainConfig,
    here: World,
    run: RunDirectory,
    signals: StopSignals,
    profile: range | None = None,
) -> int:
    inputs = open_inputs(config)
    if config.data.verify:
        verify_samples(inputs, here)
    logger.info("%s; %s steps", inputs.data, f"{inputs.num_steps:,}")
    architecture = model_configuration(config.model, inputs.vocab_size)
    check_inputs(inputs, architecture, config.data.positions)
    tokenizer = tokenizer_of(config.model)
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

    store = CheckpointStore(
        run.checkpoints,
        here,
        keep=config.checkpoint.keep,
        zero_stage=config.engine.stage,
        asynchronous=config.checkpoint.asynchronous,
    )
    flops = ModelFlops.of(model, architecture)
    engine, start, changes = start_or_continue(config, here, inputs, model, store)
    if here.is_first:
        facts = {
            "step": start,
            "world_size": here.size,
            "attention": attention.__dict__,
            "parameters": model.num_parameters,
            "fingerprints": inputs.fingerprints(),
            "data_order": inputs.schedule.identity(),
            "data_order_changes": changes,
        }
        run.begin(config, facts)
        run.forget_after(inputs.schedule.tokens_before(start))

    trainer = Trainer(
        config,
        here,
        inputs,
        engine=engine,
        run=run,
        store=store,
        flops=flops,
        start=start,
        profile=profile,
    )
    reason = trainer.run(signals)
    if reason == "done" and config.checkpoint.export:
        export_model(
            engine, run.model, here, tokenizer=tokenizer, end=end_token(inputs.data.datasets)
        )
        logger.info("model for from_pretrained: %s", run.model)
    if here.is_first:
        run.end(reason)
    return PREEMPTED if reason == "signal" else 0


def start_or_continue(
    config: PretrainConfig,
    here: World,
    inputs: Inputs,
    model: TrainingModel,
    store: CheckpointStore,
) -> tuple[Any, int, list[str]]:
    """The engine, the first step to take (0, or that of the newest good checkpoint), and what is
    drawn otherwise than that checkpoint's run would have."""
    found = None
    if config.checkpoint.resume == "never" and store.tags():
        raise ConfigError(
            f"{store.directory} has checkpoints and checkpoint.resume is never; choose another "
            "run_dir, or remove them"
        )
    if config.checkpoint.resume == "auto":
        found = store.find(verify=config.checkpoint.verify, fallback=config.checkpoint.fallback)
    if found is None:
        return start_engine(model, config, here), 0, []
    for problem in found.rejected:
        logger.warning("%s; falling back to %s", problem, found.tag)
    saved = found.manifest.state["data"]
    allowed = config.checkpoint.allow_change
    changes = inputs.schedule.check_state(saved, allowed)
    for change in changes:
        logger.warning("the data order is changed: %s", change)
    start = inputs.schedule.resume_step(saved, allowed)
    engine = start_engine(model, config, here, universal=found.universal)
    store.load(engine, found)
    logger.info(
        "continuing at step %d from %s, written by %d ranks with ZeRO-%d",
        start,
        found.tag,
        found.manifest.world_size,
        found.manifest.zero_stage,
    )
    return engine, start, changes


def leave(here: World, run: RunDirectory, message: str, code: int) -> NoReturn:
    """End this process now: the others may be gone, and nothing may wait for them."""
    print(f"megapack: rank {here.rank} on {here.host}: {message}", file=sys.stderr, flush=True)
    run.fail(message)
    logging.shutdown()
    os._exit(code)


def show_log(here: World) -> None:
    level = logging.INFO if here.is_first else logging.WARNING
    form = "[%(asctime)s] %(message)s" if here.is_first else f"[rank {here.rank}] %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = command_parser("megapack-pretrain", __doc__)
    parser.add_argument("--config", required=True, help="a YAML file, or a recipe: demo_cpu")
    add_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.add_argument(
        "--profile",
        metavar="BEGIN:END",
        help="trace these steps, as in 100:105 (SIGUSR2 to a rank: its next five)",
    )
    plan = parser.add_argument_group("of a dry run").add_argument
    plan("--world-size", type=int, metavar="RANKS", help="this launcher's, or 1")
    plan("--device", metavar="NAME", help="H100, A800, ...: the time it takes")
    plan("--gpu-price", type=float, metavar="PRICE", help="of one rank for an hour: the cost")
    plan("--lengths", metavar="SOURCE", help=LENGTHS)
    plan("--buckets", type=integers, metavar="N,...", help="of --lengths, as in 1024,2048,4096")
    plan("--show-config", action="store_true", help="the configuration in full, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

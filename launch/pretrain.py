"""Pretrain or continue to pretrain a model on packed documents.

    deepspeed launch/pretrain.py --config configs/demo_cpu.yaml
    deepspeed --hostfile hosts launch/pretrain.py --config configs/llama_1b_bucket_h100.yaml
    torchrun --nproc-per-node 8 launch/pretrain.py --config x.yaml --set optimizer.lr=1e-4
    python launch/pretrain.py --config x.yaml --dry-run --world-size 64

The same command continues a run that stopped: from its newest checkpoint, on any number of ranks.
Exit codes: 0 done, 75 stopped by a signal after saving (start again), 76 another rank was lost,
1 an error that is printed, 2 an error of the configuration or the command line.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import torch

from megapack.data import Batch, build_loader
from megapack.errors import ConfigError, MegapackError
from megapack.training.config import PretrainConfig, load_config
from megapack.training.dry_run import dry_run
from megapack.training.judge.validation import evaluate
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import open_model
from megapack.training.model.training_model import TrainingModel
from megapack.training.run.checkpoint import CheckpointStore
from megapack.training.run.directory import RunDirectory
from megapack.training.run.engine import start_engine, train_step
from megapack.training.run.export import end_token, export_model, open_tokenizer
from megapack.training.run.inputs import Inputs, check_inputs, open_inputs, verify_samples
from megapack.training.run.learning_rate import learning_rate
from megapack.training.run.world import World, join, world
from megapack.training.watch.batches import BatchTrace, TimedBatches
from megapack.training.watch.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.watch.monitor import Monitor
from megapack.training.watch.signals import PREEMPTED, Agreement, StopSignals
from megapack.training.watch.work import StepWork

logger = logging.getLogger("megapack")


def main() -> int:
    faulthandler.enable()  # a mapped file that was truncated ends a process with SIGBUS
    args = parse_arguments()
    config = load_config(PretrainConfig, args.config, args.set)
    if args.dry_run:
        print(dry_run(config, world_size=args.world_size, device=args.device))
        return 0
    join(args.local_rank)
    with world(timeout_minutes=config.engine.timeout_minutes) as here:
        show_log(here)
        with (
            StopSignals() as signals,
            Heartbeat(here, silence=config.engine.silence_seconds) as heart,
        ):
            try:
                return train(config, here, signals)
            except (MegapackError, OSError) as error:
                leave(here, f"{type(error).__name__}: {error}", code=exit_code(error))
            except Exception as error:  # a rank that fails must not leave the others waiting
                traceback.print_exc()
                # torch's errors of collectives are RuntimeErrors; so are a device's own.
                lost = heart.explain() if isinstance(error, RuntimeError) else None
                leave(here, lost or "this rank failed", code=LOST_CONTACT if lost else 1)


def train(config: PretrainConfig, here: World, signals: StopSignals) -> int:
    inputs = open_inputs(config)
    if config.data.verify:
        verify_samples(inputs, here)
    logger.info("%s; %s steps", inputs.data, f"{inputs.num_steps:,}")
    architecture = model_configuration(config.model, inputs.vocab_size)
    check_inputs(inputs, architecture, config.data.positions)
    source = config.model.tokenizer or config.model.pretrained
    tokenizer = source and open_tokenizer(source, required=source == config.model.tokenizer)
    model, attention = open_model(
        config.model, config.engine, architecture, device=here.device, seed=config.seed
    )
    logger.info("attention: %s, %s", attention.name, attention.reason)
    logger.info("model: %s, %s parameters", architecture.model_type, f"{model.num_parameters:,}")

    run = RunDirectory(config.run_dir)
    store = CheckpointStore(
        run.checkpoints, here, keep=config.checkpoint.keep, zero_stage=config.engine.zero_stage
    )
    flops = ModelFlops.of(model, architecture)  # before ZeRO-3 divides the parameters
    engine, start = start_or_continue(config, here, inputs, model, store)
    if here.is_first:
        facts = {
            "step": start,
            "world_size": here.size,
            "attention": attention.__dict__,
            "parameters": model.num_parameters,
            "fingerprints": inputs.fingerprints(),
        }
        run.begin(config, facts)
        run.forget_after(start)

    trainer = Trainer(
        config, here, inputs, engine=engine, run=run, store=store, flops=flops, start=start
    )
    stopped = trainer.run(signals)
    if not stopped and config.checkpoint.export:
        export_model(
            engine, run.model, here, tokenizer=tokenizer, end=end_token(inputs.data.datasets)
        )
        logger.info("model for from_pretrained: %s", run.model)
    if here.is_first:
        run.end({"step": trainer.done, "reason": "signal" if stopped else "done"})
    return PREEMPTED if stopped else 0


def start_or_continue(
    config: PretrainConfig,
    here: World,
    inputs: Inputs,
    model: TrainingModel,
    store: CheckpointStore,
) -> tuple[Any, int]:
    """The engine, and the first step to take: 0, or that of the newest good checkpoint."""
    found = None
    if config.checkpoint.resume == "never" and store.tags():
        raise ConfigError(
            f"{store.directory} has checkpoints and checkpoint.resume is never; choose another "
            "run_dir, or remove them"
        )
    if config.checkpoint.resume == "auto":
        found = store.find(verify=config.checkpoint.verify, fallback=config.checkpoint.fallback)
    if found is None:
        return start_engine(model, config, here), 0
    for problem in found.rejected:
        logger.warning("%s; falling back to %s", problem, found.tag)
    saved = found.manifest.state["data"]
    start = inputs.schedule.resume_step(saved, config.checkpoint.allow_change)
    engine = start_engine(model, config, here, universal=found.universal)
    store.load(engine, found)
    logger.info(
        "continuing at step %d from %s, written by %d ranks with ZeRO-%d",
        start,
        found.tag,
        found.manifest.world_size,
        found.manifest.zero_stage,
    )
    return engine, start


class Trainer:
    """The loop: steps, and now and then a log line, an evaluation, a checkpoint."""

    def __init__(
        self,
        config: PretrainConfig,
        here: World,
        inputs: Inputs,
        *,
        engine: Any,
        run: RunDirectory,
        store: CheckpointStore,
        flops: ModelFlops,
        start: int,
    ) -> None:
        self.config, self.here, self.inputs, self.engine = config, here, inputs, engine
        self.store, self.flops = store, flops
        self.done = start  # optimizer steps
        self.saved = start  # of them, in a checkpoint
        self.batches = TimedBatches(
            build_loader(
                inputs.data,
                inputs.schedule,
                data_parallel_rank=here.rank,
                data_parallel_size=here.size,
                micro_batch_tokens=config.data.micro_batch_tokens,
                start_step=start,
                num_steps=max(0, inputs.num_steps - start),
                uneven=config.data.uneven,
                cu_seqlens="padded" if config.engine.compile else "exact",
                pin_memory=here.device.type == "cuda",
                device=here.device,
                check_ranks_every=config.data.check_ranks_every,
            )
        )
        self.monitor = Monitor(run, config.logging, here, num_steps=inputs.num_steps, start=start)
        self.trace = BatchTrace(run, here) if config.logging.batches else None

    def run(self, signals: StopSignals) -> bool:
        """Train to the end, or to the step after a signal; whether it was a signal."""
        agreement = Agreement(self.here.group)
        for step, micro_batches in self.batches.steps():
            self.take(step, micro_batches)
            if agreement.stop(signals.received is not None):
                logger.warning("a signal came; saving after step %d", step)
                self.monitor.close()
                self.save()
                return True
            last = self.done == self.inputs.num_steps
            if due(self.config.evaluation.every, self.done) or last:
                self.validate()
            if due(self.config.checkpoint.every, self.done) or last:
                self.save()
        self.monitor.close()
        return False

    def take(self, step: int, micro_batches: Iterable[Batch]) -> None:
        """One optimizer step."""
        inputs, config = self.inputs, self.config
        content = inputs.schedule.step(step)
        lr = learning_rate(
            step, num_steps=inputs.num_steps, peak=config.optimizer.lr, schedule=config.schedule
        )
        torch.manual_seed(random_seed(config.seed, step, self.here.rank))  # dropout, if there is
        if self.trace is not None:
            micro_batches = self.trace.follow(micro_batches)
        result = train_step(
            self.engine, micro_batches, world=self.here, config=config.engine, lr=lr
        )
        self.done = step + 1
        line = {
            "step": step,
            "epoch": step / inputs.steps_per_epoch,
            "epoch_end": self.done / inputs.steps_per_epoch,
            "lr": lr,
            "data_wait": self.batches.waited(),
            "imbalance": self.batches.imbalance,
        }
        work = StepWork.of(inputs.schedule, content, self.flops)
        self.monitor.step(line, content=content, work=work, result=result)

    def validate(self) -> None:
        """Perplexity of the held-out documents."""
        if self.inputs.valid is None:
            return
        self.monitor.flush()
        result = evaluate(
            self.engine,
            self.inputs.valid,
            world=self.here,
            config=self.config.engine,
            micro_batch_tokens=self.config.data.micro_batch_tokens,
            max_tokens=self.config.evaluation.max_tokens,
        )
        logger.info("after step %d: validation perplexity %.4f", self.done - 1, result.perplexity)
        self.monitor.evaluation(self.done, result.report())
        self.monitor.skip_time()

    def save(self) -> None:
        """A checkpoint; the data order's state is one step number."""
        if self.saved == self.done:
            return
        self.monitor.flush()
        state = {"data": self.inputs.schedule.state_dict(self.done)}
        tag = self.store.save(self.engine, self.done, state)
        self.saved = self.done
        logger.info("saved %s", self.store.directory / tag)
        self.monitor.skip_time()


def random_seed(seed: int, step: int, rank: int) -> int:
    """Of torch's generators, so that a resumed run draws what it would have drawn."""
    return hash((seed, step, rank)) & 0x7FFFFFFFFFFFFFFF


def due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def exit_code(error: Exception) -> int:
    """2: the command line or the configuration is at fault."""
    return 2 if isinstance(error, ConfigError) else 1


def leave(here: World, message: str, code: int) -> None:
    """End this process now: the others may be gone, and nothing may wait for them."""
    print(f"megapack: rank {here.rank} on {here.host}: {message}", file=sys.stderr, flush=True)
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML of megapack.training.config")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field, as in --set optimizer.lr=1e-4; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.add_argument("--world-size", type=int, default=None, help="ranks, of a dry run")
    parser.add_argument("--device", default=None, help="of a dry run: H100, A800, ...")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (MegapackError, OSError) as error:
        print(f"megapack: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))

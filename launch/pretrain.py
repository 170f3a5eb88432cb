"""Pretrain or continue to pretrain a model on packed documents.

    deepspeed launch/pretrain.py --config configs/demo_cpu.yaml
    deepspeed --hostfile hosts launch/pretrain.py --config configs/llama_1b_bucket_h100.yaml
    torchrun --nproc-per-node 8 launch/pretrain.py --config x.yaml --set optimizer.lr=1e-4
    python launch/pretrain.py --config x.yaml --dry-run --world-size 64

The same command continues a run that stopped: from its newest checkpoint, on any number of ranks.
Exit codes: 0 done, 75 stopped by a signal after saving (start again), 76 another rank was lost,
1 an error that is printed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import traceback

from megapack.attention import choose_backend
from megapack.data import build_loader, resume_step
from megapack.errors import MegapackError
from megapack.training.agreement import PREEMPTED, Agreement, StopSignals
from megapack.training.checkpoint import CheckpointStore
from megapack.training.config import PretrainConfig, load_config
from megapack.training.distributed import World, join, world
from megapack.training.dry_run import dry_run
from megapack.training.engine import compute_dtype, start_engine, train_step
from megapack.training.evaluate import evaluate
from megapack.training.export import export_model
from megapack.training.flops import ModelFlops
from megapack.training.heartbeat import LOST_CONTACT, Heartbeat
from megapack.training.inputs import TimedBatches, check_positions, open_inputs
from megapack.training.lr import learning_rate
from megapack.training.model import (
    attention_needs,
    build_model,
    model_configuration,
    position_limit,
)
from megapack.training.monitor import BatchTrace, Monitor, StepWork
from megapack.training.run_dir import RunDirectory

logger = logging.getLogger("megapack")


def main() -> int:
    args = parse_arguments()
    config = load_config(PretrainConfig, args.config, args.set)
    if args.dry_run:
        print(dry_run(config, world_size=args.world_size, device=args.device))
        return 0
    join(args.local_rank)
    with world(timeout_minutes=config.engine.timeout_minutes) as here:
        show_log(here)
        with StopSignals() as signals, Heartbeat(here) as heart:
            try:
                return train(config, here, signals)
            except MegapackError as error:
                leave(here, f"{type(error).__name__}: {error}", code=1)
            except Exception:  # a rank that fails must not leave the others waiting
                lost = heart.explain()
                traceback.print_exc()
                leave(here, lost or "this rank failed", code=LOST_CONTACT if lost else 1)


def train(config: PretrainConfig, here: World, signals: StopSignals) -> int:
    # --- data: documents, samples, the order of steps ---
    inputs = open_inputs(config)
    logger.info("%s, %s steps", inputs.data, f"{inputs.num_steps:,}")

    # --- model and attention ---
    architecture = model_configuration(config.model, inputs.vocab_size)
    check_positions(inputs, config.data, position_limit(architecture))
    needs = attention_needs(architecture, here.device, compute_dtype(config.engine))
    attention = choose_backend(needs, config.model.attention)
    logger.info("attention: %s, %s", attention.name, attention.reason)
    with here.device:
        model = build_model(
            config.model,
            architecture,
            backend=attention.name,
            seed=config.seed,
            chunk_tokens=config.engine.loss_chunk_tokens,
            fused_loss=config.engine.compile,
        )
    flops = ModelFlops.of(model, architecture)
    num_parameters = sum(p.numel() for p in model.parameters())
    logger.info("model: %s, %s parameters", architecture.model_type, f"{num_parameters:,}")

    # --- engine, and the newest checkpoint if there is one ---
    run = RunDirectory(config.run_dir)
    store = CheckpointStore(
        run.checkpoints, here, keep=config.checkpoint.keep, zero_stage=config.engine.zero_stage
    )
    found = None
    if config.checkpoint.resume == "auto":
        found = store.find(verify=config.checkpoint.verify, fallback=config.checkpoint.fallback)
    start = 0
    if found is not None:
        for problem in found.rejected:
            logger.warning("%s; falling back to %s", problem, found.tag)
        allowed = config.checkpoint.allow_change
        start = resume_step(inputs.schedule, found.manifest.state["data"], allowed)
    engine = start_engine(model, config, here, universal=found is not None and found.universal)
    if found is not None:
        store.load(engine, found)
        how = "another number of ranks or ZeRO stage" if found.universal else "as it was saved"
        logger.info("continuing %s at step %d (%s)", found.tag, start, how)
    if here.is_first:
        facts = {
            "step": start,
            "world_size": here.size,
            "attention": attention.__dict__,
            "parameters": num_parameters,
            "fingerprints": inputs.fingerprints(),
        }
        run.begin(config, facts)
        run.forget_after(start)

    # --- the loop ---
    loader = build_loader(
        inputs.data,
        inputs.schedule,
        data_parallel_rank=here.rank,
        data_parallel_size=here.size,
        micro_batch_tokens=config.data.micro_batch_tokens,
        start_step=start,
        num_steps=max(0, inputs.num_steps - start),
        uneven=config.data.uneven,
        cu_seqlens="padded",
        num_workers=config.data.num_workers,
        pin_memory=here.device.type == "cuda",
        device=here.device,
        check_ranks_every=config.data.check_ranks_every,
    )
    monitor = Monitor(
        run, config.logging, here, flops=flops, num_steps=inputs.num_steps, start=start
    )
    trace = BatchTrace(run, here, start) if config.logging.batches else None
    agreement = Agreement()
    stopped = False
    done = start

    def save() -> None:
        tag = store.save(engine, done, {"data": inputs.schedule.state_dict(done)})
        logger.info("saved %s", store.directory / tag)

    def validate() -> None:
        if inputs.valid is None:
            return
        result = evaluate(
            engine,
            inputs.valid,
            world=here,
            config=config.engine,
            micro_batch_tokens=config.data.micro_batch_tokens,
            max_tokens=config.evaluation.max_tokens,
        )
        logger.info("step %d: validation perplexity %.4f", done, result.perplexity)
        monitor.evaluation(done, result.report())

    batches = TimedBatches(loader)
    for step, micro_batches in itertools.groupby(batches, key=lambda batch: batch["step"]):
        content = inputs.schedule.step(step)
        lr = learning_rate(
            step,
            num_steps=inputs.num_steps,
            peak=config.optimizer.lr,
            schedule=config.schedule,
        )
        seen = trace.follow(micro_batches) if trace else micro_batches
        result = train_step(engine, seen, world=here, config=config.engine, lr=lr)
        done = step + 1
        monitor.step(
            {
                "step": step,
                "epoch": step / inputs.steps_per_epoch,
                "epoch_end": done / inputs.steps_per_epoch,
                "bucket": content.bucket,
                "capacity": content.capacity,
                "lr": lr,
                "data_wait": batches.waited(),
            },
            content=content,
            work=StepWork.of(inputs.schedule, content, flops),
            result=result,
        )
        if agreement.stop(signals.received is not None):
            stopped = True
            break
        finished = done == inputs.num_steps
        if due(config.evaluation.every, done) or (finished and inputs.valid is not None):
            monitor.flush()
            validate()
            monitor.skip_time()
        if due(config.checkpoint.every, done) or finished:
            monitor.flush()
            save()
            monitor.skip_time()

    # --- the end ---
    monitor.close()
    if stopped:
        save()
    elif config.checkpoint.export:
        export_model(engine, run.model, here)
        logger.info("model for from_pretrained: %s", run.model)
    if here.is_first:
        run.end({"step": done, "reason": signals.received or ("stopped" if stopped else "done")})
    if stopped:
        logger.warning("stopped by a signal after step %d; the same command continues", done)
    return PREEMPTED if stopped else 0


def due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def leave(here: World, message: str, code: int) -> None:
    """End this process now: the others may be gone, and nothing may wait for them."""
    print(f"megapack: rank {here.rank} on {here.host}: {message}", file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(code)


def show_log(here: World) -> None:
    level = logging.INFO if here.is_first else logging.WARNING
    form = f"[%(asctime)s] %(message)s" if here.is_first else f"[rank {here.rank}] %(message)s"
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
    except MegapackError as error:
        print(f"megapack: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)

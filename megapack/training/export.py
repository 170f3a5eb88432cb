"""Any checkpoint of a run as a directory that transformers' from_pretrained loads.

    megapack-export runs/a                                 # the newest, to runs/a/model
    megapack-export runs/a --step 4000 --output exported
    torchrun --nproc-per-node 8 -m megapack.training.export runs/a

Tokenizer and end of documents go along as at the end of training. One process is enough for a
model that fits it with its optimizer state; more ranks share that. The run may go on meanwhile.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp

from megapack.config import load_config
from megapack.data.resume import check_record, model_record
from megapack.errors import ConfigError, ResumeError
from megapack.training.command import add_overrides, command_parser, join, run_command
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.directory import RunDirectory, step_of
from megapack.training.engine.engine import start_engine
from megapack.training.engine.export import end_token, export_model, tokenizer_of
from megapack.training.engine.inputs import open_inputs
from megapack.training.engine.world import World, world
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import open_model


def main() -> int:
    """The command; returns its exit code."""
    return run_command(export_checkpoint, build_parser().parse_args())


def export_checkpoint(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    overrides = [f"run_dir={args.run_dir}", *args.set]
    config = load_config(PretrainConfig, args.run_dir / "config.yaml", overrides)
    output = args.output or RunDirectory(config.run_dir).model
    if output.exists() and not (output / "config.json").exists() and any(output.glob("*")):
        raise ConfigError(
            f"--output: {output} is there and is no model (it has no config.json), and it would be "
            "replaced; name another directory"
        )
    join(args.local_rank)
    with world(timeout_minutes=config.engine.timeout_minutes) as here:
        # Not beside the checkpoints: a run that goes on clears what is half done there.
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(here.on_first(lambda: mkdtemp(dir=output.parent, prefix=".export-")))
        try:
            how = {"step": args.step, "output": output, "scratch": scratch}
            tag = export(config, here, average=args.average, **how)
        finally:
            if here.is_first:
                shutil.rmtree(scratch, ignore_errors=True)
        if here.is_first:
            print(f"{tag}: {output}")
    return 0


def export(
    config: PretrainConfig,
    here: World,
    *,
    step: int | None,
    output: Path,
    scratch: Path,
    average: bool = False,
) -> str:
    """Load a checkpoint as a resumed run would, and write its model; return the checkpoint's name.

    Args:
        average: write the average of the weights.

    Raises:
        ConfigError: the run keeps no average.
        ResumeError: there is no such checkpoint, or it is of another model than the configuration.
    """
    if average and config.optimizer.ema_decay is None:
        raise ConfigError(f"{config.run_dir} keeps no average of weights (optimizer.ema_decay)")
    inputs = open_inputs(config)
    architecture = model_configuration(config.model, inputs.vocab_size)
    fields = model_record(architecture)
    zero_3 = zero_3_configuration(config, here.size)
    model, _ = open_model(
        config.model, config.engine, architecture, device=here.device, zero_3=zero_3
    )
    checkpoints, stage = RunDirectory(config.run_dir).checkpoints, config.engine.stage
    store = CheckpointStore(checkpoints, here, keep=1, zero_stage=stage, scratch=scratch)
    found = store.find(
        verify=config.checkpoint.verify, among=lambda tag: step in (None, step_of(tag))
    )
    if found is None:
        known = ", ".join(str(step_of(tag)) for tag in store.tags())
        raise ResumeError(f"{checkpoints} has no such checkpoint (steps: {known or 'none'})")
    # Same shapes do not mean the same model: another rope_theta or hidden_act would load, too.
    saved = found.manifest.state.get("run")
    check_record({**(saved or {}), **fields}, saved, config.checkpoint.allow_change)
    engine = start_engine(model, config, here)
    store.load(engine, found)
    end = end_token(inputs.data.datasets)
    with engine.weight_average.in_model() if average else nullcontext():
        export_model(engine, output, here, tokenizer=tokenizer_of(config.model), end=end)
    return found.tag


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("megapack-export", __doc__)
    add = parser.add_argument
    add("run_dir", type=Path, help="directory of the run")
    add("--average", action="store_true", help="of the weights (optimizer.ema_decay)")
    add("--step", type=int, help="of the checkpoint; the newest one when not given")
    add("--output", type=Path, metavar="DIR", help="is replaced; RUN_DIR/model if not given")
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())

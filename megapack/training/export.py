"""Export a checkpoint of a run to a directory for transformers' from_pretrained.

    megapack-export runs/a                                 # the newest, to runs/a/model
    megapack-export runs/a --step 4000 --output exported
    torchrun --nproc-per-node 8 -m megapack.training.export runs/a

The export contains the tokenizer and the end-of-document token, as at the end of training. One
process is enough if it can hold the model and its optimizer state; several ranks divide these. The
run may continue during the export.
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
from megapack.data.resume import check_record, model_record, refuse_damage, tokenizer_digest
from megapack.errors import ConfigError, ResumeError
from megapack.training.command import (
    add_overrides,
    command_parser,
    run_command,
    set_rank_environment,
)
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.directory import MANIFEST, RunDirectory, step_of
from megapack.training.engine.engine import start_engine
from megapack.training.engine.export import end_token, export_model, tokenizer_of
from megapack.training.engine.inputs import Inputs
from megapack.training.engine.world import World, connect_ranks
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import open_model


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(export_checkpoint, build_parser().parse_args())


def export_checkpoint(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    overrides = [f"run_dir={args.run_dir}", *args.set]
    config = load_config(PretrainConfig, args.run_dir / "config.yaml", overrides)
    output = args.output or RunDirectory(config.run_dir).model
    if output.exists() and not (output / "config.json").exists() and any(output.glob("*")):
        raise ConfigError(
            f"--output: {output} exists and has no config.json, so it is not a model that may be "
            "replaced; name another directory"
        )
    set_rank_environment(args.local_rank)
    with connect_ranks(timeout_minutes=config.engine.timeout_minutes) as world:
        # Do not write among the checkpoints: a training run removes incomplete ones there.
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(world.on_first(lambda: mkdtemp(dir=output.parent, prefix=".export-")))
        try:
            tag = export(args, config, world, output, scratch)
        finally:
            if world.is_first:
                shutil.rmtree(scratch, ignore_errors=True)
        run = RunDirectory(config.run_dir)
        if world.is_first:
            # A run that still trains records the model at its next checkpoint.
            if run.has_ended and output.absolute().is_relative_to(run.path.absolute()):
                run.record("export")
            print(f"{tag}: {output}")
    return 0


def export(
    args: argparse.Namespace, config: PretrainConfig, world: World, output: Path, scratch: Path
) -> str:
    """Load a checkpoint as a resumed run would, write its model, return the checkpoint's name.
    Raises ConfigError if the run keeps no average, ResumeError if there is no such checkpoint or
    its model differs from the configuration."""
    if args.average and config.optimizer.ema_decay is None:
        raise ConfigError(f"{config.run_dir} keeps no average of weights (optimizer.ema_decay)")
    inputs = Inputs(config)
    architecture = model_configuration(config.model, inputs.vocab_size)
    fields, tokenizer = model_record(architecture), tokenizer_of(config.model)
    zero_3 = zero_3_configuration(config, world.size)
    model, _ = open_model(
        config.model, config.engine, architecture, device=world.device, zero_3=zero_3
    )
    checkpoints, stage = RunDirectory(config.run_dir).checkpoints, config.engine.stage
    store = CheckpointStore(checkpoints, world, keep=1, zero_stage=stage, scratch=scratch)
    resume = store.find(
        verify=config.checkpoint.verify, among=lambda tag: args.step in (None, step_of(tag))
    )
    if resume is None:
        known = ", ".join(str(step_of(tag)) for tag in store.tags())
        raise ResumeError(f"{checkpoints} has no such checkpoint (its steps: {known or 'none'})")
    # Compare fields: a different rope_theta or hidden_act does not change the shapes.
    with refuse_damage(f"the state in {MANIFEST} of {resume.tag}"):
        saved = resume.manifest.state.get("run")
        if saved and saved["model.tokenizer"] is not None:  # a run without one may export any
            fields["model.tokenizer"] = tokenizer and tokenizer_digest(tokenizer)
        check_record({**(saved or {}), **fields}, saved, config.checkpoint.allow_change)
    engine = start_engine(model, config, world)
    store.load(engine, resume)
    end = end_token(inputs.data.datasets)
    with engine.weight_average.in_model() if args.average else nullcontext():
        export_model(engine, output, world, tokenizer=tokenizer, end=end)
    return resume.tag


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("megapack-export", __doc__)
    add = parser.add_argument
    add("run_dir", type=Path, help="directory of the run")
    average = "export the average of the weights (optimizer.ema_decay)"
    add("--average", action="store_true", help=average)
    add("--step", type=int, help="step of the checkpoint (default: the newest)")
    output = "directory to write or replace (default: RUN_DIR/model)"
    add("--output", type=Path, metavar="DIR", help=output)
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())

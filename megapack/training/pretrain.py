"""Pretrain a model on packed documents, from scratch or from a checkpoint.

    megapack-pretrain --config demo_cpu
    megapack-pretrain --config x.yaml --dry-run --world-size 64
    torchrun --nproc-per-node 8 -m megapack.training.pretrain --config x.yaml --set seed=7
    deepspeed --hostfile hosts --module megapack.training.pretrain --config llama_1b_bucket_h100

``--config`` is a file, or the name of one in ``configs``. The same command resumes a run that
stopped, from its newest checkpoint, on any number of ranks.
Exit codes: 0 done, or at stop_at; 75 stopped by a signal after saving (start again); 76 another
rank was lost; 1 an error that is printed; 2 an error of the configuration or the command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import replace

from megapack.calls import nearest
from megapack.command_line import PrintAction
from megapack.config import check_positive
from megapack.data.blend import BlendConfig
from megapack.devices import PEAK_FLOPS, peak_flops
from megapack.errors import ConfigError
from megapack.json_schema import json_schema
from megapack.training.command import (
    RECIPES,
    add_overrides,
    check_hub,
    command_parser,
    data_errors,
    read_config,
    run_command,
    set_rank_environment,
)
from megapack.training.config import ModelConfig, PretrainConfig
from megapack.training.presets import PRESETS

LENGTHS = (
    "plan without a dataset: a .npy file with the tokens of each document, or "
    "lognormal:MEAN,MEDIAN,DOCUMENTS (lognormal:999,603,1e6 is like 1e6 documents of FineWeb-Edu)"
)
_PLAN = ("world_size", "device", "lengths", "buckets", "gpu_price", "show_config", "json")


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(pretrain, build_parser().parse_args())


def pretrain(args: argparse.Namespace) -> int:
    """Check the options and the configuration without torch, then start or plan the run."""
    check_options(args)
    branch = [f"checkpoint.branch_from={args.branch_from}"] if args.branch_from else []
    config = read_config(args.config, [*args.set, *branch])
    profile = None if args.profile is None else profiled_steps(args.profile)
    num_ranks = args.world_size or set_rank_environment(args.local_rank)
    project = config.logging.wandb_project
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb_project is {project!r}, and wandb is missing: pip install wandb"
        )
    model = planned_model(config.model, from_lengths=args.lengths is not None)
    config = replace(config, model=model)
    config.data.check_ranks(num_ranks, config.engine.sequence_parallel_size)
    if args.lengths is None:
        with data_errors(config.data):
            config.data.check_files(held_out=True)
    if int(os.environ.get("RANK", "0")) == 0:
        task = "planning" if args.dry_run else "starting"
        print(f"note: {task}; importing torch and checking the model", file=sys.stderr)
    if args.dry_run:
        from megapack.training.dry_run import dry_run  # noqa: PLC0415

        options = {name: getattr(args, name) for name in _PLAN}
        print(dry_run(config, **{**options, "world_size": num_ranks}))
        return 0
    from megapack.training.start import start  # noqa: PLC0415

    return start(config, num_ranks, profile)


def planned_model(model: ModelConfig, *, from_lengths: bool) -> ModelConfig:
    """Return the model after ``check_hub``. A plan from lengths reads no tokenizer, and takes the
    preset of the same name for a checkpoint that cannot be read. Raises ConfigError."""
    try:
        check_hub(replace(model, tokenizer=None) if from_lengths else model)
    except ConfigError:
        preset = str(model.pretrained).rpartition("/")[2].lower().replace("-", "_")
        if not from_lengths or preset not in PRESETS:
            raise
        print(f"note: {model.pretrained} is planned as model.preset={preset}", file=sys.stderr)
        return replace(model, pretrained=None, allow_missing=(), preset=preset)
    return model


def check_options(args: argparse.Namespace) -> None:
    """Check that options are valid and fit together. Raises ConfigError."""
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _PLAN}
    given = [name for name, value in options.items() if value not in (None, False)]
    if given and not args.dry_run:
        raise ConfigError(f"command line: {given[0]} needs --dry-run; add --dry-run")
    if args.dry_run and args.profile is not None:
        raise ConfigError("command line: --profile traces a run; leave out --dry-run")
    if args.buckets is not None and args.lengths is None:
        raise ConfigError("command line: --buckets needs --lengths; add --lengths")
    if args.device is not None and peak_flops(args.device) is None:
        known = f"{nearest(args.device, PEAK_FLOPS)} (known: {', '.join(PEAK_FLOPS)})"
        raise ConfigError(f"command line: --device is {args.device}, which is unknown{known}")
    numbers = {name: options[name] for name in ("--world-size", "--gpu-price", "--buckets")}
    check_positive("command line", **numbers)


def profiled_steps(text: str) -> range:
    """Return ``100:105`` as the steps 100 to 104. Raises ConfigError: not a range."""
    begin, _, end = text.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and int(begin) < int(end)):
        raise ConfigError(f"--profile is {text!r}; give two steps as in 100:105")
    return range(int(begin), int(end))


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_SCHEMAS = {"config": PretrainConfig, "manifest": BlendConfig}


def _schema(_: argparse.ArgumentParser, name: str) -> str:
    return json.dumps(json_schema(_SCHEMAS[name]), indent=2)


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("megapack-pretrain", __doc__)
    recipes = f"YAML file, or one of the recipes {', '.join(RECIPES)}"
    parser.add_argument("--config", required=True, help=recipes)
    add_overrides(parser)
    parser.add_argument(
        "--print-schema",
        action=PrintAction,
        text=_schema,
        choices=list(_SCHEMAS),
        help="print the JSON Schema of --config, or of the manifest of a blend, and exit",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    profile = "trace these steps, as in 100:105 (SIGUSR2 to a rank traces its next five)"
    parser.add_argument("--profile", metavar="BEGIN:END", help=profile)
    parser.add_argument(
        "--branch-from",
        metavar="CHECKPOINT",
        help="start from a checkpoint of another run (RUN_DIR/checkpoints/step_...) and continue "
        "its data order; if run_dir has checkpoints, the run resumes from them instead",
    )
    plan = parser.add_argument_group("options of a dry run").add_argument
    ranks = "number of ranks (default: as many as the launcher started, or 1)"
    plan("--world-size", type=int, metavar="RANKS", help=ranks)
    plan("--device", metavar="NAME", help="estimate the time on H100, A800, ...")
    price = "price of one rank per hour, to estimate the cost"
    plan("--gpu-price", type=float, metavar="PRICE", help=price)
    plan("--lengths", metavar="SOURCE", help=LENGTHS)
    buckets = "buckets for --lengths, as in 1024,2048,4096"
    plan("--buckets", type=integers, metavar="N,...", help=buckets)
    plan("--show-config", action="store_true", help="print the full configuration, too")
    plan("--json", action="store_true", help="print the plan as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

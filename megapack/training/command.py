"""Command line of megapack-pretrain, megapack-evaluate and megapack-export: parser, errors, ranks.

This module does not import torch, so most errors appear at once. Launch scripts run it as a
program: ``python -m megapack.training.command --config demo_cpu --set ...`` prints the run_dir.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from megapack.calls import explained, nearest
from megapack.command_line import Parser, add_program_options
from megapack.config import load_config
from megapack.data.run import DataConfig
from megapack.errors import (
    ConfigError,
    MegapackError,
    exit_code,
    printable_output,
    redacted,
)
from megapack.hub import hub_answers
from megapack.storage import IndexedDataset
from megapack.training.config import ModelConfig, PretrainConfig

# Report all missing packages together, instead of the first import that fails.
_missing = [name for name in ("torch", "transformers", "deepspeed") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"training needs {', '.join(_missing)}: install your torch build, then megapack with its "
        "extra train (pip install 'FILE.whl[train]' or '.[train]')"
    )


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser that also accepts the options that launchers add."""
    parser = Parser(name, description=description)
    add_program_options(parser)
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the option --set KEY=VALUE."""
    meaning = "override a field, as in --set optimizer.lr=1e-4; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=meaning)


def run_command(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Return the exit code of ``work(args)``; print its error."""
    faulthandler.enable()  # SIGBUS ends a process that reads the removed part of a mapped file
    with printable_output():
        try:
            return work(args)
        except (MegapackError, OSError) as error:
            print(f"megapack: {type(error).__name__}: {redacted(error)}", file=sys.stderr)
            return exit_code(error)


@contextmanager
def data_errors(data: DataConfig) -> Iterator[None]:
    """Turn FileNotFoundError into a ConfigError that says how to start without the file."""
    try:
        yield
    except FileNotFoundError as error:
        remedy = ""
        if data.valid_prefix and not IndexedDataset.exists(data.valid_prefix):
            remedy = "to train without held-out documents, add --set data.valid_prefix=null "
            remedy += "--set data.valid_index=null " if data.valid_index else ""
            remedy += "--set evaluation.every=null; "
        raise ConfigError(
            f"data: {explained(error)}; {remedy}to plan a run before there are data, give "
            "--dry-run --lengths (a .npy file of tokens per document, or "
            "lognormal:MEAN,MEDIAN,DOCUMENTS)"
        ) from error


def set_rank_environment(local_rank: int | None = None) -> int:
    """Complete the environment variables that describe this rank; return the number of ranks.
    Raises ConfigError if a launcher set only some of them, or values that are not integers."""
    env = os.environ
    if local_rank is not None:
        env.setdefault("LOCAL_RANK", str(local_rank))
    if "RANK" not in env and env.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in env:
        env["RANK"] = env["SLURM_PROCID"]
        env["WORLD_SIZE"] = env["SLURM_NTASKS"]
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    if "RANK" not in env and "WORLD_SIZE" not in env:  # one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        env["MASTER_PORT"] = str(free_port())
    if env.get("WORLD_SIZE") == "1":
        env.setdefault("LOCAL_RANK", "0")
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not env.get(name)]
    if missing:
        raise ConfigError(
            f"the launcher did not set {', '.join(missing)}; start with deepspeed, torchrun, "
            "launch/slurm.sh, or as one plain process"
        )
    numbers = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    wrong = [f"{name}={text}" for name, text in numbers.items() if not text.isdecimal()]
    if wrong or not int(numbers["RANK"]) < int(numbers["WORLD_SIZE"]):
        values = " ".join(f"{name}={text}" for name, text in numbers.items())
        raise ConfigError(f"the environment has {values}; ranks are from 0 to WORLD_SIZE - 1")
    return int(numbers["WORLD_SIZE"])


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# Files of a hub repository. The cache has one of them if the key can be read without a network.
_HUB_FILES = {
    "pretrained": ("config.json",),
    "config": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
}


def check_hub(model: ModelConfig) -> None:
    """Check within seconds that models and tokenizers named as on the hub can be read, from the
    hub or its cache. transformers would retry for a minute. Raises ConfigError."""
    named = {key: str(getattr(model, key) or ".") for key in _HUB_FILES}
    named = {key: name for key, name in named.items() if not Path(name).exists()}
    if isinstance(model.config, dict):
        named.pop("config", None)
    if not named or hub_answers():
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    for key, name in named.items():
        try:
            cached = any(
                isinstance(try_to_load_from_cache(name, file), str) for file in _HUB_FILES[key]
            )
        except ValueError:  # not a name of the hub
            cached = False
        if not cached:
            raise ConfigError(
                f"model.{key} is {name!r}, which is neither a file or folder nor in the cache of "
                "huggingface_hub, and the hub does not answer: give a folder, or connect this "
                "machine"
            )


_FOLDER = Path(__file__).parents[1] / "configs"
RECIPES = {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def read_config(name: str, overrides: Sequence[str] = ()) -> PretrainConfig:
    """Read a YAML file or a recipe (the name of a file in ``configs/``), with ``"a.b=value"``
    overrides. Raises ConfigError if it does not exist, and the errors of ``load_config``."""
    if not Path(name).is_file() and name not in RECIPES:
        raise ConfigError(
            f"--config {name} is neither a file nor a recipe{nearest(name, RECIPES)} (recipes: "
            f"{', '.join(RECIPES)})"
        )
    path = name if Path(name).is_file() else RECIPES[name]
    return load_config(PretrainConfig, path, overrides)


def print_run_dir(args: argparse.Namespace) -> int:
    print(read_config(args.config, args.set).run_dir)
    return 0


if __name__ == "__main__":
    _parser = command_parser("megapack.training.command", None)
    _parser.add_argument("--config", required=True)
    add_overrides(_parser)
    sys.exit(run_command(print_run_dir, _parser.parse_known_args()[0]))

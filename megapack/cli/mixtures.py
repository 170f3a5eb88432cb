"""Try mixtures on proxies of a run, and propose weights for its sources.

FILE is a configuration of megapack-pretrain with a blend whose sources have held-out documents
(valid_prefix). The command writes one proxy (as `megapack-build proxy` does) and one run of it per
mixture, in folders of DIR named after their content, and prints their commands; --run runs them.
Repeat the command at any time: it keeps finished runs, resumes stopped ones from their checkpoints,
and as soon as there are enough, a regression of their held-out losses proposes weights. If the
command ends, so do its runs.

--design dirichlet draws --number mixtures around the weights of the manifest; one tries each source
at twice and at half its weight; a YAML file lists the mixtures (mixtures: [{web: 0.8, code: 0.2},
{web: 1}]). The first mixture is always the manifest's own.

Results belong to the content of sources and to the other settings of the run. So a source that is
renamed keeps its results; with an added one, earlier runs count as runs that gave it no weight; if
you change the model, the scale or the steps, all runs are new.

  weight      the proposal, and the interval of 90 % of the proposals from resampled runs
  rank        correlation of the ranks of the measured losses with those that the regression
              predicts from all other runs: below about 0.7, run more before you trust a proposal

The regression is scikit-learn's ridge regression of the logarithm of every held-out loss; the
proposal is the mean of the best 100 of 20,000 mixtures of the design (RegMix, arXiv 2407.01492),
among those that repeat no source more than max_epochs times.

examples:
  megapack-build mixtures run.yaml tries --scale 1/64 --number 48
  megapack-build mixtures run.yaml tries --scale 1/64 --number 48 --run --workers 4
  megapack-build mixtures run.yaml tries --scale 1/64 --number 48 --run --part 3/8 \\
      --launch "torchrun --nproc-per-node 8 -m megapack.training.pretrain"
"""

from __future__ import annotations

import argparse
import ctypes
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapack.cli.arguments import add_flags, add_shared, local_folder, positive
from megapack.cli.output import Work, note, print_result, print_table
from megapack.cli.pack import add_sharing
from megapack.cli.proxy import add_scale, planned, title_of
from megapack.config import load_config
from megapack.errors import ConfigError, DataError, LockedError, MegapackError
from megapack.executors import Counted, Report, run_shards
from megapack.storage.locks import WriterLock
from megapack.training.mixtures import (
    RUN_FOLDER,
    Proposal,
    Trial,
    design,
    evidence_in,
    limits_of,
    measured,
    prior_of,
    propose,
    trials_of,
)
from megapack.training.proxy import RUN
from megapack.units import counted

PRETRAIN = (sys.executable, "-m", "megapack.training.pretrain")
_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML of the run")
    parser.add_argument("folder", metavar="DIR", type=local_folder, help="folder of the proxies")
    add_scale(parser)
    parser.add_argument(
        "--design",
        default="dirichlet",
        metavar="D",
        help="mixtures to try: dirichlet, one, or a file that lists them (default: %(default)s)",
    )
    parser.add_argument(
        "--number",
        type=positive,
        default=32,
        metavar="N",
        help="number of mixtures of --design dirichlet (default: %(default)s)",
    )
    parser.add_argument(
        "--concentration",
        type=float,
        default=1.0,
        metavar="C",
        help="random mixtures are closer to the manifest's weights if this is larger "
        "(default: %(default)s)",
    )
    add_flags(parser, run="train runs that have not finished, and resume stopped ones")
    parser.add_argument(
        "--launch",
        type=_command,
        metavar="COMMAND",
        help="program that starts a run (default: this Python, -m megapack.training.pretrain)",
    )
    add_shared(parser, "--dry-run", "--json")
    add_sharing(parser.add_argument_group("many runs (with --run)"))


@dataclass(frozen=True)
class Runner:
    """Runs trials; picklable."""

    commands: tuple[tuple[str, ...], ...]
    folders: tuple[Path, ...]  # of the trials
    threads: int = 1

    def build(self, index: int, report: Report) -> None:
        folder = self.folders[index]
        _wait_for_run(folder / RUN_FOLDER)
        if measured(folder) is None:
            self._start(self.commands[index], folder / "output.log")
        report(Counted(documents=1))

    def _start(self, command: tuple[str, ...], path: Path) -> None:
        with path.open("ab") as log:
            done = subprocess.run(
                command,
                stdout=log,
                stderr=log,
                check=False,
                preexec_fn=_ending_with_parent(),
            )
        if done.returncode:
            raise MegapackError(
                f"{shlex.join(command)} ended with status {done.returncode}: see the "
                f"end of {path}; finished runs are kept, run the same command to resume"
            )


def _wait_for_run(folder: Path) -> None:
    """Wait until no process trains in the folder: the run of a command that was killed saves a
    checkpoint first, and another command may train it."""
    is_noted = False
    while True:
        try:
            WriterLock(folder, what="megapack-build mixtures").release()
            return
        except LockedError as error:
            if not is_noted:
                note(f"waiting: {error}")
                is_noted = True
            time.sleep(_POLL_SECONDS)


def _ending_with_parent() -> Callable[[], object] | None:
    """Return a function for a forked child: when its parent ends, even by kill -9 or in a worker
    that Ctrl-C does not reach, the kernel sends it SIGTERM, and a run saves a checkpoint."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # before the fork, after which loading could block
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class DesignFile:
    """Content of a file that --design names."""

    mixtures: tuple[dict[str, float], ...]  # source -> weight; others have 0


def _command(text: str) -> tuple[str, ...]:
    """Split a command as a shell does."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a command of a shell: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("the command is empty; leave out the option, or name one")
    return words


def run(args: argparse.Namespace) -> None:
    folder = args.folder.absolute()
    scale = f"{args.scale.numerator}-{args.scale.denominator}"
    proxy = planned(args, folder / f"proxy-{scale}-{args.seed}")
    prior, names = prior_of(proxy), [source.name for source in proxy.sources]
    kind = args.design
    if kind not in ("dirichlet", "one"):
        kind = load_config(DesignFile, kind).mixtures
        if not kind:
            raise ConfigError(
                f"{args.design} lists no mixtures: add one, as in {{web: 0.8, code: 0.2}}"
            )
    sampling = {"concentration": args.concentration, "seed": args.seed}
    trials = trials_of(folder, proxy, design(names, prior, kind, number=args.number, **sampling))
    launch = PRETRAIN if args.launch is None else args.launch
    commands = [(*launch, "--config", str(trial.folder / RUN)) for trial in trials]
    if not args.dry_run:
        proxy.write(title_of(args), overwrite=True)
        for trial in trials:
            trial.write(title_of(args))
        if args.run:
            _run_trials(args, trials, commands)
    record, proposal, why = trials[0].record, None, ""
    try:
        evidence = evidence_in(folder, record.settings)
        held_out = list(dict.fromkeys(record.held_out.values()))
        sources = list(record.weights)
        proposal = propose(evidence, sources, held_out, prior, limits=limits_of(proxy), **sampling)
    except DataError as error:
        why = str(error)
    losses = [trial.losses for trial in trials]
    weights = [list(trial.record.weights.values()) for trial in trials]
    rows = zip(weights, losses, map(list, commands), strict=True)
    facts = {
        "sources": names,
        "trials": [dict(zip(("weights", "losses", "command"), row, strict=True)) for row in rows],
        "proposal": proposal and asdict(proposal),
    }

    def show() -> None:
        for command, of_trial in zip(commands, losses, strict=True):
            if of_trial is None:
                print(shlex.join(command))
        if proposal is None:
            note(f"no proposal yet: {why}")
        else:
            _show(proposal, names, prior)

    print_result(args, facts, show)


def _run_trials(
    args: argparse.Namespace, trials: Sequence[Trial], commands: Sequence[tuple[str, ...]]
) -> None:
    """Run the trials of this machine that have not ended."""
    i, n = args.part or (0, 1)
    waiting = [k for k in range(i, len(trials), n) if trials[k].losses is None]
    folders = tuple(trial.folder for trial in trials)
    with Work(f"training {counted(len(waiting), 'run')}") as work:
        run_shards(
            Runner(tuple(commands), folders),
            waiting,
            work.counting(len(waiting), lambda piece: piece.documents),
            executor=args.executor or "local",
            num_processes=max(1, min(args.workers, len(waiting))),
            ray_address=args.ray_address,
        )


def _show(proposal: Proposal, names: list[str], prior: list[float]) -> None:
    rows = zip(names, prior, proposal.weights, proposal.low, proposal.high, strict=True)
    columns: dict[str, Any] = {
        "source": lambda row: row[0],
        "now": lambda row: f"{row[1]:.4f}",
        "weight": lambda row: f"{row[2]:.4f}",
        "from": lambda row: f"{row[3]:.4f}",
        "to": lambda row: f"{row[4]:.4f}",
    }
    print_table(columns, sorted(rows, key=lambda row: -row[2]))
    ignored = proposal.num_ignored
    print(
        f"\npredicted held-out loss {proposal.loss:.4f}, and {proposal.prior_loss:.4f} with the "
        f"current weights; {counted(proposal.num_trials, 'run')}, rank correlation "
        f"{proposal.rank_correlation:.2f}"
        + (f"; {counted(ignored, 'run')} with other sources ignored" if ignored else "")
    )

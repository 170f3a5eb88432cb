"""Try mixtures on proxies of a run, and propose weights for its sources.

FILE is a configuration of megapack-pretrain with a blend whose sources have held-out documents
(valid_prefix). The command writes one proxy (as `megapack-build proxy` does) and one run of it per
mixture, in folders of DIR named for their content, and prints their commands; --run runs them.
Call it again at any time: finished runs are kept, and as soon as there are enough, a regression of
their held-out losses proposes weights.

--design dirichlet draws --number mixtures around the weights of the manifest, one tries each source
at twice and at half of its weight, and a YAML or JSON file lists mixtures (name: weight). The first
mixture is the manifest's own.

Results belong to the content of sources and to the other settings of the run. So a source that is
renamed keeps its results; with an added one, earlier runs count as runs that gave it no weight; if
you change the model, the scale or the steps, all runs are new.

  weight      proposed, and where 90 % of the proposals of resampled runs are
  rank        correlation of the ranks of the measured losses with ranks that the regression
              predicts from all other runs: below about .7, trust no proposal; run more

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
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapack.cli.arguments import add_flags, add_shared, positive
from megapack.cli.output import Work, note, print_result, print_table
from megapack.cli.pack import add_sharing
from megapack.cli.proxy import add_scale, planned, title_of
from megapack.config import read_yaml
from megapack.errors import ConfigError, DataError, MegapackError
from megapack.executors import Counted, Report, run_shards
from megapack.training.mixtures import (
    Proposal,
    design,
    evidence_in,
    limits_of,
    prior_of,
    propose,
    trials_of,
)
from megapack.training.proxy import RUN
from megapack.units import counted

PRETRAIN = (sys.executable, "-m", "megapack.training.pretrain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML of the run")
    parser.add_argument("folder", metavar="DIR", help="folder of the proxies")
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
        help="mixtures of the design dirichlet (default: %(default)s)",
    )
    parser.add_argument(
        "--concentration",
        type=float,
        default=1.0,
        metavar="C",
        help="of the design dirichlet and of proposals; larger: nearer to the manifest's weights "
        "(default: %(default)s)",
    )
    add_flags(parser, run="run what has not ended, and resume what was stopped")
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        help="start of the command of a run (default: this Python, -m megapack.training.pretrain)",
    )
    add_shared(parser, "--dry-run", "--json")
    add_sharing(parser.add_argument_group("many runs (with --run)"))


@dataclass(frozen=True)
class Runner:
    """Runs trials; picklable."""

    commands: tuple[tuple[str, ...], ...]
    logs: tuple[Path, ...]
    threads: int = 1

    def build(self, index: int, report: Report) -> None:
        with self.logs[index].open("ab") as log:
            done = subprocess.run(self.commands[index], stdout=log, stderr=log, check=False)
        if done.returncode:
            raise MegapackError(
                f"{shlex.join(self.commands[index])} ended with status {done.returncode}: see the "
                f"end of {self.logs[index]}; finished runs are kept, run the same command to resume"
            )
        report(Counted(documents=1))


def run(args: argparse.Namespace) -> None:
    if not 0 < args.concentration < 1e9:
        raise ConfigError(f"--concentration is {args.concentration}; it must be above 0")
    folder = Path(args.folder).absolute()
    scale = f"{args.scale.numerator}-{args.scale.denominator}"
    proxy = planned(args, folder / f"proxy-{scale}-{args.seed}")
    prior, names = prior_of(proxy), [source.name for source in proxy.sources]
    rows = design(
        names,
        prior,
        _listed(args.design) if args.design not in ("dirichlet", "one") else args.design,
        number=args.number,
        concentration=args.concentration,
        seed=args.seed,
    )
    trials = trials_of(folder, proxy, rows)
    if not args.dry_run:
        proxy.write(title_of(args), overwrite=True)
        for trial in trials:
            trial.write(title_of(args))
    launch = PRETRAIN if args.launch is None else tuple(shlex.split(args.launch))
    commands = [(*launch, "--config", str(trial.folder / RUN)) for trial in trials]
    i, n = args.part or (0, 1)
    waiting = [k for k in range(i, len(trials), n) if trials[k].losses is None]
    if args.run and waiting and not args.dry_run:
        logs = tuple(trial.folder / "output.log" for trial in trials)
        with Work(f"running {counted(len(waiting), 'proxy')}") as work:
            run_shards(
                Runner(tuple(commands), logs),
                waiting,
                work.counting(len(waiting), lambda piece: piece.documents),
                executor=args.executor or "local",
                num_processes=min(args.workers, len(waiting)),
                ray_address=args.ray_address,
            )
    record = trials[0].record
    proposal, why = None, ""
    try:
        proposal = propose(
            evidence_in(folder, record.settings),
            list(record.weights),
            list(record.held_out.values()),
            prior,
            limits=limits_of(proxy),
            concentration=args.concentration,
            seed=args.seed,
        )
    except DataError as error:
        why = str(error)
    facts = {
        "folder": str(folder),
        "sources": names,
        "trials": [
            {
                "weights": list(trial.record.weights.values()),
                "losses": trial.losses,
                "command": list(command),
            }
            for trial, command in zip(trials, commands, strict=True)
        ],
        "proposal": proposal and asdict(proposal),
    }

    def show() -> None:
        for trial, command in zip(trials, commands, strict=True):
            if trial.losses is None:
                print(shlex.join(command))
        if proposal is None:
            note(f"no proposal yet: {why}")
        else:
            _show(proposal, names, prior)

    print_result(args, facts, show)


def _listed(path: str) -> Any:
    """Return the mixtures that a file lists."""
    listed = read_yaml(Path(path).read_text(encoding="utf-8"))
    if not isinstance(listed, list) or not all(
        isinstance(m, dict)
        and m
        and all(isinstance(w, (int, float)) and w >= 0 for w in m.values())
        and any(m.values())
        for m in listed
    ):
        raise ConfigError(
            f"--design {path}: it must be a list of mixtures, as in [{{web: 0.8, code: 0.2}}, "
            "{web: 1}], or dirichlet or one"
        )
    return listed


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
        f"weights now; {counted(proposal.num_trials, 'run')}, rank correlation "
        f"{proposal.rank_correlation:.2f}"
        + (f"; {counted(ignored, 'run')} with other sources ignored" if ignored else "")
    )

"""A small source repeated 1, 4 and 16 times, compared with new text, at equal total tokens.

Python files are the small source, docstrings the large one. Both have the same weight, but
``max_epochs`` and ``run_tokens`` cap the share of the files (UniMax). With U tokens of files in a
run of 32 U:

    epochs of U files   1      4      16         new files     4 U    16 U
    tokens of files     U      4 U    16 U                     4 U    16 U
    of docstrings       31 U   28 U   16 U                     28 U   16 U

So an arm with repetition and one without have the same mixture. Every seed has different files; a
smaller arm has the first files of a larger arm.

Muennighoff et al. (arXiv 2305.16264) find that up to 4 epochs change the loss negligibly compared
with unique data, and that the value of a repetition decays: U tokens, repeated R times after the
first, are worth U (1 + r (1 - exp(-R / r))) unique ones with r = 15.39; at 4 epochs 3.7 U, at 16
10.6 U. This recipe interpolates the value of repeated files between the perplexities of new files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from papers.claims import Claim, below, difference, same, shown, stated
from papers.corpus import Corpus
from papers.run import Run
from papers.runs import Result, Scale, lines, paired, scores
from papers.settings import Setting

TITLE = "Files repeated, and fresh"
EQUAL = (
    "model, initial weights, tokens of the run, weights of the two sources, optimizer, learning "
    "rates, tokens per step and steps; no docstring comes twice"
)
PAPER = "Data-constrained, arXiv 2305.16264"
ONCE, FOUR, SIXTEEN = "U files, 1 epoch", "U files, 4 epochs", "U files, 16 epochs"
FRESH_FOUR, FRESH = "4 U files, 1 epoch", "16 U files, 1 epoch"
QUARTER = "4 U files, 4 epochs"
MOST = 16  # half of a run, in U
DECAY = 15.39  # the paper's r, fitted to all its runs

# name: (files in U, epochs)
ARMS = {
    FRESH: (16, 1), ONCE: (1, 1), FOUR: (1, 4), SIXTEEN: (1, 16), FRESH_FOUR: (4, 1),
    QUARTER: (4, 4),
}  # fmt: skip


def runs(scale: Scale) -> list[Run]:
    """Return the runs of six ways to fill a part of a run with files, and all seeds."""
    setting = Setting(scale)
    capacity = setting.ladder[-1]
    steps = scale.pick(cpu=192, quick=32, gpu=300)
    unit = steps * setting.step_tokens // (2 * MOST) * 5 // 2  # bytes of U, 2.5 per token
    sizes = {"min_bytes": 100, "max_bytes": 2 * capacity}
    files = Corpus(domain="code", train_bytes=unit, valid_bytes=100_000, **sizes)
    prose = replace(files, domain="prose", train_bytes=3 * MOST * unit, valid_bytes=60_000)
    base = Run(
        recipe="repetition", corpus=files, other=prose, strategy="concat", buckets=(capacity,),
        config=setting.config(steps=steps, attention="document"),
        validate={"files": files, "docstrings": prose}, valid_bucket=capacity,
    )  # fmt: skip
    found = []
    for seed in scale.seeds(5):
        arms = {}
        for name, (units, epochs) in ARMS.items():
            own = replace(files, train_bytes=units * unit, after_bytes=seed * unit)
            arms[name] = {"corpus": own, "max_epochs": epochs}
        found += paired(base, arms, [seed])
    return found


def paper_worth(epochs: int) -> float:
    """Return the value of this many epochs of U tokens, in U unique tokens (equation 5)."""
    return 1 + DECAY * (1 - math.exp(-(epochs - 1) / DECAY))


def worth(files: dict[str, list[float]], arm: str) -> list[float]:
    """Return the value of an arm's files in U fresh tokens, one per seed: interpolate between the
    perplexities of fresh files (both logarithmic). It is limited to 1 ... 16."""
    fresh = (FRESH, FRESH_FOUR, ONCE)  # by rising perplexity
    sizes = [math.log(ARMS[name][0]) for name in fresh]
    found = []
    for seed, value in enumerate(files[arm]):
        line = [math.log(files[name][seed]) for name in fresh]
        found.append(math.exp(np.interp(math.log(value), line, sizes)))
    return found


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per arm. Arms that repeat files also have the difference to as many fresh
    files, in per cent, and their worth, with the paper's figure."""
    files, prose = scores(results, "files"), scores(results, "docstrings")
    fresh = {ARMS[name][0]: name for name in (ONCE, FRESH_FOUR, FRESH)}
    found = []
    for name in files:
        units, epochs = ARMS[name]
        row = {"arm": name, "files_of_the_run_%": 100 * units * epochs / (2 * MOST)}
        row |= {"files": shown(files[name]), "docstrings": shown(prose[name])}
        if epochs > 1:
            base = files[fresh[units * epochs]]
            gap = difference(files[name], base)
            row |= {
                "against_fresh_%": 100 * gap.mean / fmean(base),
                "worth_in_fresh_U": shown(worth(files, name), 1),
                "paper_U": units * paper_worth(epochs),
            }
        found.append(row)
    return found


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims about four epochs, sixteen, and the cost for the other source."""
    files, prose = scores(results, "files"), scores(results, "docstrings")
    why = "the same mixture and tokens; the files of the smaller arm are among the other's"
    state = partial(stated, files, source=PAPER)
    four, sixteen = (f"{paper_worth(n):.1f} epochs of fresh ones" for n in (4, 16))
    return [
        state(same, FOUR, FRESH_FOUR,
              "4 epochs of files are as good as that many fresh ones, 1/8 of the run (within 2 %)",
              within=0.02, paper="negligible change of the loss up to 4 epochs", why=why),
        state(same, QUARTER, FRESH,
              "4 epochs of files are as good as that many fresh ones, 1/2 of the run (within 2 %)",
              within=0.02, paper="negligible change of the loss up to 4 epochs", why=why),
        state(below, FRESH, SIXTEEN, "16 epochs of files are worse than that many fresh ones",
              paper=f"worth {sixteen}", why=why),
        state(below, QUARTER, SIXTEEN,
              "four times as many files, each a quarter as often, are better than 16 epochs",
              paper=f"worth {4 * paper_worth(4):.1f} U against {paper_worth(16):.1f} U", why=why),
        state(below, FOUR, ONCE, "files repeated 4 times are better than once",
              paper=f"worth {four}", why="in place of docstrings; scored on files"),
        state(below, SIXTEEN, FOUR, "files repeated 16 times are better than 4 times",
              paper=f"worth {sixteen} against {four}",
              why="in place of docstrings; scored on files"),
        stated(prose, below, ONCE, SIXTEEN, "what files get by repetition, docstrings pay",
               why="31 U of docstrings against 16 U; scored on docstrings"),
    ]  # fmt: skip


def plots(results: list[Result], folder: Path) -> None:
    """Plot the perplexity of files over the tokens of files in the run: fresh, repeated."""
    files = scores(results, "files")
    curves = {"fresh": (ONCE, FRESH_FOUR, FRESH), "U repeated": (ONCE, FOUR, SIXTEEN)}
    curves |= {"4 U repeated": (FRESH_FOUR, QUARTER)}
    points = {
        label: ([math.prod(ARMS[name]) for name in names], [fmean(files[name]) for name in names])
        for label, names in curves.items()
    }
    x = "tokens of files in the run, in U (the rest of 32 U are docstrings)"
    y = "perplexity of held-out files"
    lines(folder / "repetition_files.png", points, x=x, y=y, log_x=True)

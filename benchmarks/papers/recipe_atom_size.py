"""Atom size (Chen et al. 2024): GPT-2 with ALiBi, concat and padding, atoms of 0.25 to 4 MSL.

What the paper leaves open or does otherwise, and how it is here:

* One epoch instead of two: an order that repeats would tell atoms apart by more than their size.
* Atoms of one MSL are shuffled by the schedule; those of other sizes by the packing, whose order is
  then kept (``sequential``), so that the pieces of a large atom stay neighbours.
* The paper ends every atom of padding with EOS; here documents end with it, atoms do not.
* The last token of an atom has its true successor in the document as its label. Where labels are
  the inputs shifted by one, as is usual, it has the first token of an atom drawn at random: with
  atoms of 16 tokens one label in 16 cannot be predicted. That part of the paper's differences is
  not seen here, on purpose: it says nothing of what the model has learned.
* Its perplexity is that of training, on samples that differ from atom to atom and from strategy to
  strategy. It is given, and beside it the perplexity of the same held-out documents for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from papers.claims import Claim, Verdict, less, near, shown, together
from papers.corpus import Corpus
from papers.runs import Result, Run, Scale, by_name

from megapack.training.plots import plot_curves
from megapack.training.runs import Curve, compare

__all__ = ["EQUAL", "TITLE", "claims", "plots", "rows", "runs"]

TITLE = "Atom size (Chen et al.)"
EQUAL = "documents, one epoch, tokens per step, learning rate (constant after its warmup), weights"
SOURCE = "Atom size"
MSL = 64
ATOMS = {0.25: 16, 0.5: 32, 1.0: 64, 2.0: 128, 4.0: 256}  # share of MSL -> tokens
STRATEGIES = {"concat": "concat", "pad": "padding"}
# Table 2: final perplexity of concat and padding; Table 3, MSL 64: steps.
TABLE_2 = {
    "concat": {0.25: 207.04, 0.5: 157.39, 1.0: 118.08, 2.0: 119.66, 4.0: 121.18},
    "pad": {0.25: 175.33, 0.5: 134.43, 1.0: 102.82, 2.0: 104.46, 4.0: 105.85},
}
TABLE_3_STEPS = (14_058, 17_308)
TABLE_3_PERPLEXITY = (110.45, 99.79)


def corpus(scale: Scale) -> Corpus:
    """Short prose as in A.1: no document below about 50 words, 143 tokens in the mean."""
    return Corpus(
        domain="prose",
        train_bytes=scale.pick(cpu=1_150_000, quick=60_000, gpu=3_000_000),
        valid_bytes=scale.pick(cpu=120_000, quick=10_000, gpu=300_000),
        min_bytes=250,
        max_bytes=700,
    )


def runs(scale: Scale) -> list[Run]:
    """Both strategies, five atoms, every seed."""
    documents = corpus(scale)
    result = []
    for seed in scale.seeds:
        for strategy in STRATEGIES:
            for share, atom in ATOMS.items():
                config = {
                    "num_steps": scale.pick(cpu=None, quick=8, gpu=None),
                    "model": scale.pick(
                        cpu=_small_model(),
                        quick=_small_model(),
                        gpu={"preset": "gpt2_124m_alibi"},
                    ),
                    "data": {
                        "tokens_per_step": scale.pick(cpu=1024, quick=512, gpu=4096),
                        "micro_batch_tokens": scale.pick(cpu=1024, quick=512, gpu=4096),
                        "attention": "sample",
                        "positions": "sample",
                        "labels": "sample",
                        "order": "proportional" if share == 1 else "sequential",
                    },
                    "optimizer": {"lr": scale.pick(cpu=2e-3, quick=2e-3, gpu=6e-4)},
                    "schedule": {"kind": "constant", "warmup_steps": 20},
                    "engine": scale.pick(
                        cpu={"precision": "fp32", "zero_stage": 0},
                        quick={"precision": "fp32", "zero_stage": 0},
                        gpu={"precision": "bf16"},
                    ),
                }
                run = Run(
                    recipe="atom_size",
                    name=_name(strategy, share),
                    seed=seed,
                    corpus=documents,
                    strategy=strategy,
                    buckets=(MSL,),
                    parameters={"atom_size": atom},
                    config=config,
                    validate={"prose": documents},
                    valid_bucket=MSL,
                    evaluate_every=scale.pick(cpu=50, quick=4, gpu=50) if share == 1 else None,
                )
                result.append(run)
    return result


def _small_model() -> dict[str, Any]:
    return {"preset": "gpt2_tiny_alibi", "overrides": {"n_embd": 96}}


def _name(strategy: str, share: float) -> str:
    return f"{STRATEGIES[strategy]}, atom {share:g} MSL"


class _Figures:
    """Figures by (strategy, atom / MSL), one per seed in each list."""

    def __init__(self, results: list[Result]) -> None:
        self.results = by_name(results)
        self.held_out = {
            name: [r.perplexity("prose") for r in of] for name, of in self.results.items()
        }
        self.final: dict[str, list[float]] = {name: [] for name in self.results}
        self.rank: dict[str, list[float]] = {name: [] for name in self.results}
        for strategy in STRATEGIES:
            names = [_name(strategy, share) for share in ATOMS]
            for same_seed in zip(*(self.results[name] for name in names), strict=True):
                # Runs of a handful of steps (QUICK) end within their first epoch.
                curves = {r.run.name: _whole_epoch(r.curve()) for r in same_seed}
                for name, standing in compare(curves).items():
                    self.final[name].append(standing.final_perplexity)
                    self.rank[name].append(standing.mean_rank)

    def steps(self, strategy: str) -> int:
        """Of an epoch with atoms of one MSL."""
        return int(self.results[_name(strategy, 1.0)][0].summary["steps_per_epoch"])

    def at_equal_steps(self) -> list[float]:
        """Held-out perplexity of padding when concat is done, one per seed."""
        result = []
        for padded, joined in zip(
            self.results[_name("pad", 1.0)], self.results[_name("concat", 1.0)], strict=True
        ):
            points = padded.evaluations()
            steps = [point["step"] for point in points]
            losses = [point["loss"] for point in points]
            result.append(float(np.exp(np.interp(joined.summary["steps"], steps, losses))))
        return result


def _whole_epoch(curve: Curve) -> Curve:
    """A curve whose end is one epoch, also where a run was cut short."""
    return (
        curve
        if curve.epoch[-1] >= 1 - 1e-9
        else Curve(curve.epoch / curve.epoch[-1], curve.perplexity)
    )


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Table 2, and what it does not print."""
    figures = _Figures(results)
    return [
        {
            "strategy": STRATEGIES[strategy],
            "atom": f"{share:g} MSL",
            "steps": figures.results[_name(strategy, share)][0].summary["steps"],
            "final perplexity (training)": shown(figures.final[_name(strategy, share)]),
            "paper": TABLE_2[strategy][share],
            "ranking": shown(figures.rank[_name(strategy, share)]),
            "held-out perplexity": shown(figures.held_out[_name(strategy, share)]),
            "seeds": len(figures.results[_name(strategy, share)]),
        }
        for strategy in STRATEGIES
        for share in ATOMS
    ]


def claims(results: list[Result]) -> list[Claim]:
    """Tables 2 and 3."""
    figures = _Figures(results)
    found = []
    for strategy in STRATEGIES:
        for shares, words in (((0.25, 0.5), "smaller"), ((2.0, 4.0), "larger")):
            found += [
                _atoms(figures.final, strategy, shares, words, "final training perplexity"),
                _atoms(figures.rank, strategy, shares, words, "perplexity ranking"),
                _atoms(figures.held_out, strategy, shares, words, "held-out perplexity"),
            ]
    return [*found, *_strategies(figures)]


_WHY = {
    "final training perplexity": "the last 0.01 epoch, as in A.6, which is 4 steps here: noisy; "
    "no label is the random beginning of the next atom, as it is where inputs are shifted",
    "perplexity ranking": "mean rank over 100 parts of the epoch, as in A.6",
    "held-out perplexity": "the same documents for all atoms, every token once; not in the paper",
}


def _atoms(
    measure: dict[str, list[float]],
    strategy: str,
    shares: tuple[float, ...],
    words: str,
    quantity: str,
) -> Claim:
    best = measure[_name(strategy, 1.0)]
    others = {share: measure[_name(strategy, share)] for share in shares}
    printed = TABLE_2[strategy]
    return Claim(
        source=f"{SOURCE} Table 2",
        claim=f"{STRATEGIES[strategy]}: atoms {words} than 1 MSL lose ({quantity})",
        paper="1 MSL wins"
        if quantity != "final training perplexity"
        else f"{printed[1.0]:g} against " + ", ".join(f"{printed[s]:g}" for s in shares),
        measured=f"{shown(best)} against "
        + ", ".join(f"{shown(of)} ({share:g} MSL)" for share, of in others.items()),
        agrees=together([less(best, of) for of in others.values()]),
        why=_WHY[quantity],
    )


def _strategies(figures: _Figures) -> list[Claim]:
    joined, padded = _name("concat", 1.0), _name("pad", 1.0)
    ratio = figures.steps("pad") / figures.steps("concat")
    paper_ratio = TABLE_3_STEPS[1] / TABLE_3_STEPS[0]

    def claim(words: str, paper: str, sides: tuple[list[float], list[float]], why: str,
              agrees: Verdict) -> Claim:  # fmt: skip
        measured = f"padding {shown(sides[0])}, concat {shown(sides[1])}"
        return Claim(source=f"{SOURCE} Table 3", claim=words, paper=paper, measured=measured,
                     agrees=agrees, why=why)  # fmt: skip

    final = (figures.final[padded], figures.final[joined])
    held_out = (figures.held_out[padded], figures.held_out[joined])
    equal = (figures.at_equal_steps(), figures.held_out[joined])
    return [
        Claim(
            source=f"{SOURCE} Table 3",
            claim="padding needs more steps per epoch than concat (MSL 64, atoms of 1 MSL)",
            paper=f"{paper_ratio:.2f} times",
            measured=f"{ratio:.2f} times",
            agrees=near(ratio, paper_ratio, within=0.1),
            why="exact, follows from the lengths; these documents have nearly the paper's mean",
        ),
        claim(
            "padding has the lower final training perplexity at equal epochs",
            f"{TABLE_3_PERPLEXITY[1]} against {TABLE_3_PERPLEXITY[0]}",
            final,
            "as in A.6; concat is scored on tokens that follow another document, padding is not",
            less(*final),
        ),
        claim(
            "padding has the lower held-out perplexity at equal epochs",
            "lower",
            held_out,
            f"the same documents for both; padding took {ratio:.2f} times as many steps",
            less(*held_out),
        ),
        claim(
            "padding has the higher perplexity at equal steps (held out)",
            "higher (Figure 3)",
            equal,
            "both after the last step of concat; the learning rate is constant",
            less(equal[1], equal[0]),
        ),
    ]


def plots(results: list[Result], folder: Path) -> None:
    """Figures 1 and 2: training perplexity over the epoch, smoothed (A.7), mean of the seeds."""
    groups = by_name(results)
    for strategy, words in STRATEGIES.items():
        curves = {}
        for share in ATOMS:
            of = [result.curve() for result in groups[_name(strategy, share)]]
            mean = np.mean([curve.perplexity for curve in of], axis=0)
            curves[f"{share:g} MSL"] = Curve(of[0].epoch, mean)
        plot_curves(folder / f"atom_size_{words}.png", curves)

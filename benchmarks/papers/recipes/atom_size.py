"""Atom size (Chen et al. 2024): GPT-2 with ALiBi, concat and padding, atoms of 0.25 to 4 MSL.

Differences from the paper, and choices that it leaves open:

* One epoch instead of two: a repeated order would make atoms differ by more than their size.
* The schedule shuffles atoms of one MSL. Atoms of other sizes are shuffled by packing, and the
  schedule keeps that order (``sequential``), so that the pieces of a large atom stay neighbors.
* The paper ends every padded atom with EOS; here documents end with EOS, atoms do not.
* The label of an atom's last token is its true successor in the document. If labels are the inputs
  shifted by one, as usual, it is the first token of a random atom: with atoms of 16 tokens, one
  label in 16 is unpredictable. Concat is also trained with such labels.
* The paper's perplexity is that of training, on samples that differ between atoms and strategies.
  The report has it, and the perplexity of held-out documents, which are the same for all arms.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from papers.claims import Claim, Row, below, compared, less, near, shown, together
from papers.corpus import Corpus
from papers.run import Run
from papers.runs import Result, Scale, by_name, paired, scores
from papers.settings import WHOLE, engine

from megapack.packing import pack
from megapack.training.curves import Curve, plot_curves, standings

TITLE = "Atom size (Chen et al.)"
EQUAL = "documents, one epoch, tokens per step, learning rate (constant after its warmup), weights"
SOURCE = "Atom size"
MSL = 64
ATOMS = (0.25, 0.5, 1.0, 2.0, 4.0)  # shares of MSL
STRATEGIES = {"concat": "concat", "pad": "padding"}
# Table 2: final perplexity by atom size.
TABLE_2 = {
    "concat": {0.25: 207.04, 0.5: 157.39, 1.0: 118.08, 2.0: 119.66, 4.0: 121.18},
    "pad": {0.25: 175.33, 0.5: 134.43, 1.0: 102.82, 2.0: 104.46, 4.0: 105.85},
}
# Table 3: MSL -> perplexity of concat and padding.
TABLE_3 = {32: (91.01, 87.22), 64: (110.45, 99.79), 128: (102.42, 82.55)}

NUM_DOCUMENTS = 803_000  # A.1: 1.81M rows less 55.62 %
NUM_TOKENS = 114_400_095  # A.5: per epoch
STEPS = {  # Table 3; MSL: batch, steps of concat, steps of padding
    32: (256, 28_120, 31_816),
    64: (256, 14_058, 17_308),
    128: (128, 14_056, 20_496),
}


def arm(strategy: str, share: float = 1.0, *, capacity: int = MSL, shifted: bool = False) -> str:
    """Return the name of an arm."""
    name = f"{STRATEGIES[strategy]}, atom {share:g} MSL"
    name += f", MSL {capacity}" if capacity != MSL else ""
    return name + (", shifted labels" if shifted else "")


def tables() -> list[dict[str, dict[str, Any]]]:
    """Return groups of arms, each ranked by itself (A.6), as name -> changed fields: both halves of
    Table 2, Table 3 at its other lengths, and concat with the labels of shifted inputs."""

    def own(strategy: str, share: float = 1.0, capacity: int = MSL, shifted: bool = False) -> Any:
        return arm(strategy, share, capacity=capacity, shifted=shifted), {
            "strategy": strategy,
            "buckets": (capacity,),
            "parameters": {"atom_size": round(share * capacity)},
            "valid_bucket": capacity,
            "data": {"order": "proportional" if share == 1 else "sequential"},
            "change": "papers.settings:shifted" if shifted else None,
        }

    return [
        *(dict(own(strategy, share) for share in ATOMS) for strategy in STRATEGIES),
        *(dict(own(of, capacity=n) for of in STRATEGIES) for n in TABLE_3 if n != MSL),
        dict(own("concat", share, shifted=True) for share in ATOMS if share <= 1),
    ]


def runs(scale: Scale) -> list[Run]:
    """Return the runs of all arms and seeds, on short prose as in A.1: no document below about 50
    words, 188 tokens on average."""
    documents = Corpus(
        domain="prose", min_bytes=250, max_bytes=700,
        train_bytes=scale.pick(cpu=1_150_000, quick=60_000, gpu=2_000_000),
        valid_bytes=scale.pick(cpu=120_000, quick=10_000, gpu=300_000),
    )  # fmt: skip
    small = {"preset": "gpt2_tiny_alibi", "overrides": {"n_head": 2, "initializer_range": 0.125}}
    tokens = scale.pick(cpu=1024, quick=512, gpu=4096)
    config = {
        "num_steps": scale.pick(cpu=None, quick=4, gpu=None),
        "model": scale.pick(cpu=small, gpu={"preset": "gpt2_124m_alibi"}),
        "data": {"tokens_per_step": tokens, "micro_batch_tokens": tokens, **WHOLE},
        "optimizer": {"lr": scale.pick(cpu=3e-3, gpu=6e-4)},
        "learning_rate": {"kind": "constant", "warmup_steps": 20},
        "engine": engine(scale),
    }
    base = Run(
        recipe="atom_size", corpus=documents, strategy="concat", buckets=(MSL,), config=config,
        validate={"prose": documents},
    )  # fmt: skip
    arms = {name: changes for table in tables() for name, changes in table.items()}
    arms[arm("pad")]["evaluate_every"] = scale.pick(cpu=50, quick=4, gpu=50)
    return paired(base, arms, scale.seeds())


def table_3_steps() -> list[Row]:
    """Compute Table 3: training steps of two epochs, concat and padding, atom size = MSL.

    The paper's padding cuts a document into pieces of MSL - 1 tokens and ends each with EOS: a
    document of n tokens becomes one of n + ceil(n / (MSL - 1)), cut at MSL. The paper prints the
    number and the mean of the lengths; here they are 40 plus a gamma distribution (shape 2).
    """
    generator = np.random.default_rng(0)
    lengths = 40 + generator.gamma(2.0, (NUM_TOKENS / NUM_DOCUMENTS - 40) / 2, NUM_DOCUMENTS)
    lengths = np.rint(lengths * NUM_TOKENS / lengths.sum()).astype(np.int32)
    row = partial(compared, "Atom size Table 3", "WikiText-like, mean 142")
    rows = []
    for capacity, (batch, concat_steps, padding_steps) in STEPS.items():
        pieces = -(-lengths // (capacity - 1))
        joined = pack(lengths + 1, "concat", buckets=[capacity]).num_samples
        padded = pack(lengths + pieces, "pad", buckets=[capacity]).num_samples
        ratio = padding_steps / concat_steps
        item = f"MSL {capacity}"
        rows += [
            row(f"{item}, concat", "steps, 2 epochs", (concat_steps, 2 * joined / batch)),
            row(f"{item}, padding", "steps, 2 epochs", (padding_steps, 2 * padded / batch)),
            row(item, "padding / concat", (ratio, padded / joined)),
        ]
    return rows


class Figures:
    """Figures of every arm; each list has one number per seed."""

    def __init__(self, results: list[Result]) -> None:
        self.results = by_name(results)
        self.held_out = scores(results, "prose")
        self.final: dict[str, list[float]] = {name: [] for name in self.results}
        self.rank: dict[str, list[float]] = {name: [] for name in self.results}
        for names in tables():
            for same_seed in zip(*(self.results[name] for name in names), strict=True):
                # Runs of a few steps (QUICK) end within their first epoch.
                curves = {r.run.name: _whole_epoch(r.curve()) for r in same_seed}
                for name, standing in standings(curves).items():
                    self.final[name].append(standing.final_perplexity)
                    self.rank[name].append(standing.mean_rank)

    def at_equal_steps(self) -> list[float]:
        """Return the held-out perplexity of padding at the last step of concat, one per seed."""
        result = []
        arms = (self.results[arm(of)] for of in ("pad", "concat"))
        for padded, joined in zip(*arms, strict=True):
            steps, losses = ([at[key] for at in padded.evaluations()] for key in ("step", "loss"))
            result.append(float(np.exp(np.interp(joined.summary["steps"], steps, losses))))
        return result


def _whole_epoch(curve: Curve) -> Curve:
    """Return a curve that ends at one epoch; stretch the curve of a run that ended earlier."""
    end = curve.epoch[-1]
    return curve if end >= 1 - 1e-9 else Curve(curve.epoch / end, curve.perplexity)


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per arm: training and held-out perplexity, ranking, the paper's figure."""
    figures = Figures(results)
    printed = {arm(s, share): of[share] for s, of in TABLE_2.items() for share in ATOMS}
    for capacity, perplexities in TABLE_3.items():
        for strategy, perplexity in zip(STRATEGIES, perplexities, strict=True):
            printed.setdefault(arm(strategy, capacity=capacity), perplexity)
    return [
        {
            "samples": name, "steps": group[0].summary["steps"],
            "final perplexity (training)": shown(figures.final[name]), "paper": printed.get(name),
            "ranking": shown(figures.rank[name]),
            "held-out perplexity": shown(figures.held_out[name]), "seeds": len(group),
        }
        for name, group in figures.results.items()
    ]  # fmt: skip


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims of Tables 2 and 3 and of Figure 3."""
    figures = Figures(results)
    found = []
    for strategy in STRATEGIES:
        for shares, words in (((0.25, 0.5), "smaller"), ((2.0, 4.0), "larger")):
            found += _atoms(figures, strategy, shares, words)
    found += _atoms(figures, "concat", (0.25, 0.5), "smaller", shifted=True)
    for capacity in TABLE_3:
        found += _strategies(figures, capacity)
    last = below(figures.held_out[arm("concat")], figures.at_equal_steps(), what="",
                 source=f"{SOURCE} Figure 3", paper="higher",
                 claim="padding has the higher perplexity at equal steps (held out)",
                 why="concat against padding, both after the last step of concat; the learning "
                 "rate is constant")  # fmt: skip
    return [*found, last]


_WHY = {
    "final training perplexity": "the last 0.01 epoch, as in A.6: a handful of steps here, noisy",
    "perplexity ranking": "mean rank over 100 parts of the epoch, as in A.6",
    "held-out perplexity": "the same documents for all atoms, every token once; not in the paper",
}


def _atoms(
    figures: Figures, strategy: str, shares: tuple[float, ...], words: str, shifted: bool = False
) -> list[Claim]:
    """Compare atoms of other sizes with 1 MSL, by each of three measures."""
    best, printed = arm(strategy, shifted=shifted), TABLE_2[strategy]
    labels = "labels of shifted inputs" if shifted else "true successors as labels"
    found = []
    measures = (figures.final, figures.rank, figures.held_out)
    for quantity, measure in zip(_WHY, measures, strict=True):
        others = {share: measure[arm(strategy, share, shifted=shifted)] for share in shares}
        judged = {share: less(measure[best], of) for share, of in others.items()}
        paper = f"{printed[1.0]:g} against " + ", ".join(f"{printed[s]:g}" for s in shares)
        each = (f"{shown(of)} ({s:g} MSL: {judged[s][0]})" for s, of in others.items())
        found.append(Claim(
            source=f"{SOURCE} Table 2",
            claim=f"{STRATEGIES[strategy]}, {labels}: atoms {words} than 1 MSL lose ({quantity})",
            paper=paper if quantity == "final training perplexity" else "1 MSL wins",
            measured=f"{shown(measure[best])} against {', '.join(each)}",
            **together(judged.values()), why=_WHY[quantity],
        ))  # fmt: skip
    return found


def _strategies(figures: Figures, capacity: int) -> list[Claim]:
    """Compare concat with padding at one MSL."""
    joined, padded = (arm(strategy, capacity=capacity) for strategy in STRATEGIES)
    (_, joined_steps, padded_steps), (low, high) = STEPS[capacity], TABLE_3[capacity]
    epoch = [figures.results[name][0].summary["steps_per_epoch"] for name in (padded, joined)]
    ratio, paper_ratio = epoch[0] / epoch[1], padded_steps / joined_steps
    equal = f"MSL {capacity}: padding has the lower"
    words = {"source": f"{SOURCE} Table 3", "what": "padding against concat"}
    return [
        Claim(
            source=f"{SOURCE} Table 3",
            claim=f"MSL {capacity}: padding needs more steps per epoch than concat",
            paper=f"{paper_ratio:.2f} times",
            measured=f"{ratio:.2f} times",
            agrees=near(ratio, paper_ratio, within=0.1),
            why="exact, follows from the lengths",
        ),
        below(figures.final[padded], figures.final[joined], **words,
              claim=f"{equal} final training perplexity at equal epochs",
              paper=f"{high} against {low}",
              why="as in A.6; concat is scored on tokens that follow another document, padding "
              "not"),
        below(figures.held_out[padded], figures.held_out[joined], **words,
              claim=f"{equal} held-out perplexity at equal epochs", paper="lower",
              why=f"the same documents for both; padding took {ratio:.2f} times as many steps"),
    ]  # fmt: skip


def plots(results: list[Result], folder: Path) -> None:
    """Plot Figures 1 and 2: training perplexity over the epoch, smoothed (A.7), mean of seeds."""
    groups = by_name(results)
    for strategy, words in STRATEGIES.items():
        curves = {}
        for share in ATOMS:
            of = [result.curve() for result in groups[arm(strategy, share)]]
            mean = np.mean([curve.perplexity for curve in of], axis=0)
            curves[f"{share:g} MSL"] = Curve(of[0].epoch, mean)
        plot_curves(folder / f"atom_size_{words}.png", curves)

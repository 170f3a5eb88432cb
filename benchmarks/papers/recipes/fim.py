"""Fill-in-the-middle: its cost for left-to-right text, and its gain for middles.

Arms differ in the share of transformed documents (``fim.rate``, half of them suffix first); all
have the same samples, packed with room for the sentinels. Two things are scored: unchanged held-out
documents (the cost), and the middles of the same documents, cut as in training (two random cuts),
with one of these contexts:

    prefix            only the prefix: the context of a left-to-right model
    text              suffix and prefix, without sentinels: the same text, for a model without FIM
    PSM               PRE prefix SUF suffix MID
    SPM               PRE SUF suffix MID prefix

Bavarian et al. (arXiv 2207.14255) find no cost at any rate up to 0.9, and a gain that grows with
the rate.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from papers.claims import Claim, against, below, same, shown, stated
from papers.corpus import VOCAB_SIZE, Corpus
from papers.run import Run
from papers.runs import Result, Scale, by_name, paired, plot_over_steps, probed, scores
from papers.settings import Setting

TITLE = "Fill-in-the-middle"
EQUAL = (
    "model, initial weights, samples (whole files, with room for sentinels), their order, "
    "optimizer, learning rates and steps; sentinels take the place of padding"
)
PAPER = "FIM, arXiv 2207.14255"
NONE, HALF, MOST = "no FIM", "FIM, rate 0.5", "FIM, rate 0.9"
RATES = {NONE: 0.0, HALF: 0.5, MOST: 0.9}
SENTINELS = {"prefix": VOCAB_SIZE, "suffix": VOCAB_SIZE + 1, "middle": VOCAB_SIZE + 2}
GIVEN = ("prefix", "text", "PSM", "SPM")


def runs(scale: Scale) -> list[Run]:
    """Return the runs of all rates and seeds."""
    capacity = scale.pick(cpu=2048, gpu=8192)
    corpus = Corpus(
        domain="code", min_bytes=100, max_bytes=scale.pick(cpu=2_000, gpu=16_000),
        train_bytes=scale.pick(cpu=1_500_000, quick=100_000, gpu=20_000_000),
        valid_bytes=scale.pick(cpu=100_000, quick=10_000, gpu=500_000),
    )  # fmt: skip
    steps = scale.pick(cpu=320, quick=4, gpu=300)
    config = Setting(scale).config(steps=steps, attention="document")
    config["model"]["vocab_size"] = VOCAB_SIZE + len(SENTINELS)
    base = Run(
        recipe="fim", corpus=corpus, strategy="best_fit_decreasing", buckets=(capacity,),
        parameters={"fim_room": len(SENTINELS)}, config=config, validate={"documents": corpus},
        valid_bucket=capacity, evaluate_every=max(1, steps // 3), probe="papers.given:middle",
    )  # fmt: skip
    arms = {n: {"fim": {"rate": rate, "sentinels": SENTINELS}} for n, rate in RATES.items()}
    return paired(base, arms, scale.seeds(5))


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per rate: perplexity from left to right, and of middles by context."""
    arms, whole = by_name(results), scores(results)
    return [
        {
            "arm": name,
            **against(whole[name], whole[NONE]),
            **{f"middle_given_{given}": shown(probed(group, given)) for given in GIVEN},
        }
        for name, group in arms.items()
    ]


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims: no cost from left to right, better middles."""
    arms, whole = by_name(results), scores(results)
    by_given = {given: {n: probed(g, given) for n, g in arms.items()} for given in GIVEN}
    probe = results[0].summary["probe"]
    why = f"middles of {probe['files']} held-out files, {probe['tokens']:,} tokens"
    free = "whole held-out files from left to right; the same samples in the same order"
    psm, spm = by_given["PSM"], by_given["SPM"]
    middle = partial(stated, kind=below, what="perplexity of middles", why=why, source=PAPER)
    return [
        *(
            stated(whole, same, name, NONE,
                   f"{name}: reading from left to right costs nothing (within 1 %)", within=0.01,
                   source=PAPER, paper="no cost up to 0.9, at equal tokens", why=free)
            for name in (HALF, MOST)
        ),
        middle({HALF: psm[HALF], NONE: by_given["prefix"][NONE]}, one=HALF, other=NONE,
               claim="given prefix and suffix, FIM fills in better than a model without it that is "
               "given the prefix", paper="infilling is learned"),
        middle({HALF: psm[HALF], NONE: by_given["text"][NONE]}, one=HALF, other=NONE,
               claim="and better than a model without it that reads the same text, suffix first",
               source="this project"),
        middle({"PSM": psm[HALF], "prefix": by_given["prefix"][HALF]}, one="PSM", other="prefix",
               claim="a model with FIM fills in better when it sees the suffix", paper=""),
        middle({"SPM": spm[HALF], "PSM": psm[HALF]}, one="SPM", other="PSM",
               claim="suffix first (SPM) fills in better than PSM", paper="slightly better"),
        middle(psm, one=MOST, other=HALF, claim="rate 0.9 fills in better than 0.5",
               paper="the higher the rate, the better"),
    ]  # fmt: skip


def plots(results: list[Result], folder: Path) -> None:
    """Plot the held-out perplexity from left to right over the steps."""
    what = "perplexity of held-out files from left to right"
    plot_over_steps(folder / "fim_documents.png", results, y=what)

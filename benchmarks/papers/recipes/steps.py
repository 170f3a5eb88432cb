"""Steps of one bucket, equal work for all ranks, a loss that weighs tokens: each on and off.

BucketLLM (5.3) puts the data of all GPUs in one bucket at every step, "facilitating efficient
training". Times are the forward and backward of each of four ranks (``papers.ranks``); a step lasts
as long as its slowest rank. Losses are from training with four micro batches per step, which is the
same computation as one micro batch on each of four ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from papers import ranks
from papers.claims import Claim, against, below, same, shown, stated
from papers.run import Run
from papers.runs import Result, Scale, by_name, lines, paired, perplexities
from papers.settings import Setting

TITLE = "Steps: buckets, dealing, weights of the loss"
EQUAL = (
    "model, initial weights, documents, optimizer, tokens per step and steps; lines that are "
    "compared have the same samples"
)
ON, ANY, MEANS = "one bucket, tokens weigh equally (default)", "any buckets", "ranks weigh equally"
PADDED, PADDED_MEANS = "padded, tokens weigh equally", "padded, ranks weigh equally"


def runs(scale: Scale) -> list[Run]:
    """Return the runs of five ways to make a step and all seeds; the first also measures times."""
    setting = Setting(scale)
    largest = setting.ladder[-1]
    step = ranks.NUM_RANKS * largest
    sizes = {"tokens_per_step": step, "micro_batch_tokens": largest}
    base = Run(
        recipe="steps", corpus=setting.corpus, strategy="bucket", buckets=setting.ladder,
        config=setting.config(steps=scale.pick(cpu=200, quick=1, gpu=30), **sizes),
        validate={"documents": setting.corpus}, valid_bucket=largest,
    )  # fmt: skip
    mixed = {"mix": "micro_step", "micro_step_tokens": largest}
    padded = {"strategy": "pad", "buckets": setting.ladder[-2:-1]}
    means = {"change": "papers.ranks:mean_of_ranks"}
    arms: dict[str, dict[str, Any]] = {
        ON: {"probe": "papers.ranks:step_times"}, ANY: {"data": mixed}, MEANS: means,
        PADDED: padded, PADDED_MEANS: {**padded, **means},
    }  # fmt: skip
    return paired(base, arms, scale.seeds())


def spread(result: Result, arm: str) -> float:
    """Return the seconds of the slowest rank over the mean of all, mean of steps; 1 is perfect."""
    times = result.summary["probe"]["times"][arm]
    return fmean(max(step) / fmean(step) for step in times)


def step_seconds(result: Result, arm: str) -> float:
    """Return the seconds of a step, that is of its slowest rank, mean over the steps."""
    return fmean(max(step) for step in result.summary["probe"]["times"][arm])


def _work(timed: list[Result], arm: str) -> float | None:
    found = [r.summary["probe"]["work"].get(arm) for r in timed]
    return None if None in found else fmean(found)


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return rows of the times of steps, then of losses."""
    arms = by_name(results)
    timed = arms[ON]
    found: list[dict[str, Any]] = [
        {"arm": arm, "slowest_over_mean_rank": shown([spread(r, arm) for r in timed], 3)}
        | {"step_seconds": shown([step_seconds(r, arm) for r in timed], 3)}
        | {"busiest_over_mean_attention": _work(timed, arm)}
        for arm in ranks.ARMS
    ]
    for name, group in arms.items():
        base = arms[PADDED if name in (PADDED, PADDED_MEANS) else ON]
        padding = 100 * group[0].summary["index"]["padding_ratio"]
        change = against(perplexities(group), perplexities(base))
        found.append({"arm": name, "padding_%": padding, **change})
    return found


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims about the three switches: times and losses."""
    arms = by_name(results)
    return [*_times(arms[ON]), *_losses(arms)]


def _times(timed: list[Result]) -> list[Claim]:
    dealt, undealt = "masked, same bucket, equal work", "masked, same bucket, in order"

    state = partial(
        stated,
        {arm: [spread(result, arm) for result in timed] for arm in ranks.ARMS},
        what="slowest over mean rank",
        digits=3,
    )
    why = (
        f"seconds of forward and backward of {ranks.NUM_RANKS} ranks, every one measured; with "
        "equal shapes the figure is the noise of the clock"
    )
    differences = [float(r.summary["probe"]["gradient"]) for r in timed]
    rounding = {"fp32": 1e-5, "bf16": 2e-2}[timed[0].run.config["engine"]["precision"]]
    return [
        state(below, "whole samples, same bucket", "whole samples, any bucket",
              "one bucket for all ranks makes steps even (attention over whole samples)",
              source="BucketLLM 5.3", paper="facilitates efficient training, no figure", why=why),
        state(below, undealt, "masked, any bucket",
              "the same with attention inside documents, in order of the schedule",
              source="BucketLLM 5.3",
              why="with masks a sample costs what its documents cost; its bucket bounds that only"),
        state(below, dealt, undealt, "equal-work dealing makes steps of one bucket more even",
              beside=f"; of attention work, {_work(timed, dealt):.3f} against "
              f"{_work(timed, undealt):.3f}",
              why=f"{why}; what dealing evens out is attention work (exact, from the lengths), "
              "which is a part of these seconds only"),
        Claim(
            source="this project",
            claim=f"dealing changes no gradient (relative difference below {rounding:g})",
            paper="",
            measured=f"at most {max(differences):.1e}",
            agrees="yes" if max(differences) < rounding else "no",
            why="the gradient of one whole step under both dealings, rounding apart",
        ),
    ]  # fmt: skip


def _losses(arms: dict[str, list[Result]]) -> list[Claim]:
    state = partial(stated, {name: perplexities(group) for name, group in arms.items()})
    return [
        state(same, ON, ANY, "steps of one bucket cost no quality (within 1 %)", within=0.01,
              source="BucketLLM 5.3", paper="no figure",
              why=f"a step has {ranks.NUM_RANKS} samples of the longest bucket, the paper's at "
              "least 192: the fewer, the more the texts of a step resemble each other"),
        state(same, MEANS, ON,
              "with full samples the weight of the loss hardly matters (within 0.5 %)",
              within=0.005,
              why="micro batches of packed samples have nearly equal numbers of labels"),
        state(below, PADDED, PADDED_MEANS,
              "with padding, equal weights of tokens make a better model than means of ranks",
              why="the mean of a micro batch with few labels counts each of them more; perplexity "
              "weighs tokens equally"),
    ]  # fmt: skip


def plots(results: list[Result], folder: Path) -> None:
    """Plot the slowest over the mean rank of the first seed's steps, sorted."""
    times = by_name(results)[ON][0].summary["probe"]["times"]
    curves = {}
    for arm, steps in times.items():
        ratios = sorted(max(step) / fmean(step) for step in steps)
        curves[arm] = ([100 * i / max(1, len(ratios) - 1) for i in range(len(ratios))], ratios)
    x, y = "steps, % (from the most even to the least)", "seconds of the slowest rank over the mean"
    lines(folder / "steps_ranks.png", curves, x=x, y=y)

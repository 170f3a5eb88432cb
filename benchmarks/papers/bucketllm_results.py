"""What is read off the runs of the recipe on BucketLLM: contexts, speeds, times, claims."""

from __future__ import annotations

import itertools
from statistics import fmean, median

import numpy as np
from papers.claims import Claim, alike, less, shown, together
from papers.composition.bucketllm import SPEEDS
from papers.runs import Result, by_name

__all__ = [
    "CURRICULUM",
    "MASKED",
    "claims",
    "contexts",
    "seconds_in_all",
    "seconds_to",
    "speed_by_bucket",
    "time_ratios",
]

MASKED = "bucket, documents masked"
CURRICULUM = "DD, short first (grow-P2, 8 cycles)"


def contexts(result: Result) -> dict[int, float]:
    """Context length -> perplexity of the long documents."""
    found = result.summary["contexts"]
    return {int(context): float(value["perplexity"]) for context, value in found.items()}


def speed_by_bucket(result: Result) -> dict[int, float]:
    """Capacity -> tokens per second, of the median step after the first of its bucket."""
    steps: dict[int, list[float]] = {}
    for line in result.log():
        steps.setdefault(line["capacity"], []).append(line["tokens"] / line["seconds"])
    return {capacity: median(found[1:] or found) for capacity, found in sorted(steps.items())}


def seconds_to(result: Result, perplexity: float) -> float:
    """Seconds of training until the validation perplexity is that low; infinite if it never is.

    Each step counts with the median speed of its bucket, so that what else the machine does at a
    moment does not decide; between two evaluations the logarithm of the perplexity is a line.
    """
    speed = speed_by_bucket(result)
    log = result.log()
    elapsed = np.cumsum([line["tokens"] / speed[line["capacity"]] for line in log])
    points = [(elapsed[line["step"] - 1], np.log(line["perplexity"])) for line in
              result.evaluations()]  # fmt: skip
    target = np.log(perplexity) + 1e-9
    for i, (seconds, value) in enumerate(points):
        if value > target:
            continue
        if i == 0:
            return float(seconds)
        before, above = points[i - 1]
        return float(before + (seconds - before) * (above - target) / (above - value))
    return float("inf")


def time_ratios(arm: list[Result], base: list[Result]) -> list[float]:
    """Time of ``arm`` over that of ``base`` to the higher of their final perplexities, by seed."""
    ratios = []
    for a, b in zip(arm, base, strict=True):
        target = max(a.perplexity("documents"), b.perplexity("documents"))
        ratios.append(seconds_to(a, target) / seconds_to(b, target))
    return ratios


def seconds_in_all(result: Result) -> float:
    """Of all steps, each at the median speed of its bucket."""
    speed = speed_by_bucket(result)
    return float(sum(line["tokens"] / speed[line["capacity"]] for line in result.log()))


def claims(results: list[Result]) -> list[Claim]:
    """Tables 2 and 3, Figure 3, and the time to equal loss."""
    arms = by_name(results)
    return [*_quality(arms), *_contexts(arms), *_speed(arms)]


def _perplexities(group: list[Result]) -> list[float]:
    return [result.perplexity("documents") for result in group]


def _quality(arms: dict[str, list[Result]]) -> list[Claim]:
    ladder = list(contexts(arms["BucketLLM"][0]))
    step = int(arms["BucketLLM"][0].run.config["data"]["tokens_per_step"])
    ours = _perplexities(arms["BucketLLM"])
    found = []
    accuracy = {"DD": 0.4223, "Fixed-2048": 0.4245, "Fixed-4096": 0.4204, "Fixed-8192": 0.4125}
    for name, figure in accuracy.items():
        theirs = _perplexities(arms[name])
        found.append(
            Claim(
                source="BucketLLM Table 2",
                claim=f"BucketLLM trains a better model than {name}",
                paper=f"accuracy 0.4359 against {figure}",
                measured=f"validation perplexity {shown(ours)} against {shown(theirs)}",
                agrees=less(ours, theirs),
                why="same tokens and steps, paired seeds, each document scored by itself, most of "
                "them short; perplexity stands for the accuracy of tasks, lengths of "
                f"{ladder[0]} to {ladder[-1]} for 1,024 to 16,384; a step holds "
                f"{step // ladder[-1]} samples of the longest bucket, the paper's at least 192",
            )
        )
    drawn, grown = _perplexities(arms["DD"]), _perplexities(arms[CURRICULUM])
    v0, default = _perplexities(arms["BucketLLM-v0"]), _perplexities(arms["bucket"])
    found += [
        Claim(
            source="BucketLLM 4",
            claim="BucketLLM and v0 train equally good models (within 1 %)",
            paper="Table 1 compares their composition only",
            measured=f"validation perplexity {shown(ours)} against {shown(v0)}",
            agrees=alike(ours, v0, within=0.01),
            why="they place nearly all documents alike: what differs is the last percent",
        ),
        Claim(
            source="Dataset Decomposition",
            claim="its curriculum grow-P2 trains a better model than random order",
            paper="better, in arXiv 2405.13226; BucketLLM does not say which it compares with",
            measured=f"validation perplexity {shown(grown)} against {shown(drawn)}",
            agrees=less(grown, drawn),
            why="the same samples; what differs is when the lengths come",
        ),
        Claim(
            source="this project",
            claim="bucket, the default here, is as good as BucketLLM (within 1 %)",
            paper="",
            measured=f"validation perplexity {shown(default)} against {shown(ours)}",
            agrees=alike(default, ours, within=0.01),
            why="same attention over whole samples in both",
        ),
        Claim(
            source="this project",
            claim="attention inside documents makes bucket better",
            paper="",
            measured=f"validation perplexity {shown(_perplexities(arms[MASKED]))} against "
            f"{shown(default)}",
            agrees=less(_perplexities(arms[MASKED]), default),
            why="the same samples in the same order; see the recipe on masking",
        ),
    ]
    return found


def _contexts(arms: dict[str, list[Result]]) -> list[Claim]:
    by_arm = {name: [contexts(result) for result in group] for name, group in arms.items()}
    longest = max(by_arm["BucketLLM"][0])
    shortest = min(by_arm["BucketLLM"][0])

    def at(name: str, context: int) -> list[float]:
        return [found[context] for found in by_arm[name]]

    trained = next(iter(speed_by_bucket(arms["Fixed-2048"][0])))
    why = "the same tokens are scored at every context, of long held-out documents only"
    found = [
        Claim(
            source="BucketLLM Figure 3",
            claim="Fixed-2048 degrades beyond its training length",
            paper="rapidly degrading perplexity",
            measured=f"perplexity {shown(at('Fixed-2048', trained))} at {trained} tokens of "
            f"context, {shown(at('Fixed-2048', longest))} at {longest}",
            agrees=less(at("Fixed-2048", trained), at("Fixed-2048", longest)),
            why=why,
        )
    ]
    for other in ("Fixed-2048", "Fixed-4096", "Fixed-8192"):
        for context in (shortest, longest):
            ours, theirs = at("BucketLLM", context), at(other, context)
            found.append(
                Claim(
                    source="BucketLLM Figure 3",
                    claim=f"BucketLLM is below {other} at {context} tokens of context",
                    paper="lowest for short and long contexts",
                    measured=f"perplexity {shown(ours)} against {shown(theirs)}",
                    agrees=less(ours, theirs),
                    why=why,
                )
            )
    return found


def _speed(arms: dict[str, list[Result]]) -> list[Claim]:
    speeds = [speed_by_bucket(result) for result in arms["BucketLLM"]]
    ladder = sorted(speeds[0])
    usual = ladder[-2]
    relative = {n: [100 * (s[n] / s[usual] - 1) for s in speeds] for n in ladder}
    ratios = time_ratios(arms["BucketLLM"], arms["Fixed-8192"])
    return [
        Claim(
            source="BucketLLM Table 3",
            claim="the shorter the bucket, the more tokens per second",
            paper=", ".join(f"{100 * (s / SPEEDS[8192] - 1):+.1f} %" for s in SPEEDS.values()),
            measured=", ".join(f"{fmean(found):+.1f} %" for found in relative.values())
            + f" at {', '.join(map(str, ladder))}",
            agrees=together(
                [
                    less([s[b] for s in speeds], [s[a] for s in speeds])
                    for a, b in itertools.pairwise(ladder)
                ]
            ),
            why="median step of each bucket in the runs themselves, attention over whole samples; "
            "how steep it is depends on the width of the model",
        ),
        Claim(
            source="BucketLLM 5.3",
            claim="BucketLLM needs less time than Fixed-8192 to equal loss",
            paper="accelerates training, no figure",
            measured=f"{shown(ratios)} times as long",
            agrees=less(ratios, [1.0] * len(ratios)),
            why="to the higher of the two final validation perplexities, every step at the median "
            "speed of its bucket",
        ),
    ]

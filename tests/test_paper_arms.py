"""Every claim of a recipe compares the two arms that its words name: swapped arms change it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from papers import ranks
from papers.recipes import bucketllm, fim, groups, masking, packing, repetition, steps
from papers.recipes.bucketllm import CURRICULUM, MASKED
from papers.recipes.masking import (
    ACROSS,
    CLASSIC,
    DEFAULT,
    LABELS,
    LEARNED,
    LEARNED_UNBROKEN,
    RESTARTED,
    UNBROKEN,
)
from papers.recipes.packing import (
    CLASSIC_LLM,
    CLASSIC_ONE,
    CONCAT,
    CONCAT_SHORT,
    FIT,
    FIT_CUT,
    FIT_SHORT,
    MIXED,
    ONE,
)
from papers.recipes.repetition import FOUR, FRESH, FRESH_FOUR, ONCE, QUARTER, SIXTEEN
from papers.recipes.steps import ANY, MEANS, ON, PADDED, PADDED_MEANS
from papers.runs import SCALES, Result, Run

pytestmark = pytest.mark.pages

SEEDS = (0, 1, 2, 3)
LENGTHS = (64, 128)
Values = dict[str, float]

# What must hold for "yes": the first arm lies below the second one.
BELOW: dict[ModuleType, dict[str, tuple[str, str]]] = {
    masking: {
        "attention across documents makes a worse model": (UNBROKEN, ACROSS),
        "a trained label at the boundary makes a worse model": (DEFAULT, LABELS),
        "all masks together make a better model than none": (DEFAULT, CLASSIC),
        "restarting positions without masking attention does not help": (ACROSS, RESTARTED),
        "learned positions: restarting them is better": (LEARNED, LEARNED_UNBROKEN),
    },
    bucketllm: {
        **{
            f"BucketLLM trains a better model than {name}": ("BucketLLM", name)
            for name in ("DD", "Fixed-2048", "Fixed-4096", "Fixed-8192")
        },
        **{
            f"BucketLLM is below {name} at {length} ": ("BucketLLM", name)
            for name in ("Fixed-2048", "Fixed-4096", "Fixed-8192")
            for length in LENGTHS
        },
        "its curriculum grow-P2": (CURRICULUM, "DD"),
        "attention inside documents makes bucket better": (MASKED, "bucket"),
    },
    packing: {
        "best fit makes a better model than concatenation": (FIT, CONCAT),
        "with masks longer samples are better": (CONCAT, CONCAT_SHORT),
        "whole documents do better when some are cut": (FIT_CUT, FIT),
        "several buckets in a step make a better model than one": (MIXED, ONE),
        "masks make bucket better": (ONE, CLASSIC_ONE),
        "without masks bucket makes a better model": (CLASSIC_ONE, packing.CLASSIC),
        "BucketLLM makes a better model than concat of 8k": (CLASSIC_LLM, packing.CLASSIC),
    },
    steps: {
        "with padding, equal weights of tokens make a better model": (PADDED, PADDED_MEANS),
        "one bucket for all ranks makes steps even": (
            "whole samples, same bucket",
            "whole samples, any bucket",
        ),
        "the same with attention inside documents": (
            "masked, same bucket, in order",
            "masked, any bucket",
        ),
        "equal-work dealing makes steps of one bucket more even": (
            "masked, same bucket, equal work",
            "masked, same bucket, in order",
        ),
    },
    groups: {
        "a model of folders that is given the files before": (groups.GROUPS, groups.DEFAULT),
        "given the files before, a model of folders": (groups.GROUPS, groups.DEFAULT),
        "it is the folder": (groups.GROUPS, groups.STRANGERS),
        "attention across strangers makes": (groups.DEFAULT, groups.STRANGERS),
    },
    repetition: {
        "16 epochs of files are worse": (FRESH, SIXTEEN),
        "files repeated 4 times are better": (FOUR, ONCE),
        "files repeated 16 times are better": (SIXTEEN, FOUR),
        "four times as many files": (QUARTER, SIXTEEN),
        "what files get by repetition": (ONCE, SIXTEEN),
    },
    fim: {
        "given prefix and suffix, FIM fills in better": (fim.HALF, fim.NONE),
        "and better than a model without it": (fim.HALF, fim.NONE),
        "rate 0.9 fills in better": (fim.MOST, fim.HALF),
    },
}
# What must hold for "yes": both arms are alike.
ALIKE: dict[ModuleType, dict[str, tuple[str, str]]] = {
    masking: {
        "masking attention changes less than": (UNBROKEN, ACROSS),
        "with RoPE and masked attention positions need not restart": (UNBROKEN, DEFAULT),
    },
    bucketllm: {
        "BucketLLM and v0 train equally good models": ("BucketLLM", "BucketLLM-v0"),
        "bucket, the default here, is as good as BucketLLM": ("bucket", "BucketLLM"),
    },
    packing: {
        "whole documents (best_fit, 16k) do as well": (FIT, CONCAT),
        "the same with samples of 4k": (FIT_SHORT, CONCAT_SHORT),
        "bucket with mixed steps does as well as concat": (MIXED, CONCAT),
        "bucket with mixed steps does as well as best_fit": (MIXED, FIT),
    },
    steps: {
        "steps of one bucket cost no quality": (ON, ANY),
        "with full samples the weight of the loss hardly matters": (MEANS, ON),
    },
    groups: {
        "read alone, a file loses nothing": (groups.GROUPS, groups.DEFAULT),
        "behind masks between documents grouping": (groups.MASKED, groups.DEFAULT),
    },
    repetition: {
        "4 epochs of files are as good as that many fresh ones, 1/8": (FOUR, FRESH_FOUR),
        "4 epochs of files are as good as that many fresh ones, 1/2": (QUARTER, FRESH),
    },
    fim: {
        "FIM, rate 0.5: reading from left": (fim.HALF, fim.NONE),
        "FIM, rate 0.9: reading from left": (fim.MOST, fim.NONE),
    },
}
CASES_BELOW = [(r, claim, *arms) for r, found in BELOW.items() for claim, arms in found.items()]
CASES_ALIKE = [(r, claim, *arms) for r, found in ALIKE.items() for claim, arms in found.items()]
# Claims that compare no two arms: one arm with itself, times, an exact figure.
OTHERS = {
    "Fixed-2048 degrades beyond its training length",
    "the shorter the bucket, the more tokens per second",
    "BucketLLM needs less time than Fixed-8192 to equal loss",
    "dealing changes no gradient",
    "a model of folders reads a file better behind others",
    "a model with FIM fills in better when it sees the suffix",
    "suffix first (SPM) fills in better than PSM",
}


class Written(Result):
    """A result whose logs the test wrote."""

    def log(self) -> list[dict[str, Any]]:
        return [
            {"capacity": length, "tokens": 100, "seconds": 100 / length, "step": step}
            for step, length in enumerate(LENGTHS * 4)
        ]

    def evaluations(self) -> list[dict[str, Any]]:
        return [{"step": 8, "perplexity": self.perplexity("documents")}]


def _written(run: Run, value: float, probe: Values) -> Result:
    """One arm at one seed; what seeds share moves all arms alike."""
    scores = {"perplexity": value * (1 + 0.001 * run.seed)}
    steps = {arm: [[1.0, 1.0, 1.0, slow * (1 + 0.001 * run.seed)]] for arm, slow in probe.items()}
    summary = {
        "valid": dict.fromkeys(run.validate, scores),
        "contexts": {str(length): scores for length in LENGTHS},
        "index": {"padding_ratio": 0.0},
        "probe": {
            **{"times": steps, "work": dict.fromkeys(probe, 1.0), "gradient": 0.0},
            **dict.fromkeys(("alone", "behind", *fim.GIVEN), scores["perplexity"]),
            **{"files": 1, "tokens": 100},
        },
    }
    return Written(run, Path(), summary)


def _verdicts(recipe: ModuleType, values: Values, others: float) -> dict[str, str | None]:
    """Claim -> verdict, where the arms of ``values`` have these and all others ``others``."""
    probe = {arm: values.get(arm, others) for arm in ranks.ARMS}
    first = [run for run in recipe.runs(SCALES["quick"]) if run.seed == 0]
    results = [
        _written(dataclasses.replace(run, seed=seed), values.get(run.name, others), probe)
        for run in first
        for seed in SEEDS
    ]
    return {claim.claim: claim.agrees for claim in recipe.claims(results)}


def _one(verdicts: dict[str, str | None], claim: str) -> str | None:
    (found,) = (verdict for words, verdict in verdicts.items() if words.startswith(claim))
    return found


@pytest.mark.parametrize("others", [9.0, 12.0], ids=["others below", "others above"])
@pytest.mark.parametrize(
    ("recipe", "claim", "low", "high"), CASES_BELOW, ids=[case[1] for case in CASES_BELOW]
)
def test_swapped_arms_turn_the_verdict_round(
    recipe: ModuleType, claim: str, low: str, high: str, others: float
) -> None:
    """With the others on either side, a third arm in the place of one of the two shows as well."""
    assert _one(_verdicts(recipe, {low: 10.0, high: 11.0}, others), claim) == "yes"
    assert _one(_verdicts(recipe, {low: 11.0, high: 10.0}, others), claim) == "no"


@pytest.mark.parametrize(
    ("recipe", "claim", "one", "other"), CASES_ALIKE, ids=[case[1] for case in CASES_ALIKE]
)
def test_arms_that_are_to_be_alike_are_these_two(
    recipe: ModuleType, claim: str, one: str, other: str
) -> None:
    assert _one(_verdicts(recipe, {one: 10.0, other: 10.0}, 12.0), claim) == "yes"
    assert _one(_verdicts(recipe, {one: 10.0, other: 12.0}, 12.0), claim) == "no"
    assert _one(_verdicts(recipe, {one: 12.0, other: 10.0}, 12.0), claim) == "no"


@pytest.mark.parametrize("recipe", BELOW, ids=[recipe.__name__ for recipe in BELOW])
def test_every_claim_of_a_recipe_is_tested_here(recipe: ModuleType) -> None:
    tested = [*BELOW[recipe], *ALIKE[recipe], *OTHERS]
    claims = _verdicts(recipe, {}, 10.0)
    assert not [claim for claim in claims if not claim.startswith(tuple(tested))]

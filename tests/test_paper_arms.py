"""Arms of a recipe differ only in allowed settings; claims compare the arms they name."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from papers import ranks
from papers.recipes import bucketllm, fim, groups, masking, packing, repetition, steps
from papers.run import Run
from papers.runs import SCALES, Result, Scale

from megapack.packing import STRATEGIES

pytestmark = pytest.mark.pages

SEEDS = (0, 1, 2, 3)
LENGTHS = (64, 128)
Values = dict[str, float]

# What must hold for "yes": the first arm lies below the second one. An arm is told by its name, or
# by that of the recipe's constant.
BELOW: dict[ModuleType, dict[str, tuple[str, str]]] = {
    masking: {
        "attention across documents makes a worse model": ("UNBROKEN", "ACROSS"),
        "a trained label at the boundary makes a worse model": ("DEFAULT", "LABELS"),
        "all masks together make a better model than none": ("DEFAULT", "CLASSIC"),
        "restarting positions without masking attention does not help": ("ACROSS", "RESTARTED"),
        "learned positions: restarting them is better": ("LEARNED", "LEARNED_UNBROKEN"),
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
        "its curriculum grow-P2": ("CURRICULUM", "DD"),
        "attention inside documents makes bucket better": ("MASKED", "bucket"),
    },
    packing: {
        "best fit makes a better model than concatenation": ("FIT", "CONCAT"),
        "with masks longer samples are better": ("CONCAT", "CONCAT_SHORT"),
        "whole documents do better when some are cut": ("FIT_CUT", "FIT"),
        "several buckets in a step make a better model than one": ("MIXED", "ONE"),
        "masks make bucket better": ("ONE", "CLASSIC_ONE"),
        "without masks bucket makes a better model": ("CLASSIC_ONE", "CLASSIC"),
        "BucketLLM makes a better model than concat of 8k": ("CLASSIC_LLM", "CLASSIC"),
    },
    steps: {
        "with padding, equal weights of tokens make a better model": ("PADDED", "PADDED_MEANS"),
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
        "a model trained on folders, with earlier files in view": ("GROUPS", "DEFAULT"),
        "with earlier files in view, a model trained on folders": ("GROUPS", "DEFAULT"),
        "the relation matters": ("GROUPS", "STRANGERS"),
        "attention across unrelated files makes": ("DEFAULT", "STRANGERS"),
    },
    repetition: {
        "16 epochs of files are worse": ("FRESH", "SIXTEEN"),
        "files repeated 4 times are better": ("FOUR", "ONCE"),
        "files repeated 16 times are better": ("SIXTEEN", "FOUR"),
        "four times as many files": ("QUARTER", "SIXTEEN"),
        "what files get by repetition": ("ONCE", "SIXTEEN"),
    },
    fim: {
        "given prefix and suffix, FIM fills in better": ("HALF", "NONE"),
        "and better than a model without it": ("HALF", "NONE"),
        "rate 0.9 fills in better": ("MOST", "HALF"),
    },
}
# What must hold for "yes": both arms are alike.
ALIKE: dict[ModuleType, dict[str, tuple[str, str]]] = {
    masking: {
        "masking attention changes less than": ("UNBROKEN", "ACROSS"),
        "with RoPE and masked attention positions need not restart": ("UNBROKEN", "DEFAULT"),
    },
    bucketllm: {
        "BucketLLM and v0 train equally good models": ("BucketLLM", "BucketLLM-v0"),
        "bucket, the default here, is as good as BucketLLM": ("bucket", "BucketLLM"),
    },
    packing: {
        "whole documents (best_fit, 16k) do as well": ("FIT", "CONCAT"),
        "the same with samples of 4k": ("FIT_SHORT", "CONCAT_SHORT"),
        "bucket with mixed steps does as well as concat": ("MIXED", "CONCAT"),
        "bucket with mixed steps does as well as best_fit": ("MIXED", "FIT"),
    },
    steps: {
        "steps of one bucket cost no quality": ("ON", "ANY"),
        "with full samples the weight of the loss hardly matters": ("MEANS", "ON"),
    },
    groups: {
        "read alone, a file loses nothing": ("GROUPS", "DEFAULT"),
        "behind masks between documents grouping": ("MASKED", "DEFAULT"),
    },
    repetition: {
        "4 epochs of files are as good as that many fresh ones, 1/8": ("FOUR", "FRESH_FOUR"),
        "4 epochs of files are as good as that many fresh ones, 1/2": ("QUARTER", "FRESH"),
    },
    fim: {
        "FIM, rate 0.5: reading from left": ("HALF", "NONE"),
        "FIM, rate 0.9: reading from left": ("MOST", "NONE"),
    },
}
CASES = [
    (recipe, claim, *(getattr(recipe, arm, arm) for arm in arms), kind is ALIKE)
    for kind in (BELOW, ALIKE)
    for recipe, found in kind.items()
    for claim, arms in found.items()
]
# Claims that do not compare two arms: one arm with itself, times, an exact figure.
OTHERS = {
    "Fixed-2048 degrades beyond its training length",
    "the shorter the bucket, the more tokens per second",
    "BucketLLM needs less time than Fixed-8192 to equal loss",
    "dealing changes no gradient",
    "a model trained on folders predicts a file better after others",
    "a model with FIM fills in better when it sees the suffix",
    "suffix first (SPM) fills in better than PSM",
}


class Written(Result):
    """Result with invented logs: two buckets, the long one half as fast."""

    def log(self) -> list[dict[str, Any]]:
        return [
            {"capacity": length, "tokens": 100, "seconds": 100 / speed, "step": step}
            for step, (length, speed) in enumerate(zip(LENGTHS * 4, (100, 50) * 4, strict=True))
        ]

    def evaluations(self) -> list[dict[str, Any]]:
        last = self.perplexity("documents")
        return [{"step": 4, "perplexity": 4 * last}, {"step": 8, "perplexity": last}]


def _written(run: Run, value: float, probe: Values) -> Result:
    """Return one arm at one seed; the seed shifts all arms equally."""
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
    """Return claim -> verdict; arms have their value in ``values``, or ``others``."""
    probe = {arm: values.get(arm, others) for arm in ranks.ARMS}
    first = [run for run in recipe.runs(SCALES["quick"]) if run.seed == 0]
    results = [
        _written(dataclasses.replace(run, seed=seed), values.get(run.name, others), probe)
        for run in first
        for seed in SEEDS
    ]
    return {claim.claim: claim.agrees for claim in recipe.claims(results)}


@pytest.mark.parametrize(
    ("recipe", "claim", "one", "other", "is_alike"), CASES, ids=[case[1] for case in CASES]
)
def test_claim_is_decided_by_the_two_arms_that_it_names(
    recipe: ModuleType, claim: str, one: str, other: str, is_alike: bool
) -> None:
    """The other arms are above or below, so that comparing a wrong arm fails the test."""
    below, above = (10.0, 10.0 if is_alike else 11.0), (12.0 if is_alike else 11.0, 10.0)
    for others in (9.0, 12.0):
        for values, verdict in ((below, "yes"), (above, "no")):
            found = _verdicts(recipe, dict(zip((one, other), values, strict=True)), others)
            (agrees,) = (agrees for words, agrees in found.items() if words.startswith(claim))
            assert agrees == verdict


@pytest.mark.parametrize("recipe", BELOW, ids=[recipe.__name__ for recipe in BELOW])
def test_every_claim_of_a_recipe_is_tested_here(recipe: ModuleType) -> None:
    tested = [*BELOW[recipe], *ALIKE[recipe], *OTHERS]
    claims = _verdicts(recipe, {}, 10.0)
    assert not [claim for claim in claims if not claim.startswith(tuple(tested))]


# Settings that an arm may change.
SWITCHES = {
    bucketllm: {"strategy", "buckets", "parameters", "config.data"},
    masking: {"config.data", "config.model"},
    packing: {"strategy", "buckets", "config.data", "corpus"},
    steps: {"strategy", "buckets", "config.data", "change", "probe"},
    groups: {"groups", "config.data"},
    repetition: {"corpus", "max_epochs"},
    fim: {"fim"},
}


def _flat(run: Run) -> dict[str, Any]:
    """Return the fields of a run, with those of its configuration flattened."""
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    config = fields.pop("config")
    return {**fields, **{f"config.{name}": value for name, value in config.items()}}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("recipe", SWITCHES, ids=[recipe.__name__ for recipe in SWITCHES])
def test_arms_have_the_same_seeds_and_differ_only_in_their_switches(
    recipe: ModuleType, scale: Scale
) -> None:
    runs = recipe.runs(scale)
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.name, []).append(run)
    assert len(by_arm) >= 3
    first = _flat(runs[0])
    seeds = [run.seed for run in by_arm[runs[0].name]]
    assert seeds == list(range(len(seeds))) and len(seeds) == (scale.num_seeds or len(seeds))
    asked = recipe.runs(dataclasses.replace(scale, num_seeds=2))  # SEEDS=2
    assert {run.seed for run in asked} == {0, 1}
    assert {run.strategy for run in runs} <= STRATEGIES.keys()
    for group in by_arm.values():
        assert [run.seed for run in group] == seeds, run.name
        for run in group:
            differing = {key for key, value in _flat(run).items() if value != first[key]}
            assert differing <= SWITCHES[recipe] | {"name", "seed"}, run.name
            for size in ("tokens_per_step", "micro_batch_tokens"):
                assert run.config["data"][size] == first["config.data"][size]
    contents = [
        str({k: v for k, v in _flat(run).items() if k not in ("name", "probe")}) for run in runs
    ]
    assert len(set(contents)) == len(runs), "two arms are the same run"


def test_time_to_equal_loss_lies_on_the_line_between_two_evaluations() -> None:
    result = _written(bucketllm.runs(SCALES["quick"])[0], 25.0, {})
    assert bucketllm.speed_by_bucket(result) == {64: 100.0, 128: 50.0}
    for perplexity, seconds in ((100.0, 6.0), (50.0, 9.0), (25.0, 12.0), (24.0, math.inf)):
        assert bucketllm.seconds_to(result, perplexity) == pytest.approx(seconds)

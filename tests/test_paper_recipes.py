"""The recipes on buckets, masks and steps: arms differ in their switch only, and each one runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack.packing.strategies import STRATEGIES

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from papers import corpus
from papers import runs as harness
from papers.corpus import Corpus
from papers.ranks import mean_of_ranks
from papers.recipes import bucketllm, fim, groups, masking, packing, repetition, steps
from papers.runs import SCALES, Result, Run, run_all, worker_pool

pytestmark = pytest.mark.pages

RECIPES = {
    "bucketllm": bucketllm,
    "masking": masking,
    "packing": packing,
    "steps": steps,
    "groups": groups,
    "repetition": repetition,
    "fim": fim,
}
# What an arm may change, and nothing else.
SWITCHES = {
    "bucketllm": {"strategy", "buckets", "parameters", "config.data"},
    "masking": {"config.data", "config.model"},
    "packing": {"strategy", "buckets", "config.data", "corpus"},
    "steps": {"strategy", "buckets", "config.data", "change", "probe"},
    "groups": {"groups", "config.data"},
    "repetition": {"corpus", "max_epochs"},
    "fim": {"fim"},
}


def flat(run: Run) -> dict[str, Any]:
    """Fields of a run, those of its configuration one by one."""
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    config = fields.pop("config")
    return {**fields, **{f"config.{name}": value for name, value in config.items()}}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_arms_have_the_same_seeds_and_differ_only_in_their_switches(name: str, scale: Any) -> None:
    runs = RECIPES[name].runs(scale)
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.name, []).append(run)
    assert len(by_arm) >= 3
    first = flat(runs[0])
    seeds = [run.seed for run in by_arm[runs[0].name]]
    assert set(scale.seeds) <= set(seeds)
    assert {run.strategy for run in runs} <= STRATEGIES.keys()
    for group in by_arm.values():
        assert [run.seed for run in group] == seeds, run.name
        for run in group:
            differing = {key for key, value in flat(run).items() if value != first[key]}
            assert differing <= SWITCHES[name] | {"name", "seed"}, run.name
            for size in ("tokens_per_step", "micro_batch_tokens"):
                assert run.config["data"][size] == first["config.data"][size]
    contents = [
        str({k: v for k, v in flat(run).items() if k not in ("name", "probe")}) for run in runs
    ]
    assert len(set(contents)) == len(runs), "two arms are the same run"


class Written(Result):
    """A result with a log that the test wrote: two buckets, the long one half as fast."""

    def log(self) -> list[dict[str, Any]]:
        return [
            {"capacity": capacity, "tokens": 100, "seconds": 100 / speed, "step": step}
            for step, (capacity, speed) in enumerate([(64, 100), (128, 50)] * 4)
        ]

    def evaluations(self) -> list[dict[str, Any]]:
        return [{"step": 4, "perplexity": 100.0}, {"step": 8, "perplexity": 25.0}]


def test_time_to_equal_loss_lies_on_the_line_between_two_evaluations() -> None:
    run = bucketllm.runs(SCALES["quick"])[0]
    result = Written(run, Path(), {})
    assert bucketllm.speed_by_bucket(result) == {64: 100.0, 128: 50.0}
    assert bucketllm.seconds_to(result, 100.0) == pytest.approx(6.0)
    assert bucketllm.seconds_to(result, 50.0) == pytest.approx(9.0)
    assert bucketllm.seconds_to(result, 25.0) == pytest.approx(12.0)
    assert bucketllm.seconds_to(result, 24.0) == float("inf")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a tokenizer that is trained in a second."""
    for module in (corpus, harness):
        monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(corpus, "TOKENIZER_BYTES", 200_000)
    for cached in (corpus.prepare, corpus.tokenizer):
        cached.cache_clear()
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}")
    yield tmp_path
    for cached in (corpus.prepare, corpus.tokenizer):
        cached.cache_clear()


def tiny(run: Run) -> Run:
    """A few steps of a run, every length an eighth."""
    small = Corpus(
        domain="prose",
        train_bytes=30_000,
        valid_bytes=4_000,
        min_bytes=40,
        max_bytes=300,
        folders=run.corpus.folders,
    )
    sizes = {k: v // 8 for k, v in run.config["data"].items() if isinstance(v, int)}
    data = {**run.config["data"], **sizes}
    return dataclasses.replace(
        run,
        corpus=small,
        other=run.other and small,
        buckets=tuple(n // 8 for n in run.buckets),
        config={**run.config, "num_steps": 24, "data": data},
        validate=dict.fromkeys(run.validate, small),
        valid_bucket=run.valid_bucket // 8,
        contexts=tuple(n // 8 for n in run.contexts),
    )


def test_each_recipe_runs_measures_claims_and_draws(work: Path) -> None:
    runs = {
        name: [tiny(run) for run in recipe.runs(SCALES["quick"])]
        for name, recipe in RECIPES.items()
    }
    # One arm of each is trained; what is computed from arms takes its results for all of them.
    arms = (
        *("BucketLLM", masking.DEFAULT, packing.MIXED, steps.ON, groups.GROUPS, repetition.FOUR),
        fim.HALF,
    )
    chosen = [
        next(r for r in g if r.name == arm) for g, arm in zip(runs.values(), arms, strict=True)
    ]
    with worker_pool(1) as pool:
        trained = dict(zip(runs, run_all(chosen, pool), strict=True))
    for name, recipe in RECIPES.items():
        results = [dataclasses.replace(trained[name], run=run) for run in runs[name]]
        assert len(recipe.rows(results)) >= len(results)
        claims = recipe.claims(results)
        assert len(claims) >= 7
        compared = [claim for claim in claims if "gradient" not in claim.claim]
        assert {claim.agrees for claim in compared} == {"undecided"}, "one seed decides nothing"
        recipe.plots(results, work / "figures")
    assert len(list((work / "figures").glob("*.png"))) == 9
    probe = trained["steps"].summary["probe"]
    assert probe["gradient"] < 1e-5
    assert all(len(step) == 4 for times in probe["times"].values() for step in times)


def test_the_means_of_ranks_weigh_every_micro_batch_equally() -> None:
    batch = {
        "labels": torch.tensor([[5, -100, 7, -100]]),
        "num_micro_steps": 4,
        "num_step_label_tokens": 999,
    }
    changed = mean_of_ranks(batch)
    assert changed["num_step_label_tokens"] == 2 * 4
    assert batch["num_step_label_tokens"] == 999

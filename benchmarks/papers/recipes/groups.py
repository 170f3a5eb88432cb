"""Do files of a folder in one sample, each attending to earlier ones, improve a model, and when?

A group is the folder of a file; whole folders are held out. One pair of arms compares the feature
with the default; two others are controls: grouping alone (masks hide other documents), and
attention across documents alone (shuffled ids, so that neighbors are unrelated). All held-out files
are scored alone; files that follow others of their folder are also scored with these in view. Two
arms are always compared on the same files and tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.claims import Claim, against, below, difference, same, shown, stated
from papers.corpus import Corpus
from papers.run import Run
from papers.runs import Result, Scale, by_name, paired, plot_over_steps, probed, scores
from papers.settings import Setting

TITLE = "Files of a folder in one sample"
EQUAL = (
    "model, initial weights, documents, strategy, optimizer, learning rates, tokens per step and "
    "steps (at most one epoch)"
)
GROUPS, DEFAULT = "folders, attention in groups", "files, attention in documents (the default)"
MASKED, STRANGERS = "folders, attention in documents", "shuffled ids, attention in groups"
STEP = 4  # samples per step; with one sample, the gradient would be that of a few files

ARMS: dict[str, dict[str, Any]] = {
    DEFAULT: {"groups": None, "data": {"attention": "document"}},
    GROUPS: {"groups": "folder", "data": {"attention": "group"}},
    MASKED: {"groups": "folder", "data": {"attention": "document"}},
    STRANGERS: {"groups": "shuffled", "data": {"attention": "group"}},
}


def runs(scale: Scale) -> list[Run]:
    """Return the runs of four groupings and all seeds."""
    corpus = Corpus(
        domain="code", train_bytes=scale.pick(cpu=530_000, quick=150_000, gpu=20_000_000),
        valid_bytes=scale.pick(cpu=47_000, quick=15_000, gpu=500_000), min_bytes=100,
        max_bytes=scale.pick(cpu=1_500, gpu=16_000), folders=True,
    )  # fmt: skip
    steps = scale.pick(cpu=300, quick=4, gpu=200)
    capacity = scale.pick(cpu=1024, gpu=8192)
    sizes = {"tokens_per_step": STEP * capacity, "micro_batch_tokens": STEP * capacity}
    base = Run(
        recipe="groups", corpus=corpus, strategy="best_fit_decreasing", buckets=(capacity,),
        config=Setting(scale).config(steps=steps, **sizes), validate={"documents": corpus},
        valid_bucket=capacity, evaluate_every=max(1, steps // 3), probe="papers.given:behind",
    )  # fmt: skip
    return paired(base, ARMS, scale.seeds(5))


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per arm: perplexity of all files alone, and of files after others of their
    folder without and with these in view, with the change in per cent."""
    arms, whole = by_name(results), scores(results)
    found = []
    for name, group in arms.items():
        alone, behind = probed(group, "alone"), probed(group, "behind")
        gain = difference(behind, alone)
        found.append(
            {"arm": name, **against(whole[name], whole[DEFAULT])}
            | {"behind_others_alone": shown(alone), "behind_others_in_view": shown(behind)}
            | {"view_changes_%": 100 * gain.mean / fmean(alone)}
            | {"padding_%": 100 * group[0].summary["index"]["padding_ratio"]}
        )
    return found


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims about benefits and costs of groups, of grouping, and of attention."""
    arms, whole = by_name(results), scores(results)
    alone = {name: probed(group, "alone") for name, group in arms.items()}
    behind = {name: probed(group, "behind") for name, group in arms.items()}
    some = next(iter(results)).summary["probe"]
    files = f"{some['files']} held-out files behind others of a folder, {some['tokens']:,} tokens"
    state = partial(stated, what="perplexity")
    return [
        state({GROUPS: behind[GROUPS], DEFAULT: alone[DEFAULT]}, below, GROUPS, DEFAULT,
              "a model trained on folders, with earlier files in view, predicts a file better than "
              "a model trained on single files, with none in view",
              source="In-Context Pretraining, arXiv 2310.10638",
              paper="related documents in a context: lower perplexity",
              why=f"{files}; each arm as it was trained"),
        state(behind, below, GROUPS, DEFAULT,
              "with earlier files in view, a model trained on folders is better than one trained "
              "on single files",
              why=f"{files}, in view of both models"),
        state({GROUPS: behind[GROUPS], "alone": alone[GROUPS]}, below, GROUPS, "alone",
              "a model trained on folders predicts a file better after others of its folder than "
              "alone",
              why=f"{files}, with and without these in view"),
        state(behind, below, GROUPS, STRANGERS,
              "the relation matters: training with unrelated files in view helps less",
              why=f"{files}, in view of both models; the same number of documents to a group"),
        state(whole, same, GROUPS, DEFAULT,
              "groups do not worsen the perplexity of files alone (within 1 %)", within=0.01,
              why="all held-out files, each by itself, from position 0"),
        state(whole, same, MASKED, DEFAULT,
              "with masks between documents, grouping changes nothing (within 1 %)", within=0.01,
              why="all held-out files, each by itself; only which files share a step differs"),
        state(whole, below, DEFAULT, STRANGERS,
              "attention across unrelated files makes a model worse on single files",
              source="Blog 4.1", paper="learns spurious correlations, no figure",
              why="all held-out files, each by itself"),
    ]  # fmt: skip


def plots(results: list[Result], folder: Path) -> None:
    """Plot the held-out perplexity of files alone over the steps."""
    what = "perplexity of held-out files, each alone"
    plot_over_steps(folder / "groups_alone.png", results, y=what)

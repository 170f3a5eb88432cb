"""Compare packings at equal tokens: cut or whole documents, one or several buckets a step, masks.

No paper compares these with masks, but a user has to choose one: concatenate-and-chunk cuts
documents and mixes them in every step; best fit keeps them whole; buckets keep them whole and
decide which lengths a step has. With attention inside documents, all cost the same per token. A
label is the next token of its document, also after a cut, so no arm loses labels by its cuts. A
step has as many tokens as twelve samples of the longest bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from papers.claims import Claim, against, below, same, stated
from papers.recipes.bucketllm import long_documents, mean_contexts, mean_speed, plot_contexts
from papers.run import Run
from papers.runs import Result, Scale, by_name, lines, mean_evaluations, paired, scores
from papers.settings import WHOLE, Setting

TITLE = "Which packing, at equal tokens"
EQUAL = (
    "model, initial weights, documents, optimizer, learning rates, tokens per step and steps (not "
    "more than one epoch at SCALE=long); attention inside documents unless the line says without"
)
CONCAT, CONCAT_SHORT = "concat, 16k", "concat, 4k"
FIT, FIT_SHORT = "best_fit, 16k", "best_fit, 4k"
FIT_CUT = "best_fit, 16k, documents cut at random"
ONE, MIXED = "bucket, one per step", "bucket, mix: micro_step"
CLASSIC, CLASSIC_ONE = "concat, 8k, without masks", "bucket, one per step, without masks"
CLASSIC_LLM = "BucketLLM, without masks"
STEP = 12  # samples of the longest bucket
CUT = 0.2  # share of documents to cut; concat of 16k cuts about as many


def runs(scale: Scale) -> list[Run]:
    """Return the runs of ten packings and all seeds; at SCALE=long, of the first four packings."""
    setting = Setting(scale)
    ladder = setting.ladder
    largest, short, usual = ladder[-1:], ladder[2:3], ladder[3:4]
    micro = 2 * ladder[-1]
    mixed = {"mix": "micro_step", "micro_step_tokens": micro}
    usual_corpus = setting.corpus
    # A longer run needs more documents, so that no token is repeated.
    more = replace(usual_corpus, train_bytes=9_500_000)
    corpus = scale.pick(cpu=usual_corpus, gpu=usual_corpus, long=more)
    steps = scale.pick(cpu=40, quick=1, gpu=60, long=200)
    sizes = {"tokens_per_step": STEP * ladder[-1], "micro_batch_tokens": micro}
    base = Run(
        recipe="packing", corpus=corpus, strategy="bucket", buckets=ladder,
        config=setting.config(steps=steps, **sizes),
        validate={"documents": usual_corpus, "long": long_documents(setting)},
        valid_bucket=ladder[-1], evaluate_every=max(1, steps // 5), contexts=ladder,
    )  # fmt: skip
    fit, classic = {"strategy": "best_fit_decreasing", "buckets": largest}, {"data": WHOLE}
    arms: dict[str, dict[str, Any]] = {
        CONCAT: {"strategy": "concat", "buckets": largest}, FIT: fit, ONE: {},
        MIXED: {"data": mixed}, FIT_CUT: {**fit, "corpus": replace(corpus, cut=CUT)},
        CLASSIC: {"strategy": "concat", "buckets": usual, **classic}, CLASSIC_ONE: classic,
        CONCAT_SHORT: {"strategy": "concat", "buckets": short},
        FIT_SHORT: {**fit, "buckets": short}, CLASSIC_LLM: {"strategy": "bucket_llm", **classic},
    }  # fmt: skip
    few = dict(list(arms.items())[:4]) if scale.name == "long" else arms
    return paired(base, few, scale.seeds())


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per packing; changes are relative to concatenation with masks, in per cent."""
    values = scores(results)
    return [
        {
            "arm": name,
            "padding_%": 100 * group[0].summary["index"]["padding_ratio"],
            "split_%": 100 * group[0].summary["index"]["truncation_ratio"],
            **against(values[name], values[CONCAT]),
            **{f"at_{context}": value for context, value in mean_contexts(group).items()},
            "tokens_per_second": mean_speed(group),
        }
        for name, group in by_name(results).items()
    ]


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims about masks, whole documents and mixed steps."""
    values = scores(results)
    masks = "the same samples in the same order; only what attends to what differs"
    tokens = "equal tokens, steps and learning rates, paired seeds; every document scored by itself"
    state = partial(stated, values)
    claims: list[tuple[str, str, Callable[..., Claim], str, dict[str, Any]]] = [
        (FIT, CONCAT, below, "best fit makes a better model than concatenation, masks in both",
         {"source": "Ding et al. 2024", "paper": "better at 2k to 8k, without masks"}),
        (FIT, CONCAT, same,
         "whole documents (best_fit, 16k) do as well as cut ones (within 2 %)", {"within": 0.02}),
        (FIT_CUT, FIT, below, "whole documents do better when some are cut at random places",
         {"why": "what concat may gain by its cuts: documents that begin in the middle"}),
        (FIT_SHORT, CONCAT_SHORT, same, "the same with samples of 4k (within 2 %)",
         {"within": 0.02}),
        (CONCAT, CONCAT_SHORT, below,
         "with masks longer samples are better: concat of 16k than of 4k", {}),
        (MIXED, ONE, below, "several buckets in a step make a better model than one",
         {"why": "the same samples"}),
        (MIXED, CONCAT, same,
         "bucket with mixed steps does as well as concat, masks in both (within 2 %)",
         {"within": 0.02}),
        (MIXED, FIT, same, "bucket with mixed steps does as well as best_fit (within 2 %)",
         {"within": 0.02}),
        (ONE, CLASSIC_ONE, below, "masks make bucket better", {"why": masks}),
        (CLASSIC_ONE, CLASSIC, below,
         "without masks bucket makes a better model than concat of 8k", {}),
        (CLASSIC_LLM, CLASSIC, below,
         "BucketLLM makes a better model than concat of 8k, a step of twelve 16k samples",
         {"source": "BucketLLM Table 2", "paper": "accuracy 0.4359 against 0.4125"}),
    ]  # fmt: skip
    return [
        state(kind, one, other, claim, **{"why": tokens, **words})
        for one, other, kind, claim, words in claims
        if one in values and other in values  # not every scale trains every arm
    ]


def plots(results: list[Result], folder: Path) -> None:
    """Plot validation perplexity over tokens, relative to the first arm, and by context length."""
    arms = by_name(results)
    means = {name: mean_evaluations(group) for name, group in arms.items()}
    tokens = [at["tokens"] for at in means[CONCAT]]
    base = [at["perplexity"] for at in means[CONCAT]]
    curves = {
        name: (tokens, [100 * (a["perplexity"] / b - 1) for a, b in zip(at, base, strict=True)])
        for name, at in means.items()
    }
    axes = {"x": "tokens of training", "y": f"validation perplexity against {CONCAT} (%)"}
    lines(folder / "packing_tokens.png", curves, **axes)
    plot_contexts(folder / "packing_contexts.png", arms)

"""BucketLLM (Beyond Fixed Length: Bucket Pre-training is All You Need), sections 5.2 and 5.3.

One model and one corpus under nine ways to make samples of it. As the paper says nothing of masks,
attention, labels and positions run over whole samples in all of them; the last one is what this
project does by default. Scored are held-out documents, each by itself, and for Figure 3 long ones
through contexts of every length.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from papers.bucketllm_results import (
    CURRICULUM,
    MASKED,
    claims,
    contexts,
    seconds_in_all,
    speed_by_bucket,
    time_ratios,
)
from papers.claims import shown
from papers.composition.bucketllm import LLM, V0
from papers.corpus import Corpus
from papers.figures import lines
from papers.plain import WHOLE
from papers.runs import Result, Run, Scale, by_name
from papers.settings import Setting

__all__ = ["EQUAL", "TITLE", "claims", "plots", "rows", "runs"]

TITLE = "BucketLLM: composition of samples"
EQUAL = (
    "model, initial weights, documents, optimizer, learning rates, tokens per step and steps (one "
    "epoch); attention over whole samples except in the last line"
)
FIXED = (2048, 4096, 8192)


def runs(scale: Scale) -> list[Run]:
    """Nine compositions times seeds."""
    setting = Setting(scale)
    ladder = setting.ladder
    smallest = 256 // setting.factor  # of Dataset Decomposition's own buckets
    arms: list[tuple[str, str, tuple[int, ...], dict[str, Any], dict[str, str]]] = [
        *((f"Fixed-{n}", "concat", (n // setting.factor,), {}, WHOLE) for n in FIXED),
        ("DD", "decompose", ladder, {"min_bucket": smallest}, WHOLE),
        (CURRICULUM, "decompose", ladder, {"min_bucket": smallest}, {**WHOLE, "order": "grow-p2"}),
        ("BucketLLM-v0", "bucket_v0", ladder, V0, WHOLE),
        ("BucketLLM", "bucket_llm", ladder, LLM, WHOLE),
        ("bucket", "bucket", ladder, {}, WHOLE),
        (MASKED, "bucket", ladder, {}, {}),
    ]
    steps = scale.pick(cpu=600, quick=6, gpu=40)
    return [
        Run(
            recipe="bucketllm",
            name=name,
            seed=seed,
            corpus=setting.corpus,
            strategy=strategy,
            buckets=buckets,
            parameters=parameters,
            config=setting.config(steps=steps, data=data),
            validate={"documents": setting.corpus, "long": long_documents(setting)},
            valid_bucket=ladder[-1],
            evaluate_every=scale.pick(cpu=100, quick=6, gpu=8),
            contexts=ladder,
            contexts_of="long",
        )
        for name, strategy, buckets, parameters, data in arms
        for seed in scale.seeds
    ]


def long_documents(setting: Setting) -> Corpus:
    """Held-out documents of more than about 650 tokens (6,000 on a GPU)."""
    return setting.scale.pick(
        cpu=Corpus(domain="prose", train_bytes=50_000, valid_bytes=90_000, min_bytes=1_500),
        quick=Corpus(domain="prose", train_bytes=50_000, valid_bytes=5_000, min_bytes=1_500),
        gpu=Corpus(
            domain="code",
            train_bytes=50_000,
            valid_bytes=300_000,
            min_bytes=15_000,
            max_bytes=120_000,
        ),
    )


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """One line per composition: means over seeds, and the spread of the perplexity."""
    arms = by_name(results)
    found = []
    for name, group in arms.items():
        index = group[0].summary["index"]
        by_context = [contexts(result) for result in group]
        speed = [r.summary["tokens"] / seconds_in_all(r) for r in group]
        found.append(
            {
                "composition": name,
                "buckets": " ".join(map(str, speed_by_bucket(group[0]))),
                "r_pad_%": 100 * index["padding_ratio"],
                "r_tru_%": 100 * index["truncation_ratio"],
                "r_cat": index["concatenation_ratio"],
                "perplexity": shown([r.perplexity("documents") for r in group]),
                **{
                    f"at_{context}": fmean(c[context] for c in by_context)
                    for context in by_context[0]
                },
                "tokens_per_second": fmean(speed),
                "time_to_equal_loss": fmean(time_ratios(group, arms["Fixed-8192"])),
            }
        )
    return found


def plots(results: list[Result], folder: Path) -> None:
    """Validation perplexity over time, and perplexity by context length (Figure 3)."""
    arms = by_name(results)
    curves = {}
    for name, group in arms.items():
        speed = fmean(r.summary["tokens"] / seconds_in_all(r) for r in group)
        evaluations = list(zip(*(result.evaluations() for result in group), strict=True))
        curves[name] = (
            [at[0]["tokens"] / speed for at in evaluations],
            [fmean(line["perplexity"] for line in at) for at in evaluations],
        )
    lines(
        folder / "bucketllm_time.png",
        {name: (xs[1:], ys[1:]) for name, (xs, ys) in curves.items()},
        x="seconds of training",
        y="validation perplexity",
        marker="o",
    )
    lines(
        folder / "bucketllm_contexts.png",
        {
            name: (
                list(contexts(group[0])),
                [fmean(contexts(r)[c] for r in group) for c in contexts(group[0])],
            )
            for name, group in arms.items()
        },
        x="context (tokens)",
        y="perplexity of long documents",
        marker="o",
        log_x=True,
    )

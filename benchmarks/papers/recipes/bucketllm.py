"""BucketLLM (Beyond Fixed Length: Bucket Pre-training is All You Need), sections 5.2 and 5.3.

One model and one corpus with nine ways to make samples. The paper does not mention masks, so
attention, labels and positions cross documents in all of them, except the last, this project's
default. Held-out documents are scored one by one; for Figure 3, long ones with contexts of every
length.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from lengths import BUCKETS, Lengths
from papers.claims import Claim, Row, below, compared, less, same, shown, stated, together
from papers.corpus import Corpus
from papers.run import Run
from papers.runs import Result, Scale, by_name, lines, mean_evaluations, paired, perplexities
from papers.settings import WHOLE, Setting

from megapack.compare import MODELS
from megapack.packing import SampleIndex, pack

TITLE = "BucketLLM: composition of samples"
EQUAL = (
    "model, initial weights, documents, optimizer, learning rates, tokens per step and steps (one "
    "epoch); attention over whole samples except in the last line"
)
FIXED = (2048, 4096, 8192)
MASKED = "bucket, documents masked"
CURRICULUM = "DD, short first (grow-P2, 8 cycles)"
# The paper prints neither its pool size nor its padding threshold. With these values, the
# calibrated length distribution reproduces its padding and truncation.
V0: dict[str, Any] = {"pool_size": 800, "padding_threshold": 1.0}
LLM: dict[str, Any] = {"pool_size": 3000, "padding_threshold": 0.045}
SPEEDS = {1024: 16_793, 2048: 16_263, 4096: 15_505, 8192: 13_696, 16384: 11_129}  # Table 3


def runs(scale: Scale) -> list[Run]:
    """Return the runs of nine compositions and all seeds."""
    setting = Setting(scale)
    ladder = setting.ladder
    smallest = 256 // setting.factor  # smallest bucket of Dataset Decomposition
    steps = scale.pick(cpu=600, quick=6, gpu=40)
    base = Run(
        recipe="bucketllm", corpus=setting.corpus, strategy="bucket", buckets=ladder,
        config=setting.config(steps=steps, **WHOLE),
        validate={"documents": setting.corpus, "long": long_documents(setting)},
        valid_bucket=ladder[-1], evaluate_every=scale.pick(cpu=100, quick=6, gpu=8),
        contexts=ladder,
    )  # fmt: skip
    decomposed = {"strategy": "decompose", "parameters": {"min_bucket": smallest}}
    arms: dict[str, dict[str, Any]] = {
        **{f"Fixed-{n}": {"strategy": "concat", "buckets": (n // setting.factor,)} for n in FIXED},
        "DD": decomposed,
        CURRICULUM: {**decomposed, "data": {"order": "grow-p2"}},
        "BucketLLM-v0": {"strategy": "bucket_v0", "parameters": V0},
        "BucketLLM": {"strategy": "bucket_llm", "parameters": LLM},
        "bucket": {},
        MASKED: {"config": setting.config(steps=steps)},
    }
    return paired(base, arms, scale.seeds())


def long_documents(setting: Setting) -> Corpus:
    """Return the held-out documents of more than about 650 tokens (6,000 on a GPU)."""
    pick = setting.scale.pick
    return Corpus(
        domain=pick(cpu="prose", gpu="code"),
        train_bytes=50_000,
        valid_bytes=pick(cpu=90_000, quick=5_000, gpu=300_000),
        min_bytes=pick(cpu=1_500, gpu=15_000),
        max_bytes=pick(cpu=16_000, gpu=120_000),
    )


def contexts(result: Result) -> dict[int, float]:
    """Return context length -> perplexity of the long documents."""
    found = result.summary["contexts"]
    return {int(context): float(value["perplexity"]) for context, value in found.items()}


def speed_by_bucket(result: Result) -> dict[int, float]:
    """Return capacity -> tokens per second of the median step, without a bucket's first step."""
    steps: dict[int, list[float]] = {}
    for line in result.log():
        steps.setdefault(line["capacity"], []).append(line["tokens"] / line["seconds"])
    return {capacity: median(found[1:] or found) for capacity, found in sorted(steps.items())}


def elapsed(result: Result) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the seconds of training after each step. Every step counts with the median speed of
    its bucket, so that other load on the machine hardly matters."""
    speed = speed_by_bucket(result)
    return np.cumsum([line["tokens"] / speed[line["capacity"]] for line in result.log()])


def seconds_to(result: Result, perplexity: float) -> float:
    """Return the seconds of training until the validation perplexity is this low, or infinity.

    Between two evaluations the logarithm of the perplexity is interpolated linearly.
    """
    evaluations, target = result.evaluations(), np.log(perplexity) + 1e-9
    seconds = elapsed(result)[[line["step"] - 1 for line in evaluations]]
    values = np.log([line["perplexity"] for line in evaluations])
    if not (values <= target).any():
        return float("inf")
    first = int((values <= target).argmax())
    between = [first, max(0, first - 1)]  # np.interp needs rising values
    return float(np.interp(target, values[between], seconds[between]))


def time_ratios(arm: list[Result], base: list[Result]) -> list[float]:
    """Return, per seed, the ratio of the times of ``arm`` and ``base`` to the higher of their final
    perplexities."""
    ratios = []
    for a, b in zip(arm, base, strict=True):
        target = max(a.perplexity("documents"), b.perplexity("documents"))
        ratios.append(seconds_to(a, target) / seconds_to(b, target))
    return ratios


def mean_speed(group: list[Result]) -> float:
    """Return the tokens per second of whole runs, mean over the seeds."""
    return fmean(result.summary["tokens"] / elapsed(result)[-1] for result in group)


def mean_contexts(group: list[Result]) -> dict[int, float]:
    """Return context length -> perplexity of the long documents, mean over the seeds."""
    found = [contexts(result) for result in group]
    return {context: fmean(of[context] for of in found) for context in found[0]}


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per composition: means over seeds, and the spread of the perplexity."""
    arms = by_name(results)
    found = []
    for name, group in arms.items():
        index = group[0].summary["index"]
        found.append({
            "composition": name, "buckets": " ".join(map(str, speed_by_bucket(group[0]))),
            "r_pad_%": 100 * index["padding_ratio"], "r_tru_%": 100 * index["truncation_ratio"],
            "r_cat": index["concatenation_ratio"], "perplexity": shown(perplexities(group)),
            **{f"at_{context}": value for context, value in mean_contexts(group).items()},
            "tokens_per_second": mean_speed(group),
            "time_to_equal_loss": fmean(time_ratios(group, arms["Fixed-8192"])),
        })  # fmt: skip
    return found


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims of Tables 2 and 3 and Figure 3, and of the time to equal loss."""
    arms = by_name(results)
    return [*_quality(arms), *_contexts(arms), *_speed(arms)]


def _quality(arms: dict[str, list[Result]]) -> list[Claim]:
    ladder = list(contexts(arms["BucketLLM"][0]))
    step = int(arms["BucketLLM"][0].run.config["data"]["tokens_per_step"])
    state = partial(stated, {name: perplexities(group) for name, group in arms.items()})
    accuracy = {"DD": 0.4223, "Fixed-2048": 0.4245, "Fixed-4096": 0.4204, "Fixed-8192": 0.4125}
    why = (
        "same tokens and steps, paired seeds, each document scored by itself, most of them short; "
        f"perplexity stands for the accuracy of tasks, lengths of {ladder[0]} to {ladder[-1]} for "
        f"1,024 to 16,384; a step holds {step // ladder[-1]} samples of the longest bucket, the "
        "paper's at least 192"
    )
    return [
        *(state(below, "BucketLLM", name, f"BucketLLM trains a better model than {name}",
                source="BucketLLM Table 2", paper=f"accuracy 0.4359 against {figure}", why=why)
          for name, figure in accuracy.items()),
        state(same, "BucketLLM", "BucketLLM-v0",
              "BucketLLM and v0 train equally good models (within 1 %)", within=0.01,
              source="BucketLLM 4", paper="Table 1 compares their composition only",
              why="they place nearly all documents alike: what differs is the last percent"),
        state(below, CURRICULUM, "DD",
              "its curriculum grow-P2 trains a better model than random order",
              source="Dataset Decomposition",
              paper="better, in arXiv 2405.13226; BucketLLM does not say which it compares with",
              why="the same samples; what differs is when the lengths come"),
        state(same, "bucket", "BucketLLM",
              "bucket, the default here, is as good as BucketLLM (within 1 %)", within=0.01,
              why="same attention over whole samples in both"),
        state(below, MASKED, "bucket", "attention inside documents makes bucket better",
              why="the same samples in the same order; see the recipe on masking"),
    ]  # fmt: skip


def _contexts(arms: dict[str, list[Result]]) -> list[Claim]:
    by_arm = {name: [contexts(result) for result in group] for name, group in arms.items()}
    shortest, *_, longest = sorted(by_arm["BucketLLM"][0])
    trained = next(iter(speed_by_bucket(arms["Fixed-2048"][0])))

    def at(name: str, context: int) -> list[float]:
        return [found[context] for found in by_arm[name]]

    why = "the same tokens are scored at every context, of long held-out documents only"
    state = partial(below, source="BucketLLM Figure 3", what="perplexity", why=why)
    return [
        state(at("Fixed-2048", trained), at("Fixed-2048", longest),
              claim="Fixed-2048 degrades beyond its training length",
              paper="rapidly degrading perplexity",
              beside=f", at {trained} and {longest} tokens of context"),
        *(state(at("BucketLLM", context), at(other, context),
                claim=f"BucketLLM is below {other} at {context} tokens of context",
                paper="lowest for short and long contexts")
          for other in ("Fixed-2048", "Fixed-4096", "Fixed-8192")
          for context in (shortest, longest)),
    ]  # fmt: skip


def _speed(arms: dict[str, list[Result]]) -> list[Claim]:
    speeds = [speed_by_bucket(result) for result in arms["BucketLLM"]]
    ladder = sorted(speeds[0])
    usual = ladder[-2]
    relative = {n: [100 * (s[n] / s[usual] - 1) for s in speeds] for n in ladder}
    ratios = time_ratios(arms["BucketLLM"], arms["Fixed-8192"])
    changes = ", ".join(f"{fmean(found):+.1f} %" for found in relative.values())
    pairs = itertools.pairwise(ladder)
    return [
        Claim(
            source="BucketLLM Table 3",
            claim="the shorter the bucket, the more tokens per second",
            paper=", ".join(f"{100 * (s / SPEEDS[8192] - 1):+.1f} %" for s in SPEEDS.values()),
            measured=f"{changes} at {', '.join(map(str, ladder))}",
            **together(less([s[b] for s in speeds], [s[a] for s in speeds]) for a, b in pairs),
            why="median step of each bucket in the runs themselves, attention over whole samples; "
            "how steep it is depends on the width of the model",
        ),
        Claim(
            source="BucketLLM 5.3",
            claim="BucketLLM needs less time than Fixed-8192 to equal loss",
            paper="accelerates training, no figure",
            measured=f"{shown(ratios)} times as long",
            **together([less(ratios, [1.0] * len(ratios))]),
            why="to the higher of the two final validation perplexities, every step at the median "
            "speed of its bucket",
        ),
    ]


def plots(results: list[Result], folder: Path) -> None:
    """Plot validation perplexity over time, and perplexity by context length (Figure 3)."""
    arms = by_name(results)
    curves = {}
    for name, group in arms.items():
        points, speed = mean_evaluations(group)[1:], mean_speed(group)
        seconds = [at["tokens"] / speed for at in points]
        curves[name] = seconds, [at["perplexity"] for at in points]
    axes = {"x": "seconds of training", "y": "validation perplexity"}
    lines(folder / "bucketllm_time.png", curves, **axes)
    plot_contexts(folder / "bucketllm_contexts.png", arms)


def plot_contexts(path: Path, arms: dict[str, list[Result]]) -> None:
    """Plot the perplexity of long documents by context length."""
    means = {name: mean_contexts(group) for name, group in arms.items()}
    curves = {name: (list(of), list(of.values())) for name, of in means.items()}
    lines(path, curves, x="context (tokens)", y="perplexity of long documents", log_x=True)


# ---- Lengths only


TABLE_1 = {  # capacity: r_pad %, r_tru %, r_cat
    1024: (0.01, 61.26, 1.03),
    2048: (0.01, 38.39, 2.05),
    4096: (0.02, 21.45, 4.11),
    8192: (0.04, 11.51, 8.20),
    16384: (0.08, 5.96, 16.40),
}
GROUP, GROUPED = 10_000, "groups of"

Ratios = tuple[float | None, float | None, float | None]  # r_pad %, r_tru %, r_cat


def uncalibrated(rows: list[Row]) -> list[Row]:
    """Return the rows without the paper's figures, for lengths unlike the paper's corpus."""
    those = (row for row in rows if GROUPED not in row.item)
    return [replace(row, paper=None, agrees=None, why="") for row in those]


def table_1(lengths: Lengths, corpus: str) -> list[Row]:
    """Compare Table 1: padding, truncation and concatenation of eight methods; add the default."""
    rows: list[Row] = []
    for capacity, (r_pad, r_tru, r_cat) in TABLE_1.items():
        index = pack(lengths, "concat", buckets=[capacity])
        rows += _ratios(corpus, f"Fixed-{capacity}", index, (None, r_tru, r_cat))
        rows.append(_grouped(lengths, corpus, capacity, r_pad))
    rows += _decomposition(lengths, corpus)
    for item, strategy, parameters, ratios in (
        ("BucketLLM-v0 (pool 800, P 1)", "bucket_v0", V0, (0.37, 0.19, 3.78)),
        ("BucketLLM (pool 3000, P 0.045)", "bucket_llm", LLM, (0.12, 0.28, 2.81)),
    ):
        index = pack(lengths, strategy, buckets=BUCKETS, **parameters)
        # r_tru varies by a few percent of its value between seeds of the law.
        rule = {"within": 0.06, "why": "pool size and threshold chosen to fit; the paper prints "
                "neither"}  # fmt: skip
        rows += _ratios(corpus, item, index, ratios, **rule)
    return rows + _ratios(corpus, "bucket (the default)", pack(lengths, buckets=BUCKETS))


def _ratios(
    corpus: str, item: str, index: SampleIndex, paper: Ratios = (None, None, None), **words: Any
) -> list[Row]:
    metrics = index.metrics()
    row = partial(compared, "BucketLLM Table 1", corpus, item, rounding=0.005)
    rules = {"within": 0.03, **words}
    r_pad, r_tru = (100 * metrics[f"{of}_ratio"] for of in ("padding", "truncation"))
    return [
        row("r_pad %", (paper[0], r_pad), **rules),
        row("r_tru %", (paper[1], r_tru), **rules),
        row("r_cat", (paper[2], metrics["concatenation_ratio"]), **rules,
            why_not="'the smallest bucket that holds the longest document' allows r_cat from 2.21 "
            "to 2.86 on this law (linear program); lower is better"),
    ]  # fmt: skip


def _grouped(lengths: Lengths, corpus: str, capacity: int, paper: float) -> Row:
    """Return the padding if every 10,000 documents are concatenated and cut separately."""
    padding = positions = 0
    for begin in range(0, min(len(lengths), 100 * GROUP), GROUP):
        metrics = pack(lengths[begin : begin + GROUP], "concat", buckets=[capacity]).metrics()
        padding += metrics["padding_tokens"]
        positions += metrics["num_samples"] * capacity
    item, figures = f"Fixed-{capacity}, {GROUPED} {GROUP:,}", (paper, 100 * padding / positions)
    rule = {"within": 0.15, "rounding": 0.005}  # the fill of a last sample is random
    why = "one partial sample per 10,000 documents, as in the paper; a stream has one in all"
    return compared("BucketLLM Table 1", corpus, item, "r_pad %", figures, why=why, **rule)


def _decomposition(lengths: Lengths, corpus: str) -> list[Row]:
    rows = []
    for smallest in (1, 1024):
        metrics = pack(lengths, "decompose", buckets=BUCKETS, min_bucket=smallest).metrics()
        row = partial(compared, "BucketLLM Table 1", corpus, f"DD, pieces from {smallest} on")
        rows += [
            row("r_pad %", (0.0, 100 * metrics["padding_ratio"])),
            row("r_tru %", (99.9, 100 * metrics["truncation_ratio"]), within=1e-3,
                why_not="whole are the documents of 2^k tokens"),
            row("segments per sample", (1.0, metrics["segments_per_sample"]),
                why="what the paper prints as r_cat"),
            row("r_cat", (None, metrics["concatenation_ratio"]),
                why="documents / samples, the paper's definition"),
        ]  # fmt: skip
    return rows


TABLE_3 = {1024: 6.52, 2048: 16.58, 4096: 32.34, 8192: 27.17, 16384: 17.39}


def table_3(lengths: Lengths, corpus: str) -> list[Row]:
    """Compare the data ratio of Table 3: share of the tokens in every bucket."""
    possible = 100 * 8192 * np.mean((lengths > 4096) & (lengths <= 8192)) / lengths.mean()
    limit = "a sample of 8192 needs a document of 4097 to 8192 tokens; all of them allow "
    limit += f"{possible:.1f} % at most"
    other = "the paper's shares mean r_cat 3.74, which is v0's row of its Table 1 and not 2.81"
    rows = []
    of_item = {"BucketLLM": ("bucket_llm", LLM), "bucket": ("bucket", {})}
    for item, (strategy, parameters) in of_item.items():
        index = pack(lengths, strategy, buckets=BUCKETS, **parameters)
        positions = np.diff(index.bucket_sample_offsets) * index.bucket_capacity
        for capacity, count in zip(index.bucket_capacity.tolist(), positions, strict=True):
            paper = TABLE_3[capacity] if item == "BucketLLM" else None
            figures = paper, float(100 * count / positions.sum())
            row = partial(compared, "BucketLLM Table 3", corpus, f"{item}, {capacity}")
            why_not = limit if capacity == 8192 else other
            rows.append(row("share of tokens %", figures, why_not=why_not))
    return rows


def speeds() -> list[Row]:
    """Compare the speed of Table 3, as ratios of tokens/s, with the cost model of ``compare``.

    The cost model counts operations per token of a 1B model, with attention over whole samples. It
    does not model the hardware.
    """
    model = MODELS["1b"]
    work = {n: model.flops_per_token + model.flops_per_square * n for n in SPEEDS}
    row = partial(compared, "BucketLLM Table 3", "cost model, 1B", within=0.03)
    return [
        row(f"context {capacity}", "tokens/s over those at 8192",
            (speed / SPEEDS[8192], work[8192] / work[capacity]), why="predicted from operations")
        for capacity, speed in SPEEDS.items()
    ]  # fmt: skip

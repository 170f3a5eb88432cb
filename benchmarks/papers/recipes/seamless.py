"""Seamless Packing (Yin et al. 2025): continual pretraining on a new domain, by packing strategy.

A small Llama is trained on code (one per seed), then on prose for three epochs with every strategy.
Differences from the paper, and choices that it leaves open:

* L_seq is 128 for documents with a mean of 350 tokens, the ratio of 2048 to PubMed's; c_extra 3 is
  50 / 2048 of it, and the sweeps have the same shares as the paper's.
* Attention, labels and positions cross document boundaries, as in a plain causal model.
* Validation scores the same held-out documents for all strategies, every token once, with its own
  document as context, in pieces of L_seq; the paper does not say how its validation set was packed.
* Epochs are equal, as in the paper. Overlapping windows repeat tokens, so Seamless Packing runs
  more steps; a second CT run with the same number of steps shows their effect.
* Tables 10 and 11 print the accuracy of tasks; this recipe measures perplexity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from common import take_turns
from lengths import LAWS, PUBMED
from numpy.typing import NDArray
from papers import invented_facts
from papers.claims import Claim, Row, alike, below, compared, same, shown, together
from papers.corpus import Corpus, prepare
from papers.run import Run
from papers.runs import Result, Scale, by_name, lines, paired, perplexities, probed
from papers.settings import WHOLE, engine

from megapack.data import Schedule
from megapack.packing import pack
from megapack.packing.bucket_rules import exact_ratio
from megapack.storage import read_document_lengths

TITLE = "Seamless Packing (Yin et al.)"
EQUAL = "base model, documents, three epochs, tokens per step, linear decay to 0"
SOURCE = "Seamless"
C_EXTRA = {1: 10, 3: 50, 6: 100}  # at L_seq 128 -> at 2048
R_MAX = (0.1, 0.3, 0.5)
SP = "SP"
LONGER = "CT, as many steps as SP"
TABLE_2 = {"CT": (11.49, 7.84, 6.71), "BFD": (10.16, 7.41, 6.47), SP: (10.12, 7.39, 6.43)}
CAPACITY = 128
EPOCHS = 3
FACT_EPOCHS = 8  # in the case study: a small model learns by repetition

Arm = dict[str, Any]  # ``strategy`` and ``parameters`` of a ``Run``


def arm(strategy: str, **parameters: Any) -> Arm:
    return {"strategy": strategy, "parameters": parameters}


def seamless(**changed: Any) -> Arm:
    return arm("seamless", **{"r_max": 0.3, "extra_capacity": 3, "placement": "exact", **changed})


def variants() -> dict[str, Arm]:
    """Return the arms of Table 7, the placements, and the sweeps of Tables 10 and 11."""
    return {
        "CT": arm("concat"), LONGER: arm("concat"), "FFD": arm("first_fit_decreasing"),
        "BFD": arm("best_fit_decreasing"), "BFD-m": arm("best_fit_decreasing", extra_capacity=3),
        SP: seamless(), "SP, published": seamless(placement="published"),
        **{f"SP, r_max {r}": seamless(r_max=r) for r in R_MAX if r != 0.3},
        **{f"SP, c_extra {c}": seamless(extra_capacity=c) for c in C_EXTRA if c != 3},
    }  # fmt: skip


CASES = {
    "CT": arm("concat"),
    "BFD": arm("best_fit_decreasing"),
    SP: seamless(extra_capacity=1),
}


def runs(scale: Scale) -> list[Run]:
    """Return the runs of every seed: a base on code, then continued on long prose documents with
    every variant, and on short ones with invented facts (the case study)."""
    steps, pick = scale.pick(cpu=None, quick=6, gpu=None), scale.pick
    code = Corpus(
        domain="code", train_bytes=pick(cpu=1_800_000, quick=60_000, gpu=4_000_000),
        valid_bytes=pick(cpu=50_000, quick=10_000, gpu=400_000),
    )  # fmt: skip
    documents = Corpus(
        domain="prose", train_bytes=pick(cpu=300_000, quick=30_000, gpu=300_000),
        valid_bytes=pick(cpu=100_000, quick=10_000, gpu=400_000), min_bytes=400, max_bytes=1_700,
    )  # fmt: skip
    invented = Corpus(
        domain="prose", train_bytes=pick(cpu=40_000, quick=10_000, gpu=150_000),
        valid_bytes=10_000, max_bytes=700, injected=invented_facts.documents(),
    )  # fmt: skip
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "initializer_range": 0.1}
    small = {"hidden_size": 96, "intermediate_size": 256, **heads}
    tiny, large = {"preset": "llama_tiny", "overrides": small}, {"preset": "llama_350m"}
    config = _config(scale, epochs=1, steps=steps, lr=pick(cpu=3e-3, gpu=4e-4))
    first = Run(
        recipe="seamless", corpus=code, strategy="concat", buckets=(CAPACITY,),
        config={**config, "model": pick(cpu=tiny, gpu=large)},
        validate={"prose": documents, "code": code}, valid_bucket=CAPACITY, keep_model=True,
    )  # fmt: skip
    config = _config(scale, epochs=EPOCHS, steps=steps, lr=scale.pick(cpu=2e-3, gpu=1e-4))
    arms, cases = variants(), {f"facts, {name}": case for name, case in CASES.items()}
    longer = steps or _num_steps(documents, config, **arms[SP])
    arms[LONGER]["config"] = {**config, "num_steps": longer}
    often = _config(scale, epochs=FACT_EPOCHS, steps=steps, lr=scale.pick(cpu=3e-3, gpu=1e-4))
    result = []
    for seed in scale.seeds():
        (base,) = paired(first, {"base, code": {}}, [seed])
        further = dataclasses.replace(
            base, corpus=documents, config=config, start=base, keep_model=False
        )
        facts = dataclasses.replace(
            further, corpus=invented, buckets=(invented_facts.CAPACITY,), config=often, validate={},
            valid_bucket=1024, probe="papers.invented_facts:measure",
        )  # fmt: skip
        result += [base, *paired(further, arms, [seed]), *paired(facts, cases, [seed])]
    return result


def _config(scale: Scale, *, epochs: int, steps: int | None, lr: float) -> dict[str, Any]:
    tokens = scale.pick(cpu=1024, gpu=8192)
    return {
        "num_epochs": epochs, "num_steps": steps,
        "data": {"tokens_per_step": tokens, "micro_batch_tokens": tokens, **WHOLE},
        "optimizer": {"lr": lr},
        "learning_rate": {"kind": "linear", "warmup_fraction": 0.05, "min_ratio": 0.0},
        "engine": engine(scale),
    }  # fmt: skip


def _num_steps(
    corpus: Corpus, config: Mapping[str, Any], *, strategy: str, parameters: Mapping[str, Any]
) -> int:
    """Return the steps of ``EPOCHS`` epochs with a strategy."""
    lengths = read_document_lengths(prepare(corpus).train)
    index = pack(lengths, strategy, buckets=[CAPACITY], **parameters)
    tokens_per_step = config["data"]["tokens_per_step"]
    return Schedule(index, tokens_per_step=tokens_per_step).num_steps(EPOCHS)


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return the rows of Tables 2, 7, 10 and 11, and of the case study."""
    found = []
    for name, of in by_name(results).items():
        first = of[0].summary
        row: dict[str, Any] = {"strategy": name, "steps": first["steps"]}
        for what in ("repeated", "dropped", "padding"):
            row[f"{what} %"] = 100 * first["index"][f"{what}_ratio"]
        if "probe" in first:
            row["loss per fact"] = shown(probed(of, "loss"))
            row["facts right %"] = shown([100 * x for x in probed(of, "right")], 1)
        else:
            row["perplexity, prose"] = shown(perplexities(of, "prose"), 3)
            row["perplexity, code"] = shown(perplexities(of, "code"), 3)
        found.append({**row, "seeds": len(of)})
    return found


def _perplexity(groups: dict[str, list[Result]]) -> dict[str, list[float]]:
    """Return arm -> perplexity of prose, of every arm that is scored on it."""
    return {n: perplexities(of, "prose") for n, of in groups.items() if of[0].run.validate}


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims of Tables 2, 7, 10, 11 and section 4.7."""
    groups = by_name(results)
    perplexity = _perplexity(groups)
    return [
        *_orders(perplexity, groups),
        *_table_7(perplexity),
        *_sweep(perplexity, "Table 10", "r_max", 0.3, [r for r in R_MAX if r != 0.3]),
        *_sweep(perplexity, "Table 11", "c_extra", 3, [c for c in C_EXTRA if c != 3]),
        *_case_study(groups),
    ]


def _orders(perplexity: dict[str, list[float]], groups: dict[str, list[Result]]) -> list[Claim]:
    def claim(low: str, high: str, why: str, paper: str = "") -> Claim:
        pairs = zip(TABLE_2.get(low, ()), TABLE_2.get(high, ()), strict=False)
        printed = "PubMed: " + ", ".join(f"{a} against {b}" for a, b in pairs)
        return below(
            perplexity[low], perplexity[high], source=f"{SOURCE} Table 2",
            claim=f"{low} has the lower validation perplexity than {high}", paper=paper or printed,
            why=why, what="", digits=3,
        )  # fmt: skip

    ratio = groups[SP][0].summary["steps"] / groups["CT"][0].summary["steps"]
    equal = f"equal epochs, as in the paper; SP takes {ratio:.2f} times as many steps as CT"
    control = "a control the paper has not: the gain over CT without that of more steps"
    return [
        claim("BFD", "CT", "the same documents, epochs and base"),
        claim(SP, "CT", equal),
        claim(SP, "BFD", equal),
        claim(SP, LONGER, control, "not measured"),
    ]


def _table_7(perplexity: dict[str, list[float]]) -> list[Claim]:
    bfd = perplexity["BFD"]
    others = {name: perplexity[name] for name in ("FFD", "BFD-m", SP)}
    return [
        Claim(
            source=f"{SOURCE} Table 7",
            claim="FFD, BFD-m and SP are within 2 % of BFD's perplexity",
            paper="11.24, 11.24, 11.24 of 11.24; within 3.6 % on two other models",
            measured=", ".join(f"{name} {shown(of, 3)}" for name, of in others.items())
            + f", BFD {shown(bfd, 3)}",
            **together(alike(of, bfd, within=0.02) for of in others.values()),
            why="the ablation; SP takes more steps than the others",
        ),
        same(
            perplexity["SP, published"], perplexity[SP], within=0.01, source=f"{SOURCE} eq. 3",
            claim="the authors' placement of windows is as good as the exact one (within 1 %)",
            paper="not measured",
            why="what the published arithmetic loses (docs/papers.md) is a small share of tokens",
            what="", digits=3,
        ),
    ]  # fmt: skip


def _sweep(
    perplexity: dict[str, list[float]], table: str, parameter: str, best: float, others: list[float]
) -> list[Claim]:
    """Compare the middle value, which ``SP`` has, with the others."""
    claims = []
    for other in others:
        why = "perplexity in place of the accuracy of tasks"
        if parameter == "c_extra":
            why += f"; c_extra {other} is {C_EXTRA[int(other)]} at L 2048"
        claims.append(below(
            perplexity[SP], perplexity[f"SP, {parameter} {other}"], source=f"{SOURCE} {table}",
            claim=f"{parameter} {best} is better than {other}", what="perplexity", digits=3,
            paper="accuracy of tasks: the middle one of three values is best by 0.4 to 2 points",
            why=why,
        ))  # fmt: skip
    return claims


def _case_study(groups: dict[str, list[Result]]) -> list[Claim]:
    def claim(other: str, paper: str) -> Claim:
        both = [groups[f"facts, {name}"] for name in (SP, other)]
        right = [[100 * x for x in probed(of, "right")] for of in both]
        return below(
            *(probed(of, "loss") for of in both), source=f"{SOURCE} 4.7", paper=paper, what="",
            claim=f"facts that straddle the cut are learned with SP better than with {other}",
            beside=f" nats per fact; {shown(right[0], 1)} % against {shown(right[1], 1)} % right",
            why=f"{invented_facts.NUM_FACTS} invented facts in place of one, L_seq 32",
        )  # fmt: skip

    bfd = claim("BFD", "date 3/5 against 0/5, place 5/5 against 2/5")
    return [bfd, claim("CT", "not measured")]


def plots(results: list[Result], folder: Path) -> None:
    """Plot Figure 2 with perplexity: both sweeps and the baselines, means of the seeds."""
    perplexity = {name: fmean(of) for name, of in _perplexity(by_name(results)).items()}
    for name, values, middle in (("r_max", R_MAX, 0.3), ("c_extra", tuple(C_EXTRA), 3)):
        measured = [perplexity[SP if v == middle else f"SP, {name} {v}"] for v in values]
        flat = {other: (values, [perplexity[other]] * len(values)) for other in ("CT", "BFD")}
        curves = {SP: (values, measured), **flat}
        lines(folder / f"seamless_{name}.png", curves, x=name, y="validation perplexity")


# ---- Lengths only: the paper's expectation for a corpus (histograms of Tables 13 and 14, with
# lengths uniform inside an interval), compared with the strategy

CORPORA = {  # documents, L_seq, c_extra
    "pubmed": (11_268, 2048, 50),
    "bbc_news": (11_966, 512, 10),
    "finance": (15_527, 512, 10),
}


class SeamlessStageOne(NamedTuple):
    num_sliding: float  # documents in overlapping windows (N_sw)
    short_tokens: float  # tokens for stage two of documents longer than a sample (N_token_short)


def expect_seamless(
    num_documents: NDArray[np.int64] | list[int], capacity: int, r_max: float
) -> SeamlessStageOne:
    """Evaluate equations 6 and 7.

    In the printed equation 6 both sums include k = ceil(1 / r_max). Its first sum must end before
    that, because k r_max, the share that slides, would exceed 1; this also reproduces the paper's
    6716. ``num_documents``: T_k, number of documents with a length in (k capacity, (k + 1)
    capacity], k = 1, 2, ...; ``capacity``: L_seq, tokens; ``r_max``: largest repeated share.

    Raises:
        ValueError: if r_max is out of range.
    """
    if not 0 < r_max <= 1:
        raise ValueError(f"r_max is {r_max}; it must be above 0 and at most 1")
    all_slide_from = math.ceil(1 / Fraction(*exact_ratio(r_max)))
    sliding = short = 0.0
    for k, count in enumerate(num_documents, start=1):
        share = k * r_max if k < all_slide_from else 1.0
        sliding += share * float(count)
        short += (1 - share) * float(count) * (1 - share) * capacity / 2
    return SeamlessStageOne(sliding, short)


def measure_seamless(
    lengths: NDArray[np.int32], capacity: int, r_max: float
) -> tuple[SeamlessStageOne, SeamlessStageOne]:
    """Return (figures expected from the histogram of ``lengths``, figures of the strategy).

    Both leave out documents of at most ``capacity`` tokens, as the theory does.
    """
    long = lengths[lengths > capacity]
    counts = np.bincount((long - 1) // capacity)[1:]
    index = pack(long, "seamless", buckets=[capacity], r_max=r_max)
    placed = np.bincount(index.segment_document, index.segment_length, len(long))
    slides = placed > long  # windows overlap
    done = SeamlessStageOne(int(slides.sum()), int((long[~slides] % capacity).sum()))
    return expect_seamless(counts, capacity, r_max), done


def section_4_8() -> list[Row]:
    """Compare section 4.8: texts that slide, tokens in short chunks; PubMed, L 2048, r_max 0.3."""
    lengths = LAWS["pubmed"](11_268)
    printed = expect_seamless(PUBMED, 2048, 0.3)
    _, done = measure_seamless(lengths, 2048, 0.3)
    texts, tokens = done
    share = 100 * tokens / lengths.sum(dtype=np.int64)
    row = partial(compared, "Seamless 4.8", "pubmed law")
    shape = "lengths inside an interval are uniform here, as eqs. 6 and 7 assume; "
    shape += "the paper's are not"
    return [
        row("eq. 6 on Table 13", "texts that slide", (6716, printed.num_sliding), within=1e-3),
        row("seamless", "texts that slide", (6988, texts), why_not=shape),
        row("seamless", "texts that slide, %", (62, 100 * texts / len(lengths)), why_not=shape),
        row("eq. 7 on Table 13", "short tokens, M", (2.6, printed.short_tokens / 1e6),
            within=0, rounding=0.05),
        row("seamless", "short tokens, M", (2.2, tokens / 1e6), why_not=shape),
        row("seamless", "short tokens, % of all", (3.4, share), why_not=shape),
    ]  # fmt: skip


def figure_3(ratios: Iterable[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)) -> list[Row]:
    """Measure Figure 3: both counts over r_max. The figure prints no numbers.

    The paper's text describes its shape: as r_max grows, more texts slide and fewer tokens are
    short, both ever more slowly.
    """
    lengths = LAWS["pubmed"](11_268)
    row = partial(compared, "Seamless Figure 3", "pubmed law")
    rows = []
    for ratio in ratios:
        expected = expect_seamless(PUBMED, 2048, ratio)
        _, done = measure_seamless(lengths, 2048, ratio)
        item = f"r_max {ratio:g}"
        rows += [
            row(item, "texts that slide", (None, done.num_sliding),
                why=f"eq. 6: {expected.num_sliding:.0f}"),
            row(item, "short tokens, M", (None, done.short_tokens / 1e6),
                why=f"eq. 7: {expected.short_tokens / 1e6:.2f}"),
        ]  # fmt: skip
    return rows


def dropping() -> list[Row]:
    """Compare appendix I.1: tokens that Seamless drops, tokens that best fit decreasing pads."""
    paper = {"pubmed": (51, 75), "bbc_news": (7, 140), "finance": (None, None)}
    rows = []
    for name, (count, capacity, extra) in CORPORA.items():
        lengths = LAWS[name](count)
        row = partial(compared, "Seamless I.1", f"{name} law")
        seamless = partial(pack, lengths, "seamless", buckets=[capacity], r_max=0.3, last="drop")
        best_fit = pack(lengths, "best_fit_decreasing", buckets=[capacity]).metrics()
        dropped, padded = paper[name]
        tokens = [seamless(extra_capacity=c).metrics()["dropped_tokens"] / 1e3 for c in (extra, 0)]
        rows += [
            row(f"seamless, c_extra {extra}", "dropped tokens, k", (dropped, tokens[0]),
                why_not="c tokens of nearly every stage-2 bin, as in the paper; the number of bins "
                "follows the short tokens of section 4.8"),
            row("best_fit_decreasing", "padding tokens, k",
                (padded, best_fit["padding_tokens"] / 1e3),
                why_not="remainders are uniform here; where more lie above L / 2 than below, the "
                "surplus is padded"),
            row("seamless, c_extra 0", "dropped tokens, k", (None, tokens[1]),
                why="the last partial sample alone: nothing here asks for c_extra"),
        ]  # fmt: skip
    return rows


def table_9(num_documents: int = 1_000_000) -> list[Row]:
    """Compare Table 9: seconds of FFD and BFD on three corpora, their ratio on many documents."""
    paper = {"pubmed": (1.26, 1.78), "bbc_news": (2.24, 2.63), "finance": (2.83, 3.61)}
    rows = []
    for name, (count, capacity, _) in CORPORA.items():
        row = partial(compared, "Seamless Table 9", f"{name} law")
        strategies = ("first_fit_decreasing", "best_fit_decreasing")
        small, large = (
            take_turns({s: partial(pack, lengths, s, buckets=[capacity]) for s in strategies})
            for lengths in (LAWS[name](count), LAWS[name](num_documents))
        )
        for item, printed, timing in zip(("FFD", "BFD"), paper[name], small.values(), strict=True):
            seconds = timing.seconds
            times = f"{printed / seconds:,.0f} times less than the paper's {printed} s"
            rows.append(row(f"{item}, {count:,} documents", "seconds", (None, seconds), why=times))
        ffd, bfd = large.values()
        figures = paper[name][1] / paper[name][0], bfd.seconds / ffd.seconds
        why_not = "a plan on the histogram of lengths costs both about the same; scanning lists of "
        item, rule = f"BFD / FFD, {num_documents:,} documents", {"within": 0.1}
        rows.append(row(item, "ratio", figures, **rule, why_not=f"{why_not}bins does not"))
    return rows

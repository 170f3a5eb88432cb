"""Seamless Packing (Yin et al. 2025): continual pretraining on another domain, by packing strategy.

A small Llama is trained on code (one per seed), then on prose for three epochs under every
strategy. What the paper leaves open or does otherwise, and how it is here:

* L_seq is 128 for documents of 350 tokens in the mean, as 2048 is for PubMed's; c_extra 3 is
  50 / 2048 of it, and the sweeps have the same shares as the paper's.
* Attention, labels and positions go across documents, as in a plain causal model.
* Validation is on the same held-out documents for all strategies, every token once, given its own
  document in pieces of L_seq; the paper does not say how its validation set was packed.
* Equal epochs, as in the paper. Overlapping windows repeat tokens, so Seamless Packing takes more
  steps; a second CT run of as many steps tells what these alone are worth.
* Tables 10 and 11 print the accuracy of tasks; here it is perplexity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from papers import invented_facts
from papers.claims import Claim, alike, below, same, shown, together
from papers.corpus import Corpus, prepare
from papers.figures import lines
from papers.runs import Result, Run, Scale, by_name, paired, perplexities, probed
from papers.settings import WHOLE, engine

from megapack.data import Schedule
from megapack.packing import pack
from megapack.storage import read_document_lengths

TITLE = "Seamless Packing (Yin et al.)"
EQUAL = "base model, documents, three epochs, tokens per step, linear decay to 0"
SOURCE = "Seamless"
C_EXTRA = {1: 10, 3: 50, 6: 100}  # at 128 -> at 2048
R_MAX = (0.1, 0.3, 0.5)
SP = "SP"
LONGER = "CT, as many steps as SP"
TABLE_2 = {"CT": (11.49, 7.84, 6.71), "BFD": (10.16, 7.41, 6.47), SP: (10.12, 7.39, 6.43)}
CAPACITY = 128
EPOCHS = 3
FACT_EPOCHS = 8  # of the case study: a small model learns by repetition

Arm = dict[str, Any]  # strategy and parameters, as of ``Run``


def arm(strategy: str, **parameters: Any) -> Arm:
    return {"strategy": strategy, "parameters": parameters}


def seamless(**changed: Any) -> Arm:
    return arm("seamless", **{"r_max": 0.3, "extra_capacity": 3, "placement": "exact", **changed})


def variants() -> dict[str, Arm]:
    """Table 7, the placements, and the sweeps of Tables 10 and 11."""
    return {
        "CT": arm("concat"),
        LONGER: arm("concat"),
        "FFD": arm("first_fit_decreasing"),
        "BFD": arm("best_fit_decreasing"),
        "BFD-m": arm("best_fit_decreasing", extra_capacity=3),
        SP: seamless(),
        "SP, published": seamless(placement="published"),
        **{f"SP, r_max {r}": seamless(r_max=r) for r in R_MAX if r != 0.3},
        **{f"SP, c_extra {c}": seamless(extra_capacity=c) for c in C_EXTRA if c != 3},
    }


CASES = {
    "CT": arm("concat"),
    "BFD": arm("best_fit_decreasing"),
    SP: seamless(extra_capacity=1),
}


def code(scale: Scale) -> Corpus:
    """The first domain."""
    return Corpus(
        domain="code",
        train_bytes=scale.pick(cpu=1_800_000, quick=60_000, gpu=4_000_000),
        valid_bytes=scale.pick(cpu=50_000, quick=10_000, gpu=400_000),
    )


def prose(scale: Scale, *, injected: tuple[str, ...] = ()) -> Corpus:
    """The second: long documents, or for the case study short ones among invented facts."""
    if injected:
        size = scale.pick(cpu=40_000, quick=10_000, gpu=150_000)
        return Corpus(domain="prose", train_bytes=size, valid_bytes=10_000, max_bytes=700,
                      injected=injected)  # fmt: skip
    return Corpus(
        domain="prose",
        train_bytes=scale.pick(cpu=300_000, quick=30_000, gpu=300_000),
        valid_bytes=scale.pick(cpu=100_000, quick=10_000, gpu=400_000),
        min_bytes=400,
        max_bytes=1_700,
    )


def runs(scale: Scale) -> list[Run]:
    """Per seed a base, every variant of continuing, and the case study."""
    steps = scale.pick(cpu=None, quick=6, gpu=None)
    documents = prose(scale)
    first = Run(
        recipe="seamless",
        corpus=code(scale),
        strategy="concat",
        buckets=(CAPACITY,),
        config={
            **_config(scale, epochs=1, steps=steps, lr=scale.pick(cpu=3e-3, gpu=4e-4)),
            "model": _model(scale),
        },
        validate={"prose": documents, "code": code(scale)},
        valid_bucket=CAPACITY,
        keep_model=True,
    )
    config = _config(scale, epochs=EPOCHS, steps=steps, lr=scale.pick(cpu=2e-3, gpu=1e-4))
    arms, cases = variants(), {f"facts, {name}": case for name, case in CASES.items()}
    longer = steps or _num_steps(documents, config, **arms[SP])
    arms[LONGER]["config"] = {**config, "num_steps": longer}
    often = _config(scale, epochs=FACT_EPOCHS, steps=steps, lr=scale.pick(cpu=3e-3, gpu=1e-4))
    invented = prose(scale, injected=invented_facts.documents())
    result = []
    for seed in scale.seeds():
        (base,) = paired(first, {"base, code": {}}, [seed])
        further = dataclasses.replace(
            base, corpus=documents, config=config, start=base, keep_model=False
        )
        facts = dataclasses.replace(
            further,
            corpus=invented,
            buckets=(invented_facts.CAPACITY,),
            config=often,
            validate={},
            valid_bucket=1024,
            probe="papers.invented_facts:measure",
        )
        result += [base, *paired(further, arms, [seed]), *paired(facts, cases, [seed])]
    return result


def _model(scale: Scale) -> dict[str, Any]:
    small = {
        "preset": "llama_tiny",
        "overrides": {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "intermediate_size": 256,
            "initializer_range": 0.1,
        },
    }
    return scale.pick(cpu=small, gpu={"preset": "llama_350m"})


def _config(scale: Scale, *, epochs: int, steps: int | None, lr: float) -> dict[str, Any]:
    tokens = scale.pick(cpu=1024, gpu=8192)
    return {
        "num_epochs": epochs,
        "num_steps": steps,
        "data": {"tokens_per_step": tokens, "micro_batch_tokens": tokens, **WHOLE},
        "optimizer": {"lr": lr},
        "learning_rate": {"kind": "linear", "warmup_fraction": 0.05, "min_ratio": 0.0},
        "engine": engine(scale),
    }


def _num_steps(
    corpus: Corpus, config: Mapping[str, Any], *, strategy: str, parameters: Mapping[str, Any]
) -> int:
    """Of ``EPOCHS`` epochs under a strategy."""
    lengths = read_document_lengths(prepare(corpus).train)
    index = pack(lengths, strategy, buckets=[CAPACITY], **parameters)
    tokens_per_step = config["data"]["tokens_per_step"]
    return Schedule(index, tokens_per_step=tokens_per_step).num_steps(EPOCHS)


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Tables 2, 7, 10 and 11 in one, and the case study."""
    found = []
    for name, of in by_name(results).items():
        first = of[0].summary
        row: dict[str, Any] = {
            "strategy": name,
            "steps": first["steps"],
            "repeated %": 100 * first["index"]["repeated_ratio"],
            "dropped %": 100 * first["index"]["dropped_ratio"],
            "padding %": 100 * first["index"]["padding_ratio"],
        }
        if "probe" in first:
            row["loss per fact"] = shown(probed(of, "loss"))
            row["facts right %"] = shown([100 * x for x in probed(of, "right")], 1)
        else:
            row["perplexity, prose"] = shown(perplexities(of, "prose"), 3)
            row["perplexity, code"] = shown(perplexities(of, "code"), 3)
        found.append({**row, "seeds": len(of)})
    return found


def _perplexity(groups: dict[str, list[Result]]) -> dict[str, list[float]]:
    """Of prose, of every arm that is scored on it."""
    return {n: perplexities(of, "prose") for n, of in groups.items() if of[0].run.validate}


def claims(results: list[Result]) -> list[Claim]:
    """Tables 2, 7, 10, 11 and section 4.7."""
    groups = by_name(results)
    perplexity = _perplexity(groups)
    return [
        *_orders(perplexity, groups),
        *_table_7(perplexity),
        *_sweep(perplexity, "Table 10", "r_max", {f"{r}": r for r in R_MAX}, "0.3"),
        *_sweep(perplexity, "Table 11", "c_extra", {f"{c}": c for c in C_EXTRA}, "3"),
        *_case_study(groups),
    ]


def _orders(perplexity: dict[str, list[float]], groups: dict[str, list[Result]]) -> list[Claim]:
    def claim(low: str, high: str, why: str, paper: str = "") -> Claim:
        pairs = zip(TABLE_2.get(low, ()), TABLE_2.get(high, ()), strict=False)
        printed = "PubMed: " + ", ".join(f"{a} against {b}" for a, b in pairs)
        return below(
            perplexity[low],
            perplexity[high],
            source=f"{SOURCE} Table 2",
            claim=f"{low} has the lower validation perplexity than {high}",
            paper=paper or printed,
            why=why,
            what="",
            digits=3,
        )

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
            perplexity["SP, published"],
            perplexity[SP],
            within=0.01,
            source=f"{SOURCE} eq. 3",
            claim="the authors' placement of windows is as good as the exact one (within 1 %)",
            paper="not measured",
            why="what the published arithmetic loses (docs/papers.md) is a small share of tokens",
            what="",
            digits=3,
        ),
    ]


def _sweep(
    perplexity: dict[str, list[float]],
    table: str,
    parameter: str,
    values: dict[str, float],
    best: str,
) -> list[Claim]:
    """The middle value against the others; ``SP`` itself has the middle values."""
    measured = {v: perplexity[SP if v == best else f"SP, {parameter} {v}"] for v in values}
    return [
        below(
            measured[best],
            measured[other],
            source=f"{SOURCE} {table}",
            claim=f"{parameter} {best} is better than {other}",
            paper="accuracy of tasks: the middle one of three values is best by 0.4 to 2 points",
            why="perplexity in place of the accuracy of tasks"
            + (f"; c_extra {other} is {C_EXTRA[int(other)]} at L 2048"
               if parameter == "c_extra" else ""),
            what="perplexity",
            digits=3,
        )
        for other in values
        if other != best
    ]  # fmt: skip


def _case_study(groups: dict[str, list[Result]]) -> list[Claim]:
    def claim(other: str, paper: str) -> Claim:
        both = [groups[f"facts, {name}"] for name in (SP, other)]
        right = [[100 * x for x in probed(of, "right")] for of in both]
        return below(
            *(probed(of, "loss") for of in both),
            source=f"{SOURCE} 4.7",
            claim=f"facts that straddle the cut are learned with SP better than with {other}",
            paper=paper,
            beside=f" nats per fact; {shown(right[0], 1)} % against {shown(right[1], 1)} % right",
            why=f"{invented_facts.NUM_FACTS} invented facts in place of one, L_seq 32",
            what="",
        )

    return [
        claim("BFD", "date 3/5 against 0/5, place 5/5 against 2/5"),
        claim("CT", "not measured"),
    ]


def plots(results: list[Result], folder: Path) -> None:
    """Figure 2 with perplexity: both sweeps between the baselines, means of the seeds."""
    perplexity = {name: fmean(of) for name, of in _perplexity(by_name(results)).items()}
    for name, values, middle in (("r_max", R_MAX, 0.3), ("c_extra", tuple(C_EXTRA), 3)):
        measured = [perplexity[SP if v == middle else f"SP, {name} {v}"] for v in values]
        flat = {other: (values, [perplexity[other]] * len(values)) for other in ("CT", "BFD")}
        lines(
            folder / f"seamless_{name}.png",
            {SP: (values, measured), **flat},
            x=name,
            y="validation perplexity",
        )

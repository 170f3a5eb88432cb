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

from collections.abc import Mapping
from typing import Any

from papers import invented_facts
from papers.corpus import Corpus, prepare
from papers.plain import WHOLE, engine
from papers.runs import Run, Scale
from papers.seamless_claims import C_EXTRA, LONGER, R_MAX, SP, claims, plots, rows

from megapack.data import Schedule
from megapack.packing import pack
from megapack.storage import read_document_lengths

__all__ = ["EQUAL", "TITLE", "claims", "plots", "rows", "runs"]

TITLE = "Seamless Packing (Yin et al.)"
EQUAL = "base model, documents, three epochs, tokens per step, linear decay to 0"
CAPACITY = 128
EPOCHS = 3
FACT_EPOCHS = 8  # of the case study: a small model learns by repetition

Variant = tuple[str, Mapping[str, Any]]  # strategy and its parameters


def variants() -> dict[str, Variant]:
    """Table 7, the placements, and the sweeps of Tables 10 and 11."""
    found: dict[str, Variant] = {
        "CT": ("concat", {}),
        LONGER: ("concat", {}),
        "FFD": ("first_fit_decreasing", {}),
        "BFD": ("best_fit_decreasing", {}),
        "BFD-m": ("best_fit_decreasing", {"extra_capacity": 3}),
        SP: _seamless(),
        "SP, published": _seamless(placement="published"),
    }
    found |= {f"SP, r_max {r}": _seamless(r_max=r) for r in R_MAX if r != 0.3}
    found |= {f"SP, c_extra {c}": _seamless(extra_capacity=c) for c in C_EXTRA if c != 3}
    return found


def _seamless(**changed: Any) -> Variant:
    return "seamless", {"r_max": 0.3, "extra_capacity": 3, "placement": "exact", **changed}


CASES: dict[str, Variant] = {
    "CT": ("concat", {}),
    "BFD": ("best_fit_decreasing", {}),
    SP: _seamless(extra_capacity=1),
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
    facts = prose(scale, injected=invented_facts.documents())
    validate = {"prose": documents, "code": code(scale)}
    result = []
    for seed in scale.seeds:
        base = Run(
            recipe="seamless",
            name="base, code",
            seed=seed,
            corpus=code(scale),
            strategy="concat",
            buckets=(CAPACITY,),
            config={
                **_config(scale, num_epochs=1, lr=scale.pick(cpu=3e-3, quick=3e-3, gpu=4e-4)),
                "model": _model(scale),
                "num_steps": steps,
            },
            validate=validate,
            valid_bucket=CAPACITY,
            keep_model=True,
        )
        result.append(base)
        more = _config(scale, num_epochs=EPOCHS, lr=scale.pick(cpu=2e-3, quick=2e-3, gpu=1e-4))
        for name, (strategy, parameters) in variants().items():
            longer = _num_steps(documents, *variants()[SP], more) if name == LONGER else None
            run = Run(
                recipe="seamless",
                name=name,
                seed=seed,
                corpus=documents,
                strategy=strategy,
                buckets=(CAPACITY,),
                parameters=parameters,
                config={**more, "num_steps": steps or longer},
                start=base,
                validate=validate,
                valid_bucket=CAPACITY,
            )
            result.append(run)
        often = _config(
            scale, num_epochs=FACT_EPOCHS, lr=scale.pick(cpu=3e-3, quick=3e-3, gpu=1e-4)
        )
        for name, (strategy, parameters) in CASES.items():
            run = Run(
                recipe="seamless",
                name=f"facts, {name}",
                seed=seed,
                corpus=facts,
                strategy=strategy,
                buckets=(invented_facts.CAPACITY,),
                parameters=parameters,
                config={**often, "num_steps": steps},
                start=base,
                probe="papers.invented_facts:measure",
            )
            result.append(run)
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
    return scale.pick(cpu=small, quick=small, gpu={"preset": "llama_350m"})


def _config(scale: Scale, *, num_epochs: int, lr: float) -> dict[str, Any]:
    tokens = scale.pick(cpu=1024, quick=1024, gpu=8192)
    return {
        "num_epochs": num_epochs,
        "data": {
            "tokens_per_step": tokens,
            "micro_batch_tokens": tokens,
            **WHOLE,
        },
        "optimizer": {"lr": lr},
        "schedule": {"kind": "linear", "warmup_fraction": 0.05, "min_ratio": 0.0},
        "engine": engine(scale),
    }


def _num_steps(
    corpus: Corpus, strategy: str, parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> int:
    """Of ``EPOCHS`` epochs under a strategy."""
    lengths = read_document_lengths(prepare(corpus).train)
    index = pack(lengths, strategy, buckets=[CAPACITY], **parameters)
    tokens_per_step = config["data"]["tokens_per_step"]
    return Schedule(index, tokens_per_step=tokens_per_step).num_steps(EPOCHS)

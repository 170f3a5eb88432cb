"""docs/results.md: ten questions with their figures, what did not hold, and a forest plot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import cell

__all__ = ["forest", "summary"]

HEAD = """# Measured results

Written by `make bench-report` from the logged runs in `docs/results/*.json`; no figure here is
typed. Read ratios rather than digits, and run the command before you believe either. All tables,
with the paper's figure beside ours and the reason where they differ:
{tables}

## Ten questions

A verdict (yes, no, undecided) is whether the claim holds by the 95 % interval of the mean of paired
seeds, with Holm's correction for the number of a recipe's claims; models are tiny and seeds few.
"""


@dataclass(frozen=True)
class Figure:
    """One figure: the first row of a benchmark that has these fields."""

    benchmark: str
    key: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def of(self, runs: Mapping[str, dict[str, Any]]) -> str | None:
        """As a table shows it; None where it was not measured."""
        for row in _rows(runs.get(self.benchmark, {}).get("results", [])):
            if all(_same(row.get(name), wanted) for name, wanted in self.where.items()):
                value = row.get(self.key)
                return None if value is None else cell(value)
        return None


def _same(value: Any, wanted: Any) -> bool:
    """A tuple names any of several; a word that ends in * what begins like it."""
    if isinstance(wanted, tuple):
        return any(_same(value, one) for one in wanted)
    if isinstance(wanted, str) and wanted.endswith("*"):
        return str(value).startswith(wanted[:-1])
    return bool(value == wanted)


def _rows(results: Any) -> Iterator[dict[str, Any]]:
    if isinstance(results, dict):
        yield results
        results = results.values()
    for value in results:
        if isinstance(value, (dict, list)):
            yield from _rows(value)


@dataclass(frozen=True)
class Question:
    """What is asked; the answer, with {} for each figure; the command."""

    asked: str
    answer: str
    command: str
    figures: tuple[Figure, ...]

    def row(self, runs: Mapping[str, dict[str, Any]]) -> str:
        found = [figure.of(runs) for figure in self.figures]
        known = self.answer.format(*(value or "(not measured)" for value in found))
        return f"| {self.asked} | {known} | `{self.command}` |"


def _composed(item: str, quantity: str) -> Figure:
    where = {"corpus": "fineweb_edu_like", "item": item, "quantity": quantity}
    return Figure("composition", "measured", where)


def _claim(recipe: str, claim: str) -> tuple[Figure, Figure]:
    """Its verdict, then what was measured."""
    of = {"claim": f"{claim}*"}
    return Figure(f"papers-{recipe}", "agrees", of), Figure(f"papers-{recipe}", "measured", of)


def _case(benchmark: str, key: str, *names: str) -> Figure:
    return Figure(benchmark, key, {"case": names})


def _packed(name: str) -> Figure:
    return Figure("packing", "times_faster", {"name": name, "num_documents": 10_000_000})


def _inside(loader: str) -> Figure:
    return Figure("data", "ratio", {"dataset": "PackedGPTDataset", "loader": loader})


QUESTIONS = (
    Question(
        "How much is padded and split?",
        "buckets 1024 to 16384: {} % padding, {} % of the documents split, {} per sample; "
        "concatenate-and-chunk at 4096 splits {} %, at 16384 {} % with {} documents per sample",
        "make bench-composition",
        (
            *(_composed("bucket (the default)", q) for q in ("r_pad %", "r_tru %", "r_cat")),
            _composed("Fixed-4096", "r_tru %"),
            _composed("Fixed-16384", "r_tru %"),
            _composed("Fixed-16384", "r_cat"),
        ),
    ),
    Question(
        "Do buckets train a better model than samples of one length?",
        "than 8,192: {}, {}; than 2,048: {}, {}",
        "ONLY=bucketllm make bench-papers",
        (
            *_claim("bucketllm", "BucketLLM trains a better model than Fixed-8192"),
            *_claim("bucketllm", "BucketLLM trains a better model than Fixed-2048"),
        ),
    ),
    Question(
        "Does attention across documents make a worse model?",
        "{}: {} (masked, then across)",
        "ONLY=masking make bench-papers",
        _claim("masking", "attention across documents makes a worse model"),
    ),
    Question(
        "Which packing, with masks, at equal tokens?",
        "held-out perplexity against concatenate-and-chunk, both in samples of the longest bucket, "
        "in per cent +- 95 %: best fit {} +- {}, buckets with one per step {} +- {}, with several "
        "per step {} +- {}",
        "SCALE=long ONLY=packing make bench-papers",
        tuple(
            Figure("papers-packing", key, {"arm": arm})
            for arm in ("best_fit, 16k", "bucket, one per step", "bucket, mix: micro_step")
            for key in ("against_first_%", "plus_minus_%")
        ),
    ),
    Question(
        "Is the work of the ranks equal?",
        "attention work of the busiest of 64, mean = 1: {} with 6 samples of 8k per rank (random "
        "{}), {} with 3 of 16k (random {}), {} with one of 16k. In seconds of a step, measured: {}",
        "make bench-schedule",
        (
            *(_case("schedule", key, "bucket 8192*") for key in ("ours", "random")),
            *(_case("schedule", key, "bucket 16384*") for key in ("ours", "random")),
            _case("schedule", "ours", "16384, 1 per rank, window 1"),
            _claim("steps", "equal-work dealing makes steps")[1],
        ),
    ),
    Question(
        "Does it train faster?",
        "useful tokens/s of a tiny model on one core: {} padded, {} concatenated at 2048 with "
        "masks, {} in buckets of 256 to 4096",
        "make bench-train",
        tuple(
            _case("train", "useful_tokens_per_second", *names)
            for names in (("pad to 2048",), ("concat 2048",), ("bucket 256..4096",))
        ),
    ),
    Question(
        "How fast is packing?",
        "10 million documents: {} times megatron-core's index in file order, {} times its shuffle "
        "and index",
        "make bench-packing",
        (_packed("concat, file order"), _packed("concat, shuffled")),
    ),
    Question(
        "How fast is the data path?",
        "against megatron-core's plain GPTDataset: one sample {} times, micro batches of 4 into "
        "reused buffers {}, out of a loader without workers {}; inside Megatron {} (micro batch "
        "1), {} (4), {} (4, 2 workers)",
        "make bench-data",
        (
            _case("data", "over_plain", "ours, one sample", "ours, bucket, one sample"),
            _case("data", "over_plain", "ours, micro batch of 4", "ours, bucket, micro batch of 4"),
            _case("data", "over_plain", "ours, 0 workers", "ours (thread), 0 workers"),
            _inside("mbs 1, workers 0"),
            _inside("mbs 4, workers 0"),
            _inside("mbs 4, workers 2"),
        ),
    ),
    Question(
        "How fast are documents built?",
        "against a worker pool with megatron-core's builder: {} times with the same tokenizer, {} "
        "with gigatoken, which alone is {} times as fast",
        "make bench-build",
        tuple(
            Figure("build", "times_megatron", {"what": what})
            for what in ("ours, tokenizers", "ours, gigatoken", "bare gigatoken, one call")
        ),
    ),
    Question(
        "How fast are shards merged?",
        "{} times megatron-core's speed in {} of its memory, short documents (mean 64 tokens)",
        "make bench-merge",
        tuple(
            Figure("merge", key, {"side": ("megapack", "megapack, merge")})
            for key in ("times_faster", "share_of_memory")
        ),
    ),
)


def summary(
    runs: Mapping[str, dict[str, Any]], about: Mapping[str, str], plots: Sequence[str] = ()
) -> str:
    """The page; ``about`` says of each benchmark where, when and with what it ran, ``plots`` are
    its pictures in markdown."""
    claims = [
        (name.removeprefix("papers-"), claim)
        for name, run in runs.items()
        if name.startswith("papers-") and not run["quick"]
        for claim in run["results"]["claims"]
    ]
    lines = [HEAD.format(tables=_tables(runs))]
    lines += ["| question | measured | command |", "|---|---|---|"]
    lines += [question.row(runs) for question in QUESTIONS]
    lines += ["", "![effects with their intervals](images/results_forest.png)", ""]
    lines += [
        "Change of the held-out perplexity against the first arm of its recipe; bars are 95 %"
    ]
    lines += ["intervals over paired seeds.", "", *plots, "", "## What did not hold", ""]
    lines += ["| claimed by | claim | measured |", "|---|---|---|"]
    for name, claim in claims:
        if claim["agrees"] == "no" and name != "composition":
            lines.append(f"| {claim['source']} | {claim['claim']} | {claim['measured']} |")
    printed = [claim for name, claim in claims if name == "composition"]
    counted = "; ".join(
        f"{c['source']} {c['measured'].split()[0]} of {c['paper']}" for c in printed
    )
    lines += [
        "",
        "Printed figures of data composition that are reproduced when they are computed from",
    ]
    lines += [f"lengths ([reasons](results/composition.md)): {counted}."]
    lines += ["", "## How many claims", ""]
    lines += ["| claims of | hold | do not | undecided at this size |", "|---|---|---|---|"]
    trained = [claim for name, claim in claims if name != "composition"]
    for whose, ours in (("the papers", False), ("this project", True)):
        verdicts = [c["agrees"] for c in trained if (c["source"] == "this project") == ours]
        counts = " | ".join(str(verdicts.count(v)) for v in ("yes", "no", "undecided"))
        lines.append(f"| {whose} | {counts} |")
    lines += ["", "## Where these were measured", ""]
    lines += [f"* {name}: {words}" for name, words in about.items()]
    return "\n".join(lines) + "\n"


def _tables(runs: Mapping[str, dict[str, Any]]) -> str:
    """Links to the pages that ``report`` writes."""
    names = ["papers", *(name for name in runs if not name.startswith("papers-"))]
    links = ", ".join(f"[{name}](results/{name}.md)" for name in names)
    return textwrap.fill(f"{links}.", width=100, break_on_hyphens=False)


def forest(runs: Mapping[str, dict[str, Any]], path: Path) -> None:
    """One row per arm that a recipe compares with its first one; readable in grey."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    found = [
        (f"{recipe.removeprefix('papers-')}: {row['arm']}", row["against_first_%"], half)
        for recipe, run in runs.items()
        if recipe.startswith("papers-") and not run["quick"]
        for row in run["results"].get("rows", [])
        if (half := row.get("plus_minus_%"))
    ]
    if not found:
        return
    names, means, halves = zip(*reversed(found), strict=True)
    figure, axes = pyplot.subplots(figsize=(7.5, 0.6 + 0.32 * len(names)), layout="constrained")
    axes.errorbar(means, range(len(names)), xerr=halves, fmt="o", color="black", capsize=3)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("change of held-out perplexity (%), below zero is better")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

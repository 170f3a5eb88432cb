"""make bench-composition: what the papers say about data composition, beside what is measured.

Lengths only, one core. Prints every figure of BucketLLM Tables 1 and 3, Seamless Packing 4.8,
Figure 3, Table 9 and I.1, the atom-size paper's Table 3 (steps) and the blog's tables, says whether
the measured one agrees and why not, and writes the same as JSON. QUICK=1 takes fewer documents.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

from common import quick, show, write_results
from lengths import BUCKETS, LAWS, Lengths
from papers.composition import atom_size, blog, bucketllm, seamless
from papers.composition.rows import Row, compared, python_sources

from megapack.packing import SampleIndex, pack


def all_rows(*, num_documents: int, num_files: int | None) -> list[Row]:
    """Every row, paper after paper."""
    law = LAWS["fineweb_edu_like"](num_documents)
    name, sources = python_sources(num_files)
    return [
        *bucketllm.table_1(law, "fineweb_edu_like"),
        *bucketllm.table_1(sources, name, calibrated=False),
        *bucketllm.table_3(law, "fineweb_edu_like"),
        *bucketllm.table_3(sources, name, calibrated=False),
        *bucketllm.speeds(),
        *seamless.section_4_8(),
        *seamless.figure_3(),
        *seamless.table_9(num_documents=num_documents // 10),
        *seamless.dropping(),
        *atom_size.table_3_steps(),
        *blog.padding_waste(),
        *blog.strategies(),
        *blog.costs(),
        *goals(num_documents),
        *every_strategy(law),
    ]


def figures(source: str, corpus: str, item: str, index: SampleIndex, why: str = "") -> list[Row]:
    """Padding, truncation (where any is possible) and concatenation of one packing."""
    metrics, row = index.metrics(), partial(compared, source, corpus, item)
    rows = [row("r_pad %", (None, 100 * metrics["padding_ratio"]), why=why)]
    if source == "every strategy":
        rows += [row("r_tru %", (None, 100 * metrics["truncation_ratio"]))]
    return [*rows, row("r_cat", (None, metrics["concatenation_ratio"]))]


def goals(num_documents: int) -> list[Row]:
    """The default strategy where short documents are missing, without and with `refine`."""
    rows = []
    ways = {"promote off": {"promote": "off"}, "default": {}, "refine": {"refine": True}}
    for law in ("fineweb_edu_like", "finance", "bbc_news", "pubmed"):
        lengths = LAWS[law](num_documents)
        for item, parameters in ways.items():
            index = pack(lengths, buckets=BUCKETS, **parameters)
            metrics = index.metrics()
            assert metrics["truncation_ratio"] == metrics["truncation_floor"]
            decided = ((name, text.split(":")[0]) for name, text in index.decisions.items())
            why = "; ".join(f"{name} {choice}" for name, choice in decided)
            rows += figures("bucket, nothing cut", law, item, index, why)
    return rows


def every_strategy(lengths: Lengths) -> list[Row]:
    """All strategies on one corpus."""
    rows = []
    for strategy, buckets in (
        *((name, [size]) for name in ("concat", "best_fit_decreasing") for size in (4096, 16384)),
        *((name, [4096]) for name in ("first_fit_decreasing", "next_fit", "seamless", "pad")),
        *((name, BUCKETS) for name in ("bucket", "bucket_v0", "bucket_llm", "decompose")),
    ):
        item = f"{strategy}, {buckets[0]}" + (f" to {buckets[-1]}" if len(buckets) > 1 else "")
        index = pack(lengths, strategy, buckets=buckets)
        rows += figures("every strategy", "fineweb_edu_like", item, index)
    return rows


def show_rows(rows: list[Row]) -> None:
    """One table per source and corpus, then how many figures agree."""
    for (source, corpus), group in itertools.groupby(rows, lambda row: (row.source, row.corpus)):
        columns = ("item", "quantity", "paper", "measured", "agrees", "why")
        show(f"{source} on {corpus}", map(dataclasses.asdict, group), *columns)
    judged = [row.agrees for row in rows if row.agrees is not None]
    print(f"\n{sum(judged)} of {len(judged)} printed figures agree; {len(rows)} rows in all.")


def measure(quickly: bool) -> list[Row]:
    """Every row, shown; ``quickly`` takes fewer documents."""
    rows = all_rows(
        num_documents=300_000 if quickly else 10_000_000, num_files=3_000 if quickly else None
    )
    show_rows(rows)
    return rows


def main() -> None:
    rows = measure(quick())
    write_results("composition", [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()

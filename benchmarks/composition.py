"""make bench-composition: what the papers say about data composition, beside what is measured.

Lengths only, one core. Prints every figure of BucketLLM Tables 1 and 3, Seamless Packing 4.8,
Figure 3, Table 9 and I.1, the atom-size paper's Table 3 (steps) and the blog's tables, says whether
the measured one agrees and why not, and writes the same as JSON. QUICK=1 takes fewer documents.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys

from common import quick, write_results
from lengths import LAWS
from papers.composition import atom_size, blog, bucketllm, seamless
from papers.composition.rows import Row, python_sources
from rich.console import Console
from rich.table import Table


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
    ]


def show(rows: list[Row]) -> None:
    """One table per source and corpus, then how many figures agree."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for (source, corpus), group in itertools.groupby(rows, lambda row: (row.source, row.corpus)):
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left",
                      title=f"\n[bold]{source}[/] on {corpus}")  # fmt: skip
        for head in ("", "", "paper", "measured", "agrees", "why"):
            table.add_column(head, justify="right" if head in ("paper", "measured") else "left")
        for row in group:
            table.add_row(
                row.item,
                row.quantity,
                "" if row.paper is None else f"{row.paper:,.4g}",
                f"{row.measured:,.4g}",
                {True: "yes", False: "[bold red]no[/]", None: ""}[row.agrees],
                row.why,
            )
        console.print(table)
    judged = [row.agrees for row in rows if row.agrees is not None]
    console.print(
        f"\n{sum(judged)} of {len(judged)} printed figures agree; {len(rows)} rows in all."
    )


def measure(quickly: bool) -> list[Row]:
    """Every row, shown; ``quickly`` takes fewer documents."""
    rows = all_rows(
        num_documents=300_000 if quickly else 10_000_000, num_files=3_000 if quickly else None
    )
    show(rows)
    return rows


def main() -> None:
    rows = measure(quick())
    write_results("composition", [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()

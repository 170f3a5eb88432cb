"""``make bench-composition``: the papers' figures of data composition, compared with measured ones.

Lengths only, one core. Prints every figure of BucketLLM Tables 1 and 3, Seamless Packing 4.8,
Figure 3, Table 9 and I.1, the atom-size paper's Table 3 (steps) and the blog's tables, with the
measured figure, whether they agree and why not, and writes the same as JSON. QUICK=1 takes fewer
documents.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
from common import quick, show, write_results
from lengths import BUCKETS, LAWS, Lengths
from papers import blog
from papers.claims import Row, compared
from papers.recipes import atom_size, bucketllm, seamless

from megapack.packing import SampleIndex, pack

# A letter outside of ASCII is several bytes, which stay in one token.
_TOKEN = re.compile(rb"[A-Za-z\x80-\xff]+|[0-9]+|[ \t]{2,}|[^A-Za-z\x80-\xff0-9 \t]")


def python_sources(limit: int | None = None) -> tuple[str, Lengths]:
    """Return a name and the document lengths of a real corpus that every machine has: the Python
    files of the interpreter and its packages, by sorted path, without empty files.

    Tokens are runs of letters, runs of digits, runs of two or more blanks, and every other byte
    except single blanks: about 3.5 bytes each, as with a trained tokenizer for code. Each document
    has one more token, its end.
    """
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    files = sorted({path for folder in folders if folder for path in Path(folder).rglob("*.py")})
    texts = (path.read_bytes() for path in files[:limit] if path.is_file())
    lengths = np.array([len(_TOKEN.findall(text)) + 1 for text in texts if text], np.int32)
    return f"Python sources ({len(lengths):,} files)", lengths


def measure() -> list[Row]:
    """Measure, print and write all rows, by paper; return them."""
    num_documents = 300_000 if quick() else 10_000_000
    law, fineweb = LAWS["fineweb_edu_like"](num_documents), "fineweb_edu_like"
    name, sources = python_sources(3_000 if quick() else None)
    rows = [
        *bucketllm.table_1(law, fineweb),
        *bucketllm.uncalibrated(bucketllm.table_1(sources, name)),
        *bucketllm.table_3(law, fineweb),
        *bucketllm.uncalibrated(bucketllm.table_3(sources, name)),
        *bucketllm.speeds(), *seamless.section_4_8(), *seamless.figure_3(),
        *seamless.table_9(num_documents=num_documents // 10), *seamless.dropping(),
        *atom_size.table_3_steps(),
        *blog.padding_waste(), *blog.strategies(), *blog.costs(),
        *goals(num_documents), *every_strategy(law),
    ]  # fmt: skip
    for (source, corpus), group in itertools.groupby(rows, lambda row: (row.source, row.corpus)):
        columns = ("item", "quantity", "paper", "measured", "agrees", "why")
        show(f"{source} on {corpus}", map(dataclasses.asdict, group), *columns)
    judged = [row.agrees for row in rows if row.agrees is not None]
    print(f"\n{sum(judged)} of {len(judged)} printed figures agree; {len(rows)} rows in all.")
    write_results("composition", [dataclasses.asdict(row) for row in rows])
    return rows


def figures(source: str, corpus: str, item: str, index: SampleIndex, why: str = "") -> list[Row]:
    """Return the ratios of one packing: padding, concatenation and, for "every strategy",
    truncation."""
    metrics, row = index.metrics(), partial(compared, source, corpus, item)
    rows = [row("r_pad %", (None, 100 * metrics["padding_ratio"]), why=why)]
    if source == "every strategy":
        rows += [row("r_tru %", (None, 100 * metrics["truncation_ratio"]))]
    return [*rows, row("r_cat", (None, metrics["concatenation_ratio"]))]


def goals(num_documents: int) -> list[Row]:
    """Measure the default strategy on corpora with few short documents, with three settings."""
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
    """Measure all strategies on one corpus."""
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


if __name__ == "__main__":
    measure()

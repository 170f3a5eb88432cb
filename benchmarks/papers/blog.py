"""The blog on data loading (padding, packing, attention masks): waste, utilization, cost.

Several of its figures contradict its own mean document length or each other; the bounds printed
here hold for any lengths of that mean.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from lengths import LAWS, Lengths
from papers.claims import Row, compared

from megapack.compare import GPUS, MODELS
from megapack.packing import pack

CAPACITIES = (512, 1024, 2048, 4096, 8192, 16384)
WEB = (18, 32, 48, 62, 74, 83)
CODE = (28, 45, 60, 72, 82, 89)  # mean 300
BOOKS = (5, 8, 12, 18, 25, 35)  # mean 50,000, chunked


def padding_waste(num_documents: int = 200_000) -> list[Row]:
    """Compare 'Padding Waste by max_seq_len': one document per sample, truncated if longer."""
    rows = []
    for law in ("web_blog_table", "web_800"):
        lengths = LAWS[law](num_documents)
        for capacity, printed in zip(CAPACITIES, WEB, strict=True):
            index = pack(np.minimum(lengths, capacity), "pad", buckets=[capacity])
            least = 100 * (1 - min(1.0, 800 / capacity))
            impossible = f"a mean of 800 wastes {least:.0f} % at least, whatever the lengths"
            figures = printed, 100 * index.metrics()["padding_ratio"]
            why_not = impossible if printed < least else "the shape of this law"
            row = partial(compared, "Blog padding waste", law, f"no packing, {capacity}")
            rows.append(row("waste %", figures, within=0.02, rounding=0.5, why_not=why_not))
    return [*rows, *_bounds("code, mean 300", CODE, "least"), *_bounds("books, mean 50,000", BOOKS)]


def _bounds(corpus: str, printed: tuple[int, ...], end: str = "most") -> list[Row]:
    rows = []
    for capacity, paper in zip(CAPACITIES, printed, strict=True):
        # Every document pads less than one capacity: waste < L / (L + mean).
        least, most = 100 * max(0.0, 1 - 300 / capacity), 100 * capacity / (capacity + 50_000)
        fits, bound = (paper >= least, least) if end == "least" else (paper <= most, most)
        why = "" if fits else "no lengths of this mean give the blog's figure"
        item, quantity = f"no packing, {capacity}", f"waste %; measured: the {end} possible"
        row = compared("Blog padding waste", corpus, item, quantity, (paper, bound), why=why)
        rows.append(replace(row, agrees=fits))
    return rows


def strategies(num_documents: int = 100_000) -> list[Row]:
    """Compare 'Packing Strategy Efficiency (100K documents, max_seq_len 4096)' and its speedup.

    Documents are truncated at 4096, as in the blog's code, except in rows whose code splits them.
    """
    rows = []
    unknown = "no reading of the blog's code gives it, on either law"
    for law in ("web_blog_table", "web_800"):
        lengths = LAWS[law](num_documents)
        short = np.minimum(lengths, 4096)
        nothing, best = _fill(short, "pad"), _fill(short, "first_fit_decreasing")
        row = partial(compared, "Blog strategies", law, within=0.01)
        use = "utilization %"
        rows += [
            row("no packing", use, (38.2, nothing),
                why_not="a mean of 800 fills 19.5 % at most; the row needs a mean of about 4,800"),
            row("sorted-batch padding", use, (58.0, _batch_fill(np.sort(short))),
                why_not="batches of 8 from documents sorted by length are nearly full; batches of "
                f"8 unsorted documents are filled to {_batch_fill(short):.0f} %"),
            row("random packing, splitting", use, (96.8, _fill(lengths, "concat")),
                why_not="the blog's code splits documents: only the last sample is padded"),
            row("random packing, whole", use, (96.8, _fill(short, "next_fit")), why_not=unknown),
            row("length-sorted", use, (98.1, _fill(short, "length_sorted")), why_not=unknown),
            row("FFD", use, (99.4, best)),
            row("FFD over no packing", "times as much", (2.6, best / nothing), rounding=0.05,
                why_not="follows the utilization without packing"),
        ]  # fmt: skip
    return rows


def _fill(lengths: Lengths, strategy: str) -> float:
    return 100 * float(pack(lengths, strategy, buckets=[4096]).metrics()["utilization"])


def _batch_fill(lengths: Lengths, batch: int = 8) -> float:
    """Return the utilization in % if successive documents are padded to the longest of a batch."""
    whole = lengths[: len(lengths) // batch * batch].reshape(-1, batch).astype(np.int64)
    return 100 * float(whole.sum() / (batch * whole.max(axis=1).sum()))


THROUGHPUT = {"no packing": 10_200, "sorted": 15_500, "random": 25_900, "FFD": 26_600}  # on 8 H100
DOLLARS = {"no packing": 1_280_000, "sorted": 840_000, "random": 502_000, "FFD": 492_000}
FILL = {"no packing": 0.382, "sorted": 0.58, "random": 0.968, "FFD": 0.994}


def costs() -> list[Row]:
    """Compare the throughput of Llama 7B on 8 H100, the cost of 1T tokens, and the opening sum."""
    model, peak = MODELS["7b"], GPUS["h100"].peak_flops
    operations = model.flops_per_token + model.flops_per_square * 4096
    rows = []
    for name, tokens_per_second in THROUGHPUT.items():
        used = tokens_per_second / FILL[name] * operations / (8 * peak)
        dollars = 1e12 / tokens_per_second / 3600 * 8 * 2
        implied = 1e12 / FILL[name] * operations / (DOLLARS[name] / 2 * 3600 * peak)
        rows += [
            compared("Blog throughput", "cost model, 7B", name, "tokens/s, 8 H100 at 40 %",
                     (tokens_per_second, 8 * peak * 0.4 * FILL[name] / operations),
                     claimed=False, why=f"the blog's figure is {used:.0%} of the peak"),
            compared("Blog throughput", "cost model, 7B", f"{name} / FFD", "ratio of tokens/s",
                     (tokens_per_second / THROUGHPUT["FFD"], FILL[name] / FILL["FFD"])),
            compared("Blog cost of 1T tokens", "arithmetic", name, "$, from the blog's tokens/s",
                     (DOLLARS[name], dollars),
                     why_not=f"its cost means {implied:.0%} of the peak, its speed {used:.0%}"),
        ]  # fmt: skip
    wasted = 0.3 * 2048 * 24 * 2
    why = f"2048 x 24 x $2 is $98,304 in all; $1.2M is the waste of {1.2e6 / wasted:.0f} days"
    row = partial(compared, "Blog opening", "arithmetic", "30 % of 2048 GPUs at $2 per hour")
    return [*rows, row("$ wasted per day", (1_200_000, wasted), why_not=why)]

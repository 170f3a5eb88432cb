"""What a packing is worth, as `pack` and `inspect` print it."""

from __future__ import annotations

from megapack.cli.report import print_table
from megapack.packing import SampleIndex
from megapack.units import count, percent

__all__ = ["print_composition"]


def print_composition(index: SampleIndex) -> None:
    """A row per bucket, the ratios of the papers, and what was decided."""
    m = index.metrics()
    rows = []
    columns = (index.bucket_capacity.tolist(), m["samples_per_bucket"], m["tokens_per_bucket"])
    for capacity, samples, tokens in zip(*columns, strict=True):
        padding = samples * capacity - tokens
        rows.append(
            (
                count(capacity),
                count(samples),
                count(tokens),
                percent(tokens / max(1, m["placed_tokens"])),
                percent(padding / max(1, samples * capacity), 3),
            )
        )
    print_table(("bucket", "samples", "tokens", "of all", "padding"), rows)
    bound = f"lower bound {percent(m['truncation_floor'], 3)}: longer than the largest bucket"
    facts = [
        ("padding ratio r_pad", percent(m["padding_ratio"], 3), ""),
        ("truncation ratio r_tru", percent(m["truncation_ratio"], 3), bound),
        ("concatenation ratio r_cat", f"{m['concatenation_ratio']:.3f}", "documents per sample"),
        ("dropped tokens", count(m["dropped_tokens"]), percent(m["dropped_ratio"], 3)),
        ("repeated tokens", count(m["repeated_tokens"]), percent(m["repeated_ratio"], 3)),
    ]
    print()
    for name, value, remark in facts:
        print(f"{name:26} {value:>16}  {remark}".rstrip())
    for name, reason in index.decisions.items():
        print(f"{name:26} {reason}")

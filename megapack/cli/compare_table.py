"""What ``megapack-build compare`` prints."""

from __future__ import annotations

from collections.abc import Callable

from megapack.cli.report import print_table
from megapack.compare import Comparison, Evaluation
from megapack.compare.words import short_number
from megapack.units import count, counted, percent

__all__ = ["print_comparison"]


def print_comparison(comparison: Comparison, prefix: str) -> None:
    """A line per strategy and the recommendation, for a terminal; prefix: of its command."""
    corpus, training = comparison.corpus, comparison.run
    print(
        f"{corpus.name}: {count(corpus.num_documents)} documents, {count(corpus.num_tokens)} "
        f"tokens (mean {corpus.mean:,.0f}, median {corpus.median:,.0f}, "
        f"longest {count(corpus.longest)})"
    )
    if corpus.sampled_from is not None:
        print(
            f"a random sample of {count(corpus.num_documents)} of {count(corpus.sampled_from)} "
            "documents; every figure is of the sample"
        )
    rows = []
    for position, evaluation in enumerate(comparison.evaluations):
        cells = [cell(evaluation) for _, cell in _COLUMNS]
        if position == comparison.recommendation.best:
            cells = [f"[bold green]{cell}[/]" for cell in cells]
        elif comparison.recommendation.out[position]:
            cells = [f"[dim]{cell}[/]" for cell in cells]
        rows.append(cells)
    print_table([head for head, _ in _COLUMNS], rows)
    for label, reason in comparison.left_out.items():
        print(f"left out: {label}: {reason}")
    print(
        "pad: of the positions; split: of the documents; docs: per sample; lost, rep(eated): of\n"
        f"the tokens; imbal: attention work of the busiest of {comparison.num_ranks} ranks over\n"
        f"the mean; GPU hours and cost: {short_number(training.model.parameters)} parameters, "
        f"{training.gpu.name.upper()} at {training.utilization:.0%} of its peak"
    )
    if comparison.planned:
        _print_planned(comparison)
    _print_recommendation(comparison, prefix)


def _share(name: str) -> Callable[[Evaluation], str]:
    """A metric that is a fraction, in percent with at most three decimals."""

    def cell(evaluation: Evaluation) -> str:
        value = 100.0 * float(evaluation.metrics[name])
        return "0" if value == 0 else f"{value:.3f}" if value < 10 else f"{value:.1f}"

    return cell


_COLUMNS: tuple[tuple[str, Callable[[Evaluation], str]], ...] = (
    ("strategy", lambda e: e.label),
    ("pad %", _share("padding_ratio")),
    ("split %", _share("truncation_ratio")),
    ("docs", lambda e: f"{e.metrics['concatenation_ratio']:.2f}"),
    ("lost %", _share("dropped_ratio")),
    ("rep %", _share("repeated_ratio")),
    ("imbal", lambda e: f"{e.imbalance('balanced'):.3f}"),
    ("hours", lambda e: short_number(e.breakdown.gpu_hours, 3)),
    ("$", lambda e: short_number(e.breakdown.cost, 3)),
)


def _print_planned(comparison: Comparison) -> None:
    rows = [
        [
            "one rank" if planned.max_degree == 1 else f"up to {planned.max_degree} ranks",
            percent(planned.split_ratio, 3).removesuffix(" %"),
            percent(planned.shared_ratio, 1).removesuffix(" %"),
            f"{planned.micro_batches:.2f}",
            f"{planned.extra_micro_batches:.2f}",
            f"{planned.attention.per_step:.3f}",
            f"{planned.model.per_step:.3f}",
            f"{planned.model.per_micro_batch:.3f}",
        ]
        for planned in comparison.planned
    ]
    print("\nplanned steps: documents dealt one by one (megapack.plan_step) instead of samples")
    heads = ("held by", "split %", "shared %", "micro", "extra", "imbal", "step", "micro step")
    print_table(heads, rows)
    first = comparison.planned[0]
    best = comparison.evaluations[comparison.recommendation.best]
    print(
        f"micro: micro batches of {count(first.micro_batch_tokens)} tokens a rank; extra: of them, "
        "beyond what the tokens need;\nshared: of the tokens; step, micro step: all work of the "
        "busiest rank over the mean, ranks\nmeeting at every optimizer step or micro step "
        f"(step of {best.label}: {best.breakdown.critical_path:.3f});\n"
        f"means of {counted(first.num_steps, 'drawn step')}"
    )


def _print_recommendation(comparison: Comparison, prefix: str) -> None:
    recommendation = comparison.recommendation
    best = comparison.evaluations[recommendation.best]
    print(f"\nrecommended: {best.label}")
    for reason in recommendation.reasons:
        print(f"  {reason}")
    for name, decision in best.decisions.items():
        print(f"  {name}: {decision}")
    fixed = recommendation.best_fixed
    if fixed is not None and fixed != recommendation.best:
        print(f"  With one sample shape only: {comparison.evaluations[fixed].label}.")
    print(f"\n  {best.case.command(prefix, comparison.seed)}")

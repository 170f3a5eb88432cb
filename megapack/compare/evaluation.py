"""Cases of a comparison, their evaluation on one corpus, and the recommendation.

* ``Case``: a strategy with its capacities; ``parse_case``, ``default_cases`` make them
* ``Evaluation``: metrics, attention work and cost of one case; ``COLUMNS``: columns of its tables
* ``recommend``: the best strategy, with reasons

    parse_case("concat@4096:shuffle=false", buckets=[], capacities=[])[0].label
    # -> "concat@4096 shuffle=False"
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import yaml

from megapack.compare.cost import Breakdown, BucketWork, Dealing
from megapack.config import read_yaml
from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, check_packing, find_strategy
from megapack.units import count, percent, short

# ---- Cases: strategies as the command line names them --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """Strategy with its capacities and the parameters that differ from the defaults.

    Attributes:
        label: name in tables: ``concat@4096``, ``bucket``, ``seamless@2048 r_max=0.3``.
        strategy: name in ``STRATEGIES``.
        buckets: capacities, ascending.
        parameters: keywords of ``pack``, also ``preset``.
        alignment, fim_room, second_capacity: as in ``pack``.
    """

    label: str
    strategy: str
    buckets: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    alignment: int = 1
    fim_room: int = 0
    second_capacity: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError where ``pack`` would, before the comparison starts."""
        values = dict(self.parameters)
        check_packing(
            self.strategy,
            buckets=self.buckets,
            alignment=self.alignment,
            fim_room=self.fim_room,
            second_capacity=self.second_capacity,
            preset=values.pop("preset", None),
            parameters=values,
        )

    def command(
        self, prefix: str, seed: int, groups: str | None = None, second: str | None = None
    ) -> str:
        """Return the command that packs the dataset at ``prefix``, with ``--groups groups`` and
        ``--second second``."""
        words = ["megapack-build", "pack", prefix, "--strategy", self.strategy]
        words += ["--buckets", ",".join(map(str, self.buckets))]
        for name, value in self.parameters.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{option}")
            else:
                words += [f"--{option}", str(value)]
        words += ["--alignment", str(self.alignment)] if self.alignment > 1 else []
        words += ["--fim-room", str(self.fim_room)] if self.fim_room else []
        words += ["--groups", groups] if groups else []
        if second is not None and self.second_capacity is not None:
            limits = ",".join(map(str, self.second_capacity))
            words += ["--second", second, "--second-capacity", limits]
        words += ["--seed", str(seed)] if seed else []
        return shlex.join(words)

    @property
    def is_fixed_length(self) -> bool:
        return len(self.buckets) == 1


def parse_case(
    text: str,
    *,
    buckets: Sequence[int],
    capacities: Sequence[int],
    alignment: int = 1,
    fim_room: int = 0,
    second_capacity: tuple[int, ...] | None = None,
) -> list[Case]:
    """Read ``NAME[@CAPACITY[+CAPACITY...]][:KEY=VALUE[,KEY=VALUE...]]``.

    Args:
        text: for instance ``bucket``, ``concat@4096``, ``seamless@2048:preset=paper,last=drop``.
        buckets: default capacities of a bucket strategy.
        capacities: default capacities of a fixed-length strategy, which makes one case of each.
        alignment, fim_room, second_capacity: as in ``pack``.

    Raises:
        ConfigError: the text does not have this form, the strategy or a parameter is unknown, or
            the strategy does not support these capacities.
    """
    head, _, tail = text.partition(":")
    name, at, places = head.partition("@")
    many = find_strategy(name).many_buckets
    parameters = _parse_parameters(tail, text)
    suffix = "".join(f" {key}={value}" for key, value in parameters.items())
    if at:
        if not all(place.strip().isdecimal() for place in places.split("+")):
            raise ConfigError(
                f"strategy {text!r}: {places!r} is not a capacity; write @4096, or @1024+2048"
            )
        chosen = [(head, tuple(sorted(map(int, places.split("+")))))]
    elif many:
        chosen = [(name, tuple(sorted(buckets)))]
    else:
        chosen = [(f"{name}@{capacity}", (capacity,)) for capacity in capacities]
    common: dict[str, Any] = {"strategy": name, "parameters": parameters, "alignment": alignment}
    common |= {"fim_room": fim_room, "second_capacity": second_capacity}
    return [Case(label=label + suffix, buckets=sizes, **common) for label, sizes in chosen]


def _parse_parameters(text: str, whole: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"strategy {whole!r}: {item!r} is not of the form key=value")
        try:
            # YAML reads on and off as booleans; parameters use them as words.
            parameters[key.strip()] = value if value in ("on", "off") else read_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(
                f"strategy {whole!r}: {value!r} is not a value of {key}; write a number, word, "
                "true or false"
            ) from None
    return parameters


def default_cases(
    *,
    buckets: Sequence[int],
    capacities: Sequence[int],
    alignment: int = 1,
    fim_room: int = 0,
    second_capacity: tuple[int, ...] | None = None,
) -> tuple[list[Case], dict[str, str]]:
    """Return every strategy with its default parameters; arguments of ``parse_case``.

    Returns:
        The cases, and strategies that do not support these capacities: name -> reason.

    Raises:
        ConfigError: no strategy supports them.
    """
    cases: list[Case] = []
    left_out: dict[str, str] = {}
    for name in STRATEGIES:
        try:
            cases += parse_case(
                name,
                buckets=buckets,
                capacities=capacities,
                alignment=alignment,
                fim_room=fim_room,
                second_capacity=second_capacity,
            )
        except ConfigError as error:
            left_out[name] = str(error)
    if not cases:
        raise ConfigError(f"no strategy supports this: {next(iter(left_out.values()))}")
    return cases, left_out


# ---- Evaluation of a case ------------------------------------------------------------------------


def money(amount: float) -> str:
    """Format dollars: 1234567 -> $1.23 M; estimates of cents are not worth printing."""
    if amount < 1:
        return "under $1"
    return f"${amount:,.2f}" if amount < 1000 else f"${short(amount)}"


def duration(hours: float) -> str:
    """Format hours: 0.09 -> 5.4 minutes."""
    if hours < 1 / 60:
        return "under a minute"
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of one case.

    Attributes:
        metrics: ``SampleIndex.metrics()``.
        decisions: choices of the strategy and their reasons.
        work: per non-empty bucket, by ascending capacity.
        breakdown: GPU hours and cost.
        seconds: time to pack, without measuring.
    """

    case: Case
    metrics: dict[str, Any]
    decisions: dict[str, str]
    work: list[BucketWork]
    breakdown: Breakdown
    seconds: float

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def num_positions(self) -> int:
        """Computed token positions, with padding."""
        return sum(bucket.num_positions for bucket in self.work)

    @property
    def mean_context(self) -> float:
        """Mean squared segment length per position (attention inside documents), in tokens."""
        return sum(bucket.work for bucket in self.work) / self.num_positions

    @property
    def mean_sample_context(self) -> float:
        """Mean squared capacity per position (attention over whole samples), in tokens."""
        return sum(bucket.sample_squares for bucket in self.work) / self.num_positions

    def imbalance(self, dealing: Dealing) -> float:
        """Return the work of the busiest rank over the mean, weighted by the buckets' attention
        work."""
        total = sum(bucket.work for bucket in self.work)
        return sum(bucket.work * bucket.imbalance(dealing) for bucket in self.work) / total


def _share(name: str) -> Callable[[Evaluation], str]:
    """Return a cell that prints a metric in percent, with at most three decimals."""

    def cell(evaluation: Evaluation) -> str:
        value = 100.0 * float(evaluation.metrics[name])
        return "0" if value == 0 else f"{value:.3f}" if value < 10 else f"{value:.1f}"

    return cell


class TableColumn(NamedTuple):
    """Column of the tables on the terminal and on the page."""

    head: str  # on the terminal; "": only on the page
    page_head: str
    unit: str  # on the page
    cell: Callable[[Evaluation], str]


COLUMNS = (
    TableColumn("strategy", "strategy", "", lambda e: e.label),
    TableColumn("pad %", "padding", "%", _share("padding_ratio")),
    TableColumn("split %", "truncated", "%", _share("truncation_ratio")),
    TableColumn(
        *("docs", "concatenated", "docs/sample"),
        lambda e: f"{e.metrics['concatenation_ratio']:.2f}",
    ),
    TableColumn("dropped %", "dropped", "%", _share("dropped_ratio")),
    TableColumn("repeated %", "repeated", "%", _share("repeated_ratio")),
    TableColumn("", "samples", "", lambda e: count(e.metrics["num_samples"])),
    TableColumn("", "attention", "tokens", lambda e: f"{e.mean_context:,.0f}"),
    TableColumn("imbal", "imbalance", "busiest / mean", lambda e: f"{e.imbalance('balanced'):.3f}"),
    TableColumn("hours", "GPU hours", "", lambda e: short(e.breakdown.gpu_hours)),
    TableColumn("cost", "cost", "", lambda e: money(e.breakdown.cost)),
    TableColumn("", "packed in", "s", lambda e: f"{e.seconds:.3f}"),
)
_SECOND = TableColumn("2nd pad %", "second padding", "%", _share("second_padding_ratio"))


def columns_of(evaluations: Sequence[Evaluation]) -> list[TableColumn]:
    """Return the columns of a table; with second sizes their padding, too."""
    has_second = any("second_padding_ratio" in e.metrics for e in evaluations)
    return [*COLUMNS[:2], *([_SECOND] if has_second else []), *COLUMNS[2:]]


# ---- Recommendation ------------------------------------------------------------------------------
# The rule:
#
# 1. exclude strategies that drop more than 0.1 % of the tokens, or that split more than one
#    document in a hundred beyond those longer than the largest capacity of the comparison (if none
#    remains, exclude only those that drop tokens, and keep those that split the fewest);
# 2. of the others, take the least estimated training time;
# 3. within half a percent of that time, prefer fewer split documents, then less padding, then the
#    default strategy. If attention crosses documents (``--attention sample``), first prefer fewer
#    documents per sample (up to 2 % more does not count): other documents are unrelated context.

MAX_EXTRA_TRUNCATION = 0.01
MAX_DROPPED = 0.001
SAME_TIME = 0.005
SAME_CONCATENATION = 0.02
MOST_NAMED = 3  # strategies in one sentence


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Recommended strategy and the reasons.

    Attributes:
        best: index into the evaluations.
        best_fixed: the best one with a single sample shape, or None.
        reasons: sentences, most important first.
        out: per evaluation, the reason for which rule 1 excludes it; "": not excluded.
    """

    best: int
    best_fixed: int | None
    reasons: tuple[str, ...]
    out: tuple[str, ...]


def recommend(
    evaluations: Sequence[Evaluation], attention: Literal["document", "sample"] = "document"
) -> Recommendation:
    """Apply the rule above to evaluations (one or more) of the same documents."""
    crosses = attention == "sample"
    lower_bound = min(e.metrics["truncation_floor"] for e in evaluations)
    out = tuple(_why_out(e, lower_bound) for e in evaluations)
    best = _cheapest(evaluations, range(len(evaluations)), out, crosses)
    fixed = [i for i, e in enumerate(evaluations) if e.case.is_fixed_length]
    best_fixed = _cheapest(evaluations, fixed, out, crosses) if fixed else None
    reasons = _reasons(evaluations, best, best_fixed, out, crosses)
    return Recommendation(best=best, best_fixed=best_fixed, reasons=reasons, out=out)


def _why_out(evaluation: Evaluation, lower_bound: float) -> str:
    metrics = evaluation.metrics
    if metrics["dropped_ratio"] > MAX_DROPPED:
        return f"drops {percent(metrics['dropped_ratio'], None)} of the tokens"
    if metrics["truncation_ratio"] > lower_bound + MAX_EXTRA_TRUNCATION:
        return f"splits {percent(metrics['truncation_ratio'], None)} of the documents"
    return ""


def _cheapest(
    evaluations: Sequence[Evaluation], among: Sequence[int], out: Sequence[str], crosses: bool
) -> int:
    """Apply rules 1 to 3 to the evaluations with the indices ``among``; return the best index."""
    kept = [i for i in among if not out[i]]
    # Every case is excluded: ignore the rule on splits, and keep those with the fewest splits.
    if not kept:
        kept = [i for i in among if not out[i].startswith("drops")] or list(among)
        fewest = min(evaluations[i].metrics["truncation_ratio"] for i in kept)
        limit = fewest + MAX_EXTRA_TRUNCATION
        kept = [i for i in kept if evaluations[i].metrics["truncation_ratio"] <= limit]
    least = min(evaluations[i].breakdown.gpu_hours for i in kept)
    kept = [i for i in kept if evaluations[i].breakdown.gpu_hours <= least * (1 + SAME_TIME)]
    if crosses:
        fewest = min(evaluations[i].metrics["concatenation_ratio"] for i in kept)
        limit = fewest * (1 + SAME_CONCATENATION)
        kept = [i for i in kept if evaluations[i].metrics["concatenation_ratio"] <= limit]
    return min(
        kept,
        key=lambda i: (
            evaluations[i].metrics["num_truncated_documents"],
            evaluations[i].metrics["padding_ratio"],
            evaluations[i].case.strategy != "bucket",
        ),
    )


def _reasons(
    evaluations: Sequence[Evaluation],
    best: int,
    best_fixed: int | None,
    out: Sequence[str],
    crosses: bool,
) -> tuple[str, ...]:
    chosen = evaluations[best]
    metrics = chosen.metrics
    split, must = (percent(metrics[f"truncation_{name}"], None) for name in ("ratio", "floor"))
    reasons = [
        f"It splits {split} of the documents; {must} are longer than "
        f"{max(chosen.case.buckets):,} tokens and must be split.",
        f"{percent(metrics['padding_ratio'], None)} of its positions are padding, and a sample "
        f"holds {metrics['concatenation_ratio']:,.4g} documents on average.",
    ]
    if "second_padding_ratio" in metrics:
        free = percent(metrics["second_padding_ratio"], None)
        reasons.append(f"{free} of the second capacities of its samples stay free.")
    if metrics.get("num_groups"):
        of_all = 1 / metrics["num_groups"]
        cut, longer = (
            percent(metrics[name] * of_all, None)
            for name in ("num_cut_groups", "num_groups_longer_than_largest_bucket")
        )
        reasons.append(
            f"It cuts {cut} of {metrics['num_groups']:,} groups of documents; {longer} are longer "
            "than the largest bucket and must be cut."
        )
    if out[best]:
        reasons.insert(0, f"The rule excludes every strategy; this one {out[best]}.")
    rivals = [i for i in range(len(evaluations)) if i != best and not out[i]]
    if rivals:
        runner_up = _cheapest(evaluations, rivals, out, crosses)
        reasons.append(_against(chosen, evaluations[runner_up], "the next best", crosses))
        if best_fixed is not None and best_fixed in rivals and best_fixed != runner_up:
            role = "the best with one sample shape"
            reasons.append(_against(chosen, evaluations[best_fixed], role, crosses))
    limit = chosen.breakdown.gpu_hours * (1 - SAME_TIME)
    cheaper = sorted(
        (e.breakdown.gpu_hours, f"{e.label} {why}")
        for e, why in zip(evaluations, out, strict=True)
        if why and e.breakdown.gpu_hours < limit
    )
    if cheaper:
        named = "; ".join(words for _, words in cheaper[:MOST_NAMED])
        more = len(cheaper) - MOST_NAMED
        reasons.append(f"Cheaper, but excluded: {named}{f'; and {more} more' if more > 0 else ''}.")
    return tuple(reasons)


def _against(chosen: Evaluation, rival: Evaluation, role: str, crosses: bool) -> str:
    more = rival.breakdown.gpu_hours / chosen.breakdown.gpu_hours - 1
    if abs(more) > SAME_TIME:
        amount = f"{percent(abs(more), None)} {'more' if more > 0 else 'less'} time"
        return f"{rival.label}, {role}, would take {amount}."
    disadvantage = _disadvantage(chosen.metrics, rival.metrics, crosses)
    return f"{rival.label}, {role}, would take the same time{disadvantage}."


def _disadvantage(chosen: Mapping[str, Any], rival: Mapping[str, Any], crosses: bool) -> str:
    """Return the first criterion of rule 3 on which the rival is worse."""
    ratio = rival["concatenation_ratio"]
    if crosses and ratio > chosen["concatenation_ratio"] * (1 + SAME_CONCATENATION):
        return f" but concatenates {ratio:.2f} documents per sample"
    if rival["num_truncated_documents"] > chosen["num_truncated_documents"]:
        return f" but splits {percent(rival['truncation_ratio'], None)} of the documents"
    if rival["padding_ratio"] > chosen["padding_ratio"]:
        return f" but pads {percent(rival['padding_ratio'], None)}"
    return " and is as good"

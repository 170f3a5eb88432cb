"""Generate docs/results.md and docs/results/ from the newest result files.

A benchmark writes its run to benchmarks/results/, which git ignores. Runs that the docs quote are
copied to docs/results/NAME.json and committed, so every clone generates the same pages:
docs/results.md (``summary``: ten questions with their figures, claims that did not hold) with its
pictures (``draw``: readable in gray), and docs/results/NAME.md, all tables of a benchmark
(tables.py). A QUICK run is used only if there is no other. A page names its environment once.

make bench-report        # after the benchmarks whose figures should be quoted
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, merge_run
from tables import body, rounded, table

DOCS = Path(__file__).parents[1] / "docs"
LOGGED = DOCS / "results"
PAPERS = "papers-"
Runs = Mapping[str, dict[str, Any]]
PAGE = """# Results of {title}

{about}

Written by `make bench-report` from {json}; summary: [results.md](../results.md).
Compare ratios, not absolute numbers; before you rely on either, run the command on your machine.

"""


def main() -> None:
    log(newest_runs(RESULTS))
    runs = newest_runs(LOGGED)
    if not runs:
        raise SystemExit(f"no result files in {RESULTS}; run `make bench-packing` or another first")
    (DOCS / "results.md").write_text(summary(runs, listed(runs)), encoding="utf-8")
    draw(runs, DOCS / "images")
    pages = pages_of(runs)
    for name, text in pages.items():
        (LOGGED / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"wrote {DOCS / 'results.md'} and {', '.join(pages)} in docs/results")


def pages_of(runs: Runs) -> dict[str, str]:
    """Return name -> page, one per benchmark; all papers' recipes share the page "papers"."""
    pages = {}
    for name, run in runs.items():
        if not name.startswith(PAPERS):
            about = f"`{command(run)}`, {provenance(run)}"
            page = PAGE.format(title=name, about=about, json=f"[{name}.json]({name}.json)")
            pages[name] = page + "\n".join(body(run["results"]))
    papers = {name: run for name, run in runs.items() if name.startswith(PAPERS)}
    if papers:
        about, files = "\n".join(measured_with(papers)), "the papers-*.json beside it"
        page = PAGE.format(title="papers", about=about, json=files)
        pages["papers"] = page + papers_section(list(papers.values()))
    return {name: text.rstrip("\n") + "\n" for name, text in pages.items()}


def newest_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return benchmark -> its newest run in ``folder``; merge the newest runs of its parts."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    newest: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=says):
        newest[run["benchmark"]] = merge_run(newest.get(run["benchmark"]), run)
    return dict(sorted(newest.items()))


def says(run: dict[str, Any]) -> tuple[bool, bool, str]:
    """Return the sort key of a run: quick runs first, long ones last, then by date."""
    return not run["quick"], scale_of(run) == "long", run["date"]


def scale_of(run: dict[str, Any]) -> str:
    """Return the value of SCALE; "cpu" for benchmarks without scales."""
    results = run["results"]
    return str(results.get("scale", "cpu")) if isinstance(results, dict) else "cpu"


def log(runs: dict[str, dict[str, Any]]) -> None:
    """Write ``runs`` to docs/results, except those that sort before a run already there. If only
    parts of a benchmark were measured, its other parts stay."""
    LOGGED.mkdir(exist_ok=True)
    kept = newest_runs(LOGGED)
    for name, run in runs.items():
        if name not in kept or says(run) >= says(kept[name]):
            text = json.dumps(merge_run(kept.get(name), run), indent=1) + "\n"
            (LOGGED / f"{name}.json").write_text(text, encoding="utf-8")


def papers_section(recipes: list[dict[str, Any]]) -> str:
    """Return the section of the papers' claims, by recipe."""
    verdicts = [claim["agrees"] for run in recipes for claim in run["results"]["claims"]]
    count = {verdict: verdicts.count(verdict) for verdict in ("yes", "no", "undecided")}
    intro = (
        f"What the papers claim, trained and counted again: {count['yes']} claims agree, "
        f"{count['no']} do not, {count['undecided']} are undecided at this scale. A difference is "
        "judged by the 95 % interval of the mean of paired seeds (`benchmarks/papers/claims.py`), "
        "with Holm's correction over all claims of the recipe; +- is the standard deviation over "
        "seeds."
    )
    return "\n".join([intro, "", *(line for run in recipes for line in recipe_section(run))])


def recipe_section(run: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one recipe: command, claims, measurements, plots."""
    results = run["results"]
    name = run["benchmark"].removeprefix(PAPERS).removesuffix("-gpu")
    yield from (f"### {results['title']}", "")
    yield f"`{command(run)}`; {results['seconds']} s."
    if run["quick"]:
        yield "**A handful of steps: this shows that the code runs, and is no evidence.**"
    if "seeds" in results:
        parameters = " or ".join(f"{n:,}" for n in results["parameters"])
        seeds = ", ".join(map(str, results["seeds"]))
        yield f"{results['device']}; models of {parameters} parameters; seeds {seeds}."
        yield f"Held equal: {results['equal']}."
    yield ""
    yield from table(results["claims"], "")
    yield from table(results.get("rows", []), "measured")
    if "seeds" in results and scale_of(run) != "gpu" and not run["quick"]:
        for path in sorted((DOCS / "images" / "papers").glob(f"{name}*.png")):
            yield f"![{path.stem.replace('_', ' ')}](../images/papers/{path.name})"
        yield ""


def command(run: dict[str, Any]) -> str:
    """Return the command that made the run."""
    size = "QUICK=1 " if run["quick"] else ""
    name = run["benchmark"]
    if not name.startswith(PAPERS):
        return f"{size}make bench-{name}"
    scale = "" if scale_of(run) in ("cpu", "quick") else f"SCALE={scale_of(run)} "
    return f"{size}{scale}ONLY={name.removeprefix(PAPERS).removesuffix('-gpu')} make bench-papers"


def provenance(run: dict[str, Any]) -> str:
    """Return date, hardware, commit (None without git) and versions."""
    commit = f"commit {run['commit'][:12]}, " if run.get("commit") else ""
    return f"{run['date']}, {commit}{_machine(run)}"


def _machine(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    cpu = f"{run['num_cpus']} x {run['cpu']} ({run['machine']})"
    return f"{cpu}, Python {run['python']}, {versions}"


def measured_with(runs: Runs) -> list[str]:
    """Return one line per machine with its versions, and the runs made on it."""
    made: dict[str, list[str]] = {}
    for name, run in runs.items():
        commit = f", {run['commit'][:12]}" if run.get("commit") else ""
        made.setdefault(_machine(run), []).append(f"{name} ({run['date']}{commit})")
    return [f"* {machine}: {'; '.join(names)}" for machine, names in made.items()]


# ---- The summary --------------------------------------------------------------------------------

HEAD = """# Measured results

All figures come from logged runs, `docs/results/*.json`; `make bench-report` writes this page from
them. Ratios hold on other machines better than absolute figures: run the command on yours. All
tables, with the paper's figure next to ours, and the reason where they differ:
{tables}

## Ten questions

A verdict (yes, no, undecided) is whether the claim holds by the 95 % interval of the mean of paired
seeds, with Holm's correction for the number of a recipe's claims; models are tiny and seeds few.

| question | measured | command |
|---|---|---|
{questions}

![effects with their intervals](images/results_forest.png)

Change of the held-out perplexity against the first arm of its recipe; bars are 95 %
intervals over paired seeds.

{plots}

## What did not hold

| claimed by | claim | measured |
|---|---|---|
{wrong}

Printed figures are computed again from lengths, without training: \
[each of them, with the reason where it does not come out](results/composition.md).

## How many claims

| claims | hold | do not | undecided at this size |
|---|---|---|---|
{counts}

## What these were measured with

{measured_with}
"""

Figure = tuple[str, str, dict[str, Any]]  # benchmark, key, and fields that select the row


def _figure(runs: Runs, benchmark: str, key: str, where: dict[str, Any]) -> str:
    """Return ``key`` of the first row with the fields ``where``, formatted as in a table. A string
    that ends in * matches values with this prefix."""

    def same(value: Any, wanted: Any) -> bool:
        if isinstance(wanted, str) and wanted.endswith("*"):
            return str(value).startswith(wanted[:-1])
        return bool(value == wanted)

    for row in _rows(runs.get(benchmark, {}).get("results", [])):
        if all(same(row.get(name), wanted) for name, wanted in where.items()):
            return rounded(row.get(key)) or "(not measured)"
    return "(not measured)"


def _rows(results: Any) -> Iterator[dict[str, Any]]:
    if isinstance(results, dict):
        yield results
        results = results.values()
    for value in results:
        if isinstance(value, (dict, list)):
            yield from _rows(value)


def _composed(item: str, *quantities: str) -> list[Figure]:
    where = {"corpus": "fineweb_edu_like", "item": item}
    return [("composition", "measured", {**where, "quantity": of}) for of in quantities]


def _claim(recipe: str, claim: str) -> list[Figure]:
    """Return the verdict of a claim, then its measured figure."""
    return [(f"{PAPERS}{recipe}", key, {"claim": f"{claim}*"}) for key in ("agrees", "measured")]


def _cases(benchmark: str, cases: Sequence[str], *keys: str, column: str = "case") -> list[Figure]:
    return [(benchmark, key, {column: case}) for case in cases for key in keys]


# Question; answer, with {} for each figure; command; figures.
QUESTIONS: list[tuple[str, str, str, list[Figure]]] = [
    ("How much is padded and split?",
     "buckets 1024 to 16384: {} % padding, {} % of the documents split, {} per sample; "
     "concatenate-and-chunk at 4096 splits {} %, at 16384 {} % with {} documents per sample",
     "make bench-composition",
     [
         *_composed("bucket (the default)", "r_pad %", "r_tru %", "r_cat"),
         *_composed("Fixed-4096", "r_tru %"),
         *_composed("Fixed-16384", "r_tru %", "r_cat"),
     ]),
    ("Do buckets train a better model than samples of one length?",
     "than 8,192: {}, {}; than 2,048: {}, {}",
     "ONLY=bucketllm make bench-papers",
     [
         *_claim("bucketllm", "BucketLLM trains a better model than Fixed-8192"),
         *_claim("bucketllm", "BucketLLM trains a better model than Fixed-2048"),
     ]),
    ("Does attention across documents make a worse model?",
     "{}: {} (masked, then across)",
     "ONLY=masking make bench-papers",
     _claim("masking", "attention across documents makes a worse model")),
    ("Which packing, with masks, at equal tokens?",
     "held-out perplexity against concatenate-and-chunk, both in samples of the longest bucket, "
     "in per cent +- 95 %: best fit {} +- {}, buckets with one per step {} +- {}, with several "
     "per step {} +- {}",
     "SCALE=long ONLY=packing make bench-papers",
     _cases("papers-packing",
            ("best_fit, 16k", "bucket, one per step", "bucket, mix: micro_step"),
            "against_first_%", "plus_minus_%", column="arm")),
    ("Is the work of the ranks equal?",
     "attention work of the busiest of 64, mean = 1: {} with 6 samples of 8k per rank (random "
     "{}), {} with 3 of 16k (random {}), {} with one of 16k. In seconds of a step, measured: {}",
     "make bench-schedule",
     [
         *_cases("schedule", ("bucket 8192*", "bucket 16384*"), "ours", "random"),
         *_cases("schedule", ["16384, 1 per rank, one source, window 1"], "ours"),
         _claim("steps", "equal-work dealing makes steps")[1],
     ]),
    ("Does it train faster?",
     "useful tokens/s of a tiny model on one core: {} padded, {} concatenated at 2048 with "
     "masks, {} in buckets of 256 to 4096",
     "make bench-train",
     _cases("train", ("pad to 2048", "concat 2048", "bucket 256..4096"),
            "useful_tokens_per_second")),
    ("How fast is packing?",
     "10 million documents: {} times megatron-core's index in file order, {} times its shuffle "
     "and index",
     "make bench-packing",
     [
         ("packing", "times_faster", {"name": f"concat, {order}", "num_documents": 10_000_000})
         for order in ("file order", "shuffled")
     ]),
    ("How fast is the data path?",
     "against megatron-core's plain GPTDataset: one sample {} times, micro batches of 4 into "
     "reused buffers {}, out of a loader without workers {}; inside Megatron {} (micro batch "
     "1), {} (4), {} (4, 2 workers)",
     "make bench-data",
     [
         *_cases("data", ("ours, bucket, one sample", "ours, bucket, micro batch of 4",
                          "ours, loader"), "over_plain"),
         *(
             ("data", "ratio", {"dataset": "PackedGPTDataset", "loader": loader})
             for loader in ("mbs 1, workers 0", "mbs 4, workers 0", "mbs 4, workers 2")
         ),
     ]),
    ("How fast are documents built?",
     "against a worker pool with megatron-core's builder: {} times with the same tokenizer, {} "
     "with gigatoken, which alone is {} times as fast",
     "make bench-build",
     _cases("build", ("ours, tokenizers", "ours, gigatoken", "bare gigatoken, one call"),
            "times_megatron", column="what")),
    ("How fast are shards merged?",
     "{} times megatron-core's speed in {} of its memory, short documents (mean 64 tokens)",
     "make bench-merge",
     _cases("merge", ["megapack, merge"], "times_faster", "share_of_memory", column="side")),
]  # fmt: skip


def summary(runs: Runs, plots: Sequence[str] = ()) -> str:
    """Return the page; ``plots`` are its pictures in markdown."""
    claims = [
        (name.removeprefix(PAPERS), claim)
        for name, run in runs.items()
        if name.startswith(PAPERS) and not run["quick"]
        for claim in run["results"]["claims"]
    ]
    names = ["papers", *(name for name in runs if not name.startswith(PAPERS))]
    links = ", ".join(f"[{name}](results/{name}.md)" for name in names)
    questions = [
        f"| {asked} | {answer.format(*(_figure(runs, *of) for of in figures))} | `{command_}` |"
        for asked, answer, command_, figures in QUESTIONS
    ]
    wrong = [
        f"| {claim['source']} | {claim['claim']} | {claim['measured']}"
        + (f" of {claim['paper']} |" if name == "composition" else " |")
        for name, claim in claims
        if claim["agrees"] == "no"
    ]
    by_kind: dict[str, list[str]] = {}
    for name, claim in claims:
        own = "this project's" if claim["source"] == "this project" else "the papers', trained"
        kind = "printed figures of the papers" if name == "composition" else own
        by_kind.setdefault(kind, []).append(claim["agrees"])
    by_kind["all"] = [claim["agrees"] for _, claim in claims]
    counts = [
        f"| {kind} | {' | '.join(str(of.count(v)) for v in ('yes', 'no', 'undecided'))} |"
        for kind, of in by_kind.items()
    ]
    return HEAD.format(
        tables=textwrap.fill(f"{links}.", width=100, break_on_hyphens=False),
        questions="\n".join(questions),
        plots="\n".join(plots),
        wrong="\n".join(wrong),
        counts="\n".join(counts),
        measured_with="\n".join(measured_with(runs)),
    )


# ---- Pictures, readable in gray: lines differ in style, points in marker and label ---------------

SMALLEST = 1e-4  # per cent; logarithmic axes show zero as this value
GREYS = ("0.75", "0.45", "0.15")


def listed(runs: Runs) -> list[str]:
    """Return a markdown link to the picture of every logged benchmark."""
    return [
        f"![{title}](images/results_{name}.png)"
        for name, (benchmark, title, _) in ALL.items()
        if benchmark in runs
    ]


def draw(runs: Runs, folder: Path) -> None:
    """Write the pictures that ``listed`` names, and the forest plot."""
    for name, (benchmark, _, picture) in ALL.items():
        if benchmark in runs:
            results = runs[benchmark]["results"]
            _save(folder / f"results_{name}.png", (6.4, 3.6), picture, results)
    rows = [
        (f"{recipe.removeprefix(PAPERS)}: {row['arm']}", row["against_first_%"], half)
        for recipe, run in runs.items()
        if recipe.startswith(PAPERS) and not run["quick"]
        for row in run["results"].get("rows", [])
        if (half := row.get("plus_minus_%"))
    ]
    if rows:
        size = (7.5, 0.6 + 0.32 * len(rows))
        _save(folder / "results_forest.png", size, _forest, rows)


def _save(path: Path, size: tuple[float, float], picture: Any, results: Any) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=size, layout="constrained")
    picture(figure.subplots(), results)
    figure.savefig(path, dpi=110)


def _forest(axes: Any, rows: list[tuple[str, float, float]]) -> None:
    """Plot one row per arm that a recipe compares with its first arm."""
    names, means, halves = zip(*reversed(rows), strict=True)
    axes.errorbar(means, range(len(names)), xerr=halves, fmt="o", color="black", capsize=3)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("change of held-out perplexity (%), below zero is better")


def _composition(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plot padding against truncation, one number per strategy; equal points share a label."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["source"] == "every strategy":
            points.setdefault(row["item"], {})[row["quantity"]] = max(row["measured"], SMALLEST)
    places: dict[tuple[float, ...], list[int]] = {}
    for number, of in enumerate(points.values(), start=1):
        place = tuple(round(math.log10(of[name]) * 4) / 4 for name in ("r_pad %", "r_tru %"))
        places.setdefault(place, []).append(number)
    for (x, y), numbers in places.items():
        text = ", ".join(map(str, numbers))
        axes.text(10**x, 10**y, text, ha="center", va="center", bbox={"fc": "0.9", "pad": 2.5})
    names = [f"{number}  {item}" for number, item in enumerate(points, start=1)]
    axes.text(1.03, 1, "\n".join(names), transform=axes.transAxes, va="top", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="padding (%)", ylabel="documents split (%)")
    axes.set(xlim=(SMALLEST / 3, 300), ylim=(0.05, 300))
    axes.grid(alpha=0.3)


def _speed(axes: Any, results: dict[str, Any]) -> None:
    """Plot useful tokens per second of the same small model."""
    speeds = {row["case"]: row["useful_tokens_per_second"] for row in results["strategies"]}
    axes.barh([*speeds], [*speeds.values()], color=GREYS[0], ec="black")
    axes.invert_yaxis()
    axes.set(xlabel=f"useful tokens/s, {results['setup']['device']}")


def _loader(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plot rates relative to megatron-core's plain GPTDataset: one call, a loader, in Megatron."""
    case = {row["case"]: row for row in rows if "case" in row}
    inside = {(row["dataset"], row["loader"]): row for row in rows if "loader" in row}
    plain, loader = "GPTDataset, plain", "a loader at its best setting"
    levels = {
        "one call, one sample": (case["ours, bucket, one sample"], case[plain]),
        loader: (case["ours, loader"], case[f"{plain}, loader"]),
    }
    for how in ("mbs 1, workers 0", "mbs 4, workers 0"):
        both = inside["PackedGPTDataset", how], inside["GPTDataset", how]
        levels[f"inside Megatron, {how}"] = both
    ratios, errors = [], []
    for ours, theirs in levels.values():
        rate = "rows_per_second" if "rows_per_second" in ours else "samples_per_second"
        ratios.append(ours[rate] / theirs[rate])
        # Combine the spreads of both sides as if they were independent.
        errors.append(ratios[-1] * math.hypot(ours["spread_%"], theirs["spread_%"]) / 200)
    axes.barh([*levels], ratios, xerr=errors, color=GREYS[0], ec="black", capsize=3)
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="times megatron-core's plain GPTDataset")


def _imbalance(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plot the attention work of the busiest rank over the mean, by samples per rank."""
    cases = [row for row in rows if str(row.get("case", "")).startswith("bucket ")]
    samples = [int(row["case"].split(", ")[1].split()[0]) for row in cases]
    names = {"random": "random assignment", "ours": "megapack", "worst": "megapack, worst step"}
    for (key, name), grey, style in zip(names.items(), GREYS, ("--", "-", ":"), strict=True):
        values, look = [row[key] for row in cases], {"color": grey, "marker": "o", "ms": 4}
        axes.plot(samples, values, style, label=name, **look)
    axes.set(xscale="log", xlabel="samples per rank and step (64 ranks)")
    axes.set(ylabel="attention work, busiest over mean")
    axes.set_xticks(samples, [str(n) for n in samples])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


ALL: dict[str, tuple[str, str, Callable[[Any, Any], None]]] = {
    "composition": ("composition", "padding against truncation, every strategy", _composition),
    "speed": ("train", "useful tokens per second by packing", _speed),
    "loader": ("data", "loader speed at three levels", _loader),
    "imbalance": ("schedule", "imbalance by samples per rank", _imbalance),
}


if __name__ == "__main__":
    main()

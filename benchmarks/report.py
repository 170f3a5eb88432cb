"""docs/results.md and docs/results/ from the newest result files: no figure there is typed.

A benchmark leaves its run in benchmarks/results/, which git ignores. What the docs quote is copied
from there to docs/results/NAME.json and kept with them, so every clone writes the same pages:
docs/results.md, the summary (``results_summary``), and docs/results/NAME.md, every table of a
benchmark. A QUICK run is taken only where there is no other.

make bench-report        # after the benchmarks whose figures should be quoted
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, cell
from results_plots import draw, listed
from results_summary import forest, summary

DOCS = Path(__file__).parents[1] / "docs"
LOGGED = DOCS / "results"
PAPERS = "papers-"
HEAD = """# {title}

Written by `make bench-report` from the .json beside it; summary: [results.md](../results.md).
Read ratios rather than digits, and run the command on your own machine before you believe either.
"""


def main() -> None:
    log(newest_runs(RESULTS))
    runs = newest_runs(LOGGED)
    if not runs:
        raise SystemExit(f"no result files in {RESULTS}; run `make bench-packing` or another first")
    about = {name: provenance(run) for name, run in runs.items()}
    images = DOCS / "images"
    page = summary(runs, about, listed(runs))
    (DOCS / "results.md").write_text(page, encoding="utf-8")
    forest(runs, images / "results_forest.png")
    draw(runs, images)
    papers = [run for name, run in runs.items() if name.startswith(PAPERS)]
    pages = {name: section(run) for name, run in runs.items() if not name.startswith(PAPERS)}
    pages |= {"papers": papers_section(papers)} if papers else {}
    for name, text in pages.items():
        page = f"{HEAD.format(title=f'Results of {name}')}\n{text}"
        (LOGGED / f"{name}.md").write_text(page.rstrip("\n") + "\n", encoding="utf-8")
    print(f"wrote {DOCS / 'results.md'} and {', '.join(pages)} beside it")


def newest_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Benchmark -> its newest run in ``folder``."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    newest = {run["benchmark"]: run for run in sorted(runs, key=says)}
    return dict(sorted(newest.items()))


def says(run: dict[str, Any]) -> tuple[bool, bool, str]:
    """Sorts runs by how much they say: quick ones first, long ones last, then by date."""
    return not run["quick"], scale_of(run) == "long", run["date"]


def scale_of(run: dict[str, Any]) -> str:
    """What SCALE said; "cpu" also where a benchmark has no scales."""
    results = run["results"]
    return str(results.get("scale", "cpu")) if isinstance(results, dict) else "cpu"


def log(runs: dict[str, dict[str, Any]]) -> None:
    """Keep ``runs`` with the docs, except those that say less than what is kept already."""
    LOGGED.mkdir(exist_ok=True)
    kept = newest_runs(LOGGED)
    for name, run in runs.items():
        if name not in kept or says(run) >= says(kept[name]):
            text = json.dumps(run, indent=1) + "\n"
            (LOGGED / f"{name}.json").write_text(text, encoding="utf-8")


def papers_section(recipes: list[dict[str, Any]]) -> str:
    """What the papers claim, recipe after recipe."""
    verdicts = [claim["agrees"] for run in recipes for claim in run["results"]["claims"]]
    count = {verdict: verdicts.count(verdict) for verdict in ("yes", "no", "undecided")}
    lines = [
        "## papers",
        "",
        f"What the papers claim, trained and counted again: {count['yes']} claims agree, "
        f"{count['no']} do not, {count['undecided']} are undecided at this scale. A difference is "
        "judged by the 95 % interval of the mean of paired seeds (`benchmarks/papers/claims.py`), "
        "with Holm's correction over all claims of the recipe; +- is the standard deviation over "
        "seeds.",
        "",
    ]
    for run in recipes:
        lines += recipe_section(run)
    return "\n".join(lines)


def recipe_section(run: dict[str, Any]) -> Iterator[str]:
    """Provenance, claims, measurements and plots of one recipe."""
    results = run["results"]
    name = run["benchmark"].removeprefix(PAPERS).removesuffix("-gpu")
    yield from (f"### {results['title']}", "")
    size = "QUICK=1 " if run["quick"] else ""
    scale = "" if scale_of(run) in ("cpu", "quick") else f"SCALE={scale_of(run)} "
    command = f"{size}{scale}ONLY={name} make bench-papers"
    yield f"`{command}`, {provenance(run)}; {results['seconds']} s."
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


def section(run: dict[str, Any]) -> str:
    size = "QUICK=1 " if run["quick"] else ""
    lines = [
        f"## {run['benchmark']}",
        "",
        f"`{size}make bench-{run['benchmark']}`, {provenance(run)}",
        "",
    ]
    return "\n".join(lines + list(body(run["results"])))


def provenance(run: dict[str, Any]) -> str:
    """Date, hardware, commit and versions; runs of before 2026-11-22 do not say their commit."""
    commit = f"commit {run['commit'][:12]}, " if run.get("commit") else ""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"{run['date']}, {run['num_cpus']} x {run['cpu']} ({run['machine']}), "
        f"{commit}Python {run['python']}, {versions}"
    )


def body(results: Any, title: str = "") -> Iterator[str]:
    """Lists of records as tables, records of numbers as one row, the rest one level down."""
    if isinstance(results, list) and all(isinstance(row, dict) for row in results):
        yield from table(results, title)
    elif isinstance(results, dict):
        plain = {k: v for k, v in results.items() if not isinstance(v, (dict, list))}
        if plain:
            yield from table([plain], title)
        for key, value in results.items():
            if isinstance(value, (dict, list)):
                yield from body(value, f"{title}, {key}".lstrip(", "))


def table(rows: list[dict[str, Any]], title: str) -> Iterator[str]:
    rows = [{**row, **per_document(row)} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [c for c in columns if any(row.get(c) not in (None, "", {}) for row in rows)]
    if not columns:
        return
    if title:
        yield from (f"**{title}**", "")
    yield "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield (
            "| " + " | ".join(cell(row.get(column)).replace("|", "/") for column in columns) + " |"
        )
    yield ""


def per_document(row: dict[str, Any]) -> dict[str, float]:
    if not row.get("num_documents") or not isinstance(row.get("seconds"), float):
        return {}
    return {"ns_per_document": 1e9 * row["seconds"] / row["num_documents"]}


if __name__ == "__main__":
    main()

"""docs/results.md from the newest result files: every table there is made here, none is typed.

A QUICK run is taken only where there is no other.

make bench-report        # after the benchmarks whose figures should be quoted
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, cell

TARGET = Path(__file__).parents[1] / "docs" / "results.md"
PAPERS = "papers-"
HEAD = """# Measured results

Written by `make bench-report` from the result files of the benchmarks, which lie in
`benchmarks/results/`. Each section names its command, date, processor and versions; read ratios
rather than digits, and run the command on your own machine before you believe either.
"""


def main() -> None:
    newest: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.json"), key=age):
        newest[read(path)["benchmark"]] = path
    if not newest:
        raise SystemExit(f"no result files in {RESULTS}; run `make bench-packing` or another first")
    papers = [read(newest.pop(name)) for name in sorted(newest) if name.startswith(PAPERS)]
    sections = [papers_section(papers)] if papers else []
    sections += [section(read(newest[name])) for name in sorted(newest)]
    TARGET.write_text("\n".join([HEAD, *sections]), encoding="utf-8")
    print(f"wrote {TARGET}: {', '.join([run['benchmark'] for run in papers] + sorted(newest))}")


def age(path: Path) -> tuple[bool, str, str]:
    """Sorts files by how much they say: quick ones first, then by date."""
    run = read(path)
    return not run["quick"], run["date"], path.name


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def papers_section(recipes: list[dict[str, Any]]) -> str:
    """What the papers claim, recipe after recipe."""
    verdicts = [claim["agrees"] for run in recipes for claim in run["results"]["claims"]]
    count = {verdict: verdicts.count(verdict) for verdict in ("yes", "no", "undecided")}
    lines = [
        "## papers",
        "",
        f"What the papers claim, trained and counted again: {count['yes']} claims agree, "
        f"{count['no']} do not, {count['undecided']} are undecided at this scale. A difference is "
        "judged by the 95 % interval of the mean of paired seeds (`benchmarks/papers/claims.py`); "
        "+- is the standard deviation over seeds.",
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
    scale = "SCALE=gpu " if results.get("scale") == "gpu" else ""
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
    if results.get("scale") == "cpu" and not run["quick"]:
        for path in sorted((TARGET.parent / "images" / "papers").glob(f"{name}*.png")):
            yield f"![{path.stem.replace('_', ' ')}](images/papers/{path.name})"
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

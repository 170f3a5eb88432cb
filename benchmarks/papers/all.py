"""make bench-papers: repeat the papers' training runs; the table of claims comes last.

    make bench-papers                      # all recipes, 2 CPU cores, about two hours
    QUICK=1 make bench-papers              # a few steps of one seed: tests the code, proves nothing
    SCALE=long ONLY=packing make bench-papers   # more seeds and steps, up to three hours
    SEEDS=4 make bench-papers              # 4 seeds; a later run with more seeds reuses them
    SCALE=gpu make bench-papers            # larger models on one GPU
    ONLY=atom_size,seamless make bench-papers

A recipe is a module of ``papers.recipes`` with ``TITLE``, ``EQUAL`` (what its runs have in
common), ``runs(scale)``, ``rows(results)`` (what was measured), ``claims(results)`` and
``plots(results, folder)``. ``composition`` trains nothing (``benchmarks/composition.py``). Runs are
cached in ``benchmarks/papers/.work``: an interrupted command resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Import neither torch nor recipes here: every worker imports this file before it sets its
# environment.
from common import only, quick, show, timed, write_results
from papers.claims import Claim, corrected
from papers.corpus import WORK
from papers.runs import SCALES, Scale, run_all, worker_pool

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parents[1] / "docs" / "images" / "papers"


def main() -> None:
    scale = chosen_scale()
    claims: list[Claim] = []
    begin = time.perf_counter()
    with worker_pool(scale.workers, cuda=scale.name == "gpu") as pool:
        for name in chosen_recipes():
            found, stated = compose() if name == "composition" else replay(name, scale, pool)
            claims += stated
            found["claims"] = [dataclasses.asdict(claim) for claim in stated]
            where = "-gpu" if found.get("scale") == "gpu" else ""
            write_results(f"papers-{name}{where}", found)
            print(f"{name}: done after {(time.perf_counter() - begin) / 60:.1f} min", flush=True)
    quickly = " (QUICK: a handful of steps, no evidence)" if quick() else ""
    show(f"claims{quickly}", map(dataclasses.asdict, claims))


def compose() -> tuple[dict[str, Any], list[Claim]]:
    """Count, for every source, the figures of data composition that are reproduced."""
    seconds, rows = timed(importlib.import_module("composition").measure)
    by_source: dict[str, list[bool]] = {}
    for row in rows:
        if row.agrees is not None:
            by_source.setdefault(row.source, []).append(row.agrees)
    why = "computed from lengths, no seeds; every figure and the reason of every disagreement: "
    words = {"claim": "the printed figures of data composition", "why": f"{why}section composition"}
    return {"title": "Data composition", "seconds": round(seconds)}, [
        Claim(source=source, paper=f"{len(found)} figures", measured=f"{sum(found)} come out",
              agrees="yes" if all(found) else "no", **words)
        for source, found in by_source.items()
    ]  # fmt: skip


def replay(name: str, scale: Scale, pool: Executor) -> tuple[dict[str, Any], list[Claim]]:
    """Train the runs of a recipe; return its results and claims."""
    recipe = importlib.import_module(f"papers.recipes.{name}")
    runs = recipe.runs(scale)
    print(f"\n{recipe.TITLE}: {len(runs)} runs", flush=True)
    results = run_all(runs, pool)
    recipe.plots(results, IMAGES if scale.name in ("cpu", "long") else WORK / f"plots-{scale.name}")
    rows = recipe.rows(results)
    show(recipe.TITLE, rows)
    device = f"CPU, {scale.workers} runs at a time, one thread each"
    cuda = importlib.import_module("torch").cuda
    found = {
        "title": recipe.TITLE, "equal": recipe.EQUAL, "scale": scale.name,
        "device": cuda.get_device_name() if scale.name == "gpu" else device,
        "parameters": sorted({result.summary["parameters"] for result in results}),
        "seeds": sorted({result.run.seed for result in results}),
        "seconds": round(sum(r.summary["seconds"] for r in results) / scale.workers),
        "rows": rows,
    }  # fmt: skip
    return found, corrected(recipe.claims(results))


def chosen_scale() -> Scale:
    """Return the scale of QUICK=1, SCALE=cpu (default), SCALE=long or SCALE=gpu."""
    name = os.environ.get("SCALE", "cpu")
    if name not in ("cpu", "long", "gpu"):
        raise SystemExit(f"SCALE is {name!r}; choose cpu, long or gpu (QUICK=1 is the smallest)")
    if quick():
        return SCALES["quick"]
    if name == "gpu" and not importlib.import_module("torch").cuda.is_available():
        raise SystemExit("SCALE=gpu needs a CUDA device, and torch finds none")
    scale, seeds = SCALES[name], os.environ.get("SEEDS")
    if seeds is None:
        return scale
    if not seeds.isdecimal() or int(seeds) < 1:
        raise SystemExit(f"SEEDS is {seeds!r}; it is a number of seeds, at least 1")
    return dataclasses.replace(scale, num_seeds=int(seeds))


def chosen_recipes() -> list[str]:
    """Return the recipes of ONLY=a,b, or all of them, in a fixed order."""
    return only(["composition", *sorted(path.stem for path in HERE.glob("recipes/*.py"))])


if __name__ == "__main__":
    main()

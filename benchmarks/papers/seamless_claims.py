"""What the runs of ``papers.recipes.seamless`` say to Tables 2, 7, 10, 11 and section 4.7."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from papers import invented_facts
from papers.claims import Claim, alike, less, shown, together
from papers.figures import lines
from papers.runs import Result, by_name

__all__ = ["C_EXTRA", "LONGER", "R_MAX", "SP", "claims", "plots", "rows"]

SOURCE = "Seamless"
C_EXTRA = {1: 10, 3: 50, 6: 100}  # at 128 -> at 2048
R_MAX = (0.1, 0.3, 0.5)
SP = "SP"
LONGER = "CT, as many steps as SP"
TABLE_2 = {"CT": (11.49, 7.84, 6.71), "BFD": (10.16, 7.41, 6.47), SP: (10.12, 7.39, 6.43)}


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Tables 2, 7, 10 and 11 in one, and the case study."""
    found = []
    for name, of in by_name(results).items():
        first = of[0].summary
        row: dict[str, Any] = {
            "strategy": name,
            "steps": first["steps"],
            "repeated %": 100 * first["index"]["repeated_ratio"],
            "dropped %": 100 * first["index"]["dropped_ratio"],
            "padding %": 100 * first["index"]["padding_ratio"],
        }
        if "probe" in first:
            row["loss per fact"] = shown([r.summary["probe"]["loss"] for r in of])
            row["facts right %"] = shown([100 * r.summary["probe"]["right"] for r in of], 1)
        else:
            row["perplexity, prose"] = shown([r.perplexity("prose") for r in of], 3)
            row["perplexity, code"] = shown([r.perplexity("code") for r in of], 3)
        found.append({**row, "seeds": len(of)})
    return found


def claims(results: list[Result]) -> list[Claim]:
    """Tables 2, 7, 10, 11 and section 4.7."""
    groups = by_name(results)
    perplexity = {name: [r.perplexity("prose") for r in of] for name, of in groups.items()
                  if "probe" not in of[0].summary}  # fmt: skip
    return [
        *_orders(perplexity, groups),
        *_table_7(perplexity),
        *_sweep(perplexity, "Table 10", "r_max", {f"{r}": r for r in R_MAX}, "0.3"),
        *_sweep(perplexity, "Table 11", "c_extra", {f"{c}": c for c in C_EXTRA}, "3"),
        *_case_study(groups),
    ]


def _orders(perplexity: dict[str, list[float]], groups: dict[str, list[Result]]) -> list[Claim]:
    def claim(lower: str, higher: str, why: str, paper: str) -> Claim:
        sides = perplexity[lower], perplexity[higher]
        return Claim(
            source=f"{SOURCE} Table 2",
            claim=f"{lower} has the lower validation perplexity than {higher}",
            paper=paper,
            measured=f"{shown(sides[0], 3)} against {shown(sides[1], 3)}",
            agrees=less(*sides),
            why=why,
        )

    def printed(lower: str, higher: str) -> str:
        pairs = zip(TABLE_2[lower], TABLE_2[higher], strict=True)
        return "PubMed: " + ", ".join(f"{a} against {b}" for a, b in pairs)

    ratio = groups[SP][0].summary["steps"] / groups["CT"][0].summary["steps"]
    more = f"SP takes {ratio:.2f} times as many steps as CT"
    return [
        claim("BFD", "CT", "the same documents, epochs and base", printed("BFD", "CT")),
        claim(SP, "CT", f"equal epochs, as in the paper; {more}", printed(SP, "CT")),
        claim(SP, "BFD", f"equal epochs, as in the paper; {more}", printed(SP, "BFD")),
        claim(SP, LONGER, "a control the paper has not: the gain over CT without that of more "
              "steps", "not measured"),
    ]  # fmt: skip


def _table_7(perplexity: dict[str, list[float]]) -> list[Claim]:
    bfd = perplexity["BFD"]
    others = {name: perplexity[name] for name in ("FFD", "BFD-m", SP)}
    return [
        Claim(
            source=f"{SOURCE} Table 7",
            claim="FFD, BFD-m and SP are within 2 % of BFD's perplexity",
            paper="11.24, 11.24, 11.24 of 11.24; within 3.6 % on two other models",
            measured=", ".join(f"{name} {shown(of, 3)}" for name, of in others.items())
            + f", BFD {shown(bfd, 3)}",
            agrees=together([alike(of, bfd, within=0.02) for of in others.values()]),
            why="the ablation; SP takes more steps than the others",
        ),
        Claim(
            source=f"{SOURCE} eq. 3",
            claim="the authors' placement of windows is as good as the exact one (within 1 %)",
            paper="not measured",
            measured=f"{shown(perplexity['SP, published'], 3)} against {shown(perplexity[SP], 3)}",
            agrees=alike(perplexity["SP, published"], perplexity[SP], within=0.01),
            why="what the published arithmetic loses (docs/papers.md) is a small share of tokens",
        ),
    ]


def _sweep(
    perplexity: dict[str, list[float]],
    table: str,
    parameter: str,
    values: dict[str, float],
    best: str,
) -> list[Claim]:
    """The middle value against the others; ``SP`` itself has the middle values."""
    measured = {v: perplexity[SP if v == best else f"SP, {parameter} {v}"] for v in values}
    return [
        Claim(
            source=f"{SOURCE} {table}",
            claim=f"{parameter} {best} is better than {other}",
            paper="accuracy of tasks: the middle one of three values is best by 0.4 to 2 points",
            measured=f"perplexity {shown(measured[best], 3)} against {shown(measured[other], 3)}",
            agrees=less(measured[best], measured[other]),
            why="perplexity in place of the accuracy of tasks"
            + (f"; c_extra {other} is {C_EXTRA[int(other)]} at L 2048"
               if parameter == "c_extra" else ""),
        )
        for other in values
        if other != best
    ]  # fmt: skip


def _case_study(groups: dict[str, list[Result]]) -> list[Claim]:
    def per_seed(name: str, key: str) -> list[float]:
        return [result.summary["probe"][key] for result in groups[f"facts, {name}"]]

    def claim(other: str, paper: str) -> Claim:
        loss = per_seed(SP, "loss"), per_seed(other, "loss")
        right = [[100 * x for x in per_seed(name, "right")] for name in (SP, other)]
        return Claim(
            source=f"{SOURCE} 4.7",
            claim=f"facts that straddle the cut are learned with SP better than with {other}",
            paper=paper,
            measured=f"{shown(loss[0])} against {shown(loss[1])} nats per fact; "
            f"{shown(right[0], 1)} % against {shown(right[1], 1)} % right",
            agrees=less(*loss),
            why=f"{invented_facts.NUM_FACTS} invented facts in place of one, L_seq 32",
        )

    return [
        claim("BFD", "date 3/5 against 0/5, place 5/5 against 2/5"),
        claim("CT", "not measured"),
    ]


def plots(results: list[Result], folder: Path) -> None:
    """Figure 2 with perplexity: both sweeps between the baselines, means of the seeds."""
    perplexity = {
        name: fmean(result.perplexity("prose") for result in of)
        for name, of in by_name(results).items()
        if "probe" not in of[0].summary
    }
    for name, values, middle in (("r_max", R_MAX, 0.3), ("c_extra", tuple(C_EXTRA), 3)):
        measured = [perplexity[SP if v == middle else f"SP, {name} {v}"] for v in values]
        flat = {other: (values, [perplexity[other]] * len(values)) for other in ("CT", "BFD")}
        lines(
            folder / f"seamless_{name}.png",
            {SP: (values, measured), **flat},
            x=name,
            y="validation perplexity",
            marker="o",
        )

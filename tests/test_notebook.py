"""The notebook runs from its first cell to its last, and its model learns."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import needs_torch  # noqa: F401
import pytest
from programs import PYTHON, ended

NOTEBOOK = Path(__file__).parents[1] / "examples/first_run.ipynb"
COMMAND = "import sys; from megapack.cli.main import main; sys.exit(main())"


def test_the_notebook_trains_a_model_that_keeps_documents_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"run": lambda arguments: ended(*PYTHON, COMMAND, *arguments.split())}
    pictures = []
    for i, source in enumerate(sources):
        program = re.sub(r"^!megapack-build (.*)$", r'run("\1")', source, flags=re.MULTILINE)
        exec(compile(program, f"{NOTEBOOK.name}, code cell {i}", "exec"), names)
        if i == 0:
            monkeypatch.setattr(names["plt"], "show", lambda: pictures.append(names["plt"].gcf()))
    names["plt"].close("all")
    assert len(pictures) == 6
    losses = names["losses"]
    assert losses[0] == pytest.approx(math.log(1000), rel=0.05)
    assert max(losses[-5:]) < 0.85 * losses[0]
    assert not names["probe"](names["model"], names["batches"][-1]).leaks
    figures = names["figures"]
    assert figures["bucket"]["truncation_ratio"] < 0.5 * figures["concat"]["truncation_ratio"]
    assert figures["bucket"]["padding_ratio"] < 0.1 * figures["pad"]["padding_ratio"]


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None

"""docs/concepts.md runs as it stands: its Python blocks print what it says they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "concepts.md"


def test_every_block_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, object] = {}
    printed = ""
    num_compared = 0
    for kind, body in blocks:
        if kind == "python":
            assert not printed, f"the page does not show what is printed:\n{printed}"
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(body, str(PAGE), "exec"), namespace)
            printed = output.getvalue()
        else:
            assert printed == body
            printed = ""
            num_compared += 1
    assert num_compared >= 4

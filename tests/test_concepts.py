"""docs/concepts.md runs as it stands: its blocks print what it says, its table is measured."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from lengths import LAWS

from megapack.packing import pack

pytestmark = pytest.mark.pages

FIVE = [1024, 2048, 4096, 8192, 16384]
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


@pytest.mark.parametrize(
    ("row", "strategy", "buckets", "options"),
    [
        ("`pad`, one document per sample of 4096", "pad", [4096], {}),
        ("`concat`, 1024", "concat", [1024], {}),
        ("`concat`, 4096", "concat", [4096], {}),
        ("`concat`, 16384", "concat", [16384], {}),
        ("`best_fit_decreasing`, 16384", "best_fit_decreasing", [16384], {}),
        ("`bucket_llm`, pools of 3,000 documents", "bucket_llm", FIVE, {"pool_size": 3000}),
        ("`bucket`, the default", "bucket", FIVE, {}),
    ],
)
def test_the_table_of_ten_million_documents_holds_for_half_a_million(
    row: str, strategy: str, buckets: list[int], options: dict[str, int]
) -> None:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} |")]
    padding, truncated, joined = (cell.strip(" %") for cell in line.split("|")[2:5])
    lengths = LAWS["fineweb_edu_like"](500_000)
    metrics = pack(lengths, strategy, buckets=buckets, **options).metrics()
    assert 100 * metrics["padding_ratio"] == pytest.approx(float(padding), rel=0.02, abs=0.01)
    assert 100 * metrics["truncation_ratio"] == pytest.approx(float(truncated), rel=0.08)
    assert metrics["concatenation_ratio"] == pytest.approx(float(joined), rel=0.02)

"""``megapack.integrations.hosts.megatron check`` on real trees: it reads what the run reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.hosts.check import load_ranks
from tests.hosts.corpus import STEP_ROWS, Corpus
from tests.hosts.layouts import Host, Layout, arguments, boundary_flag, environment, release_of
from tests.hosts.processes import last_line, marks_of
from tests.hosts.test_megatron_lm import TREES

pytestmark = marks_of(TREES, "MEGATRON_LM", "Megatron-LM")

# One process for all command lines: a checkout takes long to import.
COMMANDS = """
import json, pathlib, sys
from contextlib import redirect_stderr, redirect_stdout
from megapack.integrations.hosts.megatron.__main__ import main
for name, arguments in json.loads(sys.argv[1]).items():
    with open(name + ".out", "w") as out, open(name + ".err", "w") as err:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main(["check", *arguments])
            except SystemExit as ended:
                pathlib.Path(name + ".status").write_text(str(ended.code))
"""
LINE = re.compile(r" +(\d+) +(\d+) +(\d+) +(\d+)-(\d+) +(\d+) +(\d+)  ([\d,]+) labels")
RUN = Layout(name="checked", ranks=2)


@dataclass(frozen=True)
class Checked:
    """A checkout, and what the command said: (exit status, stdout, stderr) by name."""

    tree: Path
    said: dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def checked(tree: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder = tmp_path_factory.mktemp("said")
    script = str(tree / "pretrain_gpt.py")

    def line(*options: str, flags: str = "", without: str = "") -> list[str]:
        given = arguments(release_of(tree), replace(RUN, flags=flags), corpus)
        return [*options, script, *(flag for flag in given if flag != without)]

    lines = {
        "two layouts": line("--ranks", "2", "--ranks", "1x2x2", "--steps", "3"),
        "context": line("--ranks", "1x1x1x2", "--steps", "1", flags="--sft"),
        "refused": line(flags="--dataloader-type cyclic", without=boundary_flag_of(tree)),
        "unknown": line(flags="--not-a-flag 3"),
        "odd": line("--ranks", "5"),
        "no data": line(flags="--data-path nothing"),
    }
    last_line(COMMANDS, environment(tree), json.dumps(lines), folder=folder)
    said = {
        name: [(folder / f"{name}.{kind}").read_text() for kind in ("status", "out", "err")]
        for name in lines
    }
    return Checked(tree, {name: (int(code), *texts) for name, (code, *texts) in said.items()})


def boundary_flag_of(tree: Path) -> str:
    return "".join(boundary_flag(release_of(tree), ""))


def test_check_prints_the_rows_of_the_run(
    checked: Checked, host: Host, corpus: Corpus, tmp_path: Path
) -> None:
    """Row by row: max_seqlen and labels of every micro step that is printed."""
    status, said, errors = checked.said["two layouts"]
    assert status == 0, errors
    first, second = said.split("DP 1 x TP 2 x PP 2 x CP 1: 4 ranks")
    printed = [tuple(int(n.replace(",", "")) for n in found) for found in LINE.findall(first)]
    assert len(printed) == 3 * 4 == len(LINE.findall(second))
    assert first.count("one bucket\n") == 12 and "train 48" in first
    host.run(RUN, corpus, tmp_path / "run")
    ranks = load_ranks(tmp_path / "run")
    calls = [[call for call in rank["calls"] if call["training"]] for rank in ranks]
    for step, micro_step, capacity, begin, last, _, longest, labels in printed:
        number = (step - 1) * STEP_ROWS // 2 + micro_step - 1
        assert (begin, last) == (2 * number, 2 * number + 1)
        together = [rank[number] for rank in calls]
        assert labels == sum(int(call["loss_mask"].sum()) for call in together)
        assert longest == max(int(call["max_seqlen"]) for call in together) <= capacity


def test_context_parallel_ranks_are_checked(checked: Checked) -> None:
    status, said, errors = checked.said["context"]
    assert status == 0 and "one bucket" in said, errors


def test_flags_that_the_run_refuses_exit_with_status_2(checked: Checked) -> None:
    """Flags of ours, all at once; of Megatron's parser; and of Megatron's own checks."""
    for name in ("refused", "unknown", "odd"):
        assert checked.said[name][0] == 2, checked.said[name]
    refused = checked.said["refused"][2]
    assert "--dataloader-type single" in refused
    assert ("drops cu_seqlens" in refused) == (release_of(checked.tree) >= (0, 18))
    assert "--not-a-flag" in checked.said["unknown"][2]
    assert "divisible" in checked.said["odd"][2]


def test_unreadable_data_exits_with_status_1(checked: Checked) -> None:
    status, _, errors = checked.said["no data"]
    assert status == 1 and "nothing.idx" in errors

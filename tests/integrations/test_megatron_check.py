"""The check command where it needs no checkout of Megatron-LM: its words, its exit status.

What it draws is compared with real runs in tests/hosts/test_check.py.
"""

from __future__ import annotations

import pytest

from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron import check
from megapack.integrations.hosts.megatron.__main__ import main
from megapack.integrations.hosts.megatron.check import Drawn, RankLayout, RankReport


def test_help_shows_a_command_and_every_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    for words in ("--ranks 4x2x1x1", "DPxTPxPPxCP", "Exit status", "max_seqlen"):
        assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "the script nowhere.py does not exist"),
        (["--ranks", "2x0", __file__], "--ranks is '2x0'"),
        (["--ranks", "8 GPUs", __file__], "8x2x1x1"),
        (["--steps", "0", __file__], "--steps is 0; it must be 1 or more"),
        ([__file__], "cannot be imported"),
    ],
)
def test_wrong_command_lines_exit_with_status_2(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """megatron-core alone is installed here, without Megatron-LM's scripts."""
    with pytest.raises(SystemExit) as left:
        main(["check", *arguments])
    assert left.value.code == 2 and words in capfd.readouterr().err


def test_omitted_sizes_are_1_or_those_of_the_flags() -> None:
    assert check._world("8x2") == RankLayout(data=8, tensor=2, pipeline=1, context=1)
    flags = ["--pipeline-model-parallel-size", "4", "--lr", "1e-3", "--tensor", "7"]
    assert check._default_world(flags) == RankLayout(data=2, tensor=1, pipeline=4, context=1)


def report(*capacities: int) -> RankReport:
    drawn = [
        Drawn(step=0, rows=(k,), capacity=c, segments=2, longest=5, labels=6, padding=0)
        for k, c in enumerate(capacities)
    ]
    return RankReport(row=8, block=2, num_rows={"train": 4}, drawn=drawn)


TWO = RankLayout(data=2, tensor=1, pipeline=1, context=1)
STAGES = RankLayout(data=1, tensor=1, pipeline=2, context=1)


@pytest.mark.parametrize(
    ("world", "second", "problem"),
    [
        (TWO, report(4, 8), None),
        (TWO, report(4, 4), "step 1, micro step 2: ranks are in buckets [4, 8]"),
        (STAGES, report(4, 4), "pipeline stages or context-parallel ranks read different rows"),
        (TWO, report(4), "different numbers of micro batches"),
    ],
)
def test_disagreeing_ranks_are_reported(
    world: RankLayout, second: RankReport, problem: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every message makes the exit status 1."""
    problems = list(check._report(world, [report(4, 8), second]))
    assert [problem in found for found in problems] == ([] if problem is None else [True])
    assert capsys.readouterr().out.count("one bucket per 2") == 1


def test_a_script_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no function that builds its datasets"):
        check._dataset_provider((object(),), {})

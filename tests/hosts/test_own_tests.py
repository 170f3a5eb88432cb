"""Megatron-LM main's own data tests: the same outcomes on megapack's storage.

Under ``install()`` the tests of GPTDataset meet packed rows; those that then fail are named here,
with what they hold. Two files need what is downloaded (tokenizers, vocabularies) and are left out.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ports import free_port

from tests.hosts.helpers import compile_helpers
from tests.hosts.layouts import environment, release_of
from tests.hosts.processes import marks_of, run
from tests.hosts.test_megatron_lm import TREES

pytestmark = marks_of(TREES, "MEGATRON_LM", "Megatron-LM")

# Tests that build what no run would train on; of no other the outcome may differ.
REFUSED = {
    "test_fast_builder": "the batch sizes of this run are unknown",
    "test_prepare_cache_builds": "drops cu_seqlens without --dataloader-inter-document-masking",
}
FILES = ("builder", "gpt_dataset", "multimodal_dataset", "prepare_cache")
MAIN = [tree for tree in TREES if release_of(tree) >= (0, 20)]


def outcomes(tree: Path, folder: Path, swapped: str, helpers: Path) -> dict[str, str]:
    """passed, skipped, or the message with which it failed, of every test."""
    tests = tree / "tests" / "unit_tests" / "data"
    env = environment(tree)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parent)])
    env |= {"SWAPPED": swapped, "HELPERS": str(helpers), "MASTER_PORT": str(free_port())}
    report = folder / f"{swapped}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "own_tests_plugin"),
        *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tree)),
        *(f"--junitxml={report}", "--basetemp", str(folder / swapped)),
        *(str(tests / f"test_{name}.py") for name in FILES),
    ]
    done = run(command, folder, env)
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return {
        f"{case.get('classname')}.{case.get('name')}": _outcome(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag == "skipped":
            return "skipped"
        if child.tag in {"failure", "error"}:
            return child.get("message", "failed")
    return "passed"


@pytest.mark.skipif(not MAIN, reason="MEGATRON_LM names no checkout of Megatron-LM's main")
def test_own_tests_pass_on_our_storage(tmp_path: Path) -> None:
    helpers = compile_helpers(MAIN[0], tmp_path)
    stock = outcomes(MAIN[0], tmp_path, "stock", helpers)
    ours = outcomes(MAIN[0], tmp_path, "storage", helpers)
    assert Counter(stock.values())["passed"] > 100, "and they run here at all"
    assert set(stock.values()) == {"passed", "skipped"}
    assert ours == stock
    packed = outcomes(MAIN[0], tmp_path, "datasets", helpers)
    assert packed.keys() == stock.keys()
    for name, said in packed.items():
        if said != stock[name]:
            refusals = [words for test, words in REFUSED.items() if f".{test}" in name]
            assert len(refusals) == 1 and refusals[0] in said, f"{name}: {said}"

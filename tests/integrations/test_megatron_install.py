"""The launcher runs a user's own script; names are rebound before it and given back after."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

from megapack.errors import ConfigError
from megapack.integrations.megatron import install, uninstall
from megapack.integrations.megatron.__main__ import main as launch
from megapack.integrations.megatron.builder import PackedDatasetBuilder
from megapack.integrations.megatron.dataset import PackedGPTDataset
from megapack.integrations.megatron.host import version
from megapack.integrations.megatron.swap import _with_own_get_batch, needs_own_get_batch
from tests.integrations.harness import run_forked
from tests.integrations.samples import make_dataset

HOST = Path(__file__).parent / "hosts" / "megatron_lm"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def test_installing_twice_and_uninstalling_leaves_megatron_as_it_was(installed: None) -> None:
    install()
    assert gpt_dataset.GPTDataset is PackedGPTDataset
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    assert builder is PackedDatasetBuilder
    uninstall()
    assert gpt_dataset.GPTDataset.__module__ == "megatron.core.datasets.gpt_dataset"
    assert blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder is not builder
    assert issubclass(gpt_dataset.MockGPTDataset, gpt_dataset.GPTDataset)


def test_only_releases_with_a_broken_path_get_our_get_batch() -> None:
    broken = {
        v
        for v in ("0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.20.0rc1")
        if needs_own_get_batch(version(v))
    }
    assert broken == {"0.16.1", "0.17.1"}
    with pytest.raises(ConfigError, match="must be auto, yes or no"):
        install(own_get_batch="maybe")  # type: ignore[arg-type]


def test_a_script_without_get_batch_is_told_what_to_do() -> None:
    pretrain = _with_own_get_batch(lambda *args: None)
    with pytest.raises(ConfigError, match="no function of a module with a get_batch"):
        pretrain(lambda: None, "model")


def arguments(tmp_path: Path, *chosen: str) -> list[str]:
    return [
        str(HOST / "pretrain_gpt.py"),
        *chosen,
        *("--seq-length", "64", "--global-batch-size", "8", "--train-samples", "32"),
        *("--data-cache-path", str(tmp_path / "cache")),
    ]


def run_in_process(argv: list[str], packed: bool) -> dict[str, Any]:
    """The script, with and without the launcher; in a process of its own (see run_forked)."""
    printed = io.StringIO()
    sys.path.insert(0, str(HOST))
    with contextlib.redirect_stdout(printed):
        if packed:
            launch(argv)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    report: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return report


@pytest.mark.multiprocess
def test_the_script_runs_unchanged_with_packed_rows(tmp_path: Path) -> None:
    make_dataset(tmp_path, [20, 40, 7, 64, 100, 30] * 20, "web")
    argv = arguments(tmp_path, "--data-path", str(tmp_path / "web"))
    unchanged = run_forked(run_in_process, argv, False)
    assert unchanged["dataset"] == "GPTDataset" and unchanged["boundaries"] is None
    packed = run_forked(run_in_process, argv, True)
    assert packed["dataset"] == "PackedGPTDataset" and packed["rows"] == 32
    assert packed["tokens"] == unchanged["tokens"] == [1, 64]
    assert packed["boundaries"][0] == 0 and packed["boundaries"][-1] == 64


@pytest.mark.multiprocess
def test_the_launch_command_changes_by_one_module_name(tmp_path: Path) -> None:
    make_dataset(tmp_path, [20, 40, 7, 64, 100, 30] * 20, "web")
    make_dataset(tmp_path, [11, 50, 33] * 20, "code")
    blend = ["--data-path", "0.7", str(tmp_path / "web"), "0.3", str(tmp_path / "code")]
    command = [sys.executable, "-W", "ignore", "-m", "megapack.integrations.megatron"]
    done = subprocess.run(
        [*command, *arguments(tmp_path, *blend, "--micro-batch-size", "2")],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HOST)])},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["sources"] == 2 and report["tokens"] == [1, 128]
    assert report["boundaries"][-1] == 128

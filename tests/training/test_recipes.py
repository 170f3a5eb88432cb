"""Recipes of the package, by name: a wheel is enough to start a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megapack.training.command import read_config


def test_a_recipe_is_found_by_its_name_from_anywhere() -> None:
    config = read_config("demo_cpu", ["num_steps=7"])
    assert config.num_steps == 7 and config.model.preset == "llama_demo"


@pytest.mark.parametrize("command", ["pretrain", "evaluate", "export"])
def test_an_environment_for_data_is_told_what_training_needs(command: str) -> None:
    """Not the first import that happens to fail, somewhere below."""
    without = f"import sys; sys.modules['deepspeed'] = None; import megapack.training.{command}"
    done = subprocess.run(
        [sys.executable, "-c", without], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "training needs deepspeed" in done.stderr and "extra train" in done.stderr

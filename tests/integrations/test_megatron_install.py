"""The launcher runs a user's own script; names are rebound before it and given back after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron import __main__ as launch
from megapack.integrations.hosts.megatron import install, uninstall
from megapack.integrations.hosts.megatron.dataset import PackedDatasetBuilder, PackedGPTDataset
from megapack.integrations.hosts.megatron.host import version
from megapack.integrations.hosts.megatron.swap import _with_own_get_batch, needs_own_get_batch

if TYPE_CHECKING:
    from training.processes import Zygote


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def test_install_twice_and_uninstall_restores_megatron(installed: None) -> None:
    install()
    assert gpt_dataset.GPTDataset is PackedGPTDataset
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    assert builder is PackedDatasetBuilder
    uninstall()
    assert gpt_dataset.GPTDataset.__module__ == "megatron.core.datasets.gpt_dataset"
    assert blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder is not builder
    assert issubclass(gpt_dataset.MockGPTDataset, gpt_dataset.GPTDataset)


def test_only_broken_releases_get_our_get_batch() -> None:
    broken = {
        v
        for v in ("0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.20.0rc1")
        if needs_own_get_batch(version(v))
    }
    assert broken == {"0.16.1", "0.17.1"}
    with pytest.raises(ConfigError, match="must be auto, yes or no"):
        install(own_get_batch="maybe")  # type: ignore[arg-type]


def test_script_without_get_batch_gets_a_remedy() -> None:
    pretrain = _with_own_get_batch(lambda *args: None)
    with pytest.raises(ConfigError, match="no function of a module with a get_batch"):
        pretrain(lambda: None, "model")


SCRIPT = """
import json, sys
from beside_the_script import SEQUENCE_LENGTH
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
names = [GPTDataset.__name__, BlendedMegatronDatasetBuilder.__name__]
print(json.dumps([__name__, SEQUENCE_LENGTH, sys.argv[1:], names]))
"""


def test_the_launch_command_changes_by_one_module_name(tmp_path: Path, zygote: Zygote) -> None:
    """tests/hosts runs Megatron-LM's own script, where a checkout is given."""
    (tmp_path / "pretrain.py").write_text(SCRIPT)
    (tmp_path / "beside_the_script.py").write_text("SEQUENCE_LENGTH = 64\n")
    given = [str(tmp_path / "pretrain.py"), "--data-path", "0.7", "web", "--own-get-batch"]
    said = zygote.start([launch.__file__, *given], 1, tmp_path / "log").succeed()
    *same, names = json.loads(said.splitlines()[-1])
    assert same == ["__main__", 64, given[1:]], "what the script sees is what it always saw"
    assert names == ["PackedGPTDataset", "PackedDatasetBuilder"]

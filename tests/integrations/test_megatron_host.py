"""Differences between releases: names, signatures, flags, batch sizes of evaluation.

The megatron-core package does not contain Megatron-LM's own code. ``script`` stands for the one
function of it that is called here, ``get_args()``; tests/hosts asks the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megapack.errors import ConfigError
from megapack.integrations.host import Rebinding
from megapack.integrations.hosts.megatron import dataset, swap
from megapack.integrations.hosts.megatron.dataset import PackedDatasetBuilder
from megapack.integrations.hosts.megatron.host import batch_sizes
from tests.integrations.samples import make_dataset
from tests.integrations.test_megatron_dataset import build, config

if TYPE_CHECKING:
    from training.processes import Zygote

Script = Callable[..., SimpleNamespace]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """``script(**flags)``: Megatron-LM has parsed these arguments."""

    def parsed(**flags: Any) -> SimpleNamespace:
        module = ModuleType("megatron.training.global_vars")
        defaults = {"micro_batch_size": 1, "data_parallel_size": 2, "global_batch_size": 8}
        args = SimpleNamespace(**(defaults | flags))
        module.get_args = lambda: args  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return args

    return parsed


@pytest.mark.parametrize(
    ("part", "others"),
    [
        ("PackedGPTDataset", ("attention", "batch", "storage", "swap")),
        ("IndexedDatasetBuilder", ("attention", "batch", "dataset", "swap")),
        ("install", ("attention", "batch", "storage")),
    ],
)
def test_each_part_imports_alone(
    part: str, others: tuple[str, ...], zygote: Zygote, tmp_path: Path
) -> None:
    package = "megapack.integrations.hosts.megatron"
    program = (
        f"import sys; from {package} import {part}\n"
        f"print([name for name in {others} if f'{package}.{{name}}' in sys.modules])"
    )
    (tmp_path / "program.py").write_text(program)
    said = zygote.start([str(tmp_path / "program.py")], 1, tmp_path / "log").succeed()
    assert said.splitlines()[-1] == "[]"


def test_all_stages_build_the_dataset_in_every_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rank in (0, 1):
        monkeypatch.setattr(
            parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank
        )
        for called_with in ({}, {"vp_stage": 0}, {"vp_stage": None, "is_packed_sequence": True}):
            assert swap._is_dataset_built_on_rank(**called_with) == (rank == 0)


def test_missing_host_name_is_reported_with_the_release() -> None:
    host = ModuleType("megatron.core.datasets.gpt_dataset")
    host.Kept = 1  # type: ignore[attr-defined]
    rebinding = Rebinding("megatron-core 9.1")
    rebinding.replace(host, "Kept", 2)
    with pytest.raises(ConfigError, match=r"megatron-core 9\.1 has no .*gpt_dataset\.GPTDataset"):
        rebinding.replace(host, "GPTDataset", 3)
    assert host.Kept == 1 and not rebinding, "what was replaced before is given back"


def test_own_get_batch_is_refused_from_0_18_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(swap, "version", lambda: (0, 19))
    with pytest.raises(ConfigError, match="unpack another tuple"):
        swap.install(own_get_batch="yes")


@pytest.mark.parametrize(("release", "refused"), [((0, 16), True), ((0, 17), False)])
def test_hybrid_models_are_refused_before_0_17(
    release: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "version", lambda: release)
    names: dict[str, Any] = {"MambaModel": object, "get_batch": "its own"}
    exec("def forward_step(): ...", names)
    pretrain = swap._with_own_get_batch(lambda step: names["get_batch"])
    try:
        if refused:
            with pytest.raises(ConfigError, match=r"Mamba layers of .* no seq_idx"):
                pretrain(names["forward_step"])
        else:
            assert pretrain(names["forward_step"]) == "its own"
            assert PackedDatasetBuilder.needs_boundary_flag, "it reads boundaries with --sft only"
    finally:
        swap.uninstall()
    assert not PackedDatasetBuilder.needs_boundary_flag


@pytest.fixture
def web(tmp_path: Path) -> GPTDatasetConfig:
    """Return the options of a run on a new corpus."""
    make_dataset(tmp_path, [20, 40, 7, 64, 100, 30] * 40, "web")
    return config(str(tmp_path / "web"), tmp_path / "cache")


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dataset.dist, "get_rank", lambda: 0)


def test_evaluation_has_its_own_batch_sizes_and_blocks(
    script: Script, web: GPTDatasetConfig
) -> None:
    script(eval_micro_batch_size=3, eval_global_batch_size=12)
    train, valid, _ = build(web, [16, 24, 0])
    options = [part.rows.options for part in (train, valid)]
    found = [(of.rows_per_block, of.cu_seqlens) for of in options]
    assert found == [(8, "exact"), (12, "padded")]
    shapes = {tuple(valid[i]["cu_seqlens"].shape) for i in range(24)}
    assert shapes == {(65,)}, "rows of one micro batch stack"

    script(eval_micro_batch_size=3, eval_global_batch_size=8)
    with pytest.raises(ConfigError, match=r"rows_per_block is 8.*multiple of 6"):
        build(web, [16, 16, 0])


def test_evaluation_sizes_default_to_those_of_training(
    script: Script,
) -> None:
    script()
    assert batch_sizes(evaluation=True) == batch_sizes() is not None


def test_cache_can_be_prepared_without_a_run(
    script: Script, web: GPTDatasetConfig, tmp_path: Path
) -> None:
    """tools/prepare_cache.py parses a run's arguments and starts no micro batch calculator."""
    script(global_batch_size=16, dataloader_type="cyclic")
    [train, _, _] = build(web, [32, 0, 0], PackedDatasetBuilder)
    assert train.rows.options.rows_per_block == 16
    assert list((tmp_path / "cache").glob("*.samples"))


PIPELINE, MASKING = "pipeline_model_parallel_size", {"dataloader_inter_document_masking": True}


@pytest.mark.parametrize(
    ("release", "flags", "message"),
    [
        (19, {"dataloader_type": "cyclic", "sft": True}, "--dataloader-type single"),
        (19, {}, "--dataloader-inter-document-masking or --sft"),
        (20, {"dataloader_type": "external", "sft": True}, "external expects iterators"),
        (20, {"hybrid_context_parallel": True, "sft": True}, "assigns every document"),
        (18, MASKING, "Add --sft"),
        (20, {PIPELINE: 3}, "cu_seqlens without --sft: "),
        (
            20,
            {PIPELINE: 3, **MASKING},
            "no data to middle pipeline stages .* replace it with --sft",
        ),
        (
            20,
            {PIPELINE: 2, f"virtual_{PIPELINE}": 2, **MASKING},
            r"also virtual ones\): replace it with --sft",
        ),
        (20, {PIPELINE: 3, "sft": True}, None),
        (18, {"sft": True, "dataloader_type": "single"}, None),
        (20, MASKING, None),
    ],
)
def test_flags_that_misread_rows_are_refused(
    release: int,
    flags: dict[str, Any],
    message: str | None,
    script: Script,
    first_rank: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset, "version", lambda: (0, release))
    args = script(**flags)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        dataset._check_flags(args, boundaries=True)
    dataset._check_flags(script(), boundaries=False)


def test_losses_per_micro_batch_are_reported(
    script: Script, first_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for told in (True, False):
        dataset._check_flags(script(sft=True, calculate_per_token_loss=told), boundaries=True)
        assert ("without --calculate-per-token-loss" in capsys.readouterr().out) != told


def test_0_18_requires_one_row_per_micro_batch(
    script: Script, web: GPTDatasetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "version", lambda: (0, 18))
    script(eval_micro_batch_size=2, eval_global_batch_size=8)
    with pytest.raises(ConfigError, match="--eval-micro-batch-size 1"):
        build(web, [16, 16, 0])

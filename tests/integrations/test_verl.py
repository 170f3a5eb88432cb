"""verl's batch balancing by plan_step: invariants without verl, steps with the published verl.

MEGAPACK_VERL names folders, as PATH does: verl 0.9.1 or a checkout, and what it imports (pip
install --no-deps --target FOLDER verl tensordict codetiming hydra-core omegaconf pyvers cachetools
peft and antlr4-python3-runtime of omegaconf). Its SFT trainer (tests/hosts/test_verl_sft.py) wants
more: a transformers that it knows (5.10.2) with its tokenizers (0.22.2), huggingface_hub (1.17.0),
httpx, httpcore, anyio, sniffio, h11 and datasets (4.8.4), a trl with
AutoModelForCausalLMWithValueHead (0.9.6, with tyro, shtab, docstring_parser and typeguard), dill,
pylatexenc, orjson, fastapi and starlette with opentelemetry-api.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapack.errors import ConfigError
from megapack.integrations.hosts import verl as planned
from megapack.integrations.hosts.verl import get_seqlen_balanced_partitions
from tests.integrations.harness import run_forked, run_ranks

VERL = os.environ.get("MEGAPACK_VERL")
EXAMPLE = Path(__file__).parents[2] / "examples" / "planned_verl.py"
needs_verl = pytest.mark.skipif(not VERL, reason="MEGAPACK_VERL names no folder with verl")


@pytest.mark.parametrize(
    ("samples", "parts", "equal_size", "most"),
    [
        (2048, 16, True, 1.001),
        (2048, 16, False, 1.001),
        (64, 8, True, 1.2),  # eight of each may not go better
        (64, 8, False, 1.002),
        (24, 8, True, 1.2),
        (24, 8, False, 1.02),
        (8, 8, True, 1),
    ],
)
def test_partitions_hold_every_sample_once_with_equal_work(
    samples: int, parts: int, equal_size: bool, most: float
) -> None:
    rng = np.random.default_rng(samples)
    lengths = torch.from_numpy(np.minimum(rng.lognormal(8.3, 0.9, samples), 32_768).astype(int))
    costs = 24_576 * lengths + lengths**2
    found = get_seqlen_balanced_partitions(costs, parts, equal_size)
    assert sorted(i for part in found for i in part) == list(range(samples))
    assert all(part == sorted(part) and part for part in found)
    if equal_size:
        assert {len(part) for part in found} == {samples // parts}
    sums = [float(costs[part].sum()) for part in found]
    assert max(sums) <= most * max(sum(sums) / parts, float(costs.max()))


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples in 4 parts: give at least as many"):
        get_seqlen_balanced_partitions([1, 2, 3], 4, equal_size=False)
    with pytest.raises(ValueError, match="3 samples in 2 equal parts: give a multiple"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


def _import_verl() -> Any:
    sys.path.extend(str(VERL).split(os.pathsep))
    import verl.utils.seqlen_balancing as home  # noqa: PLC0415

    return home


def _step(rank: int, ranks: int, whole: bool) -> Any:
    """The example's step; `whole`: all samples as one padded batch."""
    _import_verl()
    example = runpy.run_path(str(EXAMPLE))
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 50, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **sizes))
    data = example["samples"]()
    limit = int(data.batch["attention_mask"].sum()) if whole else 160
    losses = example["update"](model, data, rank, ranks, limit)
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return losses, gradients


@needs_verl
@pytest.mark.multiprocess
def test_verl_has_the_gradients_of_the_padded_batch(free_port: int) -> None:
    [(loss, expected)] = run_ranks(_step, 1, free_port, True)
    assert len(loss) == 1
    for ranks in (1, 2):
        found = run_ranks(_step, ranks, free_port, False)
        assert len({len(losses) for losses, _ in found}) == 1 and len(found[0][0]) > 2
        np.testing.assert_allclose(sum(sum(part) for part, _ in found) / ranks, loss[0], rtol=1e-5)
        for name, gradient in expected.items():
            assert np.abs(gradient).max() > 1e-4, name
            for _, of_rank in found:
                np.testing.assert_allclose(of_rank[name], gradient, atol=1e-5, rtol=0)


def _micro_batches(rank: int, ranks: int) -> Any:
    """Laws of rearrange_micro_batches, and what is refused on both ranks though one is at fault."""
    import torch.distributed as dist  # noqa: PLC0415

    home = _import_verl()
    from tensordict import TensorDict  # noqa: PLC0415

    stock = home.rearrange_micro_batches
    planned.install()
    planned.install()
    assert home.rearrange_micro_batches is planned.rearrange_micro_batches is not stock

    def batch(lengths: list[int], nested: bool = False) -> Any:
        rows = [torch.full((n,), i) for i, n in enumerate(lengths)]
        if nested:
            ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return TensorDict({"input_ids": ids}, batch_size=len(lengths))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return TensorDict({"input_ids": ids, "attention_mask": (ids >= 0).long()}, len(lengths))

    for seed in range(20):
        rng = np.random.default_rng([seed, rank])
        lengths = np.minimum(rng.lognormal(3, 0.9, 24), 128).astype(int) + 1
        size = 2 if seed % 3 == 0 else 1
        divided = 3 if seed % 4 == 0 else None
        td = batch(lengths.tolist(), nested=seed % 2 == 0)
        how = {"num_batches_divided_by": divided, "force_group_size": size}
        how |= {"min_num_micro_batch": 4 if seed % 5 == 0 else None}
        how |= {"use_dynamic_bsz_balance": seed % 7 > 0, "dp_group": dist.group.WORLD}
        micro_batches, lists = home.rearrange_micro_batches(td, 300, **how)
        assert sorted(i for numbers in lists for i in numbers) == list(range(24))
        assert all(numbers and lengths[numbers].sum() <= 300 for numbers in lists)
        assert all({i ^ 1 for i in numbers} == set(numbers) for numbers in lists if size == 2)
        counts = [None] * ranks
        dist.all_gather_object(counts, len(lists))
        assert len(set(counts)) == 1 and len(lists) % (divided or 1) == 0
        assert len(lists) >= (4 if seed % 5 == 0 else 1)
        for micro_batch, numbers in zip(micro_batches, lists, strict=True):
            rows = micro_batch["input_ids"].unbind()
            assert [int(row[0]) for row in rows] == numbers
        values = torch.arange(24.0)[[i for numbers in lists for i in numbers]]
        assert home.restore_dynamic_batch(values, lists).tolist() == list(range(24))
    refusals = []
    for lengths in ([301] if rank else [30], [200] * 6 if rank else [3]):
        try:
            home.rearrange_micro_batches(batch(lengths), 300, dp_group=dist.group.WORLD)
        except ValueError as error:
            refusals.append(str(error))
    planned.uninstall()
    assert home.rearrange_micro_batches is stock
    return refusals


@needs_verl
@pytest.mark.multiprocess
def test_verl_micro_batches_agree_on_two_ranks(free_port: int) -> None:
    for long, few in run_ranks(_micro_batches, 2, free_port):
        assert long.startswith("301 tokens stay together, and max_token_len is 300")
        assert "6 micro batches are needed, and a rank has 1 samples or groups" in few


def _by_the_environment() -> list[str]:
    os.environ["VERL_USE_EXTERNAL_MODULES"] = planned.__name__
    sys.modules.pop(planned.__name__)
    home = _import_verl()
    names = ("rearrange_micro_batches", "get_seqlen_balanced_partitions")
    return [getattr(home, name).__module__ for name in names]


def _by_an_older_release() -> str:
    home = _import_verl()
    del home.rearrange_micro_batches
    stock = home.get_seqlen_balanced_partitions
    try:
        planned.install()
    except ConfigError as error:
        assert home.get_seqlen_balanced_partitions is stock
        return str(error)
    return "installed"


@needs_verl
def test_verl_installs_itself_in_workers_and_not_into_other_releases() -> None:
    assert run_forked(_by_the_environment) == [planned.__name__] * 2
    assert "has no verl.utils.seqlen_balancing.rearrange_micro" in run_forked(_by_an_older_release)


def _example() -> list[float]:
    _import_verl()
    losses: list[float] = runpy.run_path(str(EXAMPLE))["main"]([])
    return losses


@needs_verl
def test_the_verl_example_learns() -> None:
    losses = run_forked(_example)
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]

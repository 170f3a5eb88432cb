"""Public functions write out their arguments and refuse wrong ones with a remedy."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch

import megapack
from megapack import (
    BucketBatchSampler,
    IndexedDataset,
    IndexedDatasetBuilder,
    PackedDataset,
    Schedule,
    pack,
)
from megapack.calls import checked_call, nearest, without_none
from megapack.data import ScheduleConfig, build_loader
from megapack.errors import ArgumentError, ConfigError, DataError
from megapack.packing.strategies import PARAMETERS, STRATEGIES
from megapack.planning import plan_step, plan_trees

PACKAGES = ("storage", "packing", "planning", "compare", "data", "attention", "probe")
PASSED_ON = {"flex_block_mask"}  # to a function of torch


def public() -> dict[str, Callable[..., Any]]:
    """Return every public function and class by name."""
    modules = [importlib.import_module(f"megapack.{name}") for name in PACKAGES]
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name: value for name, value in found.items() if callable(value)}


def test_public_functions_write_out_their_arguments() -> None:
    def is_hidden(value: Callable[..., Any]) -> bool:
        try:
            parameters = inspect.signature(value).parameters.values()
        except ValueError:  # the class inherits a constructor written in C
            return False
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    assert len(public()) > 80
    assert {name for name, value in public().items() if is_hidden(value)} == PASSED_ON


CHECKED = ("build_loader", "Schedule", "ScheduleConfig", "PackedDataset", "BucketBatchSampler")
CHECKED += ("BatchLayout", "open_blend", "Stage", "Source", "Ramp", "FimConfig", "pack")
CHECKED += ("check_packing", "plan_step", "plan_trees", "StepPlanner", "simulate_step", "compare")
CHECKED += ("IndexedDataset", "IndexedDatasetBuilder", "add_column", "probe", "watch")
CHECKED += ("LeakCallback", "BlendConfig", "Sentinels", "Scores")


@pytest.mark.parametrize("name", CHECKED)
def test_a_keyword_with_a_letter_too_few_gets_a_hint(name: str) -> None:
    """Every argument gets its hint from the misspelled name alone."""
    function = public()[name]
    names = [n for n in inspect.signature(function).parameters if len(n) > 3 and n != "self"]
    names = [n for n in names if n[:-1] not in names]
    assert names
    for argument in names:
        with pytest.raises(ArgumentError) as error:
            function(**{argument[:-1]: 0})
        assert f"unknown argument '{argument[:-1]}'; did you mean " in str(error.value)


def test_arguments_of_pack_are_the_parameters_of_the_strategies() -> None:
    others = set(inspect.signature(pack).parameters) - set(PARAMETERS)
    assert others == {
        *("lengths", "strategy", "buckets", "seed", "threads", "alignment", "fim_room"),
        *("match_repetition", "groups", "second", "second_capacity", "tokens", "preset"),
        "progress",
    }
    hints = get_type_hints(pack)
    with_choices = [p for s in STRATEGIES.values() for p in s.parameters if p.choices]
    assert len(with_choices) >= 5
    for parameter in with_choices:
        literal = next(h for h in get_args(hints[parameter.name]) if get_args(h))
        assert get_args(literal) == parameter.choices, parameter.name


@checked_call
def build(
    steps: int,
    rate: float = 0.5,
    *,
    order: Literal["shuffled", "sorted"] | None = None,
    names: Sequence[str] = (),
    sizes: int | Sequence[int] = (),
    rates: Sequence[float | None] = (),
    path: str | Path = "",
    device: torch.device | str | None = None,
    done: Callable[[], None] | None = None,
    quick: bool = False,
    **more: int,
) -> dict[str, Any]:
    """Return what was given."""
    return {**without_none(locals(), ("order", "device")), "steps": steps, **more}


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": np.int64(3), "rate": np.float32(1)},
        {"steps": 3, "rate": 1, "order": "sorted", "path": Path("x"), "names": ["a"]},
        {"steps": 3, "device": torch.device("cpu"), "done": print, "quick": True, "other": 4},
        {"steps": 3, "names": np.array(["a"]), "quick": np.bool_(True), "device": "cpu"},
    ],
)
def test_right_arguments_pass(arguments: dict[str, Any]) -> None:
    assert build(**arguments)["steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "build: missing argument 'steps'; it has no default: pass it"),
        ({"steps": "3"}, "build: steps is '3'; it must be an integer"),
        ({"steps": True}, "build: steps is True; it must be an integer"),
        ({"steps": 3.0}, "build: steps is 3.0; it must be an integer"),
        ({"steps": None}, "build: steps is None; it must be an integer"),
        ({"steps": 3, "rate": "fast"}, "rate is 'fast'; it must be a number"),
        ({"steps": 3, "order": "sort"}, "must be 'shuffled' or 'sorted'; did you mean 'sorted'?"),
        ({"steps": 3, "names": "abc"}, "names is 'abc'; it must be a list, as in ['abc']"),
        ({"steps": 3, "sizes": "512,1024"}, "it must be an integer or a list, as in [512, 1024]"),
        ({"steps": 3, "sizes": "512 1024"}, "sizes is '512 1024'; it must be an integer or a list"),
        ({"steps": 3, "rates": "0.5"}, "rates is '0.5'; it must be a list, as in [0.5]"),
        ({"steps": 3, "path": 3}, "path is 3; it must be a string or Path"),
        ({"steps": 3, "device": 3}, "device is 3; it must be device or a string"),
        ({"steps": 3, "done": 3}, "done is 3; it must be a function"),
        ({"steps": 3, "quick": 1}, "quick is 1; it must be True or False"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        build(**arguments)
    assert str(error.value).endswith(message)
    assert isinstance(error.value, ConfigError) and isinstance(error.value, TypeError)


def test_a_schedule_names_itself() -> None:
    index = pack([64], buckets=[64])
    with pytest.raises(ArgumentError, match=r"^Schedule: missing argument 'tokens_per_step'"):
        Schedule(index)


@pytest.mark.parametrize("tokens", ["hello", "12", b"hello", ["a", "b"]], ids=str)
def test_text_is_no_token_ids(tokens: Any, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "docs")
    with pytest.raises(TypeError, match=r"give token ids, not text$"):
        builder.add_document(tokens)
    builder.abort()


def test_names_that_are_not_alike_are_not_suggested() -> None:
    assert nearest("num_workers", ["num_steps"]) == ""
    assert nearest("num_step", ["num_steps"]) == "; did you mean 'num_steps'?"


@pytest.mark.parametrize(
    ("name", "known", "intended"),
    [
        ("H100", ["v100", "h100", "h100-nvl"], "h100"),
        ("bestfit", STRATEGIES, "best_fit_decreasing"),
        ("bfd", STRATEGIES, "best_fit_decreasing"),
        ("Bucket-LLM", STRATEGIES, "bucket_llm"),
        ("rtx4090", ["rtx-3090", "rtx-4090"], "rtx-4090"),
    ],
)
def test_case_hyphens_and_abbreviations_do_not_count(
    name: str, known: Sequence[str], intended: str
) -> None:
    assert nearest(name, known) == f"; did you mean {intended!r}?"


def test_two_letters_abbreviate_nothing() -> None:
    assert nearest("lr", ["learning_rate", "lr_decay"]) == ""


def test_names_of_other_programs_get_ours(tmp_path: Path) -> None:
    index = pack([5, 6], buckets=8)
    with IndexedDatasetBuilder(tmp_path / "docs") as builder:
        for length in (5, 6):
            builder.add_document(range(length))
    dataset = PackedDataset(tmp_path / "docs", index)
    calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
        (pack, ([5],), {"max_length": 8}, r"'max_length'; .* as in buckets=\["),
        (pack, ("docs",), {"buckets": 8}, r"give IndexedDataset\('docs'\)\.document_lengths"),
        (Schedule, (index, 16), {}, "config is 16; .*as in tokens_per_step="),
        (Schedule, (index,), {"batch_size": 16}, "'batch_size'; .*tokens_per_step"),
        (build_loader, (dataset, index), {"rank": 0}, "'rank'; did you mean 'data_parallel_rank'"),
        (build_loader, (dataset, index), {"dp_rank": 0}, "'dp_rank'; .*'data_parallel_rank'"),
        (build_loader, (dataset, index), {"batch_size": 4}, "'batch_size'; .*micro_batch_tokens"),
        (
            PackedDataset,
            (tmp_path / "docs", None),
            {},
            "index is None; give the name of a .samples",
        ),
        (PackedDataset, (tmp_path / "docs", [5]), {}, "index is 5; give the name of a .samples"),
    ]
    for function, args, kwargs, message in calls:
        with pytest.raises((ConfigError, DataError), match=message):
            function(*args, **kwargs)


def test_too_many_positional_arguments() -> None:
    with pytest.raises(ArgumentError, match="allowed: steps, rate\\); pass the others by name"):
        build(1, 2.0, "sorted")  # type: ignore[misc]


def test_reprs_fit_in_a_line(tmp_path: Path) -> None:
    folder = tmp_path / ("a long name of a folder" * 5)
    folder.mkdir()
    with IndexedDatasetBuilder(folder / "docs") as builder:
        for length in range(1, 200):
            builder.add_document(range(length))
        lengths = np.arange(1, 200)
    index = pack(lengths, buckets=[64, 128, 256])
    data = PackedDataset(str(folder / "docs"), index)
    schedule = Schedule(data, tokens_per_step=512)
    ranks: dict[str, Any] = {"data_parallel_rank": 0, "data_parallel_size": 2}
    sampler = BucketBatchSampler(schedule, micro_batch_tokens=256, **ranks)
    loader = build_loader(data, schedule, micro_batch_tokens=256, **ranks)
    step = plan_step(lengths, num_ranks=2, max_tokens_per_rank=512)
    trees = plan_trees([[1, 2, 3], [1, 2, 4]], num_ranks=1, max_tokens_per_rank=16)
    for value in (schedule, sampler, loader, data, index, step, trees):
        assert type(value).__name__ in repr(value) and len(repr(value)) <= 120, repr(value)
    assert "512 tokens per step of buckets 64 to 256" in repr(schedule)
    assert "rank 0 of 2" in repr(loader)
    assert "199 documents, 19,900 tokens, 2 ranks, " in repr(step)
    assert repr(trees) == "TreePlan(2 sequences, 4 tokens in 1 tree, 1 rank)"
    with IndexedDatasetBuilder(folder / "one") as builder:
        builder.add_document([1, 2])
    assert repr(IndexedDataset(folder / "one")).endswith(
        ": 1 document, 1 sequence, 2 int32 tokens)"
    )


def test_the_loader_is_at_the_top() -> None:
    assert megapack.build_loader is build_loader
    with pytest.raises(ArgumentError, match="tokens_per_step"):
        ScheduleConfig(tokens_per_stp=4)  # type: ignore[call-arg]

"""Public bugs that need several ranks: context parallelism on 2 and 4, pipelines of 3 and 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from integrations.harness import run_ranks

from .parallel import context_parallel, pipeline, sharded

CASES = [
    ("huggingface/trl#6843", context_parallel, 2, "attention_mask", "layers.1.self_attn"),
    ("huggingface/trl#6843", context_parallel, 4, "attention_mask", "layers.1.self_attn"),
    ("PrimeIntellect-ai/prime-rl#3000", context_parallel, 2, "recurrent_state", "layers.1.mixer"),
    (
        "PrimeIntellect-ai/prime-rl#3003",
        context_parallel,
        4,
        "recurrent_state",
        "layers.1.linear_attn",
    ),
    ("NVIDIA-NeMo/Megatron-Bridge#2952", pipeline, 3, "attention_mask", "layers.0.self_attn"),
    ("NVIDIA-NeMo/Megatron-Bridge#2952", pipeline, 4, "attention_mask", "layers.0.self_attn"),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("issue", "function", "ranks", "kind", "layer"), CASES)
def test_a_bug_of_several_ranks_is_found(
    issue: str, function: Callable[..., Any], ranks: int, kind: str, layer: str, free_port: int
) -> None:
    reports = run_ranks(function, ranks, free_port, issue)
    for broken, fixed in reports:
        leak = broken["leaks"][0]
        assert (leak["kind"], leak["layer"]) == (kind, layer), broken
        assert function is not pipeline or leak["rank"] == 1, "the first stage in the middle"
        assert broken["leaks"] == reports[0][0]["leaks"], "all ranks have the findings of all"
        assert fixed["ok"], fixed


@pytest.mark.multiprocess
def test_a_watched_step_of_fsdp_is_the_step_without_it(free_port: int) -> None:
    for right, wrong, backward in run_ranks(sharded, 2, free_port):
        assert right[0] and wrong[0] and backward[0], "other gradients"
        assert right[1]["ok"] and not right[1]["notes"][1:], right
        assert wrong[1]["leaks"][0]["layer"] == "layers.1.self_attn"
        assert backward[1]["leaks"][0]["kind"] == "gradient"

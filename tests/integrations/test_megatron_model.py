"""A real megatron-core GPTModel on packed rows, forward and backward, on the CPU.

The local layer spec with ``PackedCoreAttention`` needs no Transformer Engine. megatron-core asks
CUDA for its current device inside RoPE; that one call is answered with "cpu" here.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.data import default_collate

from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron.attention import (
    PackedCoreAttention,
    with_packed_attention,
)
from megapack.integrations.hosts.megatron.batch import (
    flatten_rows,
    forward_step,
    to_packed_seq_params,
)
from megapack.integrations.hosts.megatron.probe import watch_first_call
from tests.integrations.harness import run_ranks
from tests.integrations.samples import make_row

VOCABULARY = 128
LENGTHS = [20, 3, 41]


def config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    plain = {"use_cpu_initialization": True, "add_bias_linear": False, "bias_dropout_fusion": False}
    gated = {"gated_linear_unit": True, "activation_func": F.silu}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    options: dict[str, Any] = {**sizes, **plain, **gated, **dropout}
    return TransformerConfig(**{**options, **changes})


def model(position_embedding: str, **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    options, spec = config(**changes), with_packed_attention(get_gpt_layer_local_spec())
    mtp = get_gpt_mtp_block_spec(options, spec, False) if options.mtp_num_layers else None
    return GPTModel(
        config=options,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type=position_embedding,
    )


def gradients(gpt: GPTModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in gpt.named_parameters() if p.grad is not None}
    gpt.zero_grad()
    return found


CASES: list[tuple[str, dict[str, Any]]] = [
    ("rope", {}),
    ("learned_absolute", {}),
    ("rope", {"window_size": (7, 0)}),
]


def _packed_against_single(rank: int, world_size: int) -> list[tuple[float, float]]:
    parallel_state.initialize_model_parallel()
    return [_errors(*case) for case in CASES]


def _errors(position_embedding: str, changes: dict[str, Any]) -> tuple[float, float]:
    """Return the error of the loss, and the largest error of a gradient."""
    row = make_row(LENGTHS)
    batch = default_collate([{**row, "labels": (row["labels"] * 7) % VOCABULARY}])
    gpt = model(position_embedding, **changes)
    with mock.patch("torch.cuda.current_device", lambda: "cpu"):
        loss, num_tokens, report = _step(gpt, batch)
        loss.backward()
        packed = gradients(gpt)
        assert int(num_tokens) == sum(LENGTHS) - len(LENGTHS) == int(report["lm loss"][1])
        total, begin = torch.zeros(()), 0
        for length in LENGTHS:
            part = slice(begin, begin + length)
            keys = ("tokens", "labels", "loss_mask", "position_ids")
            alone = {key: batch[key][:, part] for key in keys}
            alone["cu_seqlens"] = torch.tensor([[0, length]], dtype=torch.int32)
            alone["max_seqlen"] = torch.tensor([length], dtype=torch.int32)
            part_loss, _, _ = _step(gpt, alone)
            part_loss.backward()
            total = total + part_loss.detach()
            begin += length
        single = gradients(gpt)
    assert packed.keys() == single.keys() and len(packed) > 10
    worst = max(
        float((packed[name] - single[name]).norm() / single[name].norm().clamp(min=1e-12))
        for name in packed
    )
    return abs(float(loss - total) / float(total)), worst


def _step(gpt: GPTModel, batch: dict[str, Tensor]) -> Any:
    output, reduce = forward_step(iter([batch]), gpt)
    return reduce(output)


@pytest.mark.multiprocess
def test_a_packed_row_gives_the_loss_and_gradients_of_its_documents(free_port: int) -> None:
    [found] = run_ranks(_packed_against_single, 1, free_port)
    for case, (loss_error, gradient_error) in zip(CASES, found, strict=True):
        assert loss_error < 1e-6 and gradient_error < 1e-5, case


def _masked_labels(rank: int, world_size: int) -> list[float]:
    """Return the change of the gradients if a masked label changes, and if another does."""
    parallel_state.initialize_model_parallel()
    gpt = model("rope", mtp_num_layers=2)
    masked = {**make_row(LENGTHS), "labels": torch.arange(64) * 7 % VOCABULARY}
    masked["loss_mask"][30:35] = 0
    found = []
    with mock.patch("torch.cuda.current_device", lambda: "cpu"):
        for changed in (None, 32, 40):
            labels = masked["labels"].clone()
            if changed is not None:
                labels[changed] += 1
            _step(gpt, default_collate([{**masked, "labels": labels}]))[0].backward()
            found.append(gradients(gpt))
    names = [name for name in found[0] if name.startswith("mtp.")]
    assert len(names) > 10
    before, *after = found
    return [max(float((now[n] - before[n]).abs().max()) for n in names) for now in after]


@pytest.mark.multiprocess
def test_multi_token_prediction_ignores_masked_labels(free_port: int) -> None:
    [(of_masked, of_other)] = run_ranks(_masked_labels, 1, free_port)
    assert of_masked == 0 < of_other


def _plain_rows(rank: int, world_size: int) -> float:
    """Without boundaries every row is one segment: the same as one boundary per row."""
    parallel_state.initialize_model_parallel()
    gpt = model("learned_absolute")
    rows = default_collate([make_row([16], 1), make_row([16], 40)])
    plain = gpt(rows["tokens"], rows["position_ids"], None, labels=rows["labels"])
    flat = flatten_rows(rows)
    params = to_packed_seq_params(flat["cu_seqlens"], flat["max_seqlen"])
    given = {"labels": flat["labels"], "packed_seq_params": params}
    packed = gpt(flat["tokens"], flat["position_ids"], None, **given)
    return float((plain.flatten() - packed.flatten()).abs().max())


@pytest.mark.multiprocess
def test_rows_without_boundaries_have_plain_causal_attention(free_port: int) -> None:
    assert run_ranks(_plain_rows, 1, free_port)[0] < 1e-6


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"attention_dropout": 0.1}, "dropout is 0.1"),
        ({}, {"context_parallel_size": 2}, "Transformer Engine"),
        ({"attention_type": "cross"}, {}, "self-attention"),
        ({}, {"softmax_type": "learnable"}, "softmax_type is 'learnable'"),
    ],
)
def test_attention_refuses_unsupported_options(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    arguments = {"layer_number": 1, "attn_mask_type": None, "attention_type": "self", **options}
    with pytest.raises(ConfigError, match=message):
        PackedCoreAttention(config(**changes), **arguments)


LOST = {
    "none": "called",
    "one": r"boundaries \[0, 20, 64\], and positions restart at \[20, 23\]",
    "all": r"boundaries none",
    "as Bridge": r"boundaries \[\], and positions",
}


def _called_on(rank: int, world_size: int) -> list[str]:
    """A custom loop calls a model on rows and gets the refusal."""
    parallel_state.initialize_model_parallel()
    gpt, row = model("rope"), flatten_rows(default_collate([make_row(LENGTHS)]))
    inputs, said = (row["tokens"], row["position_ids"], None), []
    for lost in LOST:
        watch_first_call()
        params = to_packed_seq_params(row["cu_seqlens"], row["max_seqlen"])
        if lost == "all":
            params = None
        elif lost == "one":
            params.cu_seqlens_q = params.cu_seqlens_kv = row["cu_seqlens"][[0, 1, 3]]
        elif lost == "as Bridge":  # which cuts at the smallest value
            bounds = row["cu_seqlens"]
            params.cu_seqlens_q = params.cu_seqlens_kv = bounds[: torch.argmin(bounds)]
        with mock.patch("torch.cuda.current_device", lambda: "cpu"):
            try:
                gpt(*inputs, labels=row["labels"], packed_seq_params=params)
                # After one right call the watch ends, as generation has no boundaries.
                assert "__call__" not in vars(LanguageModule)
                said.append("called")
            except ConfigError as error:
                said.append(str(error))
    return said


@pytest.mark.multiprocess
def test_lost_boundaries_are_refused_at_the_first_call(free_port: int) -> None:
    [found] = run_ranks(_called_on, 1, free_port)
    for said, expected in zip(found, LOST.values(), strict=True):
        assert re.search(expected, said)

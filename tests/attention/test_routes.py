"""Replayed routes: every token uses the recorded experts, with the gradients of given routes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import routes as routes_module
from megapack.attention.routes import check_replay, record_routes, replay_routes
from megapack.attention.tiny_model import randomize
from megapack.errors import ConfigError, DataError

TOKENS = 40
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    **{"moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_experts": 8, "use_cache": False},
}
LATENT = {
    **{"n_routed_experts": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
}


def softmax_then_choose(logits: Tensor, routes: Tensor, normalized: bool) -> Tensor:
    weights = logits.exp() / logits.exp().sum(1, keepdim=True)
    weights = torch.stack([weights[i, row] for i, row in enumerate(routes)])
    return weights / weights.sum(1, keepdim=True) if normalized else weights


def sigmoid_normalized(logits: Tensor, routes: Tensor) -> Tensor:
    weights = torch.stack([logits[i, row] for i, row in enumerate(routes)])
    weights = 1 / (1 + (-weights).exp())
    return weights / weights.sum(1, keepdim=True)


def normalized(logits: Tensor, routes: Tensor) -> Tensor:
    return softmax_then_choose(logits, routes, normalized=True)


def plain(logits: Tensor, routes: Tensor) -> Tensor:
    return softmax_then_choose(logits, routes, normalized=False)


Weights = Callable[[Tensor, Tensor], Tensor]
# Configuration of an architecture, and the weights of given experts by its paper.
ARCHITECTURES: dict[str, tuple[dict[str, Any], Weights]] = {
    "mixtral": ({"num_local_experts": 8}, normalized),
    "qwen2_moe": ({"shared_expert_intermediate_size": 24, "norm_topk_prob": False}, plain),
    "qwen3_moe": ({"norm_topk_prob": True}, normalized),
    "olmoe": ({"norm_topk_prob": False}, plain),
    "flex_olmo": ({"norm_topk_prob": True}, normalized),
    "minimax": ({"num_local_experts": 8}, normalized),
    "granitemoe": ({"num_local_experts": 8}, normalized),  # softmax of the chosen: the same
    "gpt_oss": ({"num_local_experts": 8}, normalized),
    "jamba": ({"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1,
               "attn_layer_offset": 0}, plain),
    "deepseek_v2": ({**LATENT, "topk_method": "group_limited_greedy"},
                    lambda logits, routes: 1.7 * plain(logits, routes)),
    "deepseek_v3": ({**LATENT, "norm_topk_prob": True},
                    lambda logits, routes: 1.7 * sigmoid_normalized(logits, routes)),
}  # fmt: skip


def build(name: str, **fields: Any) -> Any:
    """A small model in which neighbors of a token choose other experts."""
    torch.manual_seed(0)
    configuration = AutoConfig.for_model(name, **{**SIZES, **ARCHITECTURES[name][0], **fields})
    model = AutoModelForCausalLM.from_config(
        configuration, dtype=torch.float32, attn_implementation="eager"
    )
    randomize(model)
    return model.train()


def arguments() -> dict[str, Any]:
    return {"input_ids": torch.arange(TOKENS)[None] * 7 % 61, "use_cache": False}


def routes_of(model: Any) -> Tensor:
    with torch.no_grad(), record_routes(model) as recording:
        model(**arguments())
    return recording.routes()


def other_routes(model: Any) -> Tensor:
    """Random experts, different within a token, that the model does not choose."""
    own = routes_of(model)
    drawn = torch.rand(*own.shape[:2], 8).argsort(-1)[..., : own.shape[2]].to(torch.int16)
    assert (drawn.sort(-1).values != own.sort(-1).values).any(-1).float().mean() > 0.9
    return drawn


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def blocks(model: Any) -> list[Any]:
    """Blocks with a router and experts, in order."""
    return [module for module in model.modules() if hasattr(module, "experts")]


def given(block: Any, routes: Tensor, weights_of: Weights, hidden: Tensor) -> Any:
    """Compute the block's output from its parameters, token by token and expert by expert."""
    router, experts = getattr(block, "gate", None) or block.router, block.experts
    flat = hidden.flatten(0, -2)
    logits = flat @ router.weight.T + getattr(router, "bias", 0)
    weights = weights_of(logits, routes.long())
    rows = []
    for token, chosen, factors in zip(flat, routes.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, factor in zip(chosen, factors, strict=True):
            row = row + factor * one_expert(experts, expert, token)
        rows.append(row)
    result = torch.stack(rows).view_as(hidden)
    if hasattr(block, "shared_expert"):
        gate = torch.sigmoid(block.shared_expert_gate(hidden))
        result = result + gate * block.shared_expert(hidden)
    if hasattr(block, "shared_experts"):
        result = result + block.shared_experts(hidden)
    return result


def one_expert(experts: Any, number: int, token: Tensor) -> Tensor:
    first, last = experts.gate_up_proj[number], experts.down_proj[number]
    if hasattr(experts, "down_proj_bias"):  # gpt-oss: interleaved, clamped, with biases
        both = token @ first + experts.gate_up_proj_bias[number]
        gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ last + experts.down_proj_bias[
            number
        ]
    half = first.shape[0] // 2
    return last @ (F.silu(first[:half] @ token) * (first[half:] @ token))


# --- the definition ---


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_output_and_gradients_are_those_of_a_model_given_its_routes(name: str) -> None:
    model = build(name)
    reference, routes = copy.deepcopy(model), other_routes(model)
    layers = blocks(reference)
    assert routes.shape == (TOKENS, len(layers), 3) and len(layers) >= 2
    for i, block in enumerate(layers):
        returns_pair = name == "gpt_oss"

        def forward(hidden: Tensor, block: Any = block, i: int = i, pair: bool = returns_pair):
            result = given(block, routes[:, i], ARCHITECTURES[name][1], hidden)
            return (result, None) if pair else result

        block.forward = forward
    expected = reference(**arguments()).logits
    with replay_routes(model, routes):
        logits = model(**arguments()).logits
    assert not torch.allclose(model(**arguments()).logits, logits, atol=1e-2)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-6)
    projection = torch.randn(expected.shape)
    ours = gradients(model, (logits * projection).sum())
    theirs = gradients(reference, (expected * projection).sum())
    assert any("gate.weight" in key or "router.weight" in key for key in theirs)
    for key, grad in theirs.items():
        error = (ours[key] - grad).norm() / grad.norm().clamp(min=1e-6)
        assert error < 5e-6, f"{key}: {error:.1e}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_own_routes_reproduce_logits_and_gradients_exactly(name: str) -> None:
    model = build(name)
    with record_routes(model) as recording:
        expected = model(**arguments()).logits
    routes = recording.routes()
    assert routes.dtype == torch.int16
    theirs = gradients(model, expected.square().sum())
    with replay_routes(model, routes):
        logits = model(**arguments()).logits
    assert torch.equal(logits, expected)
    ours = gradients(model, logits.square().sum())
    for key, grad in theirs.items():
        assert torch.equal(ours[key], grad), key


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "deepseek_v2"])
def test_routes_stay_after_the_weights_change(name: str) -> None:
    model = build(name)
    routes = routes_of(model)
    randomize(model, seed=1)
    assert not torch.equal(routes_of(model), routes)
    with record_routes(model) as recording, replay_routes(model, routes):
        model(**arguments())
        assert torch.equal(recording.routes(), routes)
    assert not torch.equal(routes_of(model), routes), "after the block, tokens choose again"


def test_tokens_with_negative_ids_choose_for_themselves() -> None:
    """For a router limited to groups, too, whose groups such tokens choose."""
    for name in ("qwen3_moe", "deepseek_v2"):
        model = build(name)
        own, routes = routes_of(model), other_routes(model)
        routes[::2] = -1
        with record_routes(model) as recording, replay_routes(model, routes):
            model(**arguments())
            used = recording.routes()
        assert torch.equal(used[1::2], routes[1::2])
        # In the first layer, nothing before it has changed.
        assert torch.equal(used[::2, 0], own[::2, 0])


# --- recomputation in the backward ---


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_replay_the_routes_of_their_forward(reentrant: bool) -> None:
    """Two forwards with different routes come before the first backward."""
    model = build("qwen3_moe")
    routes = [other_routes(model) for _ in range(2)]
    wanted, found = [], []
    for enabled, results in ((False, wanted), (True, found)):
        if enabled:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        losses = []
        for of_forward in routes:
            with replay_routes(model, of_forward):
                losses.append(model(**arguments()).logits.square().sum())
        results += [gradients(model, loss) for loss in losses]
    for ours, theirs in zip(found, wanted, strict=True):
        for key, grad in theirs.items():
            torch.testing.assert_close(ours[key], grad, msg=key)
    assert not torch.equal(wanted[0]["lm_head.weight"], wanted[1]["lm_head.weight"])


def test_recomputation_that_would_route_freely_is_an_error() -> None:
    model = build("qwen3_moe")
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    with replay_routes(model, other_routes(model)):
        loss = model(**arguments()).logits.sum()
    with pytest.raises(RuntimeError, match="routes of its forward pass are gone"):
        loss.backward()
    model(**arguments()).logits.sum().backward()  # without routes it is none


def test_compiled_layers_replay() -> None:
    model = build("qwen3_moe")
    routes = other_routes(model)
    with replay_routes(model, routes):
        expected = model(**arguments()).logits
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    for of_forward in (routes_of(model), routes):
        with replay_routes(model, of_forward):
            logits = model(**arguments()).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


# --- architectures, by construction ---

ACCEPTED = (
    *("afmoe", "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v4", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "gpt_oss"),
    *("granitemoe", "granitemoehybrid", "granitemoeshared", "jamba", "jetmoe", "laguna", "llama4"),
    *("mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral"),
    *("nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "solar_open"),
)
GROUPED: dict[str, Any] = {
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        **{"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3},
    }
}
REFUSED = {
    "llama": "it has no router that chooses experts by topk",
    "phimoe": "its PhimoeTopKRouter chooses experts without topk",
    "zaya": r"ZayaRouter did not choose 1 of 4 experts by topk over \(tokens, experts\)",
}


def from_scratch(configuration: Any, implementation: str) -> Any:
    return AutoModelForCausalLM.from_config(
        configuration, attn_implementation=implementation, dtype=torch.float32
    )


def published(name: str) -> Any:
    configuration = AutoConfig.for_model(name, **GROUPED.get(name, {}))
    return configuration.get_text_config(decoder=True)


@pytest.mark.parametrize("name", ACCEPTED)
def test_architecture_replays(name: str) -> None:
    check_replay(published(name), from_scratch)


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_without_replay_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        check_replay(published(name), from_scratch)


def test_check_finds_scores_that_a_mask_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the groups of the recorded experts, DeepSeek-V2 would give them weight 0."""
    with_scores = routes_module._with_scores

    def without_groups(scores: Tensor, chosen: Tensor) -> Any:
        return scores.topk(1) if scores.shape[1] == 2 else with_scores(scores, chosen)

    monkeypatch.setattr(routes_module, "_with_scores", without_groups)
    with pytest.raises(ConfigError, match="hides scores of experts"):
        check_replay(published("deepseek_v2"), from_scratch)


def test_check_finds_experts_that_the_routes_do_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "_replaced", lambda chosen, recorded: chosen)
    with pytest.raises(ConfigError, match=r"with routes \[.*\], MixtralTopKRouter trains experts"):
        check_replay(published("mixtral"), from_scratch)


# --- wrong routes ---


def test_wrong_routes_are_refused() -> None:
    model = build("mixtral")
    routes = other_routes(model)
    cases = {
        r"shape \[40, 2, 3\]; the model needs \[3, 3\]": routes[:, :2],
        r"contain expert 8, and a layer has 8": torch.where(routes == 7, 8, routes),
    }
    for message, wrong in cases.items():
        with pytest.raises(DataError, match=message), replay_routes(model, wrong):
            pass
    with (
        pytest.raises(DataError, match=r"routes for 39 tokens, but the forward pass has 40"),
        replay_routes(model, routes[:-1]),
    ):
        model(**arguments())
    with (
        pytest.raises(ConfigError, match="MixtralTopKRouter did not run"),
        replay_routes(model, routes),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="call the model first"),
        record_routes(model) as recording,
    ):
        recording.routes()


def test_routes_may_have_dimensions_of_a_batch() -> None:
    model = build("mixtral")
    routes = other_routes(model)
    logits = []
    for shaped in (routes, routes[None].long()):
        with replay_routes(model, shaped):
            logits.append(model(**arguments()).logits)
    assert torch.equal(*logits)

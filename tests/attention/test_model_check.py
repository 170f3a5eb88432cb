"""The model check finds every fault of a model on packed rows, and none in right ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from megapack.attention import check_architecture, check_positions, register
from megapack.attention.tiny_model import (
    CHUNK,
    EXPERTS,
    LENGTHS,
    VOCABULARY,
    WINDOW,
    Row,
    tiny_configuration,
)
from megapack.attention.transformers_interface import _attention_function, add_segment_numbers
from megapack.errors import ConfigError

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def build(configuration: Any, implementation: str) -> Any:
    return AutoModelForCausalLM.from_config(
        configuration, attn_implementation=implementation, dtype=torch.float32
    )


def check(
    name: str,
    implementation: str = "megapack",
    *,
    build: Any = build,
    loss: Any = None,
    **fields: Any,
) -> None:
    register("eager")  # the backend that applies every rule
    how: Any = {"attention": implementation, "build": build, "device": torch.device("cpu")}
    check_architecture(AutoConfig.for_model(name, **fields), loss=loss, **how)


# --- an attention function with one thing wrong ---


def broken(change: Callable[..., Any]) -> str:
    """The name of megapack's attention after ``change(arguments, keywords)``."""
    right = _attention_function("eager")

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keys: Any):
        query, key, value, keys = change(query, key, value, keys)
        return right(module, query, key, value, mask, **keys)

    AttentionInterface.register("broken", attention)
    return "broken"


def test_breakable_attention_is_right_if_not_broken() -> None:
    check("gemma2", broken(lambda q, k, v, keys: (q, k, v, keys)))


def test_dropped_boundaries_are_found() -> None:
    name = broken(lambda q, k, v, keys: (q, k, v, {**keys, "cu_seq_lens_q": None}))
    with pytest.raises(ConfigError, match=r"another document.*layers\.0\.self_attn \(LlamaAtt"):
        check("llama", name)


@pytest.mark.parametrize(
    ("architecture", "dropped"),
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("gemma2", "softcap")],
)
def test_dropped_windows_and_caps_are_found(architecture: str, dropped: str) -> None:
    name = broken(lambda q, k, v, keys: (q, k, v, {**keys, dropped: None}))
    with pytest.raises(ConfigError, match=f"'{architecture}'.*even for one document alone"):
        check(architecture, name)


def test_dropped_window_names_its_layer() -> None:
    """Gemma-3: five layers with a window, then one without; a window everywhere is wrong there."""
    name = broken(lambda q, k, v, keys: (q, k, v, {**keys, "sliding_window": WINDOW}))
    with pytest.raises(ConfigError, match=r"layers\.5\.self_attn \(Gemma3Attention, full_attent"):
        check("gemma3_text", name)


def test_attention_that_sees_the_future_is_found() -> None:
    def mirrored(q: Tensor, k: Tensor, v: Tensor, keys: dict[str, Any]) -> Any:
        return q, k.roll(-1, dims=2), v.roll(-1, dims=2), keys

    with pytest.raises(ConfigError, match=r"'llama'.*changes earlier logits"):
        check("llama", broken(mirrored))


class _NoGradient(torch.autograd.Function):
    """The identity, whose gradient loses a factor 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def test_wrong_gradients_of_right_logits_are_found() -> None:
    name = broken(lambda q, k, v, keys: (q, _NoGradient.apply(k), v, keys))
    with pytest.raises(ConfigError, match=r"'llama'.*gradients.*self_attn"):
        check("llama", name)


def cross_entropy(model: Any, row: Row) -> Tensor:
    """The loss of the labels alone, summed."""
    logits = model(**row.arguments()).logits[0]
    return nn.functional.cross_entropy(logits, row.labels[0], reduction="sum")


class WithZLoss(LlamaForCausalLM):
    """Llama, which learns in training to keep its logits small."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        if result.loss is not None:
            result.loss = result.loss + 0.1 * result.logits.logsumexp(-1).square().mean()
        return result


@pytest.mark.parametrize(
    ("name", "fields", "of_class"),
    [
        ("llama", {}, WithZLoss),
        ("mixtral", {"output_router_logits": True}, None),
        ("qwen3_moe", {"output_router_logits": True}, None),
    ],
)
def test_incomplete_loss_is_refused(name: str, fields: dict[str, Any], of_class: Any) -> None:
    def build_of_class(configuration: Any, implementation: str) -> Any:
        if of_class is None:
            return build(configuration, implementation)
        return of_class._from_config(configuration, attn_implementation=implementation)

    with pytest.raises(
        ConfigError,
        match=rf"'{name}'.*does not compute a part of .*differs from .*own training loss",
    ):
        check(name, build=build_of_class, loss=cross_entropy, **fields)
    check(name, build=build_of_class, **fields)  # a trainer that takes the architecture's own


def test_gradients_of_another_loss_are_found() -> None:
    def loss(model: Any, row: Row) -> Tensor:
        return _NoGradient.apply(cross_entropy(model, row))

    with pytest.raises(ConfigError, match=r"gradients of a row differ from those of the archi"):
        check("llama", loss=loss)


def test_recurrent_layers_of_a_users_class_get_segments() -> None:
    """Also where the class has no source, as in a notebook."""
    tiny = tiny_configuration(AutoConfig.for_model("bamba"))
    own = type("Own", (type(build(tiny, "eager")),), {"__module__": "somewhere"})
    for kind, told in ((own, True), (type("Plain", (LlamaForCausalLM,), {}), False)):
        model = kind(tiny if told else AutoConfig.for_model("llama", **SMALL))
        add_segment_numbers(model)
        assert hasattr(model.base_model, "_segment_numbers_hook") is told


# --- documents that depend on how long others in their row are ---


def with_rope(name: str, kind: str, switch: int = 4096, most: int = 16384) -> Any:
    """An architecture's configuration with RoPE of a type, in every kind of layer."""
    fields = AutoConfig.for_model(name).to_dict()
    rope = fields["rope_parameters"]
    head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]

    def of_kind(old: dict[str, Any]) -> dict[str, Any]:
        new = {"rope_type": kind, "rope_theta": old["rope_theta"], "factor": 4.0}
        new |= {"original_max_position_embeddings": switch} if kind != "dynamic" else {}
        new |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        if kind == "longrope":
            half = head // 2
            new |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
        return new

    nested = isinstance(next(iter(rope.values())), dict)
    fields["rope_parameters"] = (
        {layer: of_kind(old) for layer, old in rope.items()} if nested else of_kind(rope)
    )
    fields["max_position_embeddings"] = switch if kind == "dynamic" else most
    return AutoConfig.for_model(**fields)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "longrope"), ("qwen3", "dynamic"), ("gemma3_text", "longrope")],
)
@pytest.mark.parametrize("switch", [30, 4096])
def test_rope_with_a_threshold_is_refused_beyond_it(name: str, kind: str, switch: int) -> None:
    register("eager")
    configuration = with_rope(name, kind, switch)
    how: Any = {"attention": "megapack", "build": build}
    check_architecture(configuration, **how, device=torch.device("cpu"), longest=switch)
    field = "max_position_embeddings"
    for longest in (switch + 1, None):
        with pytest.raises(ConfigError, match=rf"{field} \({switch}\)"):
            check_architecture(configuration, **how, device=torch.device("cpu"), longest=longest)
    check_positions(configuration, **how, longest=switch)
    with pytest.raises(ConfigError, match=rf"{field} \({switch}\)"):
        check_positions(configuration, **how, longest=switch + 1)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_rope_without_a_threshold_passes_at_any_length(kind: str) -> None:
    check_positions(with_rope("llama", kind), attention="megapack", build=build, longest=10**6)


class LogN(LlamaForCausalLM):
    """Llama whose outputs depend on the largest position beyond a number of its configuration, with
    a name that no list could have, or one that is usual for other things."""

    path: tuple[Any, ...]

    def forward(self, input_ids: Tensor, **arguments: Any) -> Any:
        result = super().forward(input_ids, **arguments)
        limit = reduce(lambda place, key: place[key], self.path, self.config.to_dict())
        positions = arguments.get("position_ids")
        length = input_ids.shape[1] if positions is None else int(positions.max()) + 1
        if length > limit:
            result.logits = result.logits + length / 100
        return result


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("plateau_of_my_own", 2000, ()),
        ("plateau_of_my_own", 2000.5, ()),
        ("plateaus", {"of": [{"my_own": 2000}]}, ("of", 0, "my_own")),
        ("sliding_window", 2000, ()),
        ("attention_chunk_size", 2000, ()),
        ("rope_hidden_size", 2000, ()),
        ("num_long_experts", 2000, ()),
        ("switch_layers", 2000, ()),
        ("long_head_dim", 2000, ()),
    ],
)
def test_a_threshold_is_found_under_any_name(field: str, value: Any, path: Any) -> None:
    register("eager")
    configuration = AutoConfig.for_model("llama", **{field: value})
    kind = type("LogN", (LogN,), {"path": (field, *path)})

    def of_class(tiny: Any, implementation: str) -> Any:
        return kind._from_config(tiny, attn_implementation=implementation)

    how: Any = {"attention": "megapack", "build": of_class}
    check_positions(configuration, **how, longest=2000)
    name = str((field, *path)[-1])
    with pytest.raises(ConfigError, match=rf"{name} \(2000(\.5)?\)"):
        check_positions(configuration, **how, longest=4000)


# --- what it leaves alone ---


def test_check_keeps_random_state_and_configuration() -> None:
    configuration = AutoConfig.for_model("qwen3")
    before, state = configuration.to_dict(), torch.get_rng_state()
    register("eager")
    how: Any = {"build": build, "device": torch.device("cpu")}
    check_architecture(configuration, attention="megapack", **how)
    assert configuration.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_check_works_on_very_small_models() -> None:
    check("qwen3", **SMALL, num_key_value_heads=1, head_dim=16)


# --- packed prefix trees ---


def check_trees(name: str, implementation: str = "megapack", build: Any = build) -> None:
    register("eager")
    how: Any = {"attention": implementation, "build": build, "device": torch.device("cpu")}
    check_architecture(AutoConfig.for_model(name), longest=0, trees=True, **how)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_models_of_attention_alone_train_on_trees(name: str) -> None:
    check_trees(name)


def test_attention_without_paths_is_found() -> None:
    """Documents are right, and only trees need the keys of the path."""
    name = broken(lambda q, k, v, keys: (q, k, v, {**keys, "kv_index": None}))
    check("llama", name)
    with pytest.raises(ConfigError, match=r"in a tree, .*self_attn .*train it without trees"):
        check_trees("llama", name)


class Recurrent(LlamaForCausalLM):
    """Llama whose first MLP also reads the token before it in the segment: a state of one token."""

    def forward(self, *, cu_seq_lens_q: Tensor | None = None, **options: Any) -> Any:
        if cu_seq_lens_q is None:
            begins = torch.tensor([0])
        else:
            begins = cu_seq_lens_q[:-1].long()
            options["cu_seq_lens_q"] = cu_seq_lens_q

        def add_state(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            state = inputs[0].roll(1, dims=1)
            state[:, begins] = 0
            return (inputs[0] + state,)

        hook = self.model.layers[0].mlp.register_forward_pre_hook(add_state)
        try:
            return super().forward(**options)
        finally:
            hook.remove()


def test_recurrent_layers_are_refused_on_trees() -> None:
    """A state that begins at every document is right for documents, and never for branches."""

    def build_recurrent(configuration: Any, implementation: str) -> Any:
        return Recurrent._from_config(configuration, attn_implementation=implementation)

    check("llama", build=build_recurrent)
    with pytest.raises(ConfigError, match=r"'llama'.*in a tree, logits of sequences differ.*mlp"):
        check_trees("llama", build=build_recurrent)


# --- the tiny model ---


@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [
        ("gemma3_text", 6, {"sliding_attention", "full_attention"}),
        ("llama4_text", 4, {"chunked_attention", "full_attention"}),
        ("jamba", 5, {"linear_attention", "full_attention"}),
        ("gpt_oss", 2, {"sliding_attention", "full_attention"}),
        ("qwen3_next", 4, {"linear_attention", "full_attention"}),
    ],
)
def test_a_tiny_model_has_every_kind_of_layer(name: str, layers: int, kinds: set[str]) -> None:
    configuration = AutoConfig.for_model(name)
    tiny = tiny_configuration(configuration)
    assert set(tiny.layer_types) == set(configuration.layer_types) == kinds
    assert layers <= tiny.num_hidden_layers <= layers + 5


def test_a_tiny_model_groups_its_heads_as_the_model_does() -> None:
    def tiny(name: str, heads: int, key_heads: int, **fields: Any) -> Any:
        fields |= {"num_attention_heads": heads, "num_key_value_heads": key_heads}
        return tiny_configuration(AutoConfig.for_model(name, **fields))

    for key_heads, of_tiny in ((8, 2), (1, 1), (32, 4)):
        found = tiny("llama", 32, key_heads)
        assert (found.num_attention_heads, found.num_key_value_heads) == (4, of_tiny)
    odd = tiny("qwen2", 14, 2, hidden_size=896)
    assert (odd.hidden_size, odd.num_attention_heads) == (4 * 64, 4)


def test_exact_sizes_keep_hidden_size_heads_times_width() -> None:
    helium = AutoConfig.for_model("helium")  # projects from heads x width to as many again
    assert helium.num_attention_heads * helium.head_dim == helium.hidden_size
    tiny = tiny_configuration(helium, exact=True)
    assert tiny.num_attention_heads * tiny.head_dim == tiny.hidden_size < helium.hidden_size


def test_windows_chunks_experts_and_vocabulary_are_small() -> None:
    both = map(AutoConfig.for_model, ("llama4_text", "mixtral"))
    llama4, mixtral = map(tiny_configuration, both)
    assert llama4.attention_chunk_size == CHUNK < min(LENGTHS)
    assert mixtral.num_local_experts == EXPERTS and mixtral.vocab_size == VOCABULARY
    mistral = tiny_configuration(AutoConfig.for_model("mistral", sliding_window=4096))
    assert mistral.sliding_window == WINDOW < min(LENGTHS)


def test_architecture_that_does_not_shrink_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'xlstm'.*building a tiny model.*parameters"):
        check("xlstm", "eager")

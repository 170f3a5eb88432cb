"""Overrides are fields of the model, and every tensor of a checkpoint has its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapack.errors import ConfigError
from megapack.training.config import ModelConfig
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model
from megapack.training.model.training_model import TrainingModel

from .conftest import Corpus
from .packing_helpers import VOCAB, tiny_model
from .processes import Zygote, start_run

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 layers with a tied head."""
    directory = tmp_path_factory.mktemp("llama")
    tiny_model("llama_tiny", seed=3).save(directory)
    return directory


# --- overrides ---


@pytest.mark.parametrize("source", ["preset", "checkpoint"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 32}, r"hiden_size: no field of a llama.*did you mean 'hidden_size'\?"),
        ({"to_dict": 1}, r"to_dict: no field"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; it must be 1 or more"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0; it must be 1 or more"),
        ({"hidden_size": -64}, r"hidden_size is -64; it must be 1 or more"),
        ({"num_attention_heads": 5}, r"num_attention_heads: .*multiple"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: num_attention_heads 4 is no multiple"),
        ({"hidden_size": "64"}, r"hidden_size: .*expected int, got str"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan; it must be finite"),
        ({"rope_parameters": {"rope_type": "yarm", "rope_theta": 1.0}}, r"rope_parameters: .*yarm"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, r"rope_parameters.*factor"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2.0, "rope_theta": 1e4}},
            r"rope_parameters: .*factor.*got -2",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
            r"rope_parameters: rope_theta.*positive",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "facter": 2}},
            r"rope_parameters: .*facter",
        ),
    ],
    ids=str,
)
def test_overrides_that_no_model_has_are_refused_by_name(
    llama: Path, source: str, overrides: dict[str, Any], message: str
) -> None:
    base: Any = {"preset": "llama_tiny"} if source == "preset" else {"pretrained": str(llama)}
    with pytest.raises(ConfigError, match=rf"^model\.overrides\.{message}") as refused:
        model_configuration(ModelConfig(**base, overrides=overrides), 1)
    assert "\n" not in str(refused.value)


def test_overrides_of_other_architectures_are_checked_under_their_own_names(tmp_path: Path) -> None:
    for name, value, message in (
        ("n_head", 5, "hidden_size 64 is no multiple of num_attention_heads 5"),
        ("n_layer", 0, "must be 1 or more"),
        ("num_attention_heads", 0, "must be 1 or more"),
        ("n_heads", 4, "did you mean 'n_head'"),
    ):
        for preset in ("gpt2_tiny", "gpt2_tiny_alibi"):
            with pytest.raises(ConfigError, match=rf"^model\.overrides\.{name}.*{message}"):
                model_configuration(ModelConfig(preset=preset, overrides={name: value}), 1)
    from transformers import AutoConfig  # noqa: PLC0415

    AutoConfig.for_model("mixtral", **MIXTRAL).save_pretrained(tmp_path)
    wrong = ModelConfig(pretrained=str(tmp_path), overrides={"num_experts_per_tok": 5})
    with pytest.raises(ConfigError, match=r"overrides\.num_experts_per_tok.*5, of 4 experts"):
        model_configuration(wrong, 1)


def test_overrides_that_fit_are_taken(llama: Path) -> None:
    wide = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    for more in (
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7}},
    ):
        made = model_configuration(
            ModelConfig(preset="llama_tiny", overrides={**wide, **more}), VOCAB
        )
        assert made.hidden_size == 96 and made.head_dim == 16
        assert made.rope_parameters["rope_theta"] in (1e6, 7)
    longer = ModelConfig(pretrained=str(llama), overrides={"max_position_embeddings": 2**20})
    assert model_configuration(longer, VOCAB).max_position_embeddings == 2**20
    alibi = ModelConfig(preset="gpt2_tiny_alibi", overrides={"n_head": 2})
    assert len(model_configuration(alibi, VOCAB).alibi_slopes) == 2


# --- tensors ---


def opened(directory: Path, *allowed: str, seed: int = 0, **overrides: Any) -> TrainingModel:
    config = ModelConfig(pretrained=str(directory), overrides=overrides, allow_missing=allowed)
    return build_model(config, model_configuration(config, VOCAB), backend="sdpa", seed=seed)


def changed(llama: Path, directory: Path, without: str = "", **more: Tensor) -> Path:
    """The checkpoint without one tensor, and with others."""
    tensors = load_file(llama / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name != without}
    directory.mkdir()
    (directory / "config.json").write_bytes((llama / "config.json").read_bytes())
    path = directory / "model.safetensors"
    save_file({**tensors, **more}, path, metadata={"format": "pt"})
    return directory


def test_a_checkpoint_that_lacks_tensors_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    torn = changed(llama, tmp_path / "torn", without=down)
    with pytest.raises(ConfigError, match=rf"lacks tensors.*at random: {down}; .*allow_missing"):
        opened(torn)
    with pytest.raises(ConfigError, match=r"at random: model\.layers\.2\.input_.*and 6 more"):
        opened(llama, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"lacks tensors.*: lm_head\.weight;"):
        opened(llama, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lacks tensors.*down_proj"):
        opened(torn, "lm_head.*")
    first, same, other = (opened(torn, "*.down_proj.*", seed=seed) for seed in (1, 1, 2))
    random = [dict(m.named_parameters())[f"model.{down}"] for m in (first, same, other)]
    assert torch.equal(random[0], random[1]) and not torch.equal(random[0], random[2])
    assert len(opened(llama, "model.layers.2.*", num_hidden_layers=3).layers) == 3


def test_tensors_that_the_model_lacks_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model lacks.*lost: model\.layers\.1\.inp.*6 more"):
        opened(llama, num_hidden_layers=1)
    assert len(opened(llama, "model.layers.1.*", num_hidden_layers=1).layers) == 1
    more = changed(llama, tmp_path / "more", **{"model.extra": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"the model lacks.*lost: model\.extra;"):
        opened(more)


def test_tensors_of_other_shapes_are_refused_with_both(llama: Path) -> None:
    shapes = r"down_proj\.weight \(64, 128\) instead of \(64, 96\), .* and 3 more"
    with pytest.raises(ConfigError, match=rf"other shapes.*layers\.0\.mlp\.{shapes}"):
        opened(llama, intermediate_size=96)
    model = opened(llama, "*.mlp.*", intermediate_size=96)
    assert model.layers[0].mlp.down_proj.weight.shape == (64, 96)


def test_a_tied_head_stays_tied_and_one_of_its_own_is_not_tied(llama: Path, tmp_path: Path) -> None:
    tied = opened(llama).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    embedding = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    twice = changed(llama, tmp_path / "twice", **{"lm_head.weight": embedding.clone()})
    again = opened(twice).model
    assert again.lm_head.weight is again.model.embed_tokens.weight
    apart = changed(llama, tmp_path / "apart", **{"lm_head.weight": embedding + 1})
    with pytest.raises(ConfigError, match=r"a head of its own.*tie_word_embeddings to false"):
        opened(apart)
    own = opened(apart, tie_word_embeddings=False).model
    assert torch.equal(own.lm_head.weight, embedding + 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_torn_checkpoint_does_not_begin(
    zygote: Zygote, corpus: Corpus, llama: Path, tmp_path: Path, ranks: int
) -> None:
    """With two ranks their parameters are divided while they are loaded (ZeRO-3)."""
    torn = changed(llama, tmp_path / "torn", without="model.layers.1.mlp.down_proj.weight")
    model = {"preset": None, "pretrained": str(torn)}
    engine = {"zero_stage": 3 if ranks > 1 else 1}
    config = corpus.config(tmp_path / "run", num_steps=1, model=model, engine=engine)
    refused = start_run(zygote, config, "refused", ranks=ranks)
    assert set(refused.wait()) == {2}
    assert "at random: model.layers.1.mlp.down_proj.weight" in refused.output()
    allow = "model.allow_missing=['*.down_proj.*']"
    start_run(zygote, config, "allowed", allow, ranks=ranks).succeed()

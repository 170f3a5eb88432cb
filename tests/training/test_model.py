"""Packed training is correct: a stream equals its documents one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.data import PackedDataset
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.training.config import ModelConfig
from megapack.training.model.architecture import (
    attention_needs,
    model_configuration,
    position_limit,
)
from megapack.training.model.opening import build_model, check_document_positions
from megapack.training.model.training_model import TrainingModel
from tests.data.corpora import write_documents

from .packing_helpers import VOCAB, check_gradients, documents, pack_documents, tiny_model

LENGTHS = [37, 120, 1, 66]
# preset -> backend: on a CPU, Gemma-2's soft cap needs the eager formula
PRESETS = dict.fromkeys(("llama_tiny", "qwen2_tiny", "gpt2_tiny", "gpt2_tiny_alibi"), "sdpa")
PRESETS["gemma2_tiny"] = "eager"
WINDOW = {"sliding_window": 16}
OVERRIDES: dict[str, dict[str, Any]] = {  # effective caps, windows shorter than documents
    "gemma2_tiny": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0, **WINDOW},
    "qwen2_tiny": {
        **{"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


def _model(preset: str) -> TrainingModel:
    overrides = OVERRIDES.get(preset, {})
    model = tiny_model(preset, backend=PRESETS[preset], overrides=overrides)
    with torch.no_grad():  # small initial weights would hide attention
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model


def _one_by_one(model: nn.Module, docs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return logits and loss of every document alone, with transformers' eager attention."""
    logits, losses = [], []
    for doc in docs:
        out = model(input_ids=doc.unsqueeze(0), use_cache=False).logits[0]
        logits.append(out)
        losses.append(F.cross_entropy(out[:-1], doc[1:], reduction="sum"))
    return logits, torch.stack(losses).sum()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_packed_logits_equal_documents_one_by_one(preset: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = _model(preset).train()
    if checkpointing:
        model.checkpoint_activations()
    docs = documents(LENGTHS)
    batch = pack_documents(docs, padding=32)
    loss, *_ = model(**batch.arguments())
    loss.backward()
    packed_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        hidden = model.hidden_states(
            batch.tokens, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
        )

    model.zero_grad()
    model.model.set_attn_implementation("eager")
    logits, expected = _one_by_one(model.model, docs)
    expected.backward()
    head = model.model.get_output_embeddings().weight
    ours = hidden @ head.T
    cap = getattr(model.configuration, "final_logit_softcapping", None)
    if cap:
        ours = torch.tanh(ours / cap) * cap
    theirs = torch.cat(logits)
    assert theirs.std() > 0.1, "the logits must differ"
    assert torch.allclose(ours[: len(theirs)], theirs, atol=2e-4, rtol=1e-4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(packed_grads, model, rel=2e-3, least=1e-3)


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2_tiny"])
def test_attention_in_groups_equals_joined_documents(preset: str, tmp_path: Path) -> None:
    """With attention ``group``, loss and gradients equal those of each group's documents as one
    text; those of attention ``document`` differ."""
    torch.manual_seed(0)
    docs = documents([30, 9, 25, 14, 1, 41, 22, 70, 8])
    dataset = write_documents(tmp_path / "d", [doc.tolist() for doc in docs])
    index = pack(dataset.document_lengths, buckets=[96], groups=[1, 2, 1, 2, 1, 3, 3, 3, -1])
    assert index.metrics()["num_cut_groups"] == 1  # group 3 has 133 tokens
    model = _model(preset).train()

    def trained(attention: Literal["document", "group"]) -> tuple[float, dict[str, Tensor]]:
        data = PackedDataset(dataset, index, attention=attention)
        batch = data.micro_batch(np.arange(index.num_samples))
        names = ("tokens", "labels", "position_ids", "cu_seqlens", "max_seqlen")
        model.zero_grad()
        loss, *_ = model(**{name: batch[name] for name in names})
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

    alone, _ = trained("document")
    found, gradients = trained("group")
    texts: list[Tensor] = []
    for i in range(index.num_samples):
        first, end = index.sample_segment_offsets[i : i + 2].tolist()
        for s, (document, begin, length) in zip(range(first, end), index.sample(i)[1], strict=True):
            piece = docs[document][begin : begin + length]
            if index.segment_joined[s]:
                texts[-1] = torch.cat([texts[-1], piece])
            else:
                texts.append(piece)
    assert sorted(map(len, texts)) == [8, 23, 56, 63, 70]
    model.zero_grad()
    model.model.set_attn_implementation("eager")
    _, expected = _one_by_one(model.model, texts)
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5) and abs(found - alone) > 1
    check_gradients(gradients, model, rel=2e-3, least=1e-3)


@pytest.mark.parametrize("preset", ["llama_tiny", "qwen2_tiny", "gpt2_tiny", "gemma2_tiny"])
def test_saved_model_loads_and_trains(preset: str, tmp_path: Path) -> None:
    model = tiny_model(preset, backend=PRESETS[preset])
    model.save(tmp_path / "out")
    tokens = documents([50])[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    logits = loaded(tokens.unsqueeze(0), use_cache=False).logits[0]
    elsewhere = F.cross_entropy(logits[:-1], tokens[1:], reduction="sum").item()
    config = ModelConfig(pretrained=str(tmp_path / "out"))
    configuration = model_configuration(config, VOCAB)
    again = build_model(config, configuration, backend=PRESETS[preset], seed=9)
    assert again.training, "evaluation mode would not checkpoint activations"
    batch = pack_documents([tokens])
    with torch.no_grad():
        before, after = (m(**batch.arguments())[0].item() for m in (model, again))
    assert before == pytest.approx(elsewhere, rel=1e-5)
    assert after == pytest.approx(before, rel=1e-6)


def test_alibi_gpt2_loads_without_megapack(tmp_path: Path) -> None:
    model = tiny_model("gpt2_tiny_alibi")
    directory = tmp_path / "out"
    model.save(directory)
    assert (directory / "modeling_gpt2_alibi.py").exists()
    tokens = documents([40])[0]
    torch.save(tokens, tmp_path / "tokens.pt")
    batch = pack_documents([tokens])
    with torch.no_grad():
        expected = model(**batch.arguments())[0].item()
    # Another process, in another directory, without megapack on its path.
    program = f"""
import sys, torch
sys.path = [p for p in sys.path if p]
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(directory)!r})
except ValueError as error:
    print("refused", "trust_remote_code" in str(error))
for name in ("sdpa", "eager"):
    model = AutoModelForCausalLM.from_pretrained(
        {str(directory)!r}, trust_remote_code=True, attn_implementation=name)
    tokens = torch.load({str(tmp_path / "tokens.pt")!r})
    logits = model(tokens.unsqueeze(0)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    print("loss", loss.item())
greedy = {{}}
for cache in (True, False):
    greedy[cache] = model.generate(tokens[:8].unsqueeze(0), max_new_tokens=6, do_sample=False,
        use_cache=cache, pad_token_id=0).tolist()
print("same", greedy[True] == greedy[False])
"""
    env = {"PATH": "/usr/bin", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert "refused True" in done.stdout, "it must not load as a stock GPT-2"
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:4] == "loss"]
    assert losses == [pytest.approx(expected, rel=1e-5)] * 2
    config = ModelConfig(pretrained=str(directory))  # continue training
    again = build_model(config, model_configuration(config, VOCAB), backend="sdpa", seed=9)
    with torch.no_grad():
        assert again(**batch.arguments())[0].item() == pytest.approx(expected, rel=1e-6)
    bare = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="megapack")
    with pytest.raises(ValueError, match="attention layers have none"):
        bare(tokens.unsqueeze(0))
    assert "same True" in done.stdout, "decoding with and without a cache must agree"


def test_alibi_reaches_documents_longer_than_the_position_table_would_be() -> None:
    model = tiny_model("gpt2_tiny_alibi", overrides={"n_positions": 16})
    batch = pack_documents(documents([90]))
    with torch.no_grad():
        loss, *_ = model(**batch.arguments())
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("llama_350m", 357),
        ("llama_1b", 1236),
        ("llama_3b", 3213),
        ("qwen3_0.6b", 596),
        ("qwen3_1.7b", 1721),
        ("qwen3_4b", 4022),
        ("qwen3_8b", 8191),
        ("qwen3_30b_a3b", 30532),
        ("gpt2_124m", 124),
        ("gpt2_124m_alibi", 124),
        ("gpt2_xl_1.5b_alibi", 1556),
    ],
)
def test_presets_have_the_size_of_their_name(preset: str, millions: int) -> None:
    vocab = {"llama": 128256, "qwen3": 151936, "gpt2": 50257}[preset.partition("_")[0]]
    config = ModelConfig(preset=preset)
    with torch.device("meta"):
        model = build_model(config, model_configuration(config, vocab), backend="sdpa", seed=0)
    count = sum(p.numel() for p in model.parameters())
    assert round(count / 1e6) == pytest.approx(millions, abs=1.5)


def test_attention_needs_are_read_from_the_configuration() -> None:
    device = torch.device("cpu")

    def needs(preset: str) -> object:
        config = ModelConfig(preset=preset)
        return attention_needs(model_configuration(config, VOCAB), device, torch.float32)

    gemma, llama, alibi = (needs(p) for p in ("gemma2_tiny", "llama_1b", "gpt2_tiny_alibi"))
    assert (gemma.window, gemma.softcap, gemma.alibi) == (True, True, False)
    assert (llama.window, llama.softcap, llama.alibi) == (False, False, False)
    assert (llama.num_heads, llama.num_key_value_heads, llama.head_dim) == (32, 8, 64)
    assert alibi.alibi


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "llama_9b"}, "unknown preset 'llama_9b'; did you mean 'llama_3b'"),
        ({"preset": "gpt2_tiny", "overrides": {"attn_pdrop": 0.1}}, "no dropout"),
        ({}, "exactly one of preset"),
        ({"pretrained": "/nowhere/at/all"}, "cannot be loaded"),
        ({"preset": "llama_tiny", "overrides": {"vocab_size": 10}}, "has 10 tokens"),
    ],
)
def test_impossible_models_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_configuration(ModelConfig(**arguments), VOCAB)  # type: ignore[arg-type]


def test_run_directory_as_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("num_steps: 3")
    with pytest.raises(ConfigError, match=rf"a run directory; its model is in {tmp_path}/model"):
        model_configuration(ModelConfig(pretrained=str(tmp_path)), VOCAB)


def test_attention_refuses_mask_dropout_and_cache() -> None:
    model = tiny_model("llama_tiny").model
    tokens = documents([6])[0].unsqueeze(0)
    with pytest.raises(ValueError, match="got an attention_mask"):
        model(tokens, attention_mask=torch.zeros(1, 1, 6, 6), use_cache=False)
    past = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="not for decoding with a cache"):
        model(tokens[:, :1], past_key_values=past)
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1"):
        model.train()(tokens, use_cache=False)


def test_plain_rows_without_segments_are_one_segment_each() -> None:
    model = tiny_model("llama_tiny").model.eval()
    rows = torch.stack(documents([12, 12]))
    ours = model(rows, use_cache=False).logits
    model.set_attn_implementation("eager")
    assert torch.allclose(ours, model(rows, use_cache=False).logits, atol=1e-5)


# ---- Longest document: learned positions, RoPE and its scalings, ALiBi


SWITCH = {"original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
PHI: dict[str, Any] = {
    "initializer_range": 0.3,  # as in trained weights, so that positions matter
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **SWITCH, **FACTORS},
    **SWITCH,
}


def _limit(preset: str, wanted: int, **overrides: Any) -> tuple[int, str] | None:
    config = ModelConfig(preset=preset, overrides=overrides)
    found = position_limit(model_configuration(config, 64), wanted)
    return None if found is None else (found.tokens, found.remedy)


def test_position_limit_names_field_and_remedy() -> None:
    assert _limit("gpt2_tiny", 1000) == (512, "use a model with RoPE or ALiBi")
    assert _limit("gpt2_tiny_alibi", 10**6, n_positions=16) is None
    limit, remedy = _limit("llama_tiny", 131072) or (0, "")
    assert limit == 16384
    assert "model.overrides.max_position_embeddings=131072" in remedy and "rope_theta" in remedy
    assert _limit("llama_tiny", 131072, max_position_embeddings=131072) == (131072, remedy)
    falcon = {"num_hidden_layers": 1, "max_position_embeddings": 64}
    assert position_limit(AutoConfig.for_model("falcon", alibi=True, **falcon), 100) is None
    assert position_limit(AutoConfig.for_model("falcon", **falcon), 100) is not None
    assert position_limit(AutoConfig.for_model("mamba"), 100) is None


def test_rope_that_depends_on_the_row_is_refused() -> None:
    """With longrope the logits of a document depend on longer documents of its row. So documents
    beyond the threshold are refused, although the model has positions for them."""
    configuration = AutoConfig.for_model("phi3", **PHI)
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").eval()
    tokens = torch.arange(8).unsqueeze(0)

    def logits_beside(longest: int) -> torch.Tensor:
        """Return the logits of a short document after a longer one in the same row."""
        rows = torch.cat([torch.zeros(1, longest, dtype=torch.int64), tokens], 1)
        positions = torch.cat([torch.arange(longest), torch.arange(8)]).unsqueeze(0)
        mask = torch.full((1, 1, longest + 8, longest + 8), -1e9).triu(1)
        mask[..., longest:, :longest] = -1e9
        with torch.no_grad():
            out = model(rows, position_ids=positions, attention_mask=mask, use_cache=False)
        logits: torch.Tensor = out.logits[0, longest:]
        return logits

    assert torch.allclose(logits_beside(16), logits_beside(10), atol=1e-5)
    assert not torch.allclose(logits_beside(20), logits_beside(10), atol=1e-3)
    check_document_positions(configuration, 16)
    message = r"original_max_position_embeddings \(16\).* up to 20 pos"
    with pytest.raises(ConfigError, match=message):
        check_document_positions(configuration, 20)

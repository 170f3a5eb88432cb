"""Muon, z-loss and the average of weights equal a plain torch loop, on any number of ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.training.config import EngineConfig, OptimizerConfig, PretrainConfig
from megapack.training.engine.engine import parameter_groups
from megapack.training.engine.inputs import Inputs, check_run

from .conftest import Corpus, NewRun
from .packing_helpers import losses_one_by_one, plain, tiny_model
from .processes import ROOT, Zygote

STEPS, LR, Z_LOSS, DECAY = 3, 0.01, 0.02, 0.75
OPTIMIZER: dict[str, Any] = {"lr": 0.003, "muon_lr": 0.006, "clip": 0.5, "ema_decay": DECAY}


def plain_loop(config: PretrainConfig) -> dict[str, Any]:
    """Train on documents one by one, in one process, without our loss, attention and optimizer
    settings, and without DeepSpeed."""
    inputs, model = plain(config)
    weights = dict(model.named_parameters())
    muon = {
        n: torch.zeros_like(p)
        for n, p in weights.items()
        if config.optimizer.kind == "muon" and ".layers." in n and p.ndim == 2
    }
    others = {n: p for n, p in weights.items() if n not in muon}
    groups = [
        {"params": [p for p in others.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in others.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    average = {name: p.detach().clone() for name, p in weights.items()}
    norms = []
    for step in range(STEPS):
        found = losses_one_by_one(model, inputs, step, z_loss=Z_LOSS)
        loss = torch.stack([loss for _, loss, _ in found]).sum() / sum(n for *_, n in found)
        model.zero_grad()
        loss.backward()
        grads = {name: p.grad for name, p in weights.items()}
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        norms.append(norm.item())
        torch._foreach_mul_(list(grads.values()), min(1.0, 0.5 / (norm.item() + 1e-6)))
        adamw.step()
        with torch.no_grad():
            for name, momentum in muon.items():
                momentum.add_(grads[name] - momentum, alpha=0.05)
                update = orthogonal(0.05 * grads[name] + 0.95 * momentum)
                weights[name] *= 1 - 2 * LR * 0.1
                weights[name] -= 2 * LR * update
            for name, p in weights.items():
                average[name] = DECAY * average[name] + (1 - DECAY) * p
    return {"weights": weights, "averages": average, "norms": norms}


def orthogonal(matrix: Tensor) -> Tensor:
    """Return five Newton-Schulz steps (Jordan et al. 2024), scaled for tall matrices."""
    rows, columns = matrix.shape
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if rows > columns else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if rows > columns else x
    return x * max(1.0, rows / columns) ** 0.5


# Ranks, ZeRO stage, precision; all cases if MEGAPACK_GRADIENTS is set.
CASES = {"adamw": [(1, 1, "fp32"), (2, 3, "fp32")], "muon": [(2, 0, "fp32"), (2, 1, "bf16")]}
if os.environ.get("MEGAPACK_GRADIENTS"):
    CASES["adamw"] += [(2, 0, "fp32"), (2, 2, "fp32")]
    CASES["muon"] += [(1, 0, "fp32"), (1, 1, "bf16")]


@pytest.mark.parametrize(("kind", "cases"), CASES.items())
def test_steps_equal_those_of_a_plain_loop(new_run: NewRun, kind: str, cases: list[Any]) -> None:
    sections: dict[str, Any] = {
        "num_steps": STEPS,
        "model": {"z_loss": Z_LOSS},
        "optimizer": {**OPTIMIZER, "kind": kind},
    }
    engine = {"precision": "fp32", "zero_stage": 0}
    plain = new_run("plain", engine=engine, **sections)
    expected = plain_loop(load_config(PretrainConfig, plain.config))
    for ranks, stage, precision in cases:
        case = f"{ranks}_{stage}_{precision}"
        engine = {"precision": precision, "zero_stage": stage}
        found = new_run(case, engine=engine, **sections).worker(ranks)
        exact = precision == "fp32"
        # Muon orthogonalizes in bfloat16, whose matrix products differ by CPU.
        of_norms, of_weights = (1e-3, 5e-2) if kind == "muon" else (1e-4, 1e-2)
        if not exact:
            of_norms, of_weights = 5e-2, 0.2
        assert found["norms"] == pytest.approx(expected["norms"], rel=of_norms)
        for part in ("weights", "averages"):
            for name, theirs in expected[part].items():
                ours, begin = found[part][name], found["initial"][name]
                moved = (theirs - begin).norm()
                assert moved > 0, f"{name} was not trained"
                rounding = 0.0 if exact else 2**-8 * theirs.norm()  # rounding of the export
                error = ((ours - theirs).norm() - rounding) / moved
                assert error < of_weights, f"{case} {part} {name}: {error:.1e}"


def test_muon_updates_matrices_of_layers_and_adamw_the_rest() -> None:
    model = tiny_model("llama_tiny")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, OptimizerConfig(kind="muon", muon_lr=0.5, muon_momentum=0.9))
    taken = [{names[id(p)] for p in group["params"]} for group in groups]
    assert set().union(*taken) == set(names.values()) and sum(map(len, taken)) == len(names)
    assert [group["use_muon"] for group in groups] == [False, False, True]
    assert (groups[-1]["lr"], groups[-1]["momentum"]) == (0.5, 0.9)
    assert taken[-1] == {n for n in names.values() if n.endswith("_proj.weight")} != set()


OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"precision": "bf16"}, "zero_stage 2 in bf16"),
        ({"precision": "fp32", "zero_stage": 1}, "zero_stage 1 in fp32"),
        ({"precision": "bf16", "zero_stage": 3}, "zero_stage 3 in bf16"),
        (
            {"precision": "bf16", "zero_stage": 1, "deepspeed": OFFLOADED},
            "offload_optimizer is set",
        ),
    ],
    ids=str,
)
def test_muon_is_refused_where_deepspeed_clips_its_updates(
    corpus: Corpus, tmp_path: Path, engine: dict[str, Any], said: str
) -> None:
    tree = {"zero_stage": "auto", **engine}
    config = corpus.config(tmp_path / "run", optimizer={"kind": "muon"}, engine=tree)
    with pytest.raises(ConfigError, match=f"kind is muon and .*{said}"):
        load_config(PretrainConfig, config)
    assert EngineConfig(precision="bf16").stage == 2


def test_muon_with_experts_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    keys = {"model_type": "mixtral", **sizes, "num_key_value_heads": 2}
    model, muon = {"preset": None, "config": keys}, {"kind": "muon"}
    config = corpus.config(tmp_path / "run", model=model, optimizer=muon, engine={"zero_stage": 0})
    loaded = load_config(PretrainConfig, config)
    with pytest.raises(ConfigError, match="'mixtral' has experts"):
        check_run(loaded, Inputs(loaded), 1)


@pytest.mark.parametrize(
    ("kind", "stage", "precision"), [("adamw", 2, "fp32"), ("muon", 1, "bf16")]
)
def test_a_resumed_run_has_the_same_average(
    zygote: Zygote, new_run: NewRun, tmp_path: Path, kind: str, stage: int, precision: str
) -> None:
    """Also evaluated and exported; the same bits after a stop, close on other ranks."""
    sections: dict[str, Any] = {
        "num_steps": 6,
        "optimizer": {"kind": kind, "ema_decay": 0.9, "lr": 0.003},
        "checkpoint": {"every": 3, "export": True},
        "engine": {"precision": precision, "zero_stage": stage},
    }
    losses, models = {}, {}
    eager = {"TORCH_STANCE": "force_eager"}  # DeepSpeed compiles Muon's kernels
    runs = {name: new_run(name, **sections) for name in ("whole", "stopped", "others")}
    runs["stopped"].succeed("stop_at=3", env=eager)
    shutil.copytree(runs["stopped"].dir, runs["others"].dir)
    for name, run in runs.items():
        started = run.start("stop_at=6", ranks=1 if name == "others" else 2, env=eager)
        if (name, kind) == ("others", "muon"):
            assert started.wait() != [0]
            assert "cannot store Muon's momentum; continue with 2 ranks" in started.output()
            return
        started.succeed()
        line = run.lines("evaluation")[-1]
        losses[name] = line["loss"], line["average"]["loss"]
        models[name] = run.dir / "model_average"
    # One process loads what two wrote.
    models["exported"] = tmp_path / "out"
    argv = [str(ROOT / "launch" / "export.py"), str(tmp_path / "whole"), "--average"]
    zygote.start([*argv, "--output", str(tmp_path / "out")], 1, tmp_path / "out.log").succeed()
    live, averaged = losses["whole"]
    assert averaged > live, "the average must differ from the weights"
    assert losses["stopped"] == losses["whole"]
    assert losses["others"] == pytest.approx(losses["whole"], rel=1e-4)
    weights = {
        name: dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for name, path in models.items()
    }
    for name, weight in weights["whole"].items():
        assert torch.equal(weights["stopped"][name], weight), name
        assert torch.equal(weights["exported"][name], weight), name
        assert torch.allclose(weights["others"][name], weight, atol=1e-4), name

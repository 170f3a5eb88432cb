"""axolotl's own train on the CPU, as the example has it: losses, gradients, evaluation, refusals.

``AXOLOTL=/path/to/checkout/src:/packages``, folders as PATH has them; the packages are those that
this axolotl wants and the environment has not. For 0.19.0 (pip install --no-deps --target FOLDER):
transformers 5.14.1, trl 1.8.0, tokenizers 0.22.2, huggingface_hub 1.17.0, datasets 4.8.4,
accelerate 1.13.0, peft 0.19.1, torchao 0.17.0, bitsandbytes 0.49.1, triton, httpx with httpcore,
anyio, sniffio and h11, addict, art, backoff, colorama, distro, einops, evaluate, fastcore, fire,
llvmlite, numba, optimum 1.16.2, posthog, python-dotenv, schedulefree, termcolor, typer, wandb with
opentelemetry-api, -sdk, -semantic-conventions and -proto, axolotl-contribs-mit and -lgpl; no
kernels; and axolotl's own dist-info, by which it asks for its version.
Losses and gradients are compared with those of the documents one by one, by transformers' own
``eager`` attention.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.hosts.chats import ROW, ROWS_PER_STEP, STEPS, TOLERANCE, Chats
from tests.hosts.processes import LEAK, ROOT, environment_of, finish, marks_of, torchrun, trees_of

FOLDERS = trees_of("AXOLOTL")
SEED = 7

pytestmark = marks_of(FOLDERS, "AXOLOTL", "axolotl")


def train(folder: Path, chats: Chats, ranks: int = 1, fault: str = "none", **changed: Any) -> str:
    """Run the example's configuration, changed for a tiny model; return its log."""
    folder.mkdir()
    settings = yaml.safe_load((ROOT / "examples" / "axolotl_packed.yaml").read_text())
    settings |= {
        **{"base_model": chats.path("model"), "output_dir": str(folder / "out")},
        **{key: [{"path": chats.path("chats.json")}] for key in ("datasets", "test_datasets")},
        **{"sequence_len": ROW, "micro_batch_size": 2, "seed": SEED, "learning_rate": 0},
        **dict.fromkeys(("max_steps", "eval_steps", "save_steps"), STEPS),
        **{"attn_implementation": "sdpa", "bf16": False, "gradient_checkpointing": False},
        **{"optimizer": "adamw_torch"},
        "gradient_accumulation_steps": ROWS_PER_STEP // (2 * ranks),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | changed))
    environment = environment_of(FOLDERS[0], "hosts") | {
        "PYTHONPATH": os.pathsep.join(map(str, [*FOLDERS, ROOT, Path(sys.prefix) / "hosts"])),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "LOG_LEVEL": "INFO",
        "ACCELERATE_USE_CPU": "true",  # like accelerate launch --cpu: gloo
    }
    command = [*torchrun(ranks, "launch_axolotl.py"), fault, str(folder / "config.yaml")]
    return finish(command, folder, environment, "axolotl")


def mean_loss(model: Any, samples: Iterator[dict[str, Any]]) -> torch.Tensor:
    """Return the mean loss over all labels, with a forward pass for each document."""
    total, count = torch.zeros(()), 0
    for sample in samples:
        for begin, end in zip(sample["cu_seqlens"], sample["cu_seqlens"][1:], strict=False):
            labels = sample["labels"][begin:end]
            if (labels >= 0).any():
                logits = model(sample["tokens"][None, begin:end]).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                count += int((labels >= 0).sum())
    assert count > 100
    return total / count


@pytest.mark.parametrize(("ranks", "adapter"), [(1, "lora"), (2, None)])
def test_axolotl_trains_with_the_losses_of_the_documents(
    ranks: int, adapter: str | None, chats: Chats, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    rows = chats.rows(SEED)
    log = train(tmp_path / "run", chats, ranks, adapter=adapter)
    assert log.count("documents of a micro batch are kept apart: probed in") == ranks
    state = tmp_path / "run" / "out" / f"checkpoint-{STEPS}" / "trainer_state.json"
    told = json.loads(state.read_text())["log_history"]
    trained = [entry for entry in told if "loss" in entry]
    assert len(trained) == STEPS
    model = AutoModelForCausalLM.from_pretrained(chats.path("model"), attn_implementation="eager")
    for step, entry in enumerate(trained):
        ids = rows.schedule.step(step).sample_ids
        loss = mean_loss(model, (rows.packed[i] for i in ids.tolist()))
        assert entry["loss"] == pytest.approx(float(loss), rel=TOLERANCE)
        if adapter is None:
            model.zero_grad()
            loss.backward()
            norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
            assert entry["grad_norm"] == pytest.approx(float(norm), rel=10 * TOLERANCE)
    evaluated = {entry["eval_loss"] for entry in told if "eval_loss" in entry}
    with torch.no_grad():
        expected = mean_loss(model, (rows.packed[i] for i in range(len(rows.packed))))
    assert len(evaluated) == 1
    assert evaluated.pop() == pytest.approx(float(expected), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fault": "joined"}, LEAK),
        ({"fault": "moved"}, LEAK),
        ({"fault": "shifted"}, "check whether the mask or the labels are shifted twice"),
        ({"datasets": "window.json"}, "the run has attention windows [32], and attention 'sdpa'"),
        ({"sample_packing": True}, "sample_packing is True: rows are packed already"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value.values())),
)
def test_axolotl_refuses_wrong_rows(
    changed: dict[str, Any], message: str, chats: Chats, tmp_path: Path
) -> None:
    source = {"prefix": chats.path("chats"), "index": chats.path("chats.samples")}
    windowed = {"sources": [source], "attention_window": 32}
    Path(chats.path("window.json")).write_text(json.dumps(windowed))
    if "datasets" in changed:
        changed = {"datasets": [{"path": chats.path(changed["datasets"])}]}
    with pytest.raises(AssertionError, match=re.escape(message)):
        train(tmp_path / "run", chats, test_datasets=None, eval_steps=None, **changed)

"""verl's SFT trainer, its engine and its loss on the CPU: every forward, on one rank and on two.

``MEGAPACK_VERL=/path/to/checkout:/packages`` (tests/integrations/test_verl.py), with the
transformers that this verl wants among the packages. Losses are compared with those of the
conversations one by one, by transformers' own ``eager`` attention.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.chats import ROW, ROWS_PER_STEP, STEPS, TOLERANCE, Chats, losses_one_by_one
from tests.hosts.processes import LEAK, ROOT, environment_of, finish, marks_of, torchrun, trees_of

FOLDERS = trees_of("MEGAPACK_VERL")

pytestmark = marks_of(FOLDERS, "MEGAPACK_VERL", "verl")


# Options of the guide, and those that a CPU and a tiny model need.
SETTINGS = f"""
    data.custom_cls.path=pkg://megapack.integrations.hosts.verl data.custom_cls.name=SFTRows
    data.max_length={ROW} data.train_batch_size={ROWS_PER_STEP} data.num_workers=1
    data.train_max_samples={STEPS * ROWS_PER_STEP + 3} data.max_token_len_per_gpu={2 * ROW}
    trainer.total_epochs=1 trainer.device=cpu trainer.logger=[console] trainer.resume_mode=disable
    +model.override_config.attn_implementation=sdpa model.enable_gradient_checkpointing=False
    engine.strategy=fsdp2 engine.dtype=float32 +engine.mixed_precision.param_dtype=fp32
    engine.use_torch_compile=False optim.lr=0 checkpoint.save_contents=[] hydra.run.dir=hydra
"""


def train(folder: Path, chats: Chats, ranks: int = 1, fault: str = "none", **changed: Any) -> str:
    folder.mkdir()
    options: dict[str, Any] = dict(word.split("=", 1) for word in SETTINGS.split())
    options |= {"data.train_files": chats.path("chats.json"), "model.path": chats.path("model")}
    options |= {key.replace("__", "."): value for key, value in changed.items()}
    environment = environment_of(FOLDERS[0], "hosts") | {
        "PYTHONPATH": os.pathsep.join(map(str, [*FOLDERS, ROOT])),
        "VERL_ENGINE_DEVICE": "cuda",  # which engine; the platform says where it runs
        "HOST_RECORDS": str(folder),
        "HYDRA_FULL_ERROR": "1",
    }
    command = [*torchrun(ranks, "launch_verl.py"), fault]
    command += [f"{key}={value}" for key, value in options.items()]
    return finish(command, folder, environment, "verl's SFT trainer")


@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_trains_on_the_schedule_with_the_losses_of_the_documents(
    ranks: int, chats: Chats, tmp_path: Path
) -> None:
    rows = chats.rows(0, STEPS * ROWS_PER_STEP)
    log = train(tmp_path / "run", chats, ranks)
    assert log.count("documents of a row are kept apart: probed in") == ranks
    told = [float(loss) for loss in re.findall(r"train/loss:([0-9.]+)", log)]
    assert len(told) == STEPS
    noted = [torch.load(tmp_path / "run" / f"rank{rank}.pt") for rank in range(ranks)]
    per_rank = len(noted[0]) // STEPS
    assert per_rank >= ROWS_PER_STEP // ranks // 2
    buckets = set()
    for step in range(STEPS):
        calls = [call for of in noted for call in of[step * per_rank : (step + 1) * per_rank]]
        found = {
            name: torch.cat([call[name] for call in calls]) for name in calls[0] if name != "loss"
        }
        numbers = range(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)
        expected = rows.micro_batch(numbers)["tokens"]
        assert sorted(found["input_ids"].tolist()) == sorted(expected.tolist())
        buckets.add(rows.bucket_of(numbers[0]))
        flat = {name: value.flatten() for name, value in found.items()}
        begins = (flat["position_ids"] == 0).nonzero()[:, 0].tolist()
        assert len(begins) > ROWS_PER_STEP
        counts = flat["loss_mask"] > 0
        losses = losses_one_by_one(Path(chats.path("model")), flat["input_ids"], begins, counts)
        assert len(losses) == int(counts.sum()) > 100
        assert abs(float(losses.mean()) - told[step]) < TOLERANCE
        assert abs(sum(call["loss"] for call in calls) / ranks - told[step]) < TOLERANCE
    assert len(buckets) > 1, "or nothing was to be kept in its step"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fault": "shifted"}, "the labels are shifted twice"),
        ({"fault": "joined"}, LEAK),
        ({"trainer__total_epochs": 2}, "set trainer.total_epochs=1"),
        ({"data__pad_mode": "right"}, "data.pad_mode is 'right': rows have their padding already"),
        ({"data__val_files": "${data.train_files}"}, "are both"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_verl_refuses_wrong_rows(
    changed: dict[str, Any], message: str, chats: Chats, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        train(tmp_path / "run", chats, **changed)

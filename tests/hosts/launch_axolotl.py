"""axolotl on the CPU: ``torchrun launch_axolotl.py FAULT config.yaml`` is its ``axolotl train``.

FAULT is injected between the batch and the model: ``joined`` makes positions continue over
documents, ``moved`` makes them restart one token late, ``shifted`` shifts labels a second time;
``none``: no fault.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def put_in(fault: str) -> None:
    ours: Any = importlib.import_module("megapack.integrations.rows.rank_rows")
    emit = ours.emit

    def wrong(batch: Any, dialect: Any) -> Any:
        told = emit(batch, dialect)
        if fault == "joined":
            told["position_ids"] = torch.arange(told["input_ids"].shape[1])[None]
        if fault == "moved":
            told["position_ids"] = told["position_ids"].roll(1)
        if fault == "shifted":
            told["shift_labels"] = told["shift_labels"].roll(1)
        return told

    ours.emit = wrong


def main() -> None:
    torch.set_num_threads(1)
    fault, configuration = sys.argv[1:]
    del sys.argv[1:]  # axolotl looks for its own options there
    if fault != "none":
        put_in(fault)
    configuring: Any = importlib.import_module("axolotl.cli.config")
    normalize = configuring.normalize_config

    def without_gpus(cfg: Any) -> None:  # of several ranks each has the GPU of its number
        normalize(cfg)
        cfg.device_map = None

    configuring.normalize_config = without_gpus
    train: Any = importlib.import_module("axolotl.cli.train")
    train.do_cli(configuration)


if __name__ == "__main__":
    main()

"""Megatron-Bridge's own reader of its packed parquet: ``read_bridge.py TREE FILE MULTIPLE OUT``.

The packages above the reader are imported as folders: their ``__init__`` want Transformer Engine.
Bridge is of Python 3.12.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing

import torch
import typing_extensions

PACKAGES = ("", ".training", ".data", ".data.datasets")


def main(tree: str, file: str, multiple: str, out: str) -> None:
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    for name in PACKAGES:
        package = types.ModuleType(f"megatron.bridge{name}")
        package.__path__ = [f"{tree}/src/megatron/bridge{name.replace('.', '/')}"]
        sys.modules[package.__name__] = package
    reader = importlib.import_module("megatron.bridge.data.packing.parquet")
    dataset = reader.GPTSFTPackedParquetDataset(
        file,
        types.SimpleNamespace(eos_id=1, eod=1, bos_id=None, pad_id=0),
        max_seq_length=64,
        prompt_template="{input} {answer}",  # of text, which is not here
        truncation_field="input",
        pad_seq_to_mult=int(multiple),
    )
    for i in range(len(dataset)):
        columns = dataset._ensure_reader(0).read().slice(i, 1).to_pydict()
        row = (columns[name][0] for name in ("input_ids", "loss_mask", "seq_start_id"))
        dataset.validate_row(i, *row)
    torch.save([dataset.collate_fn([dataset[i]]) for i in range(len(dataset))], out)


if __name__ == "__main__":
    main(*sys.argv[1:])

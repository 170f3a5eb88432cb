"""GPT-NeoX on the CPU: ``launch_neox.py deepy.py launch_neox.py CONFIG.yml``.

deepy.py, here as everywhere, has DeepSpeed's launcher start the script that it is given on every
rank, with its own encoded arguments. That is this file again, which runs the guide's
train_packed.py and writes the inputs of the model.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from cpu import on_cpu, without_shared_memory
from flash import put_flash_attn
from recorder import TextRecorder


def watch_model(recorder: TextRecorder) -> None:
    recorder.watch_embedding(importlib.import_module("megatron.model.word_embeddings").Embedding)
    gpt2_model = importlib.import_module("megatron.model.gpt2_model")
    of_tokens = importlib.import_module("megatron.mpu").vocab_parallel_cross_entropy
    stock = gpt2_model.cross_entropy

    def cross_entropy(output: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.note_loss(*labels)
        recorder.note_losses(of_tokens(output.detach().float().clone(), labels[0]))
        return stock(output, labels, *args, **kwargs)

    gpt2_model.cross_entropy = cross_entropy


def train(recorder: TextRecorder) -> None:
    def watch() -> None:
        watch_model(recorder)
        # It compiles helpers of its own datasets into its tree, which tests must not write to.
        importlib.import_module("megatron.data.data_utils").compile_helper = lambda: None

    recorder.run_script("gpt_neox", "train_packed.py", watch)
    mpu = importlib.import_module("megatron.mpu")
    recorder.save(
        Path(os.environ["HOST_RECORDS"]),
        data=mpu.get_data_parallel_rank(),
        tensor=mpu.get_model_parallel_rank(),
        pipeline=mpu.get_pipe_parallel_rank(),
    )


def main() -> None:
    on_cpu()
    without_shared_memory()
    torch.set_num_threads(1)
    ranks = int(os.environ["HOST_RANKS"])
    torch.cuda.device_count = lambda: ranks
    recorder = TextRecorder()
    put_flash_attn(recorder.note_attention)
    if "RANK" in os.environ:
        train(recorder)
    else:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""One rank of Megatron-DeepSpeed on the CPU: ``launch_mds.py [arguments of pretrain_gpt.py]``.

Runs, under DeepSpeed's launcher, the guide's pretrain_packed.py from the working folder, and writes
the inputs of the model.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from cpu import on_cpu, without_shared_memory
from flash import put_flash_attn
from recorder import TextRecorder


def watch_model(recorder: TextRecorder) -> None:
    recorder.watch_embedding(importlib.import_module("megatron.model.language_model").Embedding)
    gpt_model = importlib.import_module("megatron.model.gpt_model")
    parallel = importlib.import_module("megatron.core.tensor_parallel")
    stock_loss, stock_head = gpt_model.CrossEntropy, gpt_model.post_language_model_processing

    def cross_entropy(output: Any, labels: Any) -> Any:
        """With DeepSpeed's pipeline engine."""
        recorder.note_loss(*labels)
        targets = labels[0].transpose(0, 1).contiguous()
        logits = output.detach().float().clone()
        losses = parallel.vocab_parallel_cross_entropy(logits, targets)
        recorder.note_losses(losses.transpose(0, 1))
        return stock_loss(output, labels)

    def head(lm_output: Any, labels: Any, *args: Any) -> Any:
        """Without it; the mask comes after the model, in ``watch_loss_mask``."""
        recorder.note_loss(labels, None)
        losses = stock_head(lm_output, labels, *args)
        recorder.note_losses(losses)
        return losses

    gpt_model.CrossEntropy, gpt_model.post_language_model_processing = cross_entropy, head


def watch_loss_mask(recorder: TextRecorder) -> None:
    """``forward_step`` returns the output and a loss function that holds the mask."""
    training = importlib.import_module("megatron.training")
    stock = training.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> Any:
        def step(*step_args: Any) -> Any:
            output, loss = args[3](*step_args)
            recorder.note_loss(recorder.calls[-1]["labels"], loss.args[0])
            return output, loss

        return stock(*args[:3], step, *args[4:], **kwargs)

    training.pretrain = pretrain


def leave_out_vision() -> None:
    """training.py imports its vision models, and they torchvision, for one function of theirs."""
    name = "megatron.model.vision.knn_monitor"
    module = ModuleType(name)
    module.compute_feature_bank = None  # type: ignore[attr-defined]
    sys.modules[name] = module


def main() -> None:
    on_cpu()
    without_shared_memory()
    torch.set_num_threads(1)
    recorder = TextRecorder()
    put_flash_attn(recorder.note_attention)
    leave_out_vision()

    def watch() -> None:
        # DeepSpeed has no such kernels for CUDA either; for a CPU it raises an error.
        importlib.import_module("megatron.model.transformer").FlashAttentionBuilder = None
        watch_model(recorder)
        watch_loss_mask(recorder)
        # It compiles helpers of its datasets into its tree, which tests must not write to.
        importlib.import_module("megatron.data.dataset_utils").compile_helper = lambda: None

    recorder.run_script("megatron_deepspeed", "pretrain_packed.py", watch)
    state = importlib.import_module("megatron.core.parallel_state")
    recorder.save(
        Path(os.environ["HOST_RECORDS"]),
        data=state.get_data_parallel_rank(),
        tensor=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
    )


if __name__ == "__main__":
    main()

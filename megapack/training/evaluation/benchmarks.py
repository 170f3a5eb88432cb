"""Benchmarks of an exported model, through lm-evaluation-harness (extra ``lm-eval``).

The model is loaded by transformers with its own attention, as anybody would load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megapack.errors import ConfigError
from megapack.training.engine.export import open_tokenizer
from megapack.training.model.architecture import register_architectures


def run_lm_eval(
    model: str | Path,
    tasks: Sequence[str],
    *,
    tokenizer: str | Path | None = None,
    task_directory: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Score tasks.

    Args:
        model: directory of an exported model.
        tasks: names known to the harness, or defined in ``task_directory``.
        tokenizer: as of ``open_tokenizer``; None: the one in ``model``.
        task_directory: YAML files of further tasks.
        limit: documents per task; None: all.
        batch_size: requests per forward.

    Returns:
        task -> metric -> value.

    Raises:
        ConfigError: the harness is not installed, or there is no such task or tokenizer.
    """
    try:
        import lm_eval  # noqa: PLC0415
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"--lm-eval needs the harness: pip install lm-eval ({error})") from error
    manager = TaskManager(include_path=None if task_directory is None else str(task_directory))
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise ConfigError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
    register_architectures()
    loaded = AutoModelForCausalLM.from_pretrained(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = open_tokenizer(str(tokenizer or model), required=True)
    if words.eos_token_id is None:
        words.eos_token = words.convert_ids_to_tokens(words.vocab_size - 1)
    if words.pad_token_id is None:
        words.pad_token = words.eos_token
    wrapped = HFLM(pretrained=loaded.to(device).eval(), tokenizer=words, batch_size=batch_size)
    found = lm_eval.simple_evaluate(
        model=wrapped, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0
    )
    return {
        task: {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}
        for task, values in found["results"].items()
    }

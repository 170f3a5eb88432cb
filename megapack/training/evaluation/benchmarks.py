"""Benchmarks of an exported model, through lm-evaluation-harness (extra ``lm-eval``).

The model is loaded by transformers with its own attention, as anybody would load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError

__all__ = ["run_lm_eval"]


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
        tokenizer: a directory ``AutoTokenizer`` loads, or a ``tokenizer.json``; None: in ``model``.
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
    wrapped = HFLM(
        pretrained=_load_model(model),
        tokenizer=_load_tokenizer(tokenizer or model),
        batch_size=batch_size,
    )
    found = lm_eval.simple_evaluate(
        model=wrapped, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0
    )
    return {task: _numbers(values) for task, values in found["results"].items()}


def _load_model(directory: str | Path) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from megapack.training.model.architecture import register_architectures  # noqa: PLC0415

    register_architectures()
    model = AutoModelForCausalLM.from_pretrained(directory)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _load_tokenizer(where: str | Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    path = Path(where)
    try:
        if path.is_file():
            result = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            result = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer in {path}: {error}; name one with --tokenizer (a directory or a "
            "tokenizer.json)"
        ) from error
    if result.eos_token_id is None:
        result.eos_token = result.convert_ids_to_tokens(result.vocab_size - 1)
    if result.pad_token_id is None:
        result.pad_token = result.eos_token
    return result


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}

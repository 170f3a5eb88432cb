"""Whether a transformers model keeps the documents of a row apart: tried before it is trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.integrations import deepspeed

from megapack.attention import ATTENTION_NAME, check_architecture
from megapack.data import PackedDataset, check_token_ids
from megapack.errors import ConfigError, MegapackWarning

__all__ = ["check_model"]


def check_model(
    model: Any,
    dataset: PackedDataset | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse a model that packed rows would train wrongly, or that lacks ids of the documents.

    A tiny model of its architecture is tried with its attention; see ``attention.guard``. Takes a
    second, moves no random state, and every rank may call it.

    Args:
        model: of transformers, plain or adapted by PEFT. Any other is not tried: a warning says so.
        dataset: what it shall be trained on.
        device, dtype: of the run; None: the model's.

    Raises:
        ConfigError: naming the architecture, the layer and the difference, or the ids; or there
            are attention windows, and the model's attention makes its mask of positions.
    """
    bare = getattr(model, "_orig_mod", model)
    bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    if not isinstance(bare, transformers.PreTrainedModel):
        warnings.warn(
            f"{type(bare).__name__} is no transformers model: whether it keeps the documents of a "
            "row apart was not tried",
            MegapackWarning,
            stacklevel=2,
        )
        return
    text = bare.config.get_text_config(decoder=True)
    if dataset is not None:
        check_token_ids(dataset, bare.get_input_embeddings().num_embeddings)
        _check_windows(text._attn_implementation, dataset)

    def build(configuration: Any, implementation: str) -> Any:
        options = {"attn_implementation": implementation, "dtype": torch.float32}
        if text is bare.config:
            return type(bare)._from_config(configuration, **options)
        return transformers.AutoModelForCausalLM.from_config(configuration, **options)

    with _built_whole():
        check_architecture(
            text,
            attention=text._attn_implementation,
            build=build,
            device=bare.device if device is None else device,
            dtype=bare.dtype if dtype is None else dtype,
        )


@contextmanager
def _built_whole() -> Iterator[None]:
    """Under ZeRO 3 transformers splits every new model over the ranks; here it does not."""
    configuration = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: None)
    run = configuration() if configuration is not None else None
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if run is not None:
            deepspeed.set_hf_deepspeed_config(run)


def _check_windows(implementation: str, dataset: PackedDataset) -> None:
    windows = dataset.samples.windows
    if windows and implementation != ATTENTION_NAME and "flash" not in implementation:
        raise ConfigError(
            f"the run has attention windows {windows}, and attention {implementation!r} makes its "
            "mask of positions, which do not show them: load the model with attn_implementation="
            f"{ATTENTION_NAME!r} or 'flash_attention_2', or leave attention_window out"
        )

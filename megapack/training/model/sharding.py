"""A model that no rank ever holds whole: ZeRO-3 divides its parameters while it is made.

From scratch the numbers are those of an undivided model of the same seed. Every module is made and
initialised with its own parameters whole, on all ranks in the same order and from the same random
numbers; what remains of them is this rank's share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter, also where ZeRO-3 has left a share of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def in_shares(zero_3: Mapping[str, Any] | None, *, loaded: bool = False) -> Iterator[None]:
    """Modules of transformers made meanwhile are divided among all ranks.

    Args:
        zero_3: DeepSpeed's configuration; None divides nothing.
        loaded: by ``from_pretrained``, for which the first rank alone reads the files; else from
            scratch.
    """
    if zero_3 is None:
        yield
    elif loaded:
        from transformers.integrations import HfDeepSpeedConfig  # noqa: PLC0415

        known = HfDeepSpeedConfig(dict(zero_3))  # as long as this object lives
        yield
        del known
    else:
        import deepspeed  # noqa: PLC0415

        # Without overrides of new tensors: they would round RoPE's frequencies to bfloat16.
        divided = deepspeed.zero.Init(config_dict_or_path=dict(zero_3), tensor_overrides=[])
        with _initialized_whole(), divided:
            yield


@contextmanager
def _initialized_whole() -> Iterator[None]:
    """transformers initialises a module while its own parameters are gathered."""
    import deepspeed  # noqa: PLC0415
    from transformers import PreTrainedModel  # noqa: PLC0415

    original = PreTrainedModel._initialize_weights

    def gathered(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # An initialisation may also reach for its children's, as GPT-2's does.
        children = (m for m in module.children() if not isinstance(m, PreTrainedModel))
        own = [p for m in (module, *children) for p in m.parameters(recurse=False)]
        with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
            original(self, module, *args, **kwargs)

    PreTrainedModel._initialize_weights = gathered
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original
